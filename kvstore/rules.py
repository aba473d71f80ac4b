"""What an operator grants namespaces: quotas by tier, and how durable their pages are."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from kvstore.bytesize import parse_size
from kvstore.errors import ConfigError

DURABILITIES = ("", "disk")
"""``disk``: a store is refused rather than that a page leaves the arena before it is on disk."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NamespaceRule:
    """One ``[[namespace]]`` table of the configuration file. Each namespace follows the first rule that matches it."""

    match: str = "*"
    """A shell pattern (``*``, ``?``, ``[…]``) over the namespace's name, as ``kvstore status`` prints it."""
    arena: int = 0
    """Most bytes in the arena for each namespace that follows this rule, padding included. 0: no quota."""
    disk: int = 0
    """The same on disk."""
    redis: int = 0
    """The same in Redis, of all nodes together: give every node the same."""
    durability: str = ""
    """One of ``DURABILITIES``."""

    @property
    def quotas(self) -> dict[str, int]:
        """Tier → quota, where there is one."""
        quotas = {"arena": self.arena, "disk": self.disk, "redis": self.redis}
        return {tier: limit for tier, limit in quotas.items() if limit}


NO_RULE = NamespaceRule()


def rule_for(rules: Iterable[NamespaceRule], name: str) -> NamespaceRule:
    """The first rule that matches a namespace's name; one that grants everything where none does."""
    return next((rule for rule in rules if fnmatch.fnmatchcase(name, rule.match)), NO_RULE)


def parse_rules(value: object) -> tuple[NamespaceRule, ...]:
    """Rules from what a configuration file's ``[[namespace]]`` tables hold.

    Raises:
        ConfigError: not such tables; the message names key and value.
    """
    if not isinstance(value, list | tuple):
        raise ConfigError("write each rule as a table: [[namespace]], with match = …")
    return tuple(each if isinstance(each, NamespaceRule) else _parse_rule(each) for each in value)


def _parse_rule(table: object) -> NamespaceRule:
    if not isinstance(table, Mapping):
        raise ConfigError(f"a rule is a table, not {table!r}")
    known = {field.name: str(field.type) for field in fields(NamespaceRule)}
    values: dict[str, Any] = {}
    for key, value in table.items():
        if key not in known:
            raise ConfigError(f"unknown key {key!r}; known: {', '.join(known)}")
        if known[key] == "int":
            values[key] = parse_size(value)
        elif isinstance(value, str):
            values[key] = value
        else:
            raise ConfigError(f"{key} must be a string, got {value!r}")
    rule = NamespaceRule(**values)
    if rule.durability not in DURABILITIES:
        raise ConfigError(f'durability must be "disk" or left out, got {rule.durability!r}')
    return rule
