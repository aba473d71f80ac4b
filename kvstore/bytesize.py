"""Byte sizes as people write them: ``512MiB``, ``64 GiB``, ``4096``."""

from __future__ import annotations

import re

from kvstore.errors import ConfigError

_UNITS = {
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
_FORM = re.compile(r"(\d{1,30}(?:\.\d{1,30})?)\s*([a-z]*)", re.IGNORECASE | re.ASCII)


def parse_size(text: str | int) -> int:
    """Bytes in ``text``: a number, and a unit of KiB, MiB, GiB, TiB (powers of 1024) or kB, MB, GB, TB (of 1000).

    Raises:
        ConfigError: not such a size.
    """
    match = _FORM.fullmatch(str(text).strip())
    if isinstance(text, bool) or match is None or match[2].lower() not in _UNITS:
        raise ConfigError(f"not a size: {text!r}; write it as 512MiB, 64GiB or a number of bytes")
    unit = _UNITS[match[2].lower()]
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
