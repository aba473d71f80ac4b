"""Groups of chunked local attention. Blocks hold 4 tokens, chunks 8 unless a scenario says otherwise.

The start of a chunk needs nothing of what lies before it: it is a hit in an empty cache.
"""

import pytest

from kvstore.connector.blocks import ChunkedLocalAttentionSpec, FullAttentionSpec
from kvstore.errors import ConfigError


def chunks(tokens: int = 8) -> ChunkedLocalAttentionSpec:
    return ChunkedLocalAttentionSpec(block_size=4, token_bytes=8, attention_chunk_size=tokens)


PROMPT = "SSSS pppp qqqq rrrr ssss"


class TestSkippedBlocks:
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


class TestHits:
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


class TestCounts:
    def test_hits_of_earlier_chunks_take_no_room(self, new_manager, new_request, prefill):
        manager = new_manager(4, chunks())
        assert prefill(manager, new_request("a", 6 * "ssss" + "tttt tttt t")) == ([0] * 8 + [1],)

    def test_a_long_request_needs_no_more_room_than_it_holds_at_once(self, new_manager, new_request):
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


class TestLevelBelow:
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


def test_what_does_not_go_together_is_refused(new_manager):
    with pytest.raises(ConfigError, match="drafting heads do not go with chunked_local_attention"):
        new_manager(8, chunks(), use_eagle=True)
    with pytest.raises(ConfigError, match="context parallelism does not go with chunked_local_attention"):
        new_manager(8, chunks(), dcp_world_size=2)
    with pytest.raises(
        ConfigError, match="need the block size of the other groups: 4 tokens, hits end at multiples of 8"
    ):
        new_manager(8, FullAttentionSpec(block_size=8, token_bytes=8), chunks())
