"""What tenants have for all of their namespaces together: in the arena as a sum, in lower tiers in even parts."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from memory_tier import MemoryTier
from tiny_stores import OpenStore, found_pages, hold_pages, kill_store, put_pages

from kvstore.config.rules import NamespaceRule, TenantRule, parse_tenants
from kvstore.errors import ConfigError
from kvstore.layout import Layout
from kvstore.namespaces.registry import KnownNamespace
from kvstore.store.leases import NODE
from kvstore.store.store import Store

FRAME = 4096


def opened(store: Store, tenant: str, model: str = "one", frames: int = 1) -> KnownNamespace:
    return store.open_namespace(Layout(model=model, block_size=16, page_bytes=frames * FRAME, tenant=tenant))


def put_each(store: Store, known: KnownNamespace, numbers: range) -> None:
    for number in numbers:
        put_pages(store, known, [number])


def used(store: Store, *namespaces: KnownNamespace) -> int:
    """Bytes in the arena."""
    found = {each.layout: each.used_bytes["arena"] for each in store.statistics().namespaces}
    return sum(found[known.layout] for known in namespaces)


def test_a_tenants_namespaces_keep_to_its_quota_together(open_store: OpenStore) -> None:
    """What leaves is what the tenant used longest ago, in whichever of its namespaces, whatever its pages' size."""
    store = open_store(tenants=[TenantRule(name="a", arena=8 * FRAME)])
    one, two, large = opened(store, "a"), opened(store, "a", "two"), opened(store, "a", "large", 3)
    other, nobodys = opened(store, "b"), opened(store, "")
    put_each(store, other, range(10))
    put_each(store, nobodys, range(10))
    for number in range(12):
        put_each(store, (one, two)[number % 2], range(number, number + 1))
        assert used(store, one, two, large) <= 8 * FRAME
    assert found_pages(store, one, range(12)) == [4, 6, 8, 10]
    assert found_pages(store, two, range(12)) == [5, 7, 9, 11]
    put_each(store, large, range(1))
    assert used(store, one, two, large) == 8 * FRAME
    assert found_pages(store, one, range(12)) == [8, 10]
    assert found_pages(store, two, range(12)) == [7, 9, 11]
    assert found_pages(store, large, range(1)) == [0]
    assert used(store, other, nobodys) == 20 * FRAME, "nobody else pays"
    store.check_integrity()


def test_what_does_not_fit_beside_what_is_held_is_refused(open_store: OpenStore) -> None:
    store = open_store(tenants=[TenantRule(name="a", arena=4 * FRAME)])
    one, two = opened(store, "a"), opened(store, "a", "two")
    put_each(store, one, range(4))
    held = hold_pages(store, one, range(4))
    assert put_pages(store, two, [0]).refused == 1
    store.complete_load(0, held.lease)
    assert put_pages(store, two, [0]).stored == 1
    assert used(store, one, two) == 4 * FRAME


def test_in_lower_tiers_each_of_its_namespaces_has_an_even_part(open_store: OpenStore, tier: MemoryTier) -> None:
    store = open_store(tiers=[tier], tenants=[TenantRule(name="a", disk=12 * FRAME)])
    one = opened(store, "a")
    assert tier.quotas[one.fingerprint] == 12 * FRAME
    two, three, other = opened(store, "a", "two"), opened(store, "a", "three"), opened(store, "b")
    for known in (one, two, three):
        assert tier.quotas[known.fingerprint] == 4 * FRAME
    assert tier.quotas[other.fingerprint] == 0
    store.clear(two.fingerprint)
    assert tier.quotas[one.fingerprint] == tier.quotas[three.fingerprint] == 6 * FRAME
    shown = {each.layout.model: each.quota_bytes for each in store.statistics().namespaces if each.layout.tenant == "a"}
    assert shown == {"one": {"disk": 6 * FRAME}, "three": {"disk": 6 * FRAME}}


def test_the_smaller_of_both_quotas_counts(open_store: OpenStore, tier: MemoryTier) -> None:
    rules = [NamespaceRule(match="small*", arena=2 * FRAME, disk=FRAME), NamespaceRule(arena=32 * FRAME, disk=1 << 20)]
    store = open_store(tiers=[tier], rules=rules, tenants=[TenantRule(name="a", arena=6 * FRAME, disk=8 * FRAME)])
    small, large = opened(store, "a", "small"), opened(store, "a", "large")
    put_each(store, small, range(10))
    put_each(store, large, range(10))
    assert used(store, small) <= 2 * FRAME
    assert used(store, small, large) == 6 * FRAME
    assert (tier.quotas[small.fingerprint], tier.quotas[large.fingerprint]) == (FRAME, 4 * FRAME)


def test_rules_change_while_pages_are_there(open_store: OpenStore, tier: MemoryTier) -> None:
    store = open_store(tiers=[tier])
    one, two = opened(store, "a"), opened(store, "a", "two")
    put_each(store, one, range(10))
    store.set_rules((), 0.0, [TenantRule(name="a", arena=4 * FRAME, disk=4 * FRAME)])
    assert used(store, one) == 10 * FRAME, "it counts from the next page on"
    put_each(store, two, range(1))
    assert used(store, one, two) == 4 * FRAME
    assert tier.quotas[one.fingerprint] == 2 * FRAME
    store.set_rules((), 0.0, ())
    put_each(store, two, range(1, 10))
    assert used(store, one, two) == 13 * FRAME
    assert tier.quotas[one.fingerprint] == 0
    store.check_integrity()


def test_a_namespace_that_is_dropped_while_rules_change_has_no_part_any_more(
    open_store: OpenStore, tier: MemoryTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(tiers=[tier])
    one, two = opened(store, "a"), opened(store, "a", "two")
    register = store.namespaces
    known = register.known

    def then_dropped() -> list[KnownNamespace]:
        listed = known()
        monkeypatch.setattr(register, "known", known)
        store.clear(two.fingerprint)
        return listed

    monkeypatch.setattr(register, "known", then_dropped)
    store.set_rules((), 0.0, [TenantRule(name="a", arena=4 * FRAME, disk=4 * FRAME)])
    assert known() == [one]
    assert tier.quotas[one.fingerprint] == 4 * FRAME
    store.check_integrity()


def test_a_namespace_that_is_opened_anew_while_it_is_dropped_keeps_its_part(
    open_store: OpenStore, tier: MemoryTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(tiers=[tier], tenants=[TenantRule(name="a", disk=4 * FRAME)])
    one, two = opened(store, "a"), opened(store, "a", "two")
    put_each(store, two, range(1))
    contains = tier.contains

    def opened_anew(keys: Sequence[bytes]) -> list[bool]:
        monkeypatch.setattr(tier, "contains", contains)
        assert opened(store, "a", "two").number != two.number
        return contains(keys)

    monkeypatch.setattr(tier, "contains", opened_anew)
    store.clear(two.fingerprint)
    assert tier.quotas[one.fingerprint] == tier.quotas[two.fingerprint] == 2 * FRAME


def test_a_quota_counts_for_the_pages_of_an_earlier_node(open_store: OpenStore, shm: Path) -> None:
    store = open_store()
    one = opened(store, "a")
    put_each(store, one, range(10))
    kill_store(store)
    store = open_store(tenants=[TenantRule(name="a", arena=4 * FRAME)])
    put_each(store, opened(store, "a"), range(10, 11))
    assert used(store, opened(store, "a")) == 4 * FRAME
    store.check_integrity()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("a", r"\[\[tenant\]\]"),
        ([1], "rule 1: a rule is a table"),
        ([{"arena": 1}], "rule 1: name is missing"),
        ([{"name": ""}], "rule 1: name=: a name has"),
        ([{"name": "a "}], "rule 1: name=a : a name has"),
        ([{"name": "a", "request_per_second": 1}], "did you mean 'requests_per_second'"),
        ([{"name": "a", "requests_per_second": "1KiB"}], "requests_per_second must be a whole number"),
        ([{"name": "a"}, {"name": "a"}], "rule 2: tenant 'a' has one already"),
        ([{"name": "a", "aren": 1}], "rule 1: unknown key 'aren'"),
        ([{"name": "a", "arena": "x"}], "rule 1: arena"),
        ([{"name": "a", "requests_per_second": -1}], "rule 1: requests_per_second"),
    ],
)
def test_rules_that_cannot_be_right(value: list[dict[str, object]], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_tenants(value)


def test_a_tenants_store_and_a_namespace_that_is_opened_do_not_wait_for_each_other(
    open_store: OpenStore, eventually: Callable[[Callable[[], object]], None]
) -> None:
    store = open_store()
    known = opened(store, "a")
    opening = threading.Thread(target=opened, args=(store, "a", "another"), daemon=True)
    asking = threading.Thread(target=store._state.allowance, args=(NODE, known), daemon=True)
    with store._state.lock:  # as a store has it when it asks
        opening.start()
        eventually(store.namespaces._lock.locked)  # and now it wants the other one
        asking.start()
        asking.join(30)
        assert not asking.is_alive()
    opening.join(30)
    assert not opening.is_alive()
