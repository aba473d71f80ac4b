"""Finished answers: read from a body or a stream, and told again as either. No I/O.

An answer is kept in the form of a body that is no stream. One that came as a stream is put together from its events,
where all that they say is understood; one that came as a body is told as a stream under the same condition. What is
not understood is not kept, or not told in that form: it is computed.
"""

from __future__ import annotations

import json
import re
import time
import uuid
from collections.abc import Iterable, Mapping
from typing import Any

_FINISHED = ("stop", "length")
_HEAD = ("id", "object", "created", "model", "usage", "choices", "system_fingerprint", "service_tier")
_DELTA = ("role", "content", "reasoning", "reasoning_content", "refusal")
"""Of a chat: texts that are told in parts."""
_CHOICE = ("index", "delta", "message", "text", "finish_reason", "stop_reason", "logprobs")
_NOT_KEPT = ("id", "created", "kv_transfer_params")
"""An answer's own, and no part of what is told again."""
_BLANK_LINE = re.compile(rb"\r\n\r\n|\n\n|\r\r")


def read_answer(content: bytes, chat: bool, stream: bool, most_bytes: int) -> dict[str, Any] | None:
    """A finished answer from all of a body, or all events of a stream; None: it is not to be kept.

    Args:
        content: what came.
        chat: whether it answers a chat.
        stream: whether it consists of events.
        most_bytes: longest that is kept.
    """
    if len(content) > most_bytes:
        return None
    if not stream:
        return finished_body(content)
    recorder = StreamRecorder(chat, most_bytes)
    for event in _BLANK_LINE.split(content):
        recorder.add(event)
    return recorder.finished()


def finished_body(body: bytes) -> dict[str, Any] | None:
    """An answer from a body that is no stream; None: it is none, or not all of its choices ended by themselves."""
    try:
        answer = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(answer, dict) or answer.get("error") or not _is_finished(answer.get("choices")):
        return None
    return {name: value for name, value in answer.items() if name not in _NOT_KEPT}


def _is_finished(choices: object) -> bool:
    return (
        isinstance(choices, list)
        and bool(choices)
        and all(isinstance(each, dict) and each.get("finish_reason") in _FINISHED for each in choices)
    )


class StreamRecorder:
    """Puts an answer together from the events of a stream, each of which is given whole.

    Args:
        chat: whether the events are a chat's.
        most_bytes: of events; an answer with more is not kept.
    """

    def __init__(self, chat: bool, most_bytes: int) -> None:
        self._chat = chat
        self._left = most_bytes
        self._understood = True
        self._done = False
        self._head: dict[str, Any] = {}
        self._choices: dict[int, dict[str, Any]] = {}

    def add(self, event: bytes) -> None:
        """One more event, with or without the empty line behind it."""
        self._left -= len(event)
        if self._left < 0:
            self._understood = False
        if not self._understood:
            return
        data = b"\n".join(line[5:].strip() for line in event.splitlines() if line.startswith(b"data:"))
        if data == b"[DONE]":
            self._done = True
        elif data:
            self._understood = not self._done and self._takes(data)

    def finished(self) -> dict[str, Any] | None:
        """The answer as a body; None: the stream is not at its end, was not understood, or did not end by itself."""
        if not self._understood or not self._done:
            return None
        choices = [self._choices[index] for index in sorted(self._choices)]
        if not _is_finished(choices):
            return None
        head = dict(self._head, object="chat.completion" if self._chat else "text_completion")
        return {name: value for name, value in head.items() if name not in _NOT_KEPT} | {"choices": choices}

    def _takes(self, data: bytes) -> bool:
        try:
            event = json.loads(data)
        except (ValueError, RecursionError):
            return False
        if not isinstance(event, dict) or _more_than(event, _HEAD) or not isinstance(event.get("choices"), list):
            return False
        self._head |= {name: value for name, value in event.items() if name != "choices" and value is not None}
        return all(self._takes_choice(each) for each in event["choices"])

    def _takes_choice(self, told: object) -> bool:
        if not isinstance(told, dict) or _more_than(told, _CHOICE):
            return False
        index = told.get("index", 0)
        if not isinstance(index, int):
            return False
        choice = self._choices.setdefault(
            index, {"index": index, "message": {"role": "assistant", "content": ""}} if self._chat else
            {"index": index, "text": ""}
        )  # fmt: skip
        if choice.get("finish_reason") is not None:
            return False  # it goes on behind its end
        for name in ("finish_reason", "stop_reason"):
            if told.get(name) is not None:
                choice[name] = told[name]
        if told.get("logprobs") is not None and not _extend(choice.setdefault("logprobs", {}), told["logprobs"]):
            return False
        if not self._chat:
            return told.get("delta") is None and _append(choice, "text", told.get("text"))
        delta = told.get("delta") or {}
        if told.get("text") is not None or not isinstance(delta, dict) or _more_than(delta, _DELTA):
            return False
        if delta.get("role") not in (None, "assistant"):
            return False
        return all(_append(choice["message"], name, delta.get(name)) for name in _DELTA[1:])


def as_body(answer: Mapping[str, Any], chat: bool) -> bytes | None:
    """A kept answer as one body; None: it has no usage, which those who ask for a body count on."""
    if not isinstance(answer.get("usage"), dict):
        return None
    return json.dumps(_new_head(chat) | dict(answer) | {"usage": cached_usage(answer["usage"])}).encode()


def as_events(answer: Mapping[str, Any], chat: bool, with_usage: bool) -> bytes | None:
    """A kept answer as server-sent events, to their end; None: it says something that has no known form as events, or
    no usage where that is wanted."""
    usage = answer.get("usage")
    if _more_than(answer, _HEAD) or (with_usage and not isinstance(usage, dict)):
        return None
    head = _new_head(chat) | {
        name: value for name, value in answer.items() if name not in ("object", "choices", "usage")
    }
    head["object"] = "chat.completion.chunk" if chat else "text_completion"
    told: list[dict[str, Any]] = []
    for choice in answer["choices"]:
        parts = _chat_parts(choice) if chat else _text_parts(choice)
        if parts is None:
            return None
        told += [head | {"choices": [part]} for part in parts]
    if with_usage:
        told.append(head | {"choices": [], "usage": cached_usage(usage or {})})
    return b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in told) + b"data: [DONE]\n\n"


def cached_usage(usage: Mapping[str, Any]) -> dict[str, Any]:
    """A usage that says that nothing was computed: all prompt tokens are cached ones, and ``cached`` is true."""
    details = usage.get("prompt_tokens_details")
    details = dict(details) if isinstance(details, dict) else {}
    details["cached_tokens"] = usage.get("prompt_tokens", 0)
    return dict(usage) | {"prompt_tokens_details": details, "cached": True}


def tokens_of(answer: Mapping[str, Any]) -> int:
    """Prompt and answer together, as its usage says; 0: it has none."""
    usage = answer.get("usage")
    total = usage.get("total_tokens") if isinstance(usage, dict) else None
    return total if isinstance(total, int) else 0


def _new_head(chat: bool) -> dict[str, Any]:
    return {"id": f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}", "created": int(time.time())}


def _chat_parts(choice: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    message = choice.get("message")
    if not isinstance(message, dict) or _more_than(choice, _CHOICE) or _more_than(message, _DELTA):
        return None
    index = choice.get("index", 0)
    said = {name: message[name] for name in _DELTA[1:] if message.get(name)}
    middle = {"index": index, "delta": said, "logprobs": choice.get("logprobs"), "finish_reason": None}
    return [
        {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None},
        middle,
        {"index": index, "delta": {}, "logprobs": None} | _end(choice),
    ]


def _text_parts(choice: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    if _more_than(choice, _CHOICE) or not isinstance(choice.get("text"), str):
        return None
    head = {"index": choice.get("index", 0), "text": choice["text"], "logprobs": choice.get("logprobs")}
    return [head | _end(choice)]


def _end(choice: Mapping[str, Any]) -> dict[str, Any]:
    return {"finish_reason": choice["finish_reason"], "stop_reason": choice.get("stop_reason")}


def _more_than(told: Mapping[str, Any], known: Iterable[str]) -> bool:
    """Whether something is said that is not known. What says nothing is not told."""
    return any(value not in (None, [], {}) and name not in known for name, value in told.items())


def _append(into: dict[str, Any], name: str, text: object) -> bool:
    if text is None:
        return True
    if not isinstance(text, str):
        return False
    into[name] = (into.get(name) or "") + text
    return True


def _extend(into: dict[str, Any], more: object) -> bool:
    """Log-probabilities come as lists, by name, each event with those of its tokens."""
    if not isinstance(more, dict):
        return False
    for name, values in more.items():
        if values is None:
            continue
        if not isinstance(values, list):
            return False
        into.setdefault(name, []).extend(values)
    return True
