"""The block manager, scenario by scenario: models and engines that are not plain, and input that is wrong.

Blocks hold 4 tokens; a request's text has one token a letter.
"""

import pytest

from kvstore.connector.blocks import (
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheBlocks,
    KVCacheConfig,
    KVCacheManager,
    PrefixCacheStats,
)
from kvstore.errors import ConfigError, InvalidRequestError


class TestWithoutAttention:
    """A model that needs no blocks: everything is answered, nothing is held."""

    @pytest.fixture(params=[True, False], ids=["caching", "no caching"])
    def manager(self, request) -> KVCacheManager:
        return KVCacheManager(KVCacheConfig(1, ()), 1000, enable_caching=request.param)

    def test_every_operation_answers(self, manager, new_request, prefill, compute):
        request = new_request("a", "SSSS pppp x")
        assert prefill(manager, request) == ()
        request.append([1])
        assert compute(manager, request) == ()
        assert manager.get_blocks("a") == KVCacheBlocks(())
        assert manager.get_blocks("a").get_block_ids() == ()
        assert manager.get_computed_blocks_with(request, {}) == (KVCacheBlocks(()), 0, 0)
        assert manager.get_blocks_to_load("a") == ()
        assert manager.get_num_common_prefix_blocks("a") == []
        assert manager.estimate_cached_tokens(request) == 0
        assert manager.usage == 0.0
        assert manager.complete_load(request, [1]) == request.num_computed_tokens
        manager.cache_blocks(request, 8)
        manager.remove_skipped_blocks("a", 8)
        manager.new_step_starts()
        manager.free_popped(manager.pop_blocks_for_free(request))
        manager.free(request)
        assert manager.reset_prefix_cache()
        manager.check_integrity()

    def test_there_are_always_slots(self, manager, new_request, prefill):
        for number in range(5):
            assert prefill(manager, new_request(str(number), "SSSS"), full_sequence_must_fit=True) == ()

    def test_nothing_is_counted(self, manager, new_request, prefill, compute):
        request = new_request("a", "SSSS")
        prefill(manager, request)
        for token in range(3):
            request.append([token])
            compute(manager, request)
        assert manager.make_prefix_cache_stats() == PrefixCacheStats()


class TestContextParallelism:
    """Ranks that share each block: a block holds that many times the tokens."""

    @pytest.fixture
    def sharded(self, new_manager):
        return new_manager(8, dcp_world_size=2, pcp_world_size=2)

    def test_blocks_hold_the_tokens_of_all_ranks(self, sharded, new_request, prefill):
        assert sharded.block_sizes == (16,)
        assert sharded.hash_block_size == sharded.scheduler_block_size == 16
        assert prefill(sharded, new_request("a", 17 * "a", hash_block_size=16)) == ([1, 2],)

    def test_hits_are_blocks_of_all_ranks(self, sharded, new_request, prefill, hit_tokens):
        prefill(sharded, new_request("a", 40 * "a", hash_block_size=16))
        assert hit_tokens(sharded, new_request("b", 40 * "a", hash_block_size=16)) == 32
        assert hit_tokens(sharded, new_request("b", 31 * "a", hash_block_size=16)) == 16

    def test_a_load_is_cut_at_a_block_of_all_ranks(self, sharded, new_request, start_load, end_load):
        request = new_request("a", 40 * "a", hash_block_size=16)
        assert start_load(sharded, request, "11") == (0, 32)
        assert end_load(sharded, request, 2) == 16


class TestEagle:
    """A drafting head needs the last hidden state before its tokens: the last block of a hit is computed again."""

    def test_the_last_matched_block_is_dropped(self, new_manager, new_request, prefill, hit_tokens):
        manager = new_manager(8, use_eagle=True)
        prefill(manager, new_request("a", "SSSS pppp qqqq"))
        assert hit_tokens(manager, new_request("b", "SSSS pppp qqqq r")) == 8
        assert hit_tokens(manager, new_request("b", "SSSS pppp x")) == 4
        assert hit_tokens(manager, new_request("b", "SSSS x")) == 0
        assert hit_tokens(manager, new_request("b", "TTTT x")) == 0

    def test_it_is_the_last_one_below_the_last_token(self, new_manager, new_request, prefill, hit_tokens):
        manager = new_manager(8, use_eagle=True)
        prefill(manager, new_request("a", "SSSS pppp qqqq"))
        assert hit_tokens(manager, new_request("b", "SSSS pppp qqqq")) == 4

    def test_pages_of_kvstore_count_as_matched(self, new_manager, new_request, prefill, start_load, end_load):
        manager = new_manager(8, use_eagle=True)
        prefill(manager, new_request("a", "SSSS x"))
        request = new_request("b", "SSSS pppp qqqq r")
        assert start_load(manager, request, "111") == (0, 8)
        assert manager.get_block_ids("b") == ([1, 3],)
        assert [index for index, _ in manager.get_blocks_to_load("b")[0]] == [1]
        assert end_load(manager, request) == 8

    def test_a_failed_load_drops_nothing_more(self, new_manager, new_request, start_load, end_load):
        manager = new_manager(8, use_eagle=True)
        request = new_request("b", "SSSS pppp qqqq rrrr s")
        assert start_load(manager, request, "1111") == (0, 12)
        assert end_load(manager, request, 3) == 8


class TestBadInput:
    def test_numbers_that_do_not_fit_are_refused_and_change_nothing(self, new_manager, new_request, prefill):
        manager = new_manager(4)
        prefill(manager, new_request("a", "SSSS x"))
        request = new_request("b", "SSSS y")
        hit, _ = manager.get_computed_blocks(request)
        for arguments, message in [
            ((0,), "at least one token"),
            ((-1,), "must not be negative"),
            ((1, 0, None, -1), "must not be negative"),
            ((1, 0, None, 0, -4), "must not be negative"),
            ((1, 3, hit), "3 computed tokens do not fill 1 blocks of 4"),
            ((1, 0, hit), "0 computed tokens do not fill 1 blocks of 4"),
            ((1, 8, hit), "8 computed tokens do not fill 1 blocks of 4"),
            ((1, 4, None), "4 computed tokens do not fill 0 blocks"),
        ]:
            with pytest.raises(InvalidRequestError, match=message):
                manager.allocate_slots(request, *arguments)
        assert manager.get_block_ids("b") == ([],)
        manager.check_integrity()

    def test_a_request_with_blocks_can_not_be_given_computed_ones(self, new_manager, new_request, prefill):
        manager = new_manager(4)
        request = new_request("a", "SSSS x")
        prefill(manager, request)
        hit, num_hit = manager.get_computed_blocks(request)
        with pytest.raises(InvalidRequestError, match="request a: it holds blocks"):
            manager.allocate_slots(request, 1, num_hit, hit)
        with pytest.raises(InvalidRequestError, match="request a: it holds blocks"):
            manager.allocate_slots(request, 1, num_external_computed_tokens=4)

    def test_a_request_without_blocks_can_not_be_computed(self, new_manager, new_request):
        request = new_request("a", "SSSS x")
        request.num_computed_tokens = 4
        with pytest.raises(InvalidRequestError, match="holds no blocks and says that 4 tokens"):
            new_manager(4).allocate_slots(request, 1)

    def test_hashes_that_are_missing_are_noticed_before_anything_changes(self, new_manager, new_request):
        manager = new_manager(4)
        request = new_request("a", "SSSS pppp")
        request.block_hashes.pop()
        with pytest.raises(InvalidRequestError, match="1 block hashes for 2 full blocks"):
            manager.allocate_slots(request, 8)
        assert manager.usage == 0.0

    def test_hashes_of_another_step_are_noticed(self, new_manager, new_request):
        with pytest.raises(InvalidRequestError, match="4 block hashes for 8 tokens: there is one for each 4"):
            new_manager(4).allocate_slots(new_request("a", "SSSS pppp", hash_block_size=2), 8)

    def test_computed_tokens_need_their_blocks(self, new_manager, new_request):
        manager = new_manager(4)
        with pytest.raises(InvalidRequestError, match="8 computed tokens do not fill 0 blocks of 4"):
            manager.allocate_slots(new_request("a", "SSSS pppp x"), 1, 8, KVCacheBlocks(((),)))
        with pytest.raises(InvalidRequestError, match="must not be negative"):
            manager.allocate_slots(new_request("a", "SSSS"), 4, reserved_blocks=-1)
        assert manager.usage == 0.0

    def test_an_empty_hit_is_no_hit(self, new_manager, new_request, compute):
        manager = new_manager(4)
        request = new_request("a", "SSSS pppp")
        compute(manager, request, 4)
        assert manager.allocate_slots(request, 4, 0, KVCacheBlocks(((),))) is not None

    def test_hashes_are_not_needed_where_nothing_is_cached(self, new_manager, new_request):
        request = new_request("a", "SSSS pppp")
        request.block_hashes.clear()
        assert new_manager(4, enable_caching=False).allocate_slots(request, 8) is not None
        assert new_manager(4).allocate_slots(request, 8, delay_cache_blocks=True) is not None

    def test_configurations_that_can_not_be_served_are_refused(self, new_manager):
        full = FullAttentionSpec(block_size=4, token_bytes=8)
        encoder = CrossAttentionSpec(block_size=4, token_bytes=8)
        with pytest.raises(ConfigError, match="prefix caching does not go with cross_attention"):
            new_manager(4, full, encoder)
        with pytest.raises(ConfigError, match="max_model_len must be an integer of at least 1, got 0"):
            new_manager(4, max_model_len=0)
        with pytest.raises(ConfigError, match="dcp_world_size must be an integer of at least 1, got 0"):
            new_manager(4, dcp_world_size=0)


def test_a_request_that_holds_nothing_has_no_blocks(new_manager):
    assert new_manager(4).get_blocks("unknown").get_block_ids() == ([],)
