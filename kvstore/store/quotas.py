"""Quotas: namespaces are opened by their rules, which say how many bytes of each tier their pages may take."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from kvstore.arena.format import FRAME_BYTES, frames_for
from kvstore.catalog.order_migration import OrderMigration
from kvstore.config.rules import (
    DURABILITIES,
    NamespaceRule,
    TenantRule,
    rule_for,
    warn_of_quotas_below_a_page,
)
from kvstore.errors import InvalidRequestError, LimitExceededError
from kvstore.labels import checked_label, with_label
from kvstore.layout import Layout
from kvstore.namespaces.registry import KnownNamespace
from kvstore.namespaces.tenant_quotas import TenantQuotas
from kvstore.store.state import PAUSE_SECONDS, StoreState
from kvstore.units import format_size

_LOOK_SECONDS = 0.1
"""How often somebody who waits for another thread's migration looks whether to stop."""
_log = logging.getLogger(__name__)


class NamespaceQuotas:
    """The rules of a store, carried out in the catalog and in lower tiers. Safe for threads.

    The first rule that matches a namespace counts; ``life`` is that of a namespace whose rule does not say.
    """

    def __init__(
        self,
        state: StoreState,
        rules: Sequence[NamespaceRule],
        life: float = 0.0,
        tenants: Sequence[TenantRule] = (),
    ) -> None:
        self._state = state
        self._lock = state.lock
        self._catalog = state.catalog
        self._namespaces = state.namespaces
        self._lower_tiers = state.lower_tiers
        self._rules = tuple(rules)
        self._life = life
        self._tenants = TenantQuotas(tenants)
        """The store's lock guards it."""
        self._in_step = threading.Lock()
        """Held while quotas are worked out and set in lower tiers, so that both have one order. Taken behind the
        register's lock, before the store's."""
        self._migrating = threading.Lock()
        """Held while namespaces' pages are put into orders of their own, and taken before the store's lock."""
        state.namespaces.apply_to_all(self._apply_rules)

    def open_namespace(
        self, layout: Layout, durability: str = "", *, label: str = "", of_tenant: bool = False
    ) -> KnownNamespace:
        """The namespace of a layout, new or known."""
        checked_label(label)
        if frames_for(layout.page_bytes) > self._state.half_frames:
            raise LimitExceededError(
                f"page_bytes is {layout.page_bytes} ({format_size(layout.page_bytes)}), the limit is half of the arena,"
                f" {format_size(self._state.half_frames * FRAME_BYTES)}"
            )
        if durability not in DURABILITIES:
            raise InvalidRequestError(f'durability must be "disk" or empty, got {durability!r}')
        before = self._namespaces.get(layout.fingerprint)
        labels = with_label(before.labels if before is not None else (), label)
        durability = durability or rule_for(self._rules, layout, labels).durability
        if durability == "disk" and not self._lower_tiers.own:
            raise InvalidRequestError(
                f"namespace {layout.named(label or layout.model)!r} asks for durability"
                ' "disk": this node has no disk tier'
            )
        self._state.check_open()
        known = self._namespaces.open(layout, durability, self._apply_rules, label=label, of_tenant=of_tenant)
        if durability == "disk":
            self._protect(known)
        return known

    def _protect(self, known: KnownNamespace) -> None:
        """Let the pages not leave that were dirty before their namespace was durable: who opens it is told so then."""
        catalog = self._catalog
        if not catalog.is_unprotected(known.number):
            return
        for stamps in self._state.pages_here(known.number, dirty=True):
            with self._lock:
                self._state.check_open()
                catalog.protect(self._state.still_here(stamps))
        with self._lock:
            catalog.end_protecting(known.number)

    def quotas(self, known: KnownNamespace) -> dict[str, int]:
        """Tier → most bytes that a namespace may take there, where there is a quota."""
        return self._tenants.within(known, self._rule(known).quotas)

    def forget(self, known: KnownNamespace) -> None:
        """A namespace was dropped with its pages: the others of its tenant may have what it had in lower tiers."""
        with self._in_step:
            with self._lock:
                self._catalog.forget_namespace(known.number)
                self._state.usage.forget(known.number, known.fingerprint, known.layout.tenant)
                others = self._tenants.remove(known)
                anew = self._tenants.has(known.fingerprint, known.layout.tenant)
            self._set_lower_quotas(others)
            for tier in () if anew else self._lower_tiers.all():
                tier.set_quota(known.fingerprint, 0)

    def life_of(self, known: KnownNamespace) -> float:
        """Seconds after which a namespace that nobody uses is dropped; 0: never."""
        expire = self._rule(known).expire
        return self._life if expire is None else expire

    @property
    def shortest_life(self) -> float:
        """The shortest of those that may be anybody's; 0: none is dropped."""
        lives = [rule.expire for rule in self._rules if rule.expire] + [self._life] * bool(self._life)
        return min(lives, default=0.0)

    def set_rules(
        self,
        rules: Sequence[NamespaceRule],
        life: float,
        tenants: Sequence[TenantRule] = (),
        leave: Callable[[], bool] = lambda: False,
    ) -> None:
        """Other rules from now on."""
        self._rules, self._life = tuple(rules), life
        with self._lock:
            self._tenants.set_rules(tenants)
        self._namespaces.apply_to_all(self._apply_rules)
        self._migrate(leave)

    def migrate_orders(self, stop: threading.Event) -> None:
        """Put the pages of namespaces that have their first quota into orders of their own, until ``stop`` is set."""
        self._migrate(stop.is_set)

    def _migrate(self, leave: Callable[[], bool]) -> None:
        while not self._migrating.acquire(timeout=_LOOK_SECONDS):
            if leave():
                return
        try:
            self._migrate_all(leave)
        finally:
            self._migrating.release()

    def _migrate_all(self, leave: Callable[[], bool]) -> None:
        left: list[int] = []
        try:
            while (migration := self._next_migration()) is not None:
                left.append(migration.namespace)
                try:
                    if not self._carry_out(migration, leave):
                        return
                except Exception:  # noqa: BLE001 - whatever it is, the others' quotas count, and this one is tried again
                    _log.exception(
                        "the quotas of namespace %d wait: not all of its pages could be put into an order of their own;"
                        " it is tried again within a minute",
                        migration.namespace,
                    )
                else:
                    left.pop()
        finally:
            with self._lock:
                for namespace in left:
                    self._catalog.migrate_again(namespace)

    def _next_migration(self) -> OrderMigration | None:
        with self._lock:
            return self._catalog.take_migration()

    def _carry_out(self, migration: OrderMigration, leave: Callable[[], bool]) -> bool:
        """False: it was left before its end."""
        for step in migration.steps():
            with self._lock:
                if self._state.closed:
                    return False
                step()
            if leave():
                return False
            time.sleep(PAUSE_SECONDS)  # and wait for no event: a signal's handler that sets it would wait for that
        return True

    def _apply_rules(self, known: KnownNamespace) -> None:
        """Before anybody finds a namespace, and again when its durability or its labels change."""
        rule = self._rule(known)
        own = rule.quotas
        with self._in_step:
            with self._lock:
                if known.durability == "disk":
                    self._catalog.set_durable(known.number)
                self._catalog.set_quota(known.number, own["arena"] // FRAME_BYTES if "arena" in own else None)
                together = self._tenants.arena(known)
                self._catalog.set_tenant_quota(
                    known.number, known.layout.tenant, together // FRAME_BYTES if together is not None else None
                )
                others = self._tenants.add(known)
            self._set_lower_quotas(others)
        warn_of_quotas_below_a_page(rule, known.name, known.layout.page_bytes)

    def _rule(self, known: KnownNamespace) -> NamespaceRule:
        return rule_for(self._rules, known.layout, known.labels)

    def _set_lower_quotas(self, namespaces: Sequence[KnownNamespace]) -> None:
        """The caller holds ``_in_step``."""
        with self._lock:
            quotas = [self.quotas(known) for known in namespaces]
        for known, each in zip(namespaces, quotas, strict=True):
            for tier in self._lower_tiers.all():
                tier.set_quota(known.fingerprint, each.get(tier.name, 0))
