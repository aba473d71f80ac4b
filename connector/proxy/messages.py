"""Bodies of completion requests and answers, as the proxy reads and writes them. No I/O.

What it does not know it hands on untouched.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from enum import Enum
from typing import Any

from kvstore.errors import FormatError, InvalidRequestError, LimitExceededError

TRANSFER = "kv_transfer_params"
"""The field that engines take and give tickets in."""

MOST_TICKET_BYTES = 64 * 1024
"""Longest JSON of an answer's transfer parameters that is handed on."""

MOST_EVENT_BYTES = 16 << 20
"""Longest event of a stream."""

# For one token that nobody reads. Engines refuse these with another answer's length, or would compute more for them.
_NOT_FOR_PREFILL = (
    "stream_options",
    "min_tokens",
    "best_of",
    "logprobs",
    "top_logprobs",
    "prompt_logprobs",
    "echo",
)
_TICKET_KEYS = ("do_remote_decode", "do_remote_prefill", "ticket")
_EVENT_END = re.compile(rb"\r\n\r\n|\n\n|\r\r")


class EventKind(Enum):
    """What an event of a stream means to somebody who waits for the first token."""

    EMPTY = "empty"
    """No token: a comment, the role, the usage."""
    TOKEN = "token"  # noqa: S105 - none that opens anything
    FAILED = "failed"
    """The instance gives up, for no fault of the request's."""
    DONE = "done"
    """The end."""


def parse_request(body: bytes) -> dict[str, Any]:
    """A client's request.

    Raises:
        InvalidRequestError: no JSON object.
    """
    try:
        request = json.loads(body, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"the body is not JSON: {error}") from error
    if not isinstance(request, dict):
        raise InvalidRequestError("the body is not a JSON object")
    if not isinstance(request.get(TRANSFER), dict | None):
        raise InvalidRequestError(f"{TRANSFER} is not an object")
    return request


def has_several_prompts(request: Mapping[str, Any]) -> bool:
    """Whether a completion is asked for more than one prompt: an answer has one ticket, which is for one of them."""
    prompt = request.get("prompt")
    return isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int)


def prefill_request(request: Mapping[str, Any]) -> dict[str, Any]:
    """What the prefill instance is asked: the same prompt, one token, and a ticket for what it computed."""
    asked = {key: value for key, value in request.items() if key not in _NOT_FOR_PREFILL}
    asked |= {"max_tokens": 1, "stream": False}
    for key, least in (("max_completion_tokens", 1), ("n", 1)):
        if key in asked:
            asked[key] = least
    asked[TRANSFER] = _own_parameters(request) | {"do_remote_decode": True}
    return asked


def ticket_of(answer: bytes) -> dict[str, Any]:
    """The transfer parameters in a prefill instance's answer.

    Raises:
        FormatError: there are none, or they are too long.
    """
    try:
        fields = json.loads(answer)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"the answer is not JSON: {error}") from error
    parameters = fields.get(TRANSFER) if isinstance(fields, dict) else None
    if not isinstance(parameters, dict) or not parameters:
        raise FormatError("the answer has no ticket: is kvstore's connector on, and its ticket_key_file set?")
    if len(json.dumps(parameters)) > MOST_TICKET_BYTES:
        raise FormatError(f"the answer's {TRANSFER} are longer than {MOST_TICKET_BYTES} bytes")
    return parameters


def decode_request(request: Mapping[str, Any], ticket: Mapping[str, Any] | None) -> dict[str, Any]:
    """What the decode instance is asked: the client's request, with the ticket where there is one."""
    parameters = _own_parameters(request) | dict(ticket or {})
    asked = dict(request)
    if parameters:
        asked[TRANSFER] = parameters
    elif asked.get(TRANSFER):
        del asked[TRANSFER]
    return asked


def error_body(message: str, status: int) -> dict[str, Any]:
    """An error as OpenAI's clients understand it."""
    kind = "invalid_request_error" if status < 500 else "service_unavailable"
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}


def error_events(message: str) -> bytes:
    """The end of a stream whose instance was lost behind the first token."""
    return b"data: " + json.dumps(error_body(message, 502)).encode() + b"\n\ndata: [DONE]\n\n"


class EventSplitter:
    """Cuts a stream of bytes into whole events, so that one that broke off is never handed on."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The events that these bytes complete, each with the empty line behind it.

        Raises:
            LimitExceededError: one is longer than :data:`MOST_EVENT_BYTES`.
        """
        search_from = max(0, len(self._rest) - 3)  # an end that was cut in two
        self._rest += data
        events, start = [], 0
        while (end := _EVENT_END.search(self._rest, search_from)) is not None:
            events.append(bytes(self._rest[start : end.end()]))
            start = search_from = end.end()
        del self._rest[:start]
        if len(self._rest) > MOST_EVENT_BYTES:
            raise LimitExceededError(f"an event is longer than {MOST_EVENT_BYTES} bytes")
        return events


def kind_of(event: bytes) -> EventKind:
    """What an event says. One that says nothing known counts as a token: it is handed on."""
    lines = [line[5:].strip() for line in event.splitlines() if line.startswith(b"data:")]
    data = b"\n".join(lines)
    if not data:
        return EventKind.EMPTY
    if data == b"[DONE]":
        return EventKind.DONE
    try:
        fields = json.loads(data)
    except (ValueError, RecursionError):
        return EventKind.TOKEN
    if not isinstance(fields, dict):
        return EventKind.TOKEN
    error = fields.get("error")
    if error:
        code = error.get("code") if isinstance(error, dict) else None
        return EventKind.TOKEN if isinstance(code, int) and 400 <= code < 500 else EventKind.FAILED
    choices = fields.get("choices")
    if not isinstance(choices, list):
        return EventKind.TOKEN
    return EventKind.TOKEN if any(map(_has_token, choices)) else EventKind.EMPTY


def _has_token(choice: Any) -> bool:
    if not isinstance(choice, dict):
        return True
    delta = choice.get("delta")
    if delta is not None and not isinstance(delta, dict):
        return True
    told = [choice.get(key) for key in ("text", "token_ids", "finish_reason", "logprobs")]
    return any(told) or any(value for key, value in (delta or {}).items() if key != "role")


def _own_parameters(request: Mapping[str, Any]) -> dict[str, Any]:
    """The client's own transfer parameters: whether to store, and to load. Tickets come from prefill instances only."""
    return {key: value for key, value in (request.get(TRANSFER) or {}).items() if key not in _TICKET_KEYS}


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")
