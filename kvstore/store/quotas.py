"""What namespaces are granted: opened by their rules, with their quotas in every tier."""

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
from kvstore.layout import Layout
from kvstore.namespaces.registry import KnownNamespace
from kvstore.namespaces.tenant_quotas import TenantQuotas
from kvstore.store.state import PAUSE_SECONDS, StoreState
from kvstore.tiers.lower_tiers import LowerTiers
from kvstore.units import format_size

_LOOK_SECONDS = 0.1
"""How often somebody who waits for another thread's regrouping looks whether to stop."""
_log = logging.getLogger(__name__)


class NamespaceQuotas:
    """The rules of a store, carried out. Safe for threads.

    Args:
        books: of the arena.
        below: tiers that keep quotas, too.
        rules: the first that matches a namespace counts.
        life: seconds after which a namespace that nobody uses is dropped, where its rule does not say; 0: never.
        tenants: what tenants have for all of their namespaces together.
    """

    def __init__(
        self,
        state: StoreState,
        below: LowerTiers,
        rules: Sequence[NamespaceRule],
        life: float = 0.0,
        tenants: Sequence[TenantRule] = (),
    ) -> None:
        self._state = state
        self._below = below
        self._rules = tuple(rules)
        self._life = life
        self._tenants = TenantQuotas(tenants)
        """The books' lock guards it."""
        self._below_in_step = threading.Lock()
        """Quotas below are worked out and set in one order. Behind the register's lock, before the books'."""
        self._regrouping = threading.Lock()
        """Held while namespaces' pages are put into orders of their own, and taken before the books'."""
        state.namespaces.grant_all(self._grant)

    def open_namespace(self, layout: Layout, durability: str = "", *, of_tenant: bool = False) -> KnownNamespace:
        """The namespace of a layout, new or known.

        Args:
            layout: of its pages.
            durability: ``disk``: from now on its stores are refused rather than that pages leave the arena before they
                are on disk. Empty: as it was opened before, or as a rule has it.
            of_tenant: whether a tenant asks.

        Raises:
            InvalidRequestError: no such durability, or the node has no disk to keep it.
            LayoutMismatchError: the same name is known with another page size.
            LimitExceededError: too many namespaces, or pages larger than half of the arena.
        """
        if frames_for(layout.page_bytes) > self._state.half_frames:
            raise LimitExceededError(
                f"page_bytes is {layout.page_bytes} ({format_size(layout.page_bytes)}), the limit is half of the arena,"
                f" {format_size(self._state.half_frames * FRAME_BYTES)}"
            )
        if durability not in DURABILITIES:
            raise InvalidRequestError(f'durability must be "disk" or empty, got {durability!r}')
        durability = durability or rule_for(self._rules, layout.name).durability
        if durability == "disk" and not self._below.own:
            raise InvalidRequestError(
                f'namespace {layout.name!r} asks for durability "disk": this node has no disk tier'
            )
        self._state.check_open()
        known = self._state.namespaces.open(layout, durability, self._grant, of_tenant=of_tenant)
        if durability == "disk":
            self._protect(known)
        return known

    def _protect(self, known: KnownNamespace) -> None:
        """Let the pages not leave that were dirty before their namespace was durable: who opens it is told so then."""
        catalog = self._state.catalog
        if not catalog.is_unprotected(known.number):
            return
        for stamps in self._state.pages_here(known.number, dirty=True):
            with self._state.lock:
                self._state.check_open()
                catalog.protect(self._state.still_here(stamps))
        with self._state.lock:
            catalog.end_protecting(known.number)

    def quotas(self, known: KnownNamespace) -> dict[str, int]:
        """Tier → most bytes that a namespace may take there, where there is a quota."""
        return self._tenants.within(known, rule_for(self._rules, known.layout.name).quotas)

    def forget(self, known: KnownNamespace) -> None:
        """A namespace was dropped with its pages: the others of its tenant may have what it had below."""
        with self._below_in_step:
            with self._state.lock:
                self._state.catalog.forget_namespace(known.number)
                self._state.usage.forget(known.number, known.fingerprint, known.layout.tenant)
                others = self._tenants.remove(known)
                anew = self._tenants.has(known.fingerprint, known.layout.tenant)
            self._set_quotas_below(others)
            for tier in () if anew else self._below.all():
                tier.set_quota(known.fingerprint, 0)

    def life_of(self, known: KnownNamespace) -> float:
        """Seconds after which a namespace that nobody uses is dropped; 0: never."""
        expire = rule_for(self._rules, known.layout.name).expire
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
        """Other rules from now on. A quota that is smaller than what is used takes effect with the next pages.

        The first quota of a namespace counts when this returns: its pages are put into an order of their own, which
        takes up to a minute for a million. Once ``leave`` says so that is left undone, and where it fails the quota
        waits for the next ``regroup``.

        A durability that a namespace was opened with stays; a new rule's counts when it is opened again.
        """
        self._rules, self._life = tuple(rules), life
        with self._state.lock:
            self._tenants.set_rules(tenants)
        self._state.namespaces.grant_all(self._grant)
        self._regroup(leave)

    def regroup(self, stop: threading.Event) -> None:
        """Put the pages of namespaces that have their first quota into orders of their own, and log what fails: that
        is left to the next call. Another thread that is at it is waited for, until ``stop`` is set."""
        self._regroup(stop.is_set)

    def _regroup(self, leave: Callable[[], bool]) -> None:
        while not self._regrouping.acquire(timeout=_LOOK_SECONDS):
            if leave():
                return
        try:
            self._regroup_all(leave)
        finally:
            self._regrouping.release()

    def _regroup_all(self, leave: Callable[[], bool]) -> None:
        left: list[int] = []
        try:
            while (regrouping := self._take_regrouping()) is not None:
                left.append(regrouping.namespace)
                try:
                    if not self._carry_out(regrouping, leave):
                        return
                except Exception:  # noqa: BLE001 - whatever it is, the others' quotas count, and this one is tried again
                    _log.exception(
                        "the quotas of namespace %d wait: not all of its pages could be put into an order of their own;"
                        " it is tried again within a minute",
                        regrouping.namespace,
                    )
                else:
                    left.pop()
        finally:
            with self._state.lock:
                for namespace in left:
                    self._state.catalog.regroup_again(namespace)

    def _take_regrouping(self) -> OrderMigration | None:
        with self._state.lock:
            return self._state.catalog.take_regrouping()

    def _carry_out(self, regrouping: OrderMigration, leave: Callable[[], bool]) -> bool:
        """False: it was left before its end."""
        for step in regrouping.steps():
            with self._state.lock:
                if self._state.closed:
                    return False
                step()
            if leave():
                return False
            time.sleep(PAUSE_SECONDS)  # and wait for no event: a signal's handler that sets it would wait for that
        return True

    def _grant(self, known: KnownNamespace) -> None:
        """Let a namespace have what its rule says: before anybody finds it, and again when its durability changes."""
        own = rule_for(self._rules, known.layout.name).quotas
        with self._below_in_step:
            with self._state.lock:
                if known.durability == "disk":
                    self._state.catalog.set_durable(known.number)
                self._state.catalog.set_quota(known.number, own["arena"] // FRAME_BYTES if "arena" in own else None)
                together = self._tenants.arena(known)
                self._state.catalog.set_tenant_quota(
                    known.number, known.layout.tenant, together // FRAME_BYTES if together is not None else None
                )
                others = self._tenants.add(known)
            self._set_quotas_below(others)
        warn_of_quotas_below_a_page(rule_for(self._rules, known.layout.name), known.layout)

    def _set_quotas_below(self, namespaces: Sequence[KnownNamespace]) -> None:
        """The caller has the lock that keeps them in step."""
        with self._state.lock:
            quotas = [self.quotas(known) for known in namespaces]
        for known, each in zip(namespaces, quotas, strict=True):
            for tier in self._below.all():
                tier.set_quota(known.fingerprint, each.get(tier.name, 0))
