"""Counting what the prefix cache was asked, and the hit rate of late."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.connector.blocks.statistics import HitRate, PrefixCacheRecorder, PrefixCacheStats
from kvstore.errors import ConfigError


class TestRecorder:
    def test_local_and_external_hits_are_told_apart(self):
        recorder = PrefixCacheRecorder()
        recorder.record(100, 40, 32, preempted=False)
        recorder.record(50, 0, 0, preempted=False)
        assert recorder.take() == PrefixCacheStats(
            requests=2, queries=150, hits=40, external_requests=2, external_queries=110, external_hits=32
        )

    def test_preempted_requests_are_counted_apart(self):
        recorder = PrefixCacheRecorder()
        recorder.record(100, 40, 32, preempted=True)
        recorder.record(10, 4, None, preempted=False)
        assert recorder.take() == PrefixCacheStats(
            requests=1,
            queries=10,
            hits=4,
            preempted_requests=1,
            preempted_queries=100,
            preempted_hits=40,
            preempted_external_requests=1,
            preempted_external_queries=60,
            preempted_external_hits=32,
        )

    def test_the_level_below_is_not_charged_with_what_it_was_not_asked(self):
        recorder = PrefixCacheRecorder()
        recorder.record(100, 40, None, preempted=False)
        recorder.record(64, 64, 0, preempted=False)  # nothing is left to be asked for
        assert recorder.take() == PrefixCacheStats(requests=2, queries=164, hits=104)

    def test_taking_begins_anew(self):
        recorder = PrefixCacheRecorder()
        recorder.record(100, 40, 8, preempted=False)
        recorder.record_reset()
        assert recorder.take().reset
        assert recorder.take() == PrefixCacheStats()

    def test_a_reset_keeps_what_was_counted_before(self):
        recorder = PrefixCacheRecorder()
        recorder.record(100, 40, None, preempted=False)
        recorder.record_reset()
        recorder.record(20, 0, None, preempted=False)
        assert recorder.take() == PrefixCacheStats(reset=True, requests=2, queries=120, hits=40)


def local(requests: int, queries: int, hits: int, *, reset: bool = False) -> PrefixCacheStats:
    return PrefixCacheStats(reset=reset, requests=requests, queries=queries, hits=hits)


class TestHitRate:
    def test_nothing_asked_is_0(self):
        rate = HitRate()
        assert rate.hit_rate == rate.external_hit_rate == 0.0

    def test_tokens_count_and_not_requests(self):
        rate = HitRate()
        rate.observe(local(1, 100, 90))
        rate.observe(local(1, 300, 10))
        assert rate.hit_rate == 100 / 400

    def test_the_oldest_leave_when_there_are_more_requests_than_asked_for(self):
        rate = HitRate(max_recent_requests=5)
        rate.observe(local(3, 30, 30))
        rate.observe(local(2, 20, 0))
        assert rate.hit_rate == 30 / 50  # exactly as many
        rate.observe(local(1, 10, 0))
        assert rate.hit_rate == 0.0

    def test_the_newest_stay_however_many_they_are(self):
        rate = HitRate(max_recent_requests=5)
        rate.observe(local(1, 10, 0))
        rate.observe(local(100, 1000, 500))
        assert rate.hit_rate == 0.5

    def test_counts_without_a_request_push_nothing_out(self):
        rate = HitRate(max_recent_requests=5)
        rate.observe(local(9, 90, 45))
        rate.observe(PrefixCacheStats(preempted_requests=9, preempted_queries=90, preempted_hits=90))
        assert rate.hit_rate == 0.5

    def test_a_reset_comes_before_the_counts_that_tell_of_it(self):
        rate = HitRate()
        rate.observe(local(1, 10, 10))
        rate.observe(local(1, 10, 5, reset=True))
        assert rate.hit_rate == 0.5
        rate.observe(PrefixCacheStats(reset=True))
        assert rate.hit_rate == 0.0

    def test_a_reset_of_this_engine_s_cache_leaves_the_external_rate(self):
        rate = HitRate()
        rate.observe(PrefixCacheStats(external_requests=1, external_queries=8, external_hits=4))
        rate.observe(PrefixCacheStats(reset=True))
        assert rate.external_hit_rate == 0.5

    def test_local_requests_push_no_external_ones_out(self):
        rate = HitRate(max_recent_requests=2)
        rate.observe(PrefixCacheStats(requests=1, queries=8, external_requests=1, external_queries=8, external_hits=4))
        for _ in range(5):
            rate.observe(local(1, 8, 8))
        assert (rate.hit_rate, rate.external_hit_rate) == (1.0, 0.5)

    @pytest.mark.parametrize("most", [0, -1, True, 2.0])
    def test_a_number_of_requests_out_of_its_range_is_refused(self, most):
        with pytest.raises(ConfigError, match=f"max_recent_requests must be an integer of at least 1, got {most}"):
            HitRate(most)


def naive_rate(observed: list[tuple[int, int, int]], most: int) -> float:
    """The longest run of newest observations that counts no more requests than asked for; one at least."""
    kept = [counts for counts in observed if counts[0]]
    while len(kept) > 1 and sum(requests for requests, _, _ in kept) > most:
        kept = kept[1:]
    asked = sum(queries for _, queries, _ in kept)
    return sum(hits for _, _, hits in kept) / asked if asked else 0.0


@st.composite
def counts(draw) -> tuple[int, int, int]:
    requests = draw(st.integers(0, 4))
    queries = draw(st.integers(0, 20)) if requests else 0
    return requests, queries, draw(st.integers(0, queries))


@given(
    most=st.integers(1, 6),
    observations=st.lists(st.tuples(counts(), counts(), st.integers(0, 5).map(lambda number: number == 0))),
)
def test_rates_are_those_of_a_list_of_observations(most, observations):
    rate = HitRate(most)
    here: list[tuple[int, int, int]] = []
    below: list[tuple[int, int, int]] = []
    for mine, others, reset in observations:
        if reset:
            here.clear()
        here.append(mine)
        below.append(others)
        rate.observe(
            PrefixCacheStats(
                reset=reset,
                requests=mine[0],
                queries=mine[1],
                hits=mine[2],
                external_requests=others[0],
                external_queries=others[1],
                external_hits=others[2],
            )
        )
        assert rate.hit_rate == naive_rate(here, most)
        assert rate.external_hit_rate == naive_rate(below, most)
