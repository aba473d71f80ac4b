"""What expected reuse learns, and its order against a plain model."""

import random
import tracemalloc
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from kvstore.catalog.policies import ExpectedReuse, LeastRecentlyUsed
from kvstore.catalog.policies.reuse_odds import uses_of
from kvstore.cli.bench.replay import Replay, hit_blocks

SLOTS = 12


def key(number: int) -> bytes:
    return number.to_bytes(64, "big")


def test_before_anything_was_wanted_again_it_is_least_recently_used() -> None:
    learnt, plain = ExpectedReuse(), LeastRecentlyUsed()
    for slot in range(300):
        for policy in (learnt, plain):
            policy.insert(slot, key(slot))
            policy.touch([slot])
    assert list(learnt.victims()) == list(plain.victims())


class Model:
    """What is here: by slot, the slot of the page before it."""

    def __init__(self) -> None:
        self.parent: dict[int, int | None] = {}

    def behind(self, slot: int) -> list[int]:
        return [each for each, parent in self.parent.items() if parent == slot]

    def is_above(self, slot: int, of: int) -> bool:
        at: int | None = of
        while at is not None:
            if at == slot:
                return True
            at = self.parent.get(at)
        return False

    def adopt(self, slot: int, parent: int | None) -> None:
        if parent is not None and parent in self.parent and not self.is_above(slot, parent):
            self.parent[slot] = parent

    def remove(self, slot: int) -> None:
        self.parent.pop(slot, None)
        for each in self.behind(slot):
            self.parent[each] = None

    def check(self, order: list[int], value: dict[int, int]) -> None:
        """Of those with none behind them, always one of least value leaves."""
        left = dict(self.parent)
        for slot in order:
            ends = [each for each in left if each not in left.values()]
            assert slot in ends
            assert value[slot] == min(map(value.__getitem__, ends))
            del left[slot]


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["insert", "use", "touch", "remove", "drop", "leave"]),
        st.lists(st.integers(0, SLOTS - 1), min_size=1, max_size=5, unique=True),
        st.booleans(),
    ),
    max_size=40,
)


@given(STEPS)
def test_of_the_ends_of_chains_one_of_least_value_leaves(steps: list[tuple[str, list[int], bool]]) -> None:
    """The order is asked for behind some of the steps: what is put off until then must add up."""
    policy, model = ExpectedReuse(), Model()
    for what, slots, asked in [*steps, ("drop", [0], True)]:
        if what == "insert":
            for place, slot in enumerate(slots):
                parent = slots[place - 1] if place else None
                policy.insert(slot, key(slot), parent)
                model.remove(slot)
                model.parent[slot] = None
                model.adopt(slot, parent)
        elif what in ("remove", "drop"):
            policy.remove(slots[0], lost=what == "remove")
            model.remove(slots[0])
        elif what == "leave":
            victim = next(policy.victims(), None)
            if victim is not None:
                assert not model.behind(victim)
                policy.remove(victim)
                model.remove(victim)
        else:
            (policy.use if what == "use" else policy.touch)(slots)
            here = [slot for slot in slots if slot in model.parent]
            for before, slot in pairwise(here):
                if model.parent[slot] is None:
                    model.adopt(slot, before)
        if not asked:
            continue
        policy._trial._losses = -1e9  # the learned order is what is asked for, whatever is at stake
        order = list(policy.victims())
        assert sorted(order) == sorted(model.parent)
        model.check(order, {slot: policy._value[slot] for slot in order})
        policy._trial._losses = 1e9
        assert sorted(policy.victims()) == sorted(order)
        policy._trial._losses = 0.0


def scans(rounds: int) -> list[tuple[int, ...]]:
    """Prompts that come again and again, at a distance that LRU does not bridge, between ones that never do."""
    prompts: list[tuple[int, ...]] = []
    fresh = 10_000
    for round_ in range(rounds):
        for each in range(10):
            again = round_ % 4 * 10 + each
            prompts.append((again * 3, again * 3 + 1, again * 3 + 2))
            prompts.append(tuple(range(fresh, fresh + 5)))
            fresh += 5
    return prompts


def test_it_learns_which_prompts_come_again() -> None:
    prompts = scans(200)
    learnt, plain = (hit_blocks(prompts, 150, policy) for policy in (ExpectedReuse(), LeastRecentlyUsed()))
    assert plain == 0
    assert learnt > 0.8 * 200 * 10 * 3


def test_it_unlearns_what_is_no_longer_so() -> None:
    """The prompts that came again stop; others, of another length, do now."""
    before = scans(200)
    after = [
        tuple(1_000_000 + block for block in prompt)
        if len(prompt) == 5
        else tuple(2_000_000 + place for place in prompt)
        for prompt in scans(200)
    ]
    cache = Replay(ExpectedReuse(), 150)
    for prompt in before:
        cache.request(prompt)
    assert sum(map(cache.request, after)) > 0.4 * 200 * 10 * 3


def test_a_loop_larger_than_the_cache_is_hit_in_part() -> None:
    prompts = [tuple(range(10 * each, 10 * each + 10)) for each in range(40)] * 30
    assert hit_blocks(prompts, 200, LeastRecentlyUsed()) == 0
    assert hit_blocks(prompts, 200, ExpectedReuse()) > 0


def test_a_loop_that_fits_is_hit_as_by_lru() -> None:
    prompts = [tuple(range(10 * each, 10 * each + 10)) for each in range(40)] * 10
    assert hit_blocks(prompts, 400, ExpectedReuse()) == 400 * 9


def test_a_page_that_was_lost_counts_as_used_when_it_is_back_and_one_dropped_by_wish_does_not() -> None:
    policy = ExpectedReuse()
    for lost, uses in ((False, 1), (True, 2)):
        policy.insert(1, key(1))
        policy.remove(1, lost=lost)
        assert policy.remembers(key(1)) == lost
        policy.insert(1, key(1))
        assert uses_of(policy._class[1]) == uses
        policy.remove(1, lost=False)


def test_one_request_is_one_use() -> None:
    """It reads what is here, stores the rest, and touches all of it."""
    policy = ExpectedReuse()
    for slot in range(3):
        policy.insert(slot, key(slot), slot - 1 if slot else None)
    policy.touch([0, 1, 2])
    assert [uses_of(policy._class[slot]) for slot in range(3)] == [1, 1, 1]
    policy.use([0, 1])
    policy.insert(3, key(3), 1)
    policy.touch([0, 1, 3])
    assert [uses_of(policy._class[slot]) for slot in range(4)] == [2, 2, 1, 1]


def test_pages_of_an_earlier_nodes_arena_are_as_old_as_they_came_and_join_their_chains_when_used() -> None:
    """A takeover names pages in any order, without what comes before them, and nobody touches them."""
    policy = ExpectedReuse()
    for slot in (3, 1, 2, 5, 4):
        policy.insert(slot, key(slot))
    assert list(policy.victims()) == [3, 1, 2, 5, 4]
    policy.use([1, 2, 3])
    assert list(policy.victims()) == [5, 4, 3, 2, 1]


def test_an_empty_order_is_small() -> None:
    """There is one for each size of slot, and one for each namespace with a quota."""
    tracemalloc.start()
    policy = ExpectedReuse()
    policy.insert(1, key(1))
    policy.touch([1])
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert size < 16 << 10


def test_pages_come_and_go_in_bounded_memory() -> None:
    policy = ExpectedReuse()
    random_ = random.Random(1)
    for slot in range(100):
        policy.insert(slot, key(slot))
    for number in range(5000):
        slot = number * 37 % 100
        policy.use([slot])
        policy.touch([slot])
        if number % 3 == 0:
            policy.remove(slot)
            policy.insert(slot, key(random_.randrange(10_000)))
        next(policy.victims())
    assert len(policy._state) <= 100 + 16, "rows are made sixteen at a time"
    assert len(policy._new) <= 256
    assert len(policy._ghosts) <= 16 * 100
    assert len(policy._trial._order) <= 100
    for ends in (policy._by_value, policy._by_use):
        assert len(ends) == 100
        assert len(ends._values) <= 2 * 100 + 64
    assert len(policy._by_use._first) <= 100
