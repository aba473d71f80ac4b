"""A setting of a node, declared once: its key, default and kind, its flag, and what its documentation says.

The fields of :class:`kvstore.config.node.NodeConfig` declare the settings. The keys of the file, flags with their help,
names in the environment and the table in docs/configuration.md are made from the declarations.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from kvstore.config.kinds import SIZE, Kind

T = TypeVar("T")
ENVIRONMENT_PREFIX = "KVSTORE_"
CONNECT_PREFIX = "KVSTORE_CONNECT_"
"""What begins so is for clients, not for nodes."""


def flag_name(key: str) -> str:
    """The flag of a key, as ``--disk-limit``."""
    return "--" + key.replace("_", "-")


class Flag(NamedTuple):
    """The flag of ``kvstore serve`` that gives a setting."""

    metavar: str
    """Empty: the flag has no value, and means true."""
    help: str
    """``{default}`` in it stands for the default."""
    behind: str = ""
    """In ``--help``, the key of the setting whose flag it follows; empty: that of the field before."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting."""

    key: str
    """In the file; of flag and environment too, in their spelling."""
    default: Callable[[], Any]
    """What its default is here: some depend on the user."""
    kind: Kind
    meaning: str
    """In Markdown, for docs/configuration.md."""
    flag: Flag | None
    zero: str
    """What a default of 0 means, for docs/configuration.md."""
    default_place: str
    """In Markdown, the default where it depends on the user."""
    reloaded: bool
    """Whether SIGHUP changes it while the node runs. Not the arena's size: clients map its files, which keep theirs."""

    @property
    def flag_name(self) -> str:
        """As ``--disk-limit``; empty where there is none."""
        return flag_name(self.key) if self.flag is not None else ""

    @property
    def environment_name(self) -> str:
        """As ``KVSTORE_DISK_LIMIT``; empty where it is given in the file only."""
        return "" if self.kind.file_only else ENVIRONMENT_PREFIX + self.key.upper()

    @property
    def written_default(self) -> str:
        """The default as one would write it: ``1GiB``; empty where nothing is."""
        default = self.default()
        if default in (None, "", ()):
            return ""
        if isinstance(default, float):
            return f"{default:g}"
        shown = self.kind.show(default)
        return shown.replace(" ", "") if self.kind is SIZE else shown

    @property
    def flag_help(self) -> str:
        """What ``--help`` says of its flag."""
        return self.flag.help.replace("{default}", self.written_default) if self.flag is not None else ""


def declared(
    default: T | Callable[[], Any],
    kind: Kind,
    meaning: str,
    *,
    flag: Flag | None = None,
    zero: str = "",
    default_place: str = "",
    reloaded: bool = False,
) -> T:
    """A dataclass's field that declares a setting: its default, or what makes it; the rest is as in :class:`Setting`.

    Like :func:`dataclasses.field` it is typed as the default, for type checkers to compare with the field's type.
    """
    metadata = {
        "kind": kind,
        "meaning": meaning,
        "flag": flag,
        "zero": zero,
        "default_place": default_place,
        "reloaded": reloaded,
    }
    factory: Callable[[], T] = default if callable(default) else lambda: default
    return dataclasses.field(default_factory=factory, metadata=metadata)


def settings_of(config: type[Any]) -> dict[str, Setting]:
    """The settings that a dataclass declares, by key, in its order."""
    return {
        field.name: Setting(field.name, field.default_factory, **field.metadata)  # type: ignore[arg-type]
        for field in dataclasses.fields(config)
    }


def in_order_of_flags(settings: dict[str, Setting]) -> list[Setting]:
    """Those that have a flag, as ``--help`` lists them."""
    ordered: list[Setting] = []
    for each in settings.values():
        if each.flag is not None and not each.flag.behind:
            ordered.append(each)
            ordered += [other for other in settings.values() if other.flag and other.flag.behind == each.key]
    return ordered
