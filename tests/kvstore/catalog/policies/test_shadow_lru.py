"""When the learned order is trusted, and that its picture of least recently used is right."""

import random
from collections.abc import Sequence

import pytest
import xxhash

from kvstore.catalog.policies import ExpectedReuse, LeastRecentlyUsed
from kvstore.catalog.policies import shadow_lru as trial
from kvstore.catalog.policies.shadow_lru import ShadowLRU
from kvstore.cli.bench.replay import Replay, hit_blocks
from kvstore.cli.bench.workloads import WORKLOADS


def store(shadow: ShadowLRU, keys: Sequence[int], pages: int) -> None:
    for key in keys:
        shadow.came(key, pages)
    shadow.used(keys, 0)


@pytest.fixture
def shadow() -> ShadowLRU:
    """Of a cache of 1,000 pages that were used ten times again."""
    shadow = ShadowLRU()
    for key in range(1000):
        store(shadow, [key], key + 1)
    for _ in range(10):
        shadow.wanted(range(1000))
    return shadow


def test_losses_are_what_lru_would_have_had_and_gains_make_up_for_them(shadow: ShadowLRU) -> None:
    assert not shadow.hits_more
    store(shadow, range(910, 1000), 1000)
    assert not shadow.hits_more, "90 of 10,000 are few"
    store(shadow, range(900, 1000), 1000)
    assert shadow.hits_more
    shadow.wanted(range(5000, 5150))
    assert not shadow.hits_more, "pages that LRU has not"


def test_what_lru_let_go_is_no_loss(shadow: ShadowLRU) -> None:
    store(shadow, range(2000, 3000), 1000)
    store(shadow, range(1000), 1000)
    assert not shadow.hits_more


def test_what_was_dropped_by_wish_is_no_loss(shadow: ShadowLRU) -> None:
    for key in range(600):
        shadow.left(key, lost=False)
    store(shadow, range(600), 1000)
    assert not shadow.hits_more


def leave(shadow: ShadowLRU, keys: Sequence[int]) -> None:
    for key in keys:
        shadow.left(key, lost=True)


def test_pages_at_stake_count_before_they_are_lost(shadow: ShadowLRU) -> None:
    leave(shadow, range(900, 990))
    assert not shadow.hits_more, "90 of 10,000 are few"
    leave(shadow, range(800, 900))
    assert shadow.hits_more
    store(shadow, range(800, 990), 1000)
    assert shadow.hits_more, "190 are lost, and no more at stake"
    shadow.wanted(range(5000, 5190))
    assert not shadow.hits_more


def test_what_lru_lets_go_is_at_stake_no_more(shadow: ShadowLRU) -> None:
    leave(shadow, range(200))
    assert shadow.hits_more
    store(shadow, range(2000, 2150), 1000)
    assert not shadow.hits_more


def test_little_is_at_stake_where_lru_hits_little() -> None:
    shadow = ShadowLRU()
    store(shadow, range(1000), 1000)
    leave(shadow, range(500, 1000))
    assert shadow.hits_more
    store(shadow, range(1000, 10_000), 1000)
    leave(shadow, range(9500, 10_000))
    assert not shadow.hits_more, "of 9,000 it had, none was wanted"


def test_great_gains_do_not_pay_for_what_comes_later(shadow: ShadowLRU) -> None:
    for _ in range(20):
        shadow.wanted(range(10_000, 20_000))
    for _ in range(2):
        store(shadow, range(1000), 1000)
    assert shadow.hits_more


def test_a_sample_sees_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Above so many keys one of 2, 4, 8, … is kept, and losses are found in the sample as they were in all of them."""
    monkeypatch.setattr(trial, "_MOST", 256)
    shadow, numbers = ShadowLRU(), random.Random(1)
    keys = [numbers.getrandbits(64) for _ in range(4000)]
    store(shadow, keys, 4000)
    assert len(shadow._order) <= 256
    shadow.wanted(keys)
    assert not shadow.hits_more
    store(shadow, keys[:400], 4000)
    assert shadow.hits_more


def test_its_keys_are_those_of_an_lru_cache() -> None:
    """But for a few: a request's pages come before room is made here, and behind it there."""
    learnt = ExpectedReuse()
    caches = Replay(learnt, 400), Replay(LeastRecentlyUsed(), 400)
    for prompt in WORKLOADS["chat"](300, 1):
        for cache in caches:
            cache.request(prompt)
    kept = learnt._trial._order
    same = sum(xxhash.xxh3_64_intdigest(block.to_bytes(8, "big")) in kept for block in caches[1]._slots)
    assert same >= 0.9 * 400
    assert len(kept) <= 400


def test_while_lru_hits_more_the_oldest_leaves() -> None:
    policy, plain = ExpectedReuse(), LeastRecentlyUsed()
    for slot in range(400):
        for each in (policy, plain):
            each.insert(slot, slot.to_bytes(8, "big"))
            each.touch([slot])
            if slot >= 100:
                each.use([slot % 50])
    policy._trial._losses, policy._trial.horizon = 1000.0, 0
    order = list(policy.victims())
    ages = [policy._used[slot] >> 4 for slot in order]
    assert ages == sorted(ages)
    policy._trial._losses = -1000.0
    assert list(policy.victims()) != order


@pytest.mark.parametrize("seed", [1, 2])
def test_a_workload_that_turns_out_otherwise_costs_little(seed: int) -> None:
    """First prompts come in bursts and never again; then each comes once more, after a while; and so on."""
    random_ = random.Random(seed)
    prompts: list[tuple[int, ...]] = []
    number = 0
    for phase in range(4):
        recent: list[tuple[int, ...]] = []
        for _ in range(100):
            prompt = tuple(range(number, number + random_.randint(1, 12)))
            number = prompt[-1] + 1
            recent.append(prompt)
            prompts += [prompt] * (random_.randint(2, 6) if phase % 2 else 1)
            if not phase % 2 and len(recent) > 8:
                prompts.append(recent[-random_.randint(2, 8)])
    for percent in (5, 20):
        pages = number * percent // 100
        assert hit_blocks(prompts, pages, ExpectedReuse()) >= 0.99 * hit_blocks(prompts, pages, LeastRecentlyUsed())
