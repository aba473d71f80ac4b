"""Rules of the settings file: quotas, durability and expiry by namespace; quotas and rate limits by tenant."""

from __future__ import annotations

import difflib
import fnmatch
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from kvstore.arena.format import FRAME_BYTES, frames_for
from kvstore.errors import ConfigError
from kvstore.layout import Layout
from kvstore.security.grants import check_name
from kvstore.units import format_size, parse_duration, parse_named, parse_size

DURABILITIES = ("", "disk")
"""``disk``: a store is refused rather than that a page leaves the arena before it is on disk."""
LEAST_DIGITS = 12
"""Fewest digits of a fingerprint by which a rule names a namespace: as many as ``kvstore status`` prints."""
_log = logging.getLogger(__name__)
Amount = TypeVar("Amount", int, float)


@dataclass(frozen=True, kw_only=True, slots=True)
class NamespaceRule:
    """One ``[[namespace]]`` table of the configuration file. Each namespace follows the first rule that matches it."""

    match: str = "*"
    """A shell pattern (``*``, ``?``, ``[…]``) over the namespace's names (:func:`rule_for`), or the first digits of its
    fingerprint, ``LEAST_DIGITS`` of them at least."""
    arena: int = 0
    """Most bytes in the arena for each namespace that follows this rule, padding included. 0: no quota."""
    disk: int = 0
    """The same on disk."""
    redis: int = 0
    """The same in Redis, of all nodes together: give every node the same."""
    objects: int = 0
    """The same in object storage, of all nodes together."""
    durability: str = ""
    """One of ``DURABILITIES``."""
    expire: float | None = None
    """Seconds after which a namespace that nobody uses is dropped. 0: never. None: as the node does with all."""

    @property
    def quotas(self) -> dict[str, int]:
        """Tier → quota, where there is one."""
        return _given(self.arena, self.disk, self.redis, self.objects)


@dataclass(frozen=True, kw_only=True, slots=True)
class TenantRule:
    """One ``[[tenant]]`` table of the configuration file."""

    name: str
    """As layouts and the token file name it."""
    arena: int = 0
    """Most bytes in the arena for all of the tenant's namespaces together, padding included. 0: no quota."""
    disk: int = 0
    """The same on disk."""
    redis: int = 0
    """The same in Redis, of all nodes together: give every node the same."""
    objects: int = 0
    """The same in object storage, of all nodes together."""
    requests_per_second: int = 0
    """Most requests by the tenant's tokens. 0: any number."""
    bytes_per_second: int = 0
    """Most bytes of pages that they move through the network. 0: any number."""

    @property
    def quotas(self) -> dict[str, int]:
        """Tier → quota, where there is one."""
        return _given(self.arena, self.disk, self.redis, self.objects)


def _given(arena: int, disk: int, redis: int, objects: int) -> dict[str, int]:
    quotas = {"arena": arena, "disk": disk, "redis": redis, "objects": objects}
    return {tier: limit for tier, limit in quotas.items() if limit}


NO_RULE = NamespaceRule()


def rule_for(rules: Iterable[NamespaceRule], layout: Layout, labels: Sequence[str] = ()) -> NamespaceRule:
    """The first rule that matches any of a namespace's names; one that grants everything where none does.

    Its names are its layout's, each of its labels, and the layout's with each label in the model's place.
    """
    names = {layout.name, *labels, *map(layout.named, labels)}
    digits = layout.fingerprint.hex()
    return next((rule for rule in rules if _matches(rule.match, names, digits)), NO_RULE)


def _matches(match: str, names: Collection[str], digits: str) -> bool:
    if any(fnmatch.fnmatchcase(name, match) for name in names):
        return True
    return len(match) >= LEAST_DIGITS and digits.startswith(match.lower())


def quotas_below_a_page(rule: NamespaceRule, page_bytes: int) -> dict[str, tuple[int, int]]:
    """Tiers whose quota is too small for a single page, so that every page is refused there.

    Args:
        rule: of the namespace.
        page_bytes: size of its pages.

    Returns:
        Tier → its quota and what one page takes there, padding included; in bytes.
    """
    padded = frames_for(page_bytes) * FRAME_BYTES
    takes = {"arena": padded, "disk": padded, "redis": page_bytes, "objects": padded}
    return {tier: (quota, takes[tier]) for tier, quota in rule.quotas.items() if quota < takes[tier]}


def warn_of_quotas_below_a_page(rule: NamespaceRule, name: str, page_bytes: int) -> None:
    """Say in the log what :func:`quotas_below_a_page` finds of a namespace of this name: for when it is opened."""
    for tier, (quota, page) in quotas_below_a_page(rule, page_bytes).items():
        _log.warning(
            "namespace %r: its %s quota of %s (rule %r) is smaller than one page, which takes %s there:"
            " every page of it is refused",
            name,
            tier,
            format_size(quota),
            rule.match,
            format_size(page),
        )


def parse_rules(value: object) -> tuple[NamespaceRule, ...]:
    """Rules from what a configuration file's ``[[namespace]]`` tables hold.

    Raises:
        ConfigError: not such tables; the message names the rule (by number, from 1, and pattern), key and value.
    """
    if not isinstance(value, list | tuple):
        raise ConfigError("write each rule as a table: [[namespace]], with match = …")
    return tuple(
        each if isinstance(each, NamespaceRule) else _parse_numbered(number, each)
        for number, each in enumerate(value, 1)
    )


def parse_tenants(value: object) -> tuple[TenantRule, ...]:
    """Rules from what a configuration file's ``[[tenant]]`` tables hold.

    Raises:
        ConfigError: not such tables, or two for one tenant; the message names the rule (by number, from 1), key and
            value.
    """
    if not isinstance(value, list | tuple):
        raise ConfigError("write each tenant as a table: [[tenant]], with name = …")
    rules: dict[str, TenantRule] = {}
    for number, each in enumerate(value, 1):
        rule = each if isinstance(each, TenantRule) else _parse_tenant(number, each)
        if rule.name in rules:
            raise ConfigError(f"rule {number}: tenant {rule.name!r} has one already")
        rules[rule.name] = rule
    return tuple(rules.values())


def _parse_tenant(number: int, table: object) -> TenantRule:
    if not isinstance(table, Mapping):
        raise ConfigError(f"rule {number}: a rule is a table, not {table!r}")
    try:
        values = _parse_values(table, TenantRule)
        if "name" not in values:
            raise ConfigError("name is missing")
        check_name("name", values["name"])
        return TenantRule(**values)
    except ValueError as error:
        raise ConfigError(f"rule {number}: {error}") from error


def _parse_numbered(number: int, table: object) -> NamespaceRule:
    if not isinstance(table, Mapping):
        raise ConfigError(f"rule {number}: a rule is a table, not {table!r}")
    try:
        return _parse_rule(table)
    except ValueError as error:
        match = f" (match = {table['match']!r})" if "match" in table else ""
        raise ConfigError(f"rule {number}{match}: {error}") from error


def _parse_rule(table: Mapping[str, object]) -> NamespaceRule:
    rule = NamespaceRule(**_parse_values(table, NamespaceRule))
    if rule.durability not in DURABILITIES:
        raise ConfigError(f'durability must be "disk" or left out, got {rule.durability!r}')
    return rule


def _parse_values(table: Mapping[str, object], kind: type[NamespaceRule | TenantRule]) -> dict[str, Any]:
    known = {field.name: str(field.type) for field in fields(kind)}
    values: dict[str, Any] = {}
    for key, value in table.items():
        if key not in known:
            near = did_you_mean(key, known) or f"; known: {', '.join(known)}"
            raise ConfigError(f"unknown key {key!r}{near}")
        if key == "requests_per_second":
            values[key] = _requests(value)
        elif known[key] == "int":
            values[key] = _measure(key, value, parse_size, (int, str))
        elif key == "expire":
            values[key] = _measure(key, value, parse_duration, (int, float, str))
        elif isinstance(value, str):
            values[key] = value
        else:
            raise ConfigError(f"{key} must be a string, got {value!r}")
    return values


def did_you_mean(key: str, known: Iterable[str]) -> str:
    """A hint at the known key that is most like this one; empty: none is."""
    near = difflib.get_close_matches(key, known, 1)
    return f"; did you mean {near[0]!r}?" if near else ""


def _requests(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ConfigError(f"requests_per_second must be a whole number, at least 0 (any number), got {value!r}")
    return value


def _measure(key: str, value: object, parse: Callable[[Any], Amount], types: tuple[type, ...]) -> Amount:
    """A size or a duration."""
    if isinstance(value, bool) or not isinstance(value, types):
        raise ConfigError(f"{key} can't be {value!r}")
    return parse_named(key, parse, value)
