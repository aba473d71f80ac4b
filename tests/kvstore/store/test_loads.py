"""Loads: pages are promoted and held; reports of what was loaded without a call."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from memory_tier import Gate, MemoryTier
from tiny_stores import (
    OpenStore,
    counters_of,
    found_pages,
    hold_pages,
    layout_of,
    load_pages,
    page_hash,
    page_hashes,
    put_in_tier,
    put_pages,
    result_of,
)

from kvstore.errors import (
    LimitExceededError,
)
from kvstore.limits import MOST_LOOKUP_PAGES
from kvstore.namespaces.registry import KnownNamespace
from kvstore.page_codes import PageTier
from kvstore.store.leases import NODE
from kvstore.store.results import Held
from kvstore.store.store import Store

FRAME = 4096
PATIENCE = 60.0


def test_pages_are_promoted_and_say_so(open_store: OpenStore, tier: MemoryTier) -> None:
    store = open_store(16, [tier])
    known = store.open_namespace(layout_of("a", FRAME))
    put_in_tier(store, known, tier, [1, 2, 3])
    [tiers] = store.lookup([(known.fingerprint, page_hashes([1, 2, 3, 4]))])
    assert list(tiers) == [PageTier.DISK, PageTier.DISK, PageTier.DISK, PageTier.ABSENT]
    put_pages(store, known, [4])
    held = hold_pages(store, known, [1, 4, 2])
    assert list(held.tiers) == [PageTier.DISK, PageTier.ARENA, PageTier.DISK]
    assert store.complete_load(NODE, held.lease)
    assert load_pages(store, known, [1, 2]) == 2
    assert len(tier.asked) == 2, "a page that came up is in the arena"
    assert counters_of(store, "stored") == (4,)
    assert store.statistics().dirty_pages == 1
    store.check_integrity()


@pytest.mark.parametrize(("ask", "expected"), [(load_pages, 2), (found_pages, [1, 2])])
def test_a_page_that_goes_to_a_lower_tier_behind_the_look_is_found_there(
    open_store: OpenStore,
    tier: MemoryTier,
    ask: Callable[[Store, KnownNamespace, Sequence[int]], int | list[int]],
    expected: int | list[int],
) -> None:
    """The tier is asked, then the page is written back and leaves the arena, then the arena is looked at."""
    store = open_store(16, [tier])
    known = store.open_namespace(layout_of("a", FRAME))
    put_pages(store, known, [1, 2])
    contains, looks = tier.contains, []

    def asked_too_early(keys: Any) -> Any:
        answer = contains(keys)
        looks.append(answer)
        if len(looks) == 1:
            while store.write_back.write_back():
                pass
            for number in range(3, 30):
                put_pages(store, known, [number])
                store.write_back.write_back()
        return answer

    tier.contains = asked_too_early
    try:
        answer = ask(store, known, [1, 2])
    finally:
        tier.contains = contains
    assert looks[0] == [False, False]
    assert answer == expected
    store.check_integrity()


def test_what_a_lower_tier_has_is_present_for_a_store(open_store: OpenStore, tier: MemoryTier) -> None:
    store = open_store(16, [tier])
    known = store.open_namespace(layout_of("a", FRAME))
    put_in_tier(store, known, tier, [1])
    assert put_pages(store, known, [1, 2]) == (1, 1, 0)
    assert load_pages(store, known, [1, 2]) == 2


def test_a_page_damaged_in_a_lower_tier_is_a_miss_and_the_prefix_ends_there(
    open_store: OpenStore, tier: MemoryTier
) -> None:
    store = open_store(16, [tier])
    known = store.open_namespace(layout_of("a", FRAME))
    put_in_tier(store, known, tier, [1, 2, 3])
    put_pages(store, known, [4])
    tier.damage(known.fingerprint + page_hash(2))
    assert load_pages(store, known, [1, 2, 3, 4]) == 1
    assert counters_of(store, "asked", "hit", "missed") == (4, 1, 3)
    assert found_pages(store, known, [1, 2, 3, 4]) == [1, 3, 4]
    assert load_pages(store, known, [3, 4]) == 2
    assert put_pages(store, known, [2]) == (1, 0, 0)
    store.check_integrity()


def test_a_load_that_fails_as_it_begins_leaves_nothing_behind(
    open_store: OpenStore, tier: MemoryTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(64, [tier])
    known = store.open_namespace(layout_of("a", FRAME))
    put_in_tier(store, known, tier, range(1, 6))
    put_pages(store, known, [0])
    state = store._state
    reserve, calls = state.residency.reserve, 0

    def fail(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise MemoryError
        return reserve(*arguments, **options)

    with monkeypatch.context() as patched:
        patched.setattr(state.residency, "reserve", fail)
        with pytest.raises(MemoryError):
            load_pages(store, known, range(6))
    store.check_integrity()
    promotions = state.promotions
    assert (promotions.reserved, promotions._runs.taken, promotions._frames.taken, promotions._coming) == (0, 0, 0, {})
    assert load_pages(store, known, range(6)) == 6
    store.check_integrity()


def test_a_page_twice_in_a_load_is_read_once(open_store: OpenStore, tier: MemoryTier) -> None:
    store = open_store(16, [tier])
    known = store.open_namespace(layout_of("a", FRAME))
    put_in_tier(store, known, tier, [1])
    assert load_pages(store, known, [1, 1, 1]) == 3
    assert len(tier.asked) == 1
    store.check_integrity()


def test_concurrent_loads_read_a_page_once(
    open_store: OpenStore, tier: MemoryTier, threads: ThreadPoolExecutor
) -> None:
    store = open_store(32, [tier])  # half of it holds all loads at once
    known = store.open_namespace(layout_of("a", FRAME))
    put_in_tier(store, known, tier, [1, 2, 3])
    tier.read_gate.close()
    first = threads.submit(load_pages, store, known, [1, 2])
    tier.read_gate.wait_reached()
    others = [threads.submit(load_pages, store, known, [1, 2]) for _ in range(4)]
    tier.read_gate.open()
    assert [result_of(each) for each in (first, *others)] == [2] * 5
    assert sorted(tier.asked) == [known.fingerprint + page_hash(number) for number in (1, 2)]
    store.check_integrity()


def test_a_load_that_waits_for_another_keeps_nobody_waiting(
    open_store: OpenStore, tier: MemoryTier, threads: ThreadPoolExecutor
) -> None:
    """It publishes what it read itself before it waits, so that no ring of loads can wait for each other."""
    store = open_store(32, [tier])
    known = store.open_namespace(layout_of("a", FRAME))
    put_in_tier(store, known, tier, [1, 2])
    read, slow, second_read = tier.read, Gate(), threading.Event()
    slow.close()

    def read_slowly(keys: list[bytes], into: list[Any]) -> list[int | None]:
        if keys[-1:] == [known.fingerprint + page_hash(1)]:
            slow.go_through()
        elif keys:
            second_read.set()
        return list(read(keys, into))

    tier.read = read_slowly
    first = threads.submit(load_pages, store, known, [1])
    slow.wait_reached()
    second = threads.submit(load_pages, store, known, [2, 1])
    assert second_read.wait(PATIENCE)
    third = threads.submit(load_pages, store, known, [2])
    assert result_of(third) == 1
    assert not first.done()
    assert not second.done()
    slow.open()
    assert (result_of(first), result_of(second)) == (1, 2)
    assert len(tier.asked) == 2
    store.check_integrity()


def test_a_load_waits_for_anothers_reading_no_longer_than_its_deadline(
    open_store: OpenStore, tier: MemoryTier, threads: ThreadPoolExecutor
) -> None:
    store = open_store(16, [tier])
    known = store.open_namespace(layout_of("a", FRAME))
    put_in_tier(store, known, tier, [1])
    put_pages(store, known, [2])
    tier.read_gate.close()
    first = threads.submit(load_pages, store, known, [1])
    tier.read_gate.wait_reached()
    held = store.prepare_load(NODE, known.fingerprint, page_hashes([2, 1]), 0.01)
    assert len(held.frames) == 1
    tier.read_gate.open()
    assert result_of(first) == 1
    store.complete_load(NODE, held.lease)
    store.check_integrity()


def test_a_tier_that_raises_leaks_nothing(open_store: OpenStore, tier: MemoryTier, threads: ThreadPoolExecutor) -> None:
    store = open_store(16, [tier])
    known = store.open_namespace(layout_of("a", FRAME))
    put_in_tier(store, known, tier, [1, 2])
    put_pages(store, known, [3])
    used = store.statistics().arena_used_bytes
    tier.read_gate.error = RuntimeError("broken")
    tier.read_gate.close()
    first = threads.submit(load_pages, store, known, [3, 1, 2])
    tier.read_gate.wait_reached()
    second = threads.submit(load_pages, store, known, [3, 1])
    tier.read_gate.open()
    with pytest.raises(RuntimeError, match="broken"):
        result_of(first)
    # It waited for the first one's page, or read it itself, which broke, too.
    assert isinstance(second.exception(PATIENCE), RuntimeError) or result_of(second) == 1
    assert store.statistics().arena_used_bytes == used
    store.check_integrity()
    tier.read_gate.error = None
    assert load_pages(store, known, [3, 1, 2]) == 3


def test_a_second_tier_is_asked_for_what_the_first_one_misses(open_store: OpenStore, tier: MemoryTier) -> None:
    lower = MemoryTier(name="lower")
    store = open_store(16, [tier, lower])
    known = store.open_namespace(layout_of("a", FRAME))
    put_in_tier(store, known, tier, [1, 2])
    key = known.fingerprint + page_hash(1)
    lower.pages[key] = tier.pages[key]
    tier.damage(key)
    assert load_pages(store, known, [1, 2]) == 2
    assert lower.asked == [key]
    assert list(store.statistics().lower_tiers) == ["disk", "lower"]


def test_a_load_without_free_slots_is_shorter(open_store: OpenStore, tier: MemoryTier) -> None:
    store = open_store(16, [tier])
    known = store.open_namespace(layout_of("a", FRAME))
    put_in_tier(store, known, tier, [1, 2, 3])
    holds = []
    for number in range(100, 114):
        put_pages(store, known, [number])
        holds.append(hold_pages(store, known, [number], owner=number))
    held = hold_pages(store, known, [1, 2, 3, 100])
    assert len(held.frames) == 2
    store.check_integrity()
    assert store.complete_load(NODE, held.lease)
    for owner, each in enumerate(holds, 100):
        assert store.complete_load(owner, each.lease)
    assert load_pages(store, known, [1, 2, 3]) == 3


def test_one_owner_holds_half_of_the_arena_at_most(open_store: OpenStore) -> None:
    store = open_store(16)
    known = store.open_namespace(layout_of("a", FRAME))
    for number in range(16):
        put_pages(store, known, [number])
    sizes = [len(hold_pages(store, known, list(range(first, first + 4)), owner=3).frames) for first in range(0, 12, 4)]
    assert sizes == [4, 4, 0]
    assert len(hold_pages(store, known, [8, 9], owner=4).frames) == 2
    store.check_integrity()


def test_loads_under_way_count_in_the_half_that_one_owner_may_hold(
    open_store: OpenStore, tier: MemoryTier, threads: ThreadPoolExecutor
) -> None:
    """Each of them found its pages before any of the others had its lease."""
    store = open_store(16, [tier])
    known = store.open_namespace(layout_of("a", FRAME))
    for number in range(12):
        put_pages(store, known, [number])
    put_in_tier(store, known, tier, [20, 21, 22, 23])
    tier.read_gate.close()
    loads: list[Future[Held]] = []
    for call in range(4):
        numbers = [3 * call, 3 * call + 1, 3 * call + 2, 20 + call]
        loads.append(threads.submit(hold_pages, store, known, numbers, owner=3))
        if call < 2:
            tier.read_gate.wait_reached()
            tier.read_gate.close()
        else:  # six are held, so two more may be: nothing is read for these calls
            assert len(loads[-1].result(60).frames) == (2 if call == 2 else 0)
    assert len(hold_pages(store, known, [8, 9], owner=4).frames) == 2
    tier.read_gate.open()
    assert [len(load.result(60).frames) for load in loads] == [3, 3, 2, 0]
    assert store._state.frames_of(3) == 8
    read = len(tier.asked)
    assert load_pages(store, known, [20, 21], owner=4) == 2
    assert len(tier.asked) == read, "they came all the same, for others"
    store.check_integrity()


def test_a_disk_that_hangs_takes_three_quarters_of_the_arena_and_some_calls_at_most(
    open_store: OpenStore, tier: MemoryTier, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is in the arena is loaded and stored meanwhile."""
    monkeypatch.setattr("kvstore.store.promotion.MOST_RUNS", 8)
    store = open_store(16, [tier])
    known = store.open_namespace(layout_of("a", FRAME))
    put_in_tier(store, known, tier, list(range(13)))
    put_pages(store, known, [100])
    tier.read_gate.close()

    def begin(numbers: range, owner: int = 0) -> Future[int]:
        begun = len(tier.asked)
        hanging.append(threads.submit(load_pages, store, known, numbers, owner=owner))
        tier.read_gate.wait_reached()
        tier.read_gate.close()
        assert len(tier.asked) == begun + len(numbers)
        return hanging[-1]

    hanging: list[Future[int]] = []
    begin(range(4))
    begin(range(4, 8))
    assert load_pages(store, known, range(8, 12)) == 0, "no room for more than half on their way to one owner"
    begin(range(8, 10), owner=3)
    begin(range(10, 12), owner=4)
    assert load_pages(store, known, [12], owner=5) == 0, "nor for more than three quarters on their way to all of them"
    assert load_pages(store, known, [100, 12]) == 1
    assert put_pages(store, known, [101]) == (1, 0, 0)
    runs = store._state.promotions._runs
    hanging.append(threads.submit(load_pages, store, known, [0]))
    while runs.taken < 5:
        assert not hanging[-1].done()
    assert load_pages(store, known, [1]) == 0, "a fourth call of one owner does not wait"
    tier.read_gate.open()
    *first, last = [result_of(each) for each in hanging]
    assert first == [4, 4, 2, 2]
    assert last <= 1, "none where the two of its owner still hold their half of the arena"
    assert load_pages(store, known, [0, 1]) == 2
    assert (runs.taken, store._state.promotions._frames.taken) == (0, 0)
    store.check_integrity()


def test_bringing_up_does_not_push_out_the_rest_of_the_prefix(open_store: OpenStore, tier: MemoryTier) -> None:
    store = open_store(16, [tier])
    known = store.open_namespace(layout_of("a", FRAME))
    put_in_tier(store, known, tier, [1])
    put_pages(store, known, [2])
    for number in range(100, 115):
        put_pages(store, known, [number])
    assert load_pages(store, known, [1, 2]) == 2, "the oldest page of a full arena was the prefix's own"


def test_a_report_that_counts_more_than_there_can_be_does_no_harm(open_store: OpenStore) -> None:
    store = open_store()
    known = store.open_namespace(layout_of("a", FRAME))
    put_pages(store, known, [1])
    for _ in range(3):
        store.note_use(known.fingerprint, page_hashes([1]), read=True, missed=(1 << 64) - 1)
    assert counters_of(store, "asked", "hit", "missed") == (3 * (1 + MOST_LOOKUP_PAGES), 3, 3 * MOST_LOOKUP_PAGES)
    assert load_pages(store, known, [1]) == 1
    with pytest.raises(LimitExceededError, match=str(MOST_LOOKUP_PAGES)):
        store.note_use(known.fingerprint, [bytes(32)] * (MOST_LOOKUP_PAGES + 1), read=True, missed=0)
