"""Attention groups: sliding windows, chunked local attention, cross-attention. Blocks hold 4 tokens.

A window of 6 covers 5 tokens before the next one: 2 blocks. Chunks hold 8 tokens unless a scenario says otherwise; the
start of a chunk needs nothing of what lies before it, so it is a hit in an empty cache. Full attention has a model of
its own: ``test_full_attention_states``.
"""

import pytest

from kvstore.connector.blocks import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    SlidingWindowSpec,
)
from kvstore.errors import ConfigError

PROMPT = "SSSS pppp qqqq rrrr ssss"
FULL = FullAttentionSpec(block_size=4, token_bytes=8)
CROSS = CrossAttentionSpec(block_size=4, token_bytes=8)


def window(tokens: int) -> SlidingWindowSpec:
    return SlidingWindowSpec(block_size=4, token_bytes=8, sliding_window=tokens)


def chunks(tokens: int = 8) -> ChunkedLocalAttentionSpec:
    return ChunkedLocalAttentionSpec(block_size=4, token_bytes=8, attention_chunk_size=tokens)


class TestSlidingWindowSkippedBlocks:
    def test_blocks_before_the_window_are_freed_as_a_request_goes_on(self, new_manager, new_request, compute):
        manager = new_manager(8, window(6))
        request = new_request("a", PROMPT)
        tables = []
        for _ in range(5):
            compute(manager, request, 4)
            tables.append(manager.get_block_ids("a")[0])
        assert tables == [
            [1],
            [1, 2],
            [1, 2, 3],  # token 8 sees 3 … 7
            [0, 2, 3, 4],  # token 12 sees 7 … 11
            [0, 0, 3, 4, 5],
        ]

    @pytest.mark.parametrize(
        ("tokens", "held"),
        [(1, [0, 0, 0]), (2, [0, 0, 3]), (5, [0, 0, 3]), (6, [0, 2, 3]), (9, [0, 2, 3]), (10, [1, 2, 3])],
    )
    def test_a_window_holds_the_next_token_and_those_before_it(self, new_manager, new_request, prefill, tokens, held):
        manager = new_manager(8, window(tokens))
        prefill(manager, new_request("a", "SSSS pppp qqqq r"), chunk=12)
        assert manager.get_block_ids("a")[0][:3] == held

    def test_a_prompt_longer_than_the_pool_is_computed_in_pieces(self, new_manager, new_request, prefill):
        manager = new_manager(4, window(6))
        assert prefill(manager, new_request("a", 10 * "ssss"), chunk=4) is not None
        assert manager.usage == 0.75

    def test_blocks_that_are_left_behind_can_be_hit_until_they_are_given_away(
        self, new_manager, new_request, prefill, hit_tokens
    ):
        manager = new_manager(8, window(6))
        prefill(manager, new_request("a", PROMPT), chunk=4)
        assert hit_tokens(manager, new_request("b", "SSSS pppp x")) == 8
        assert manager.pool.free_block_ids() == [6, 7, 8, 1, 2]

    def test_they_are_freed_even_when_no_block_is_free_for_the_step(self, new_manager, new_request, compute):
        manager = new_manager(3, window(5))
        request = new_request("a", "SSSS pppp qqqq rrrr rrrr rrrr")
        compute(manager, request, 12)
        assert compute(manager, request, 12) is None
        assert manager.get_block_ids("a") == ([0, 0, 3],)
        assert compute(manager, request, 8) == ([2, 1],)

    def test_what_steps_under_way_still_read_is_kept(self, new_manager, new_request, compute):
        manager = new_manager(8, window(5))
        request = new_request("a", PROMPT)
        for expected in ([1, 2], [1, 2, 3, 4]):
            compute(manager, request, 8)
            request.num_in_flight_tokens += 8
            assert manager.get_block_ids("a") == (expected,)
        request.num_in_flight_tokens -= 8  # the first step is over
        compute(manager, request, 4)
        assert manager.get_block_ids("a") == ([0, 2, 3, 4, 5],)

    def test_they_are_freed_at_once_when_a_step_is_over(self, new_manager, new_request, compute):
        manager = new_manager(8, window(5))
        request = new_request("a", PROMPT)
        compute(manager, request)
        manager.remove_skipped_blocks("a", 16)
        manager.check_integrity()
        assert manager.get_block_ids("a") == ([0, 0, 0, 4, 5],)
        assert manager.pool.free_block_ids() == [6, 7, 8, 3, 2, 1]


class TestSlidingWindowHits:
    def test_a_hit_needs_the_blocks_of_one_window_only(self, new_manager, new_request, prefill):
        manager = new_manager(8, window(6))
        prefill(manager, new_request("a", PROMPT))
        manager.evict_blocks([1, 2])
        hit, num_hit = manager.get_computed_blocks(new_request("b", PROMPT + "x"))
        assert (hit.get_block_ids(), num_hit) == (([0, 0, 0, 4, 5],), 20)

    def test_the_longest_hit_is_the_last_place_with_a_whole_window(self, new_manager, new_request, prefill):
        manager = new_manager(8, window(6))
        prefill(manager, new_request("a", PROMPT))
        manager.evict_blocks([1, 4])
        hit, num_hit = manager.get_computed_blocks(new_request("b", PROMPT + "x"))
        assert (hit.get_block_ids(), num_hit) == (([0, 2, 3],), 12)

    def test_less_than_a_window_hits_at_the_start_of_a_prompt(self, new_manager, new_request, prefill):
        manager = new_manager(8, window(20))
        prefill(manager, new_request("a", PROMPT))
        manager.evict_blocks([3])
        hit, num_hit = manager.get_computed_blocks(new_request("b", PROMPT + "x"))
        assert (hit.get_block_ids(), num_hit) == (([1, 2],), 8)

    def test_less_than_a_window_does_not_hit_elsewhere(self, new_manager, new_request, prefill, hit_tokens):
        manager = new_manager(8, window(20))
        prefill(manager, new_request("a", PROMPT))
        manager.evict_blocks([1])
        assert hit_tokens(manager, new_request("b", PROMPT + "x")) == 0

    def test_blocks_of_a_window_of_one_token_are_never_asked_for_and_never_cached(
        self, new_manager, new_request, prefill, hit_tokens
    ):
        manager = new_manager(8, window(1))
        prefill(manager, new_request("a", PROMPT))
        assert not list(manager.pool.cached[0])
        assert hit_tokens(manager, new_request("b", PROMPT + "x")) == 0

    def test_what_lies_before_the_window_is_not_held(self, new_manager, new_request, prefill):
        manager = new_manager(8, window(6))
        first = new_request("a", PROMPT)
        prefill(manager, first)
        manager.free(first)
        assert prefill(manager, new_request("b", PROMPT + "x")) == ([0, 0, 0, 4, 5, 6],)
        assert manager.pool.free_block_ids() == [7, 8, 3, 2, 1]

    def test_the_last_token_is_computed_again_when_everything_hits(self, new_manager, new_request, prefill):
        manager = new_manager(8, window(6))
        prefill(manager, new_request("a", PROMPT))
        assert manager.get_computed_blocks(new_request("b", PROMPT))[1] == 16


class TestSlidingWindowCounts:
    def test_hits_outside_the_window_take_no_blocks(self, new_manager, new_request, prefill):
        manager = new_manager(5, window(6))
        first = new_request("a", PROMPT)
        prefill(manager, first)
        manager.free(first)
        prefill(manager, new_request("b", "T"))  # takes the tail
        # The hit is SSSS pppp qqqq rrrr. 4 are free: 2 of them are the window, 2 are left.
        assert prefill(manager, new_request("c", "SSSS pppp qqqq rrrr tttt tttt t")) is None
        assert prefill(manager, new_request("c", "SSSS pppp qqqq rrrr tttt tttt")) == ([0, 0, 3, 4, 2, 1],)

    def test_a_long_request_needs_no_more_blocks_than_it_holds_at_once(self, new_manager, new_request):
        request = new_request("a", 10 * "ssss")
        # 5 tokens before the first one of a step, and 8 in the step: 13 tokens in 4 blocks, and one for a bad start
        assert new_manager(4, window(6), max_in_flight_tokens=8).allocate_slots(
            request, 8, full_sequence_must_fit=True
        ) is None  # fmt: skip
        assert new_manager(5, window(6), max_in_flight_tokens=8).allocate_slots(request, 8, full_sequence_must_fit=True)

    def test_without_a_limit_of_tokens_under_way_all_its_blocks_count(self, new_manager, new_request):
        request = new_request("a", 10 * "ssss")
        assert new_manager(9, window(6)).allocate_slots(request, 8, full_sequence_must_fit=True) is None
        assert new_manager(10, window(6)).allocate_slots(request, 8, full_sequence_must_fit=True)

    def test_tokens_from_elsewhere_need_blocks_in_the_window_only(self, new_manager, new_request):
        manager = new_manager(3, window(6))
        request = new_request("a", PROMPT + "x")
        assert manager.allocate_slots(request, 1, num_external_computed_tokens=20, delay_cache_blocks=True)
        assert manager.get_block_ids("a") == ([0, 0, 0, 1, 2, 3],)
        manager.check_integrity()

    def test_hits_that_tokens_from_elsewhere_leave_behind_are_not_held_and_take_no_blocks(
        self, new_manager, new_request, prefill
    ):
        manager = new_manager(4, window(6))
        first = new_request("a", "SSSS pppp")
        prefill(manager, first)
        manager.free(first)
        prefill(manager, new_request("b", "T"))
        request = new_request("c", PROMPT + "x")
        hit, num_hit = manager.get_computed_blocks(request)
        assert hit.get_block_ids() == ([1, 2],)
        # Three are free, and three are needed: for 12 … 19 and the token behind them.
        assert manager.allocate_slots(request, 1, num_hit, hit, num_external_computed_tokens=12)
        manager.check_integrity()
        assert manager.get_block_ids("c") == ([0, 0, 0, 4, 2, 1],)

    def test_leading_blocks_do_not_last(self, new_manager, new_request, prefill):
        manager = new_manager(8, window(6))
        prefill(manager, new_request("a", PROMPT))
        prefill(manager, new_request("b", PROMPT))
        assert manager.get_num_common_prefix_blocks("a") == [0]


class TestSlidingWindowEagle:
    def test_a_hit_needs_one_block_more_which_is_dropped(self, new_manager, new_request, prefill):
        manager = new_manager(8, window(6), use_eagle=True)
        prefill(manager, new_request("a", PROMPT))
        hit, num_hit = manager.get_computed_blocks(new_request("b", PROMPT + "x"))
        assert (hit.get_block_ids(), num_hit) == (([0, 0, 3, 4],), 16)
        manager.evict_blocks([3])  # 4, 5 are a window, but not one of 16 tokens and a block to be dropped
        hit, num_hit = manager.get_computed_blocks(new_request("b", PROMPT + "x"))
        assert (hit.get_block_ids(), num_hit) == (([1],), 4)

    def test_a_single_block_is_no_hit(self, new_manager, new_request, prefill, hit_tokens):
        manager = new_manager(8, window(6), use_eagle=True)
        prefill(manager, new_request("a", "SSSS x"))
        assert hit_tokens(manager, new_request("b", "SSSS y")) == 0


class TestSlidingWindowRemotePages:
    def test_only_the_pages_of_the_window_are_loaded(self, new_manager, new_request, start_load, end_load, hit_tokens):
        manager = new_manager(8, window(6))
        request = new_request("a", PROMPT + "x")
        assert start_load(manager, request, "11111") == (0, 20)
        assert manager.get_block_ids("a") == ([0, 0, 0, 1, 2],)
        assert [index for index, _ in manager.get_blocks_to_load("a")[0]] == [3, 4]
        assert hit_tokens(manager, new_request("b", PROMPT + "y")) == 0
        assert end_load(manager, request) == 20
        assert hit_tokens(manager, new_request("b", PROMPT + "y")) == 20

    def test_a_window_may_be_half_here_and_half_in_kvstore(self, new_manager, new_request, prefill, start_load):
        manager = new_manager(8, window(6))
        prefill(manager, new_request("a", PROMPT))
        manager.evict_blocks([4])
        request = new_request("b", PROMPT + "x")
        assert start_load(manager, request, "00010") == (12, 8)
        assert manager.get_block_ids("b") == ([0, 0, 0, 6, 5],)
        assert [(index, block.block_id) for index, block in manager.get_blocks_to_load("b")[0]] == [(3, 6)]

    def test_a_window_that_did_not_come_whole_is_no_hit(self, new_manager, new_request, start_load, end_load):
        manager = new_manager(8, window(6))
        request = new_request("a", PROMPT + "x")
        start_load(manager, request, "11111")
        assert end_load(manager, request, 2) == 0  # token 16 would need tokens 11 … 15, which were never asked for
        assert manager.usage == 0.0

    def test_a_prompt_shorter_than_the_window_is_cut_at_the_bad_block(
        self, new_manager, new_request, start_load, end_load, compute
    ):
        manager = new_manager(8, window(30))
        request = new_request("a", PROMPT + "x")
        start_load(manager, request, "11111")
        assert end_load(manager, request, 3) == 8
        assert manager.get_block_ids("a") == ([1, 2, 3, 4, 5],)
        assert compute(manager, request) == ([6],)


def test_ranks_can_not_share_the_blocks_of_a_window(new_manager):
    with pytest.raises(ConfigError, match="context parallelism does not go with sliding_window"):
        new_manager(8, window(6), pcp_world_size=2)


class TestChunkedLocalSkippedBlocks:
    def test_the_blocks_of_a_chunk_are_freed_when_the_next_one_begins(self, new_manager, new_request, compute):
        manager = new_manager(8, chunks())
        request = new_request("a", PROMPT)
        tables = []
        for _ in range(5):
            compute(manager, request, 4)
            tables.append(manager.get_block_ids("a")[0])
        assert tables == [[1], [1, 2], [0, 0, 3], [0, 0, 3, 4], [0, 0, 0, 0, 5]]

    def test_a_block_that_reaches_into_the_next_chunk_is_kept(self, new_manager, new_request, compute):
        manager = new_manager(8, chunks(6), enable_caching=False)
        request = new_request("a", PROMPT)
        compute(manager, request, 13)
        compute(manager, request, 4)  # token 13 sees 12
        assert manager.get_block_ids("a") == ([0, 0, 0, 4, 3],)
        manager = new_manager(8, chunks(10), enable_caching=False)
        request = new_request("a", PROMPT)
        compute(manager, request, 13)
        compute(manager, request, 4)  # token 13 sees 10 … 12
        assert manager.get_block_ids("a") == ([0, 0, 3, 4, 2],)

    def test_chunks_that_are_no_whole_blocks_are_refused_with_caching(self, new_manager):
        with pytest.raises(ConfigError, match="attention_chunk_size must be a multiple of the block size, got 6"):
            new_manager(8, chunks(6))

    def test_a_prompt_longer_than_the_pool_is_computed_in_pieces(self, new_manager, new_request, compute):
        manager = new_manager(2, chunks())
        request = new_request("a", 10 * "ssss")
        for _ in range(10):
            assert compute(manager, request, 4) is not None

    def test_blocks_that_are_left_behind_can_be_hit(self, new_manager, new_request, compute, hit_tokens):
        manager = new_manager(8, chunks())
        request = new_request("a", PROMPT)
        compute(manager, request, 8)
        compute(manager, request, 12)
        assert manager.get_block_ids("a") == ([0, 0, 3, 4, 5],)
        assert hit_tokens(manager, new_request("b", "SSSS x")) == 4


class TestChunkedLocalHits:
    def test_the_start_of_a_chunk_needs_no_block_at_all(self, new_manager, new_request):
        hit, num_hit = new_manager(8, chunks()).get_computed_blocks(new_request("b", "SSSS pppp x"))
        assert (hit.get_block_ids(), num_hit) == (([0, 0],), 8)

    def test_such_a_hit_is_given_null_blocks_and_goes_on_behind_them(self, new_manager, new_request, prefill):
        manager = new_manager(8, chunks())
        assert prefill(manager, new_request("a", "SSSS pppp x")) == ([0, 0, 1],)

    def test_a_hit_needs_nothing_of_earlier_chunks(self, new_manager, new_request, compute):
        manager = new_manager(8, chunks())
        compute(manager, new_request("a", PROMPT))
        manager.evict_blocks([1, 2, 3, 4])
        hit, num_hit = manager.get_computed_blocks(new_request("b", PROMPT + "x"))
        assert (hit.get_block_ids(), num_hit) == (([0, 0, 0, 0, 5],), 20)

    def test_it_ends_at_the_first_block_missing_in_its_chunk(self, new_manager, new_request, compute):
        manager = new_manager(8, chunks(16))
        compute(manager, new_request("a", PROMPT + "tttt uuuu vvvv"))
        manager.evict_blocks([6])
        hit, num_hit = manager.get_computed_blocks(new_request("b", PROMPT + "tttt uuuu vvvv"))
        assert (hit.get_block_ids(), num_hit) == (([0, 0, 0, 0, 5],), 20)

    def test_the_last_token_is_computed_again_when_everything_hits(self, new_manager, new_request, compute, hit_tokens):
        manager = new_manager(8, chunks(16))
        compute(manager, new_request("a", "SSSS pppp qqqq"))
        assert hit_tokens(manager, new_request("b", "SSSS pppp qqqq")) == 8


class TestChunkedLocalCounts:
    def test_hits_of_earlier_chunks_take_no_blocks(self, new_manager, new_request, prefill):
        manager = new_manager(4, chunks())
        assert prefill(manager, new_request("a", 6 * "ssss" + "tttt tttt t")) == ([0] * 8 + [1],)

    def test_a_long_request_needs_no_more_blocks_than_it_holds_at_once(self, new_manager, new_request):
        request = new_request("a", 10 * "ssss")
        manager = new_manager(3, chunks(), max_in_flight_tokens=8)
        assert manager.allocate_slots(request, 8, full_sequence_must_fit=True) is None
        manager = new_manager(4, chunks(), max_in_flight_tokens=8)
        assert manager.allocate_slots(request, 8, full_sequence_must_fit=True)

    def test_leading_blocks_do_not_last(self, new_manager, new_request, compute, prefill):
        manager = new_manager(8, chunks(32))
        compute(manager, new_request("a", PROMPT))
        assert prefill(manager, new_request("b", PROMPT)) == ([1, 2, 3, 4, 6],)
        assert manager.get_num_common_prefix_blocks("a") == [0]


class TestChunkedLocalRemotePages:
    def test_only_the_pages_of_the_last_chunk_are_loaded(self, new_manager, new_request, start_load, end_load):
        manager = new_manager(8, chunks(16))
        request = new_request("a", PROMPT + "tttt u")
        assert start_load(manager, request, "111111") == (16, 8)
        assert manager.get_block_ids("a") == ([0, 0, 0, 0, 1, 2],)
        assert end_load(manager, request, 2) == 20

    def test_when_none_of_them_came_the_chunk_is_computed(
        self, new_manager, new_request, start_load, end_load, compute
    ):
        manager = new_manager(8, chunks(16))
        request = new_request("a", PROMPT + "tttt u")
        start_load(manager, request, "111111")
        assert end_load(manager, request, 1, 2) == 16
        assert compute(manager, request) == ([3],)
        assert manager.get_block_ids("a") == ([0, 0, 0, 0, 1, 2, 3],)


def test_what_does_not_go_with_chunks_is_refused(new_manager):
    with pytest.raises(ConfigError, match="drafting heads do not go with chunked_local_attention"):
        new_manager(8, chunks(), use_eagle=True)
    with pytest.raises(ConfigError, match="context parallelism does not go with chunked_local_attention"):
        new_manager(8, chunks(), dcp_world_size=2)
    with pytest.raises(
        ConfigError, match="need the block size of the other groups: 4 tokens, hits end at multiples of 8"
    ):
        new_manager(8, FullAttentionSpec(block_size=8, token_bytes=8), chunks())


class TestCrossAttention:
    @pytest.fixture
    def manager(self, new_manager):
        return new_manager(8, FULL, CROSS, enable_caching=False)

    def test_all_blocks_for_the_encoder_are_given_at_once(self, manager, new_request, compute):
        request = new_request("a", "SSSS x")
        assert compute(manager, request, 4, num_encoder_tokens=9) == ([1], [2, 3, 4])
        assert compute(manager, request, 1) == ([5], [])
        assert manager.get_block_ids("a") == ([1, 5], [2, 3, 4])

    def test_they_need_free_blocks(self, manager, new_request, compute):
        request = new_request("a", "SSSS x")
        assert compute(manager, request, 5, num_encoder_tokens=25) is None
        assert manager.usage == 0.0
        assert compute(manager, request, 5, num_encoder_tokens=24) is not None
        assert manager.usage == 1.0

    def test_they_count_where_a_whole_request_must_fit(self, manager, new_request, compute):
        request = new_request("a", "SSSS pppp qqqq")
        assert compute(manager, request, 4, num_encoder_tokens=24, full_sequence_must_fit=True) is None
        assert compute(manager, request, 4, num_encoder_tokens=20, full_sequence_must_fit=True) is not None

    def test_equal_inputs_share_nothing(self, manager, new_request, compute):
        compute(manager, new_request("a", "SSSS"), num_encoder_tokens=4)
        twin = new_request("b", "SSSS")
        assert manager.get_computed_blocks(twin)[1] == 0
        assert compute(manager, twin, num_encoder_tokens=4) == ([3], [4])
        assert manager.get_num_common_prefix_blocks("a") == [0, 0]

    def test_they_are_kept_until_the_request_is_over(self, manager, new_request, compute):
        request = new_request("a", "SSSS x")
        compute(manager, request, num_encoder_tokens=9)
        manager.remove_skipped_blocks("a", 5)
        assert manager.get_block_ids("a")[1] == [3, 4, 5]
        manager.free(request)
        manager.check_integrity()
        assert manager.usage == 0.0

    def test_a_request_without_an_input_holds_none(self, manager, new_request, compute):
        assert compute(manager, new_request("a", "SSSS")) == ([1], [])

    def test_tokens_from_elsewhere_are_the_decoders(self, manager, new_request):
        request = new_request("a", "SSSS pppp x")
        added = manager.allocate_slots(
            request, 0, num_external_computed_tokens=8, delay_cache_blocks=True, num_encoder_tokens=4
        )
        manager.check_integrity()
        assert added.get_block_ids() == ([], [3])
        assert manager.get_block_ids("a") == ([1, 2], [3])
        request.num_computed_tokens = 8
        assert manager.complete_load(request) == 8
        manager.check_integrity()

    def test_ranks_do_not_share_the_encoders_tokens(self, new_manager):
        manager = new_manager(8, FULL, CROSS, enable_caching=False, dcp_world_size=2)
        assert manager.block_sizes == (8, 4)

    def test_an_estimate_of_what_is_cached_leaves_the_encoder_out(self, new_manager, new_request, compute):
        manager = new_manager(8, CROSS, enable_caching=False)
        request = new_request("a", "SSSS")
        assert compute(manager, request, num_encoder_tokens=4) == ([1],)
        assert manager.estimate_cached_tokens(request) == 0
