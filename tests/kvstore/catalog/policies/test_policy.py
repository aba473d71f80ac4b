"""What every policy promises, whatever its order."""

import random
from collections.abc import Callable

import pytest

from kvstore.catalog.policies import POLICIES, EvictionPolicy, ExpectedReuse
from kvstore.catalog.policies.deferred import Deferred


def key(number: int) -> bytes:
    return number.to_bytes(64, "big")


def store(policy: EvictionPolicy, slots: list[int]) -> None:
    """A prompt's pages, each in the slot of its number."""
    for place, slot in enumerate(slots):
        policy.insert(slot, key(slot), slots[place - 1] if place else None)
    policy.touch(slots)


@pytest.fixture(params=[*sorted(POLICIES), "told later"])
def new_policy(request: pytest.FixtureRequest) -> Callable[[], EvictionPolicy]:
    return POLICIES.get(request.param) or (lambda: Deferred(ExpectedReuse()))


@pytest.fixture
def policy(new_policy: Callable[[], EvictionPolicy]) -> EvictionPolicy:
    return new_policy()


class TestContract:
    def test_nothing_is_proposed_of_nothing(self, policy: EvictionPolicy) -> None:
        assert list(policy.victims()) == []

    def test_all_that_came_is_proposed_once(self, policy: EvictionPolicy) -> None:
        for first in range(0, 100, 10):
            store(policy, list(range(first, first + 10)))
            policy.use(range(first, first + 5))
        assert sorted(policy.victims()) == list(range(100))

    def test_what_left_is_not_proposed(self, policy: EvictionPolicy) -> None:
        store(policy, [1, 2, 3])
        policy.use([1, 2])
        for slot in (2, 2, 9):
            policy.remove(slot)
        policy.use([2, 9])
        policy.touch([1, 2, 3, 9])
        assert sorted(policy.victims()) == [1, 3]

    def test_looking_changes_nothing(self, policy: EvictionPolicy) -> None:
        for first in range(0, 30, 3):
            store(policy, [first, first + 1, first + 2])
            policy.use([first])
        whole = list(policy.victims())
        assert next(policy.victims()) == whole[0]
        assert list(policy.victims()) == whole

    def test_the_tail_of_one_use_leaves_before_its_head(self, policy: EvictionPolicy) -> None:
        store(policy, [1, 2, 3, 4])
        store(policy, [5, 6, 7, 8])
        policy.use([1, 2, 3, 4])
        order = list(policy.victims())
        assert [slot for slot in order if slot < 5] == [4, 3, 2, 1]
        assert [slot for slot in order if slot > 4] == [8, 7, 6, 5]

    def test_a_page_that_comes_again_is_one_page(self, policy: EvictionPolicy) -> None:
        store(policy, [1, 2])
        policy.insert(1, key(7), None)
        policy.touch([1])
        policy.touch([2, 2])
        policy.use([1, 1])
        assert sorted(policy.victims()) == [1, 2]

    def test_pages_out_of_order_all_can_leave(self, policy: EvictionPolicy) -> None:
        """Somebody who names pages in any order harms himself, not others: the cache still finds victims."""
        random_ = random.Random(1)
        for slot in range(50):
            policy.insert(slot, key(slot), random_.randrange(50))
        for _ in range(200):
            some = random_.choices(range(60), k=5)
            random_.choice([policy.use, policy.touch])(some)
            gone = random_.randrange(50)
            policy.remove(gone)
            policy.insert(gone, key(gone), random_.randrange(50))
        left = []
        while True:
            victim = next(policy.victims(), None)
            if victim is None:
                break
            policy.remove(victim)
            left.append(victim)
        assert sorted(left) == list(range(50))

    def test_the_same_calls_give_the_same_order(self, new_policy: Callable[[], EvictionPolicy]) -> None:
        orders = []
        for _ in range(2):
            policy, random_ = new_policy(), random.Random(3)
            for number in range(400):
                chain = [number % 40 * 5 + place for place in range(random_.randint(1, 5))]
                store(policy, chain)
                policy.use(chain[: random_.randint(0, 5)])
                if number % 3 == 0:
                    policy.remove(next(policy.victims()))
            orders.append(list(policy.victims()))
        assert orders[0] == orders[1]
