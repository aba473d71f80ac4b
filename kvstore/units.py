"""Sizes and durations as people write them: ``512MiB``, ``64 GiB``, ``4096``; ``90s``, ``30m``, ``12h``, ``30d``."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeVar

from kvstore.errors import ConfigError

Written = TypeVar("Written")
Parsed = TypeVar("Parsed")

_BYTES = {
    "": 1,
    "b": 1,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
    "tib": 1 << 40,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
}
_SIZE = re.compile(r"(\d{1,30}(?:\.\d{1,30})?)\s*([a-z]*)", re.IGNORECASE | re.ASCII)
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}
_DURATION = re.compile(r"(\d{1,15}(?:\.\d{1,15})?)\s*([smhd]?)", re.ASCII)


def parse_size(text: str | int) -> int:
    """Bytes in ``text``: a number, and a unit of KiB, MiB, GiB, TiB (powers of 1024) or kB, MB, GB, TB (of 1000).

    Raises:
        ConfigError: not such a size.
    """
    match = _SIZE.fullmatch(str(text).strip())
    if isinstance(text, bool) or match is None or match[2].lower() not in _BYTES:
        raise ConfigError(f"not a size: {text!r}; write it as 512MiB, 64GiB or a number of bytes")
    unit = _BYTES[match[2].lower()]
    size = int(float(match[1]) * unit) if "." in match[1] else int(match[1]) * unit
    if size >= 1 << 63:
        raise ConfigError(f"a size is below 8 EiB, got {text!r}")
    return size


def format_size(size: int) -> str:
    """``size`` bytes with the largest power of 1024 that leaves a number of at least 1: ``1.5 GiB``."""
    amount = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{amount:.4g} {unit}"
        amount /= 1024
    return f"{amount:.4g} TiB"


def parse_duration(text: str | float) -> float:
    """Seconds in ``text``: a number, and a unit of s, m, h or d.

    Raises:
        ConfigError: not such a time.
    """
    match = _DURATION.fullmatch(str(text).strip())
    if isinstance(text, bool) or match is None:
        raise ConfigError(f"not a time: {text!r}; write it as 90s, 30m, 12h or 30d")
    return float(match[1]) * _SECONDS[match[2]]


def format_duration(seconds: float) -> str:
    """The time in its largest two units: ``3d 4h``, ``12m 5s``, ``8s``."""
    left = int(max(0.0, seconds))
    parts: list[str] = []
    for unit in ("d", "h", "m", "s"):
        amount, left = divmod(left, _SECONDS[unit])
        if amount or (unit == "s" and not parts):
            parts.append(f"{amount}{unit}")
        elif parts:
            break
    return " ".join(parts[:2])


def parse_named(name: str, parse: Callable[[Written], Parsed], value: Written) -> Parsed:
    """``parse(value)``, whose error says of which flag or setting the value is: ``--for: not a time: 'soon'; …``.

    Raises:
        ConfigError: ``parse`` raised a ValueError.
    """
    try:
        return parse(value)
    except ValueError as error:
        raise ConfigError(f"{name}: {error}") from error
