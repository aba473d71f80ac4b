"""A policy that is told later."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from tiny_stores import counters_of, found_pages, layout_of, load_pages, page_hash, put_pages

from kvstore.arena.format import FRAME_BYTES
from kvstore.catalog.policies import ExpectedReuse, LeastRecentlyUsed
from kvstore.catalog.policies.deferred import Deferred
from kvstore.store.store import Store


def key(number: int) -> bytes:
    return number.to_bytes(64, "big")


class Told(LeastRecentlyUsed):
    """Notes what it is told of."""

    def __init__(self) -> None:
        super().__init__()
        self.pages: list[int] = []

    def insert(self, slot: int, key: bytes, parent: int | None = None) -> None:
        self.pages.append(slot)
        super().insert(slot, key, parent)

    def touch(self, slots: Sequence[int]) -> None:
        self.pages += slots
        super().touch(slots)


def test_whatever_happens_the_order_is_that_of_a_policy_that_was_told_at_once() -> None:
    random_ = random.Random(5)
    plain, deferred = ExpectedReuse(), Deferred(ExpectedReuse())
    for _ in range(300):
        chain = random_.sample(range(60), 4)
        gone = random_.randrange(60)
        for policy in (plain, deferred):
            for place, slot in enumerate(chain):
                policy.insert(slot, key(slot), chain[place - 1] if place else None)
            policy.touch(chain)
            policy.use(chain[:2])
            policy.remove(gone, lost=gone % 2 == 0)
        if gone % 7 == 0:
            assert list(deferred.victims()) == list(plain.victims())
            assert [deferred.remembers(key(slot)) for slot in range(60)] == list(
                map(plain.remembers, map(key, range(60)))
            )
    assert list(deferred.victims()) == list(plain.victims())


def test_it_is_told_when_it_is_asked_or_there_is_time() -> None:
    told = Told()
    policy = Deferred(told)
    policy.insert_all([(1, key(1), None), (2, key(2), 1)])
    assert told.pages == []
    assert list(policy.victims()) == [1, 2]
    policy.touch([1, 2])
    assert told.pages == [1, 2]
    policy.catch_up()
    assert told.pages == [1, 2, 1, 2]


def test_what_it_does_not_know_is_bounded() -> None:
    told = Told()
    policy = Deferred(told)
    for slot in range(5000):
        policy.insert(slot, key(slot))
        assert slot + 1 - len(told.pages) <= 256
    policy.touch(range(1000))
    assert len(told.pages) == 6000


class Failing(LeastRecentlyUsed):
    """Fails at some pages, whatever it is told of them."""

    def __init__(self, *wrong: int) -> None:
        super().__init__()
        self.wrong = set(wrong)

    def _check(self, *slots: int) -> None:
        if self.wrong & set(slots):
            raise MemoryError

    def insert(self, slot: int, key: bytes, parent: int | None = None) -> None:
        self._check(slot)
        super().insert(slot, key, parent)

    def touch(self, slots: Sequence[int]) -> None:
        self._check(*slots)
        super().touch(slots)

    def remove(self, slot: int, *, lost: bool = True) -> None:
        self._check(slot)
        super().remove(slot, lost=lost)


def test_a_page_that_a_policy_fails_at_leaves_first_and_the_others_in_their_order() -> None:
    failing = Failing(2)
    policy = Deferred(failing)
    policy.insert_all([(1, key(1), None), (2, key(2), 1), (3, key(3), 2)])
    policy.touch([1])
    assert list(policy.victims()) == [2, 3, 1]
    policy.touch([2, 3])
    assert list(policy.victims()) == [2, 3, 1]
    policy.remove(2)
    assert list(policy.victims()) == [3, 1]
    policy.insert(2, key(20))
    assert list(policy.victims()) == [2, 3, 1]
    policy.remove(2)
    failing.wrong.clear()
    policy.insert(2, key(200))
    assert list(policy.victims()) == [3, 1, 2], "it is one page like others again"
    policy.remove(2)
    assert list(policy.victims()) == [3, 1]


def test_a_page_that_left_is_proposed_no_more_though_the_policy_failed_to_let_it_go() -> None:
    failing = Failing()
    policy = Deferred(failing)
    policy.insert_all([(1, key(1), None), (2, key(2), 1), (3, key(3), 2)])
    policy.catch_up()
    failing.wrong = {2}
    policy.remove(2)
    assert list(policy.victims()) == [1, 3]
    failing.wrong.clear()
    policy.insert(2, key(20))
    assert list(policy.victims()) == [1, 3, 2]


def test_what_a_policy_fails_at_for_good_is_bounded_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    policy = Deferred(Failing(*range(0, 5000, 2)))
    for slot in range(5000):
        policy.insert(slot, key(slot))
        policy.touch([slot])
        policy.use([slot])
        assert policy._pages == sum(pages for pages, _ in policy._untold) <= 256
    policy.catch_up()
    assert policy._pages == len(policy._untold) == 0
    assert list(policy.victims()) == [*range(0, 5000, 2), *range(1, 5000, 2)]
    for slot in range(5000):
        policy.remove(slot)
    assert list(policy.victims()) == []
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "MemoryError" in caplog.text


def test_who_was_interrupted_tells_it_again() -> None:
    class Interrupted(LeastRecentlyUsed):
        times = 1

        def insert(self, slot: int, key: bytes, parent: int | None = None) -> None:
            if slot == 2 and self.times:
                self.times -= 1
                raise KeyboardInterrupt
            super().insert(slot, key, parent)

    policy = Deferred(Interrupted())
    policy.insert_all([(1, key(1), None), (2, key(2), 1), (3, key(3), 2)])
    with pytest.raises(KeyboardInterrupt):
        policy.catch_up()
    assert list(policy.victims()) == [1, 2, 3]


def test_a_store_goes_on_with_a_policy_that_fails_at_a_page_for_good(
    open_store: Callable[..., Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(16)
    known = store.open_namespace(layout_of("a", FRAME_BYTES))
    wrong = {known.fingerprint + page_hash(number) for number in (5, 50)}
    insert = ExpectedReuse.insert

    def fail(self: Any, slot: int, key: bytes, parent: int | None = None) -> None:
        if key in wrong:
            raise MemoryError
        insert(self, slot, key, parent)

    monkeypatch.setattr(ExpectedReuse, "insert", fail)
    for first in range(0, 100, 4):
        numbers = range(first, first + 4)
        assert put_pages(store, known, numbers).stored == 4
        assert load_pages(store, known, numbers) == 4
        store.check_integrity()
    assert counters_of(store, "stored", "evicted") == (100, 84)
    assert not found_pages(store, known, [5, 50])
