"""Lengths of time as people write them: ``90s``, ``30m``, ``12h``, ``30d``."""

from __future__ import annotations

import re

from kvstore.errors import ConfigError

_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}
_FORM = re.compile(r"(\d{1,15}(?:\.\d{1,15})?)\s*([smhd]?)", re.ASCII)


def parse_duration(text: str | float) -> float:
    """Seconds in ``text``: a number, and a unit of s, m, h or d.

    Raises:
        ConfigError: not such a time.
    """
    match = _FORM.fullmatch(str(text).strip())
    if isinstance(text, bool) or match is None:
        raise ConfigError(f"not a time: {text!r}; write it as 90s, 30m, 12h or 30d")
    return float(match[1]) * _UNITS[match[2]]


def format_duration(seconds: float) -> str:
    """The time in its largest two units: ``3d 4h``, ``12m 5s``, ``8s``."""
    left = int(max(0.0, seconds))
    parts: list[str] = []
    for unit in ("d", "h", "m", "s"):
        amount, left = divmod(left, _UNITS[unit])
        if amount or (unit == "s" and not parts):
            parts.append(f"{amount}{unit}")
        elif parts:
            break
    return " ".join(parts[:2])
