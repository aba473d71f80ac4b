"""Loads a node's settings from a TOML file, the environment and flags, each winning over the one before."""

from __future__ import annotations

import dataclasses
import logging
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvstore.config.kinds import Kind, without_passwords
from kvstore.config.node import SETTINGS, NodeConfig
from kvstore.config.rules import did_you_mean
from kvstore.config.setting import CONNECT_PREFIX, ENVIRONMENT_PREFIX, flag_name
from kvstore.core.choice import VARIABLE
from kvstore.errors import ConfigError
from kvstore.security.secret_files import check_private
from kvstore.units import parse_named

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SettingValue:
    """One setting's value, and who gave it."""

    value: Any
    origin: str
    """``default``, the file's path, a name of the environment, or a flag."""
    kind: Kind

    @property
    def plain(self) -> Any:
        """The value for JSON: sizes in bytes, times in seconds, None for nothing; without passwords."""
        if isinstance(self.value, tuple):
            return [dataclasses.asdict(rule) for rule in self.value]
        if isinstance(self.value, bool | int | float):
            return self.value
        return None if self.value in (None, "") else without_passwords(str(self.value))

    @property
    def text(self) -> str:
        """The value as one would write it, without the passwords that a URL may hold."""
        return "none" if self.value in (None, "", ()) else self.kind.show(self.value)


def load_config(
    file: Path | None = None,
    environment: Mapping[str, str] | None = None,
    flags: Mapping[str, Any] | None = None,
) -> NodeConfig:
    """The settings of a node.

    Args:
        file: TOML, whose keys are the settings'.
        environment: names and values; names that are no setting's are ignored, with a warning in the log.
        flags: by key, not by flag.

    Raises:
        ConfigError: the file can't be read, a key is unknown, or a value can't be used.
    """
    return NodeConfig(**{key: each.value for key, each in load_settings(file, environment, flags).items()})


def load_settings(
    file: Path | None = None,
    environment: Mapping[str, str] | None = None,
    flags: Mapping[str, Any] | None = None,
) -> dict[str, SettingValue]:
    """Every setting by its key, from what :func:`load_config` takes; whether they go together is not looked at.

    Raises:
        ConfigError: the file can't be read, a key is unknown, or a value can't be used alone.
    """
    given: dict[str, SettingValue] = {}
    if file is not None:
        given |= {key: _parse(key, value, str(file)) for key, value in _read(file).items()}
        _warn_of_readable_passwords(file, given)
    for name, text in sorted((environment or {}).items()):
        key = name.removeprefix(ENVIRONMENT_PREFIX).lower()
        if not name.startswith(ENVIRONMENT_PREFIX) or name.startswith(CONNECT_PREFIX) or name == VARIABLE:
            continue
        if key not in SETTINGS:
            # Not an error: orchestrators set variables of their own after the name of a service.
            _log.warning("the environment's %s is not a setting of kvstore%s", name, did_you_mean(key, SETTINGS))
        elif SETTINGS[key].kind.file_only:
            raise ConfigError(f"{name}: {key} is given in the file only, as [[{key}]]")
        else:
            given[key] = _parse(key, text, name)
    for key, value in (flags or {}).items():
        given[key] = _parse(key, value, flag_name(key))
    return {
        key: given[key] if key in given else SettingValue(each.default(), "default", each.kind)
        for key, each in SETTINGS.items()
    }


def _read(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text())
    except OSError as error:
        raise ConfigError(f"{file} can't be read: {error.strerror}") from error
    except RecursionError as error:
        raise ConfigError(f"{file} is not valid TOML: brackets in brackets, too many") from error
    except ValueError as error:  # no TOML, no UTF-8, or a number with thousands of digits
        raise ConfigError(f"{file} is not valid TOML: {error}") from error


def _parse(key: str, value: object, origin: str) -> SettingValue:
    if key not in SETTINGS:
        near = did_you_mean(key, SETTINGS) or f"; known keys: {', '.join(SETTINGS)}"
        raise ConfigError(f"{origin}: unknown key {key!r}{near}")
    if isinstance(value, str | Path) and "\0" in str(value):
        raise ConfigError(f"{origin}: {key} can't be {str(value)!r}: there is a zero byte in it")
    kind = SETTINGS[key].kind
    parsed = parse_named(f"{origin}: {key}", kind.parse, value)
    if parsed is None:
        raise ConfigError(f"{origin}: {key} can't be {value!r}")
    return SettingValue(parsed, origin, kind)


def _warn_of_readable_passwords(file: Path, settings: Mapping[str, SettingValue]) -> None:
    secret = [key for key, each in settings.items() if str(each.value) != without_passwords(str(each.value))]
    if not secret:
        return
    try:
        check_private(file, "settings file")
    except ConfigError as error:  # no reason not to start: whoever could has read it
        _log.warning("%s; it holds the password of %s", error, ", ".join(secret))
