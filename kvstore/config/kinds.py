"""Kinds of settings: how a value is read from a file, the environment or a flag, and how it is shown."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvstore.config.rules import parse_rules, parse_tenants
from kvstore.errors import ConfigError
from kvstore.units import format_duration, format_size, parse_duration, parse_size

_SHOWN_WITH_UNIT = 1 << 20
"""Smaller sizes are shown in bytes, since that is how they were written."""


@dataclass(frozen=True, slots=True)
class Kind:
    """What a setting's value can be."""

    parse: Callable[[Any], object | None]
    """From TOML's type or from text; None where there is no such value. Raises ConfigError for text that is wrong."""
    show: Callable[[Any], str] = str
    """As ``kvstore config show`` prints a value that is not empty."""
    file_only: bool = False
    """Whether it is given as tables of the file, not in the environment."""


def without_passwords(text: str) -> str:
    """The same text, with ``***`` for the passwords of URLs in it."""
    text = re.sub(r"(?<=://)([^/?#]*?):[^/?#]*@", r"\1:***@", text)
    return re.sub(r"(?<=password=)[^&#]*", "***", text)


def _parse_size(value: object) -> int | None:
    return parse_size(value) if isinstance(value, int | str) else None


def _parse_duration(value: object) -> float | None:
    return parse_duration(value) if isinstance(value, int | float | str) else None


def _parse_seconds(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError) as error:
        raise ConfigError(f"not a number of seconds: {value!r}") from error


def _parse_path(value: object) -> Path | None:
    if not isinstance(value, str | Path) or not str(value):
        return None
    try:
        return Path(value).expanduser()
    except RuntimeError as error:  # no such user's home
        raise ConfigError(str(error)) from error


def _parse_switch(value: object) -> bool | None:
    return {"true": True, "1": True, "false": False, "0": False}.get(str(value).lower())


def _parse_text(value: object) -> str | None:
    return str(value) if isinstance(value, str | int) and not isinstance(value, bool) else None


def _show_size(value: int) -> str:
    return format_size(value) if value >= _SHOWN_WITH_UNIT else str(value)


def _show_rules(value: tuple[object, ...]) -> str:
    return f"{len(value)} rules"


SIZE = Kind(_parse_size, _show_size)
"""Bytes: ``512MiB``."""
NUMBER = Kind(_parse_size)
"""A whole number, written as a size."""
SECONDS = Kind(_parse_seconds, lambda value: f"{value:g}s" if value else "none")
"""Seconds, without a unit."""
DURATION = Kind(_parse_duration, lambda value: format_duration(value) if value else "none")
"""Seconds, with or without a unit: ``30d``."""
PATH = Kind(_parse_path, lambda value: without_passwords(str(value)))
"""A path, in which ``~`` is a home."""
SWITCH = Kind(_parse_switch, lambda value: str(value).lower())
"""``true`` or ``false``."""
TEXT = Kind(_parse_text, without_passwords)
"""Anything."""
NAMESPACE_RULES = Kind(parse_rules, _show_rules, file_only=True)
"""``[[namespace]]`` tables."""
TENANT_RULES = Kind(parse_tenants, _show_rules, file_only=True)
"""``[[tenant]]`` tables."""
