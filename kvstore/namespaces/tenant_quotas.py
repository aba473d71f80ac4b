"""Tenant quotas: what a tenant's limits leave for each of its namespaces. Decides; does no I/O.

In the arena the catalog keeps the sum over all of a tenant's namespaces. The lower tiers know quotas of one namespace
alone, so there a tenant's quota is divided evenly: the sum is never more, and less where some of them are idle.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from kvstore.config.rules import TenantRule
from kvstore.namespaces.registry import KnownNamespace


class TenantQuotas:
    """The rules of tenants, one for each at most, and which namespaces these have. Not safe for threads."""

    def __init__(self, rules: Iterable[TenantRule] = ()) -> None:
        self._namespaces: defaultdict[str, dict[bytes, KnownNamespace]] = defaultdict(dict)
        self.set_rules(rules)

    def set_rules(self, rules: Iterable[TenantRule]) -> None:
        """These from now on."""
        self._rules = {rule.name: rule for rule in rules}

    def add(self, known: KnownNamespace) -> list[KnownNamespace]:
        """A namespace is there from now on. Returns all of its tenant's: what each may take in lower tiers changed."""
        own = self._namespaces[known.layout.tenant]
        own[known.fingerprint] = known
        return list(own.values()) if known.layout.tenant in self._rules else [known]

    def remove(self, known: KnownNamespace) -> list[KnownNamespace]:
        """A namespace is gone. Returns those of its tenant that are left."""
        own = self._namespaces[known.layout.tenant]
        if own.get(known.fingerprint, known).number == known.number:  # else it was opened anew meanwhile
            own.pop(known.fingerprint, None)
        if not own:
            del self._namespaces[known.layout.tenant]
        return list(own.values()) if known.layout.tenant in self._rules else []

    def has(self, fingerprint: bytes, tenant: str) -> bool:
        """Whether a namespace of this tenant is there."""
        return fingerprint in self._namespaces.get(tenant, ())

    def arena(self, known: KnownNamespace) -> int | None:
        """Most bytes in the arena for all of the tenant's namespaces together; None: any."""
        rule = self._rules.get(known.layout.tenant)
        return rule.arena or None if rule is not None else None

    def within(self, known: KnownNamespace, quotas: dict[str, int]) -> dict[str, int]:
        """Tier → most bytes that a namespace may take, where there is a quota of its own or of its tenant."""
        rule = self._rules.get(known.layout.tenant)
        if rule is None:
            return quotas
        number = max(1, len(self._namespaces[known.layout.tenant] | {known.fingerprint: known}))
        shares = {tier: limit if tier == "arena" else limit // number for tier, limit in rule.quotas.items()}
        return quotas | {tier: min(share, quotas.get(tier, share)) for tier, share in shares.items()}
