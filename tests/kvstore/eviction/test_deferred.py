"""A policy that is told later."""

import random
from collections.abc import Sequence

import pytest

from kvstore.eviction import ExpectedReuse, LeastRecentlyUsed
from kvstore.eviction.deferred import Deferred


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


def test_what_a_policy_fails_at_once_is_told_again() -> None:
    class Failing(LeastRecentlyUsed):
        failures = 1

        def touch(self, slots: Sequence[int]) -> None:
            if self.failures:
                self.failures -= 1
                raise MemoryError
            super().touch(slots)

    policy = Deferred(Failing())
    policy.insert_all([(1, key(1), None), (2, key(2), None), (3, key(3), None)])
    policy.touch([1])
    policy.remove(2)
    with pytest.raises(MemoryError):
        policy.catch_up()
    assert list(policy.victims()) == [3, 1]


def test_pages_before_one_that_a_policy_fails_at_are_told_once() -> None:
    class Failing(Told):
        failures = 1

        def insert(self, slot: int, key: bytes, parent: int | None = None) -> None:
            if slot == 2 and self.failures:
                self.failures -= 1
                raise MemoryError
            super().insert(slot, key, parent)

    failing = Failing()
    policy = Deferred(failing)
    policy.insert_all([(1, key(1), None), (2, key(2), 1), (3, key(3), 2)])
    with pytest.raises(MemoryError):
        policy.catch_up()
    assert sorted(policy.victims()) == [1, 2, 3]
    assert failing.pages == [1, 2, 3]
