"""What namespaces are granted: quotas in the arena, and pages that must not leave before they are on disk."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from memory_tier import MemoryTier
from tiny_stores import hold_pages, layout_of, load_pages, page_hashes, put_pages

from kvstore.arena.arena import Arena
from kvstore.config.rules import (
    NO_RULE,
    NamespaceRule,
    parse_rules,
    quotas_below_a_page,
    rule_for,
    warn_of_quotas_below_a_page,
)
from kvstore.errors import ConfigError, InvalidRequestError
from kvstore.page_codes import PageTier
from kvstore.store.store import Store

FRAME = 4096
OpenStore = Callable[..., Store]


def here(store: Store, known: Any, numbers: Any) -> list[int]:
    [tiers] = store.lookup([(known.fingerprint, page_hashes(numbers))])
    return [number for number, tier in zip(numbers, tiers, strict=True) if tier == PageTier.ARENA]


def put_all(store: Store, known: Any, numbers: Any) -> None:
    for number in numbers:
        assert put_pages(store, known, [number]).stored == 1


def test_quotas_change_while_pages_are_there(open_store: OpenStore) -> None:
    """The first quota of a namespace with pages, a lower one, and none again."""
    store = open_store(64, [])
    one, other = (store.open_namespace(layout_of(name, FRAME)) for name in ("one", "other"))
    put_pages(store, one, range(10))  # a chain: its tail leaves first
    put_pages(store, one, [20])
    put_all(store, other, range(10))
    store.set_rules(parse_rules([{"match": "one*", "arena": 8 * FRAME}]), 0.0)
    store.check_integrity()
    assert len(here(store, one, range(21))) == 11, "it counts from the next page on"
    put_all(store, one, [21])
    store.check_integrity()
    assert here(store, one, [0, 20, 21]) == [0, 20, 21], "what was used last stays, and the head of the chain"
    assert len(here(store, one, range(22))) == 8
    assert len(here(store, other, range(10))) == 10, "nobody else pays"
    store.set_rules(parse_rules([{"match": "one*", "arena": 4 * FRAME}]), 0.0)
    put_all(store, one, [22])
    assert len(here(store, one, range(23))) == 4
    store.set_rules((), 0.0)
    put_all(store, one, range(30, 40))
    assert len(here(store, one, range(40))) == 14
    store.check_integrity()


def test_the_first_rule_that_matches_counts() -> None:
    rules = parse_rules(
        [{"match": "llama*", "arena": "1MiB"}, {"match": "*tenant b", "disk": 5}, {"durability": "disk"}]
    )
    qwen = layout_of("qwen", FRAME)
    assert rule_for(rules, replace(layout_of("llama-8b", FRAME), tenant="b")).quotas == {"arena": 1 << 20}
    assert rule_for(rules, replace(qwen, tenant="b")).quotas == {"disk": 5}
    assert rule_for(rules, qwen).durability == "disk"
    assert rule_for(rules[:2], qwen) == NO_RULE


@pytest.mark.parametrize(
    ("match", "follows"),
    [
        ("chat", True),
        ("chat-*", False),
        ("chat@r1 · block 16 · *", True),
        ("acme/c[a-z]at", True),
        ("LlamaForCausalLM@r1 *", True),
        ("Qwen*", False),
        ("{12}", True),
        ("{64}", True),
        ("{11}", False),  # it could be somebody's name
        ("{11}*", False),
        ("0" * 64, False),
    ],
)
def test_a_rule_names_a_model_by_any_label_or_by_its_fingerprint(match: str, follows: bool) -> None:
    layout = replace(layout_of("LlamaForCausalLM", FRAME), revision="r1")
    digits = layout.fingerprint.hex()
    for count in (11, 12, 64):
        match = match.replace(f"{{{count}}}", digits[:count])
    rules = parse_rules([{"match": match, "disk": 5}, {"match": "chat*", "disk": 7}])
    assert rule_for(rules, layout, ["chat", "acme/chat"]).quotas == {"disk": 5 if follows else 7}
    assert rule_for(rules[1:], layout) == NO_RULE


def test_a_label_that_comes_later_brings_the_rule_that_names_it_with_pages_there(open_store: OpenStore) -> None:
    rules = [{"match": "second*", "arena": 4 * FRAME}, {"match": "first*", "arena": 8 * FRAME}]
    store = open_store(64, rules=parse_rules(rules))
    layout = layout_of("LlamaForCausalLM", FRAME)
    known = store.open_namespace(layout, label="first")
    put_all(store, known, range(20))
    assert len(here(store, known, range(20))) == 8
    assert store.open_namespace(layout, label="third").labels == ("first", "third")
    assert store.statistics().namespaces[0].quota_bytes == {"arena": 8 * FRAME}
    store.open_namespace(layout, label="second")
    assert store.statistics().namespaces[0].quota_bytes == {"arena": 4 * FRAME}
    put_all(store, known, [20])
    assert len(here(store, known, range(21))) == 4
    store.check_integrity()


def test_the_first_quota_that_a_label_brings_counts_from_the_next_migration_on(open_store: OpenStore) -> None:
    store = open_store(64, rules=parse_rules([{"match": "second*", "arena": 4 * FRAME}]))
    layout = layout_of("LlamaForCausalLM", FRAME)
    known = store.open_namespace(layout, label="first")
    put_all(store, known, range(20))
    store.open_namespace(layout, label="second")
    store.migrate_orders(threading.Event())
    put_all(store, known, [20])
    assert len(here(store, known, range(21))) == 4
    store.check_integrity()


def test_a_label_that_comes_later_makes_a_namespace_durable(open_store: OpenStore, tier: MemoryTier) -> None:
    store = open_store(64, [tier], rules=parse_rules([{"match": "second*", "durability": "disk"}]))
    layout = layout_of("LlamaForCausalLM", FRAME)
    assert store.open_namespace(layout, label="first").durability == ""
    assert store.open_namespace(layout, label="second").durability == "disk"
    assert store.open_namespace(layout, label="first").durability == "disk"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("arena=1", r"\[\[namespace\]\]"),
        ([3], "rule 1: a rule is a table"),
        ([{}, {"arnea": 3}], "rule 2: unknown key 'arnea'; did you mean 'arena'"),
        ([{}, {"match": "a*", "disk": "many"}], r"rule 2 \(match = 'a\*'\): disk: not a size: 'many'"),
        ([{"arena": True}], "rule 1: arena can't be True"),
        ([{"arena": 1.5}], "rule 1: arena can't be 1.5"),
        ([{"match": 3}], "match must be a string"),
        ([{"durability": "tape"}], "tape"),
    ],
)
def test_a_rule_that_cant_be_is_named(value: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_rules(value)


def test_a_quota_below_one_page_is_found_padding_included() -> None:
    rule = NamespaceRule(match="small*", arena=2 * FRAME - 1, disk=2 * FRAME, redis=FRAME)
    assert quotas_below_a_page(rule, FRAME + 1) == {"arena": (2 * FRAME - 1, 2 * FRAME), "redis": (FRAME, FRAME + 1)}
    assert quotas_below_a_page(rule, FRAME) == {}
    assert quotas_below_a_page(NO_RULE, 1 << 40) == {}


def test_a_quota_below_one_page_is_said_with_both_sizes(caplog: pytest.LogCaptureFixture) -> None:
    warn_of_quotas_below_a_page(NamespaceRule(match="small*", arena=FRAME), "small", 2 * FRAME)
    [record] = caplog.records
    assert "its arena quota of 4 KiB (rule 'small*') is smaller than one page, which takes 8 KiB" in record.getMessage()


def test_a_namespace_makes_room_within_its_quota(open_store: OpenStore) -> None:
    store = open_store(64, rules=[NamespaceRule(match="small*", arena=4 * FRAME + 100)])
    small, other = (store.open_namespace(layout_of(name, FRAME)) for name in ("small", "other"))
    put_pages(store, other, [1, 2, 3])
    for number in range(10):
        assert put_pages(store, small, [number]).stored == 1
        assert store.statistics().namespaces[0].used_bytes["arena"] <= 4 * FRAME
        store.check_integrity()
    assert here(store, small, range(10)) == [6, 7, 8, 9]
    assert here(store, other, [1, 2, 3]) == [1, 2, 3]
    usage = store.statistics().namespaces[0]
    assert (usage.used_bytes["arena"], usage.quota_bytes) == (4 * FRAME, {"arena": 4 * FRAME + 100})


def test_what_is_held_fills_a_quota(open_store: OpenStore) -> None:
    store = open_store(64, rules=[NamespaceRule(arena=2 * FRAME)])
    known = store.open_namespace(layout_of("a", FRAME))
    put_pages(store, known, [1, 2])
    held = hold_pages(store, known, [1, 2])
    assert put_pages(store, known, [3]).refused == 1
    store.complete_load(0, held.lease)
    assert put_pages(store, known, [3]).stored == 1
    store.check_integrity()


def test_a_full_arena_takes_the_coldest_page_with_or_without_quota(open_store: OpenStore) -> None:
    store = open_store(16, rules=[NamespaceRule(match="small*", arena=8 * FRAME)])
    small, other = (store.open_namespace(layout_of(name, FRAME)) for name in ("small", "other"))
    put_pages(store, small, range(4))
    put_all(store, other, range(12))
    put_all(store, other, range(20, 24))
    assert here(store, small, range(4)) == []
    load_pages(store, other, [0])
    put_pages(store, small, [50])
    assert len(here(store, other, [*range(12), *range(20, 24)])) == 15
    store.check_integrity()


def test_quotas_hold_after_a_restart_too(open_store: OpenStore) -> None:
    first = open_store(64)
    put_pages(first, first.open_namespace(layout_of("a", FRAME)), range(10))
    first.close()
    store = open_store(64, rules=[NamespaceRule(arena=4 * FRAME)])
    known = store.open_namespace(layout_of("a", FRAME))
    assert put_pages(store, known, [20]).stored == 1
    assert len(here(store, known, [*range(10), 20])) == 4
    store.check_integrity()


def test_a_durable_page_does_not_leave_before_it_is_on_disk(open_store: OpenStore, tier: MemoryTier) -> None:
    store = open_store(64, [tier])
    durable = store.open_namespace(layout_of("durable", FRAME), "disk")
    other = store.open_namespace(layout_of("other", FRAME))
    done = [put_pages(store, durable, [number]) for number in range(30)]
    assert [each.stored for each in done] == [1] * 16 + [0] * 14, "a quarter of the arena is at risk at most"
    put_all(store, other, range(100, 164))
    assert here(store, durable, range(30)) == list(range(16)), "others' pages left instead"
    store.check_integrity()
    assert store.statistics().counters["refused"] == 14
    while store.write_back.write_back():
        store.check_integrity()
    assert put_pages(store, durable, [30]).stored == 1
    assert store.statistics().namespaces[0].durability == "disk"
    store.write_back.write_back()
    put_all(store, other, range(200, 264))
    assert here(store, durable, range(31)) == [], "what is on disk may leave"
    [tiers] = store.lookup([(durable.fingerprint, page_hashes([0, 30, 29]))])
    assert list(tiers)[:2] == [2, 2] and tiers[2] == PageTier.ABSENT
    store.check_integrity()


def test_durability_is_remembered_and_needs_a_disk(open_store: OpenStore, tier: MemoryTier) -> None:
    store = open_store(64, [tier])
    layout = layout_of("a", FRAME)
    assert store.open_namespace(layout).durability == ""
    assert store.open_namespace(layout, "disk").durability == "disk"
    assert store.open_namespace(layout).durability == "disk"
    with pytest.raises(InvalidRequestError, match="'tape'"):
        store.open_namespace(layout, "tape")
    store.close()
    again = open_store(64, [tier])
    assert again.open_namespace(layout).durability == "disk"
    again.close()
    bare = open_store(64)
    with pytest.raises(InvalidRequestError, match="no disk tier"):
        bare.open_namespace(layout, "disk")


def test_a_given_up_store_is_at_risk_no_more(open_store: OpenStore, tier: MemoryTier) -> None:
    store = open_store(64, [tier])
    known = store.open_namespace(layout_of("a", FRAME), "disk")
    for _ in range(5):
        reserved = store.prepare_store(0, known.fingerprint, page_hashes(range(16)), 10.0, direct=True)
        assert reserved.outcomes == bytes(16)
        store.complete_store(0, reserved.lease, publish=False)
        store.check_integrity()
    put_pages(store, known, range(16))
    assert store.evict(known.fingerprint, page_hashes(range(16))) == 16
    assert put_pages(store, known, range(16)).stored == 16
    store.check_integrity()


def test_a_namespace_has_its_quota_before_anybody_finds_it(open_store: OpenStore) -> None:
    """Cleared and opened again under traffic: who knows the fingerprint must not store before the quota is there."""
    store = open_store(64, rules=[NamespaceRule(arena=4 * FRAME)])
    layout = layout_of("a", FRAME)
    known = store.open_namespace(layout)
    store.clear(known.fingerprint)
    seen = []
    apply_rules = store._quotas._apply_rules

    def watched(known: Any) -> None:
        seen.append(store.namespaces.get(known.fingerprint))
        apply_rules(known)

    store._quotas._apply_rules = watched  # type: ignore[method-assign]
    known = store.open_namespace(layout)
    assert seen == [None]
    put_all(store, known, range(10))
    assert len(here(store, known, range(10))) == 4


def test_loads_from_disk_are_no_risk(open_store: OpenStore, tier: MemoryTier) -> None:
    store = open_store(64, [tier])
    known = store.open_namespace(layout_of("a", FRAME), "disk")
    put_all(store, known, range(16))
    store.flush()
    other = store.open_namespace(layout_of("b", FRAME))
    put_all(store, other, range(100, 164))
    tier.refuse = lambda key: True
    put_all(store, known, range(20, 36))
    assert put_pages(store, known, [36]).refused == 1, "as much is at risk as may be"
    assert load_pages(store, known, range(4)) == 4
    store.check_integrity()


def test_what_is_dirty_when_a_namespace_becomes_durable_stays(open_store: OpenStore, tier: MemoryTier) -> None:
    store = open_store(64, [tier])
    layout = layout_of("a", FRAME)
    known = store.open_namespace(layout)
    put_all(store, known, range(8))
    store.open_namespace(layout, "disk")
    store.check_integrity()
    other = store.open_namespace(layout_of("b", FRAME))
    put_all(store, other, range(100, 228))
    assert here(store, known, range(8)) == list(range(8))


def test_a_damaged_page_that_another_node_shares_goes_to_disk_again(shm: Any, tier: MemoryTier) -> None:
    shared = MemoryTier(name="redis")
    with Store(Arena(shm / "arena", 64 * FRAME), [tier], [shm / "arena"], shared) as store:
        known = store.open_namespace(layout_of("a", FRAME), "disk")
        put_all(store, known, range(4))
        store.flush()
        put_all(store, store.open_namespace(layout_of("b", FRAME)), range(100, 164))
        tier.damage(known.fingerprint + page_hashes([1])[0])
        held = hold_pages(store, known, range(4))
        assert list(held.tiers) == [2, 3, 2, 2]
        store.complete_load(0, held.lease)
        store.flush()
        assert known.fingerprint + page_hashes([1])[0] in tier.pages
