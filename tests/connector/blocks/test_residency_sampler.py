"""Sampled residencies, under a clock that is moved by hand."""

from random import Random

import pytest

from kvstore.connector.blocks.residency_sampler import BlockResidency, ResidencySampler
from kvstore.errors import ConfigError


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def sampler(clock) -> ResidencySampler:
    """Follows every block."""
    return ResidencySampler(1.0, clock=clock)


def hit_at(sampler, clock, block_id, *times):
    for clock.now in times:
        sampler.on_accessed(block_id)


def test_a_block_that_is_never_hit_is_idle_all_its_life(sampler, clock):
    sampler.on_allocated(3)
    clock.now += 7
    sampler.on_evicted(3)
    assert sampler.take() == [BlockResidency(lifetime=7, idle=7, reuse_gaps=())]


def test_hits_end_idle_time_and_the_gaps_are_between_them(sampler, clock):
    sampler.on_allocated(3)
    hit_at(sampler, clock, 3, 101, 103, 108)
    clock.now = 120
    sampler.on_evicted(3)
    assert sampler.take() == [BlockResidency(lifetime=20, idle=12, reuse_gaps=(2, 5))]


def test_one_hit_has_no_gap(sampler, clock):
    sampler.on_allocated(3)
    hit_at(sampler, clock, 3, 104)
    sampler.on_evicted(3)
    assert sampler.take() == [BlockResidency(lifetime=4, idle=0, reuse_gaps=())]


def test_of_many_hits_the_last_four_count(sampler, clock):
    sampler.on_allocated(3)
    hit_at(sampler, clock, 3, 101, 111, 112, 114, 118, 126)
    sampler.on_evicted(3)
    assert sampler.take() == [BlockResidency(lifetime=26, idle=0, reuse_gaps=(2, 4, 8))]


def test_a_block_given_out_again_starts_anew(sampler, clock):
    sampler.on_allocated(3)
    hit_at(sampler, clock, 3, 101, 102)
    sampler.on_evicted(3)
    sampler.on_allocated(3)
    clock.now = 110
    sampler.on_evicted(3)
    assert sampler.take()[1] == BlockResidency(lifetime=8, idle=8, reuse_gaps=())


def test_blocks_are_told_apart_and_come_in_the_order_of_their_ends(sampler, clock):
    sampler.on_allocated(1)
    clock.now = 101
    sampler.on_allocated(2)
    clock.now = 110
    sampler.on_evicted(2)
    sampler.on_evicted(1)
    assert [residency.lifetime for residency in sampler.take()] == [9, 10]


def test_what_was_taken_does_not_come_again(sampler):
    sampler.on_allocated(3)
    sampler.on_evicted(3)
    assert len(sampler.take()) == 1
    sampler.on_evicted(3)
    assert sampler.take() == []


def test_a_reset_forgets_followed_blocks_and_ended_stays(sampler):
    sampler.on_allocated(1)
    sampler.on_evicted(1)
    sampler.on_allocated(2)
    sampler.reset()
    sampler.on_evicted(2)
    assert sampler.take() == []


def test_a_block_outside_the_sample_is_ignored(clock):
    sampler = ResidencySampler(0.25, clock=clock, random=Sequence((0.25, 0.24)))
    for block_id in (1, 2):
        sampler.on_allocated(block_id)
        clock.now += 1
        sampler.on_accessed(block_id)
    sampler.on_evicted(1)
    assert sampler.take() == []
    sampler.on_evicted(2)
    assert len(sampler.take()) == 1


class Sequence(Random):
    """Draws these numbers."""

    def __new__(cls, numbers):
        return super().__new__(cls)

    def __init__(self, numbers) -> None:
        super().__init__(0)
        self._numbers = iter(numbers)

    def random(self) -> float:
        return next(self._numbers)


def followed(seed: int, clock) -> list[int]:
    sampler = ResidencySampler(0.1, clock=clock, random=Random(seed))
    blocks = []
    for block_id in range(1000):
        sampler.on_allocated(block_id)
        sampler.on_evicted(block_id)
        if sampler.take():
            blocks.append(block_id)
    return blocks


def test_a_seed_decides_which_blocks_are_followed(clock):
    sample = followed(7, clock)
    assert sample == followed(7, clock) != followed(8, clock)
    assert 50 < len(sample) < 150


def test_stays_that_nobody_takes_do_not_pile_up(sampler, clock):
    for _ in range(10_050):
        sampler.on_allocated(1)
        clock.now += 1
        sampler.on_evicted(1)
    sampler.on_allocated(1)
    clock.now += 5
    sampler.on_evicted(1)
    kept = sampler.take()
    assert len(kept) == 10_000
    assert kept[-1].lifetime == 5


@pytest.mark.parametrize("rate", [0, -0.1, 1.01, float("nan")])
def test_a_rate_out_of_its_range_is_refused(rate):
    with pytest.raises(ConfigError, match=f"sample_rate must be above 0 and at most 1, got {rate}"):
        ResidencySampler(rate)
