"""Request traces: one JSON object a line, as the Mooncake paper's authors publish them.

``timestamp`` (ms since the start), ``input_length`` and ``output_length`` (tokens), ``hash_ids`` (one number for each
block of the prompt, head first; equal numbers are equal prefixes).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvstore.errors import InvalidRequestError


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """One request of a trace."""

    timestamp: float
    """Milliseconds."""
    input_length: int
    output_length: int
    """Tokens."""
    hash_ids: tuple[int, ...]
    """The prompt's blocks, head first, each once."""


def unique_blocks(requests: list[TracedRequest]) -> int:
    """How many different blocks the requests have."""
    return len({block for request in requests for block in request.hash_ids})


def read_trace(path: Path) -> list[TracedRequest]:
    """The requests of a trace, in the order of the file.

    Raises:
        InvalidRequestError: the file can't be read, has no request, or a line is none; names file, line and field.
    """
    requests: list[TracedRequest] = []
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    requests.append(_request(line, f"{path}, line {number}"))
    except OSError as error:
        raise InvalidRequestError(f"{path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from error
    if not any(request.hash_ids for request in requests):
        raise InvalidRequestError(f"{path}: no request with a block in it")
    return requests


def _request(line: str, where: str) -> TracedRequest:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{where}: not JSON ({error})") from error
    if not isinstance(fields, dict):
        raise InvalidRequestError(f"{where}: a request is a JSON object, got {_shown(fields)}")
    timestamp = _field(fields, "timestamp", where)
    if isinstance(timestamp, bool) or not isinstance(timestamp, int | float) or not 0 <= timestamp < 1e18:
        raise InvalidRequestError(f"{where}: timestamp must be a number of milliseconds, got {_shown(timestamp)}")
    input_length, output_length = (_tokens(fields, name, where) for name in ("input_length", "output_length"))
    blocks = _field(fields, "hash_ids", where)
    if not isinstance(blocks, list):
        raise InvalidRequestError(f"{where}: hash_ids must be a list of numbers, got {_shown(blocks)}")
    for block in blocks:
        if not _is_count(block):
            raise InvalidRequestError(f"{where}: hash_ids must hold numbers from 0 to 2^63 - 1, got {_shown(block)}")
    if len(set(blocks)) != len(blocks):
        raise InvalidRequestError(f"{where}: hash_ids names a block twice; a prefix has each of its blocks once")
    return TracedRequest(timestamp, input_length, output_length, tuple(blocks))


def _field(fields: dict[str, Any], name: str, where: str) -> Any:
    if name not in fields:
        raise InvalidRequestError(f"{where}: {name} is missing")
    return fields[name]


def _tokens(fields: dict[str, Any], name: str, where: str) -> int:
    length = _field(fields, name, where)
    if not _is_count(length):
        raise InvalidRequestError(f"{where}: {name} must be a number of tokens, got {_shown(length)}")
    return int(length)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "..."
