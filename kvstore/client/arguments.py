"""What a caller gives, checked before anything is asked of a node: an error names the value and what it may be."""

from __future__ import annotations

import os
from collections.abc import Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from kvstore.errors import InvalidRequestError
from kvstore.hashing import HASH_BYTES
from kvstore.limits import LONGEST_PIN, LONGEST_TIMEOUT

_LONGEST = 100
"""Characters of a value that an error shows."""


def checked_timeout(seconds: Any) -> float:
    """Seconds that a call may take.

    Raises:
        InvalidRequestError: no number, or none above 0 and at most a day.
    """
    is_number = isinstance(seconds, Real) and not isinstance(seconds, bool)
    if not is_number or not 0 < seconds <= LONGEST_TIMEOUT:
        raise InvalidRequestError(
            f"timeout must be above 0 and at most {LONGEST_TIMEOUT:.0f} seconds, got {_shown(seconds)}"
        )
    return float(seconds)


def checked_pin(seconds: Any) -> int:
    """Seconds that a pin lasts.

    Raises:
        InvalidRequestError: no whole number, or none from 1 to 366 days.
    """
    is_number = isinstance(seconds, Integral) and not isinstance(seconds, bool)
    if not is_number or not 1 <= seconds <= LONGEST_PIN:
        raise InvalidRequestError(
            f"a pin lasts a whole number of seconds from 1 to {LONGEST_PIN} (366 days), got {_shown(seconds)}"
        )
    return int(seconds)


def checked_text(name: str, text: Any) -> str:
    """A string.

    Raises:
        InvalidRequestError: none.
    """
    if not isinstance(text, str):
        raise InvalidRequestError(f"{name} must be a string, got {_shown(text)}")
    return text


def checked_file(name: str, file: Any) -> Path | None:
    """A file's path, where there is one.

    Raises:
        InvalidRequestError: neither a string nor a path.
    """
    if file is None or isinstance(file, str | Path):
        return None if file is None else Path(file)
    path = os.fspath(file) if isinstance(file, os.PathLike) else file
    if not isinstance(path, str):
        raise InvalidRequestError(f"{name} must be the path of a file, got {_shown(file)}")
    return Path(path)


def checked_fingerprint(fingerprint: Any) -> bytes:
    """A namespace's fingerprint.

    Raises:
        InvalidRequestError: no bytes, or not 32 of them.
    """
    if not isinstance(fingerprint, bytes) or len(fingerprint) != HASH_BYTES:
        raise InvalidRequestError(f"a fingerprint is {HASH_BYTES} bytes, got {_shown(fingerprint)}")
    return fingerprint


def checked_pairs(queries: Any, kind: type) -> Sequence[tuple[Any, Sequence[bytes]]]:
    """Pairs of a namespace and its hashes.

    Raises:
        InvalidRequestError: no sequence of such pairs.
    """
    if not isinstance(queries, Sequence) or isinstance(queries, str | bytes):
        raise InvalidRequestError(f"queries must be a list of (namespace, hashes), got {_shown(queries)}")
    for each in queries:
        if not isinstance(each, tuple | list) or len(each) != 2 or not isinstance(each[0], kind):
            raise InvalidRequestError(f"a query is a pair (namespace, hashes), got {_shown(each)}")
    return queries


def _shown(value: object) -> str:
    """A value in an error: it may be a million of something."""
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
