"""Which requests are equal, and which may be answered from a store at all. No I/O.

A request is known by a *canonical form*: the path and every field of a list, in one order. A field that is not on the
list may mean anything, so a request with one is not cached. Fields that say how an answer travels (``stream``) are no
part of it: a stream and a whole body answer each other.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"

_SHARED_FIELDS = frozenset(
    (
        # what is asked, of whom
        "model",
        "user",
        # sampling, as OpenAI has it
        "frequency_penalty",
        "logit_bias",
        "logprobs",
        "max_tokens",
        "n",
        "presence_penalty",
        "response_format",
        "seed",
        "stop",
        "temperature",
        "top_p",
        # sampling, as vLLM and SGLang have it besides
        "bad_words",
        "ignore_eos",
        "include_stop_str_in_output",
        "length_penalty",
        "min_p",
        "min_tokens",
        "repetition_penalty",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "stop_token_ids",
        "structured_outputs",
        "top_k",
        "truncate_prompt_tokens",
        "use_beam_search",
        # the adapter, where it is not named as the model
        "lora_path",
    )
)
FIELDS: Mapping[str, frozenset[str]] = {
    CHAT: _SHARED_FIELDS
    | {
        "add_generation_prompt",
        "chat_template",
        "chat_template_kwargs",
        "continue_final_message",
        "max_completion_tokens",
        "messages",
        "parallel_tool_calls",
        "reasoning_effort",
        "tool_choice",
        "tools",
        "top_logprobs",
    },
    COMPLETIONS: _SHARED_FIELDS | {"add_special_tokens", "best_of", "echo", "prompt", "suffix"},
}
"""By path: the fields that decide an answer, all of which are compared."""
_TRAVEL = ("stream", "stream_options")
MOST_REQUEST_BYTES = 1 << 20
"""Longest canonical form that is looked up: longer prompts are rarely asked twice, and cost the most to compare."""


@dataclass(frozen=True, slots=True)
class CacheableRequest:
    """One whose fields are all known."""

    canonical: bytes
    """JSON, its fields sorted, what is in them as it was written: the same for equal requests, and for no others."""
    model: str
    """As it is named; empty: it is not."""
    chat: bool
    stream: bool
    """Whether the answer is wanted as server-sent events."""
    with_usage: bool
    """Whether the events end with one for the usage."""
    determined: bool
    """Whether the request determines its answer: temperature 0 said explicitly, or a seed."""


@dataclass(frozen=True, slots=True)
class NotCacheable:
    """``reason`` is a word for metrics; ``words`` are for people."""

    reason: str
    words: str


def read_request(path: str, fields: Mapping[str, Any]) -> CacheableRequest | NotCacheable:
    """What a request is to the cache.

    Args:
        path: of the URL, without a query.
        fields: of its body.
    """
    known = FIELDS.get(path)
    if known is None:
        return NotCacheable("path", f"{path} has no answers that are kept")
    unknown = sorted(name for name in fields if name not in known and name not in _TRAVEL)
    if unknown:
        return NotCacheable("unknown_field", f"the field {unknown[0]!r} is not known: it may mean anything")
    stream, options = fields.get("stream"), fields.get("stream_options")
    if not isinstance(stream, bool | None) or not _understood(options):
        return NotCacheable("unknown_field", f"stream: {stream!r} with stream_options: {options!r} is not known")
    prompt = fields.get("messages" if path == CHAT else "prompt")
    if not isinstance(prompt, str | list) or not prompt:
        return NotCacheable("no_prompt", "it has no prompt")
    if path == CHAT and (named := _named_elsewhere(prompt)):
        return NotCacheable("elsewhere", f"{named} is an address: what is there may change")
    # Only the outermost fields are sorted: in which order a schema names its properties decides the answer.
    said = {name: fields[name] for name in sorted(fields) if name not in _TRAVEL}
    try:
        canonical = json.dumps([path, said], separators=(",", ":"), allow_nan=False).encode()
    except (ValueError, RecursionError):
        return NotCacheable("not_json", "a value is not JSON")
    if len(canonical) > MOST_REQUEST_BYTES:
        return NotCacheable("too_long", f"it is longer than {MOST_REQUEST_BYTES} bytes")
    model = fields.get("model")
    return CacheableRequest(
        canonical,
        model if isinstance(model, str) else "",
        path == CHAT,
        stream is True,
        isinstance(options, dict) and options.get("include_usage") is True,
        _is_zero(fields.get("temperature")) or _is_integer(fields.get("seed")),
    )


def _named_elsewhere(messages: list[Any] | str) -> str | None:
    """The first part of a message that names a picture, a video or a sound by its address, as ``image_url``; None: none
    does. ``data:`` has it with it."""
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else None
        for part in content if isinstance(content, list) else ():
            for name, value in part.items() if isinstance(part, dict) else ():
                address = value.get("url") if isinstance(value, dict) else value
                if name.endswith("_url") and not str(address).startswith("data:"):
                    return str(name)
    return None


def _understood(options: object) -> bool:
    """Whether stream options say nothing else than whether the usage is told."""
    if options is None:
        return True
    return isinstance(options, dict) and all(
        name == "include_usage" and isinstance(value, bool | None) for name, value in options.items()
    )


def _is_zero(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value == 0


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
