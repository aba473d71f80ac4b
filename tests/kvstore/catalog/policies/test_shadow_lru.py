"""When the learned order is trusted, and that its picture of least recently used is right."""

import math
import random

import pytest

from kvstore.catalog.policies import ExpectedReuse, LeastRecentlyUsed
from kvstore.catalog.policies import shadow_lru as trial
from kvstore.catalog.policies.shadow_lru import ShadowLRU
from kvstore.cli.bench.replay import Replay
from kvstore.cli.bench.workloads import WORKLOADS


@pytest.fixture
def learning() -> ShadowLRU:
    """Of a cache of 1,000 pages, used one after the other from 1 on, that all were used ten times again."""
    learning = ShadowLRU()
    for key in range(1000):
        learning.came(key, key + 1, key + 1)
    for _ in range(10):
        learning.wanted(range(1000))
    return learning


def test_few_pages_are_risked_where_nothing_was_hit() -> None:
    learning = ShadowLRU()
    for key in range(10):
        learning.came(key, key + 1, key + 1)
    risked = 0
    while learning.free_before() == math.inf:
        learning.left(risked, lost=True)
        risked += 1
    assert 0 < risked < 10


def test_a_part_of_the_hits_may_be_put_at_stake(learning: ShadowLRU) -> None:
    assert learning.free_before() == math.inf
    for key in range(999):
        learning.left(key, lost=True)
    assert math.isfinite(learning.free_before()), "none of them was lost yet, but they may be"
    for key in range(999):
        learning.came(1000 + key, 1001 + key, 1000)
    assert learning.free_before() == math.inf, "nor would LRU have them any more"


def test_losses_are_what_lru_would_have_had(learning: ShadowLRU) -> None:
    for key in range(600):
        learning.left(key, lost=True)
        learning.came(key, 2000, 1000)
    assert math.isfinite(learning.free_before())
    for key in range(600):
        learning.left(key, lost=True)
        learning.came(5000 + key, 3000 + key, 1000)
    horizon = learning.free_before()
    assert 0 < horizon < 3000, "what LRU let go meanwhile may still leave by worth"
    learning.wanted(range(10_000, 12_000))
    assert learning.free_before() == math.inf, "pages that LRU had not any more make up for it"


def test_what_left_by_wish_is_no_loss(learning: ShadowLRU) -> None:
    for key in range(999):
        learning.left(key, lost=False)
        learning.came(key, 2000, 1000)
    assert learning.free_before() == math.inf


@pytest.mark.parametrize("sampled", [False, True])
def test_it_knows_what_lru_would_have_hit(monkeypatch: pytest.MonkeyPatch, sampled: bool) -> None:
    if sampled:
        monkeypatch.setattr(trial, "_MOST", 1000)
    prompts = WORKLOADS["chat"](700, 3)
    policy = ExpectedReuse()
    monkeypatch.setattr(policy._trial, "forget", lambda keep: None) if not sampled else None
    learnt, plain = Replay(policy, 1200), Replay(LeastRecentlyUsed(), 1200)
    hits = sum(map(learnt.request, prompts)), sum(map(plain.request, prompts))
    seen = policy._trial
    here, lru = seen._both + seen._gains, seen._both + seen._losses
    assert len(seen._order) <= (1000 if sampled else 1200)
    assert (seen._mask > 0) == sampled
    if sampled:
        assert here / lru == pytest.approx(hits[0] / hits[1], rel=0.02)
    else:
        assert (here, lru) == pytest.approx(hits, rel=0.005)


def test_a_cache_that_shrinks_is_compared_with_a_smaller_one() -> None:
    random_ = random.Random(1)
    policy, slots = ExpectedReuse(), list(range(400))
    for slot in slots:
        policy.insert(slot, b"%d" % slot)
    for victim in list(policy.victims())[:200]:
        policy.remove(victim)
        slots.remove(victim)
    for number in range(1000):
        victim = next(policy.victims())
        policy.remove(victim)
        policy.insert(victim, b"%d" % random_.randrange(10_000 + number))
    assert len(policy._trial._order) == 200
