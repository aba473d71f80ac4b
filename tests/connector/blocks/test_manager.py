"""The block manager, scenario by scenario. Blocks hold 4 tokens; a request's text has one token a letter."""

import pytest

from connector.blocks import CacheConfig, FullAttentionSpec, KVCacheBlocks, KVCacheManager, PrefixCacheStatistics
from kvstore.errors import ConfigError, InvalidRequestError


def hit_tokens(manager, request) -> int:
    return manager.get_computed_blocks(request)[1]


def external(manager, request, num_tokens, *, delay=True):
    """Gives a request that hits nothing blocks for tokens that come from kvstore, as a scheduler does."""
    hit, num_hit = manager.get_computed_blocks(request)
    added = manager.allocate_slots(
        request, 0, num_hit, hit, num_external_computed_tokens=num_tokens, delay_cache_blocks=delay
    )
    if added is not None:
        request.num_computed_tokens = num_hit + num_tokens
    manager.check_integrity()
    return added


class TestHits:
    def test_a_second_request_shares_the_full_blocks_of_an_equal_prefix(self, new_manager, new_request, prefill):
        manager = new_manager(8)
        assert prefill(manager, new_request("a", "SSSS pppp xx")) == [1, 2, 3]
        assert prefill(manager, new_request("b", "SSSS pppp yyyy z")) == [1, 2, 4, 5]

    def test_a_block_that_is_not_full_is_never_shared(self, new_manager, new_request, prefill):
        manager = new_manager(8)
        prefill(manager, new_request("a", "SSSS pp"))
        assert hit_tokens(manager, new_request("b", "SSSS pp qq r")) == 4

    def test_when_everything_hits_the_last_token_is_computed_again(self, new_manager, new_request, prefill):
        manager = new_manager(8)
        prefill(manager, new_request("a", "SSSS pppp"))
        assert hit_tokens(manager, new_request("b", "SSSS pppp")) == 4
        assert hit_tokens(manager, new_request("c", "SSSS pppp q")) == 8

    def test_equal_tokens_behind_another_prefix_do_not_hit(self, new_manager, new_request, prefill):
        manager = new_manager(8)
        prefill(manager, new_request("a", "SSSS pppp x"))
        assert hit_tokens(manager, new_request("b", "TTTT pppp x")) == 0

    def test_looking_up_holds_nothing(self, new_manager, new_request, prefill):
        manager = new_manager(2)
        request = new_request("a", "SSSS ppp")
        prefill(manager, request)
        manager.free(request)
        assert hit_tokens(manager, new_request("b", "SSSS q")) == 4
        assert prefill(manager, new_request("c", "TTTT tttt")) == [2, 1]
        assert hit_tokens(manager, new_request("b", "SSSS q")) == 0

    def test_generated_tokens_can_be_hit_once_their_block_is_full(self, new_manager, new_request, prefill):
        manager = new_manager(8)
        request = new_request("a", "SSSS pp")
        prefill(manager, request)
        for token in range(3):
            request.append([token])
            assert manager.allocate_slots(request, 1) is not None
            request.num_computed_tokens += 1
        follow_up = new_request("b", "SSSS pp")
        follow_up.append([0, 1, 2])
        assert hit_tokens(manager, follow_up) == 8

    def test_without_caching_every_lookup_misses(self, new_manager, new_request, prefill):
        manager = new_manager(8, enable_caching=False)
        assert prefill(manager, new_request("a", "SSSS pppp x")) == [1, 2, 3]
        assert prefill(manager, new_request("b", "SSSS pppp x")) == [4, 5, 6]


class TestAllocation:
    def test_a_block_is_added_when_the_last_one_is_full(self, new_manager, new_request, prefill):
        manager = new_manager(3)
        request = new_request("a", "SSS")
        prefill(manager, request)
        added = []
        for token in range(3):
            request.append([token])
            added.append(manager.allocate_slots(request, 1).get_block_ids())
            request.num_computed_tokens += 1
        assert added == [([],), ([2],), ([],)]

    def test_a_prompt_may_be_given_slots_chunk_by_chunk(self, new_manager, new_request):
        manager = new_manager(4)
        request = new_request("a", "SSSS pppp qqqq")
        for chunk in (6, 6):
            assert manager.allocate_slots(request, chunk) is not None
            request.num_computed_tokens += chunk
        assert manager.get_block_ids("a") == ([1, 2, 3],)
        assert hit_tokens(manager, new_request("b", "SSSS pppp qqqq r")) == 12

    @pytest.mark.parametrize("text", ["TTTT tttt tttt", "SSSS tttt tttt t"])
    def test_no_room_changes_nothing(self, new_manager, new_request, prefill, text):
        manager = new_manager(4)
        holder, gone = new_request("a", "SSSS p"), new_request("b", "RRRR r")
        prefill(manager, holder)
        prefill(manager, gone)
        manager.free(gone)
        before = manager.pool.free_block_ids()
        assert prefill(manager, new_request("c", text)) is None
        assert manager.pool.free_block_ids() == before
        assert manager.get_block_ids("c") == ([],)
        assert hit_tokens(manager, new_request("d", "SSSS x")) == 4
        assert hit_tokens(manager, new_request("d", "RRRR x")) == 4
        assert manager.make_prefix_cache_stats().requests == 2

    def test_hits_that_no_one_holds_take_room_too(self, new_manager, new_request, prefill):
        manager = new_manager(3)
        gone = new_request("a", "SSSS pppp")
        prefill(manager, gone)
        manager.free(gone)
        # Three are free, two of them are the hit: only one is left for new tokens.
        assert prefill(manager, new_request("b", "SSSS pppp qqqq qqqq")) is None
        assert prefill(manager, new_request("b", "SSSS pppp qqqq")) == [1, 2, 3]

    def test_usage_counts_what_requests_hold(self, new_manager, new_request, prefill):
        manager = new_manager(4)
        request = new_request("a", "SSSS p")
        prefill(manager, request)
        assert manager.usage == 0.5
        manager.free(request)
        assert manager.usage == 0.0


class TestEviction:
    def test_the_tail_of_a_prefix_leaves_before_its_head(self, new_manager, new_request, prefill):
        manager = new_manager(4)
        request = new_request("a", "SSSS pppp qqqq")
        prefill(manager, request)
        manager.free(request)
        prefill(manager, new_request("b", "TTTT tttt"))  # 4, never used, and 3, the tail
        assert manager.get_block_ids("b") == ([4, 3],)
        assert hit_tokens(manager, new_request("c", "SSSS pppp qqqq r")) == 8

    def test_the_prefix_used_longest_ago_leaves_first(self, new_manager, new_request, prefill):
        manager = new_manager(3)
        old, young = new_request("a", "OOOO"), new_request("b", "YYYY")
        for request in (old, young):
            prefill(manager, request)
            manager.free(request)
        again = new_request("c", "OOOO x")
        prefill(manager, again)  # hits the old one and thereby makes it the youngest
        manager.free(again)
        prefill(manager, new_request("d", "TTTT tttt"))
        assert hit_tokens(manager, new_request("e", "YYYY x")) == 0
        assert hit_tokens(manager, new_request("e", "OOOO x")) == 4

    def test_a_shared_block_stays_until_its_last_holder_is_gone(self, new_manager, new_request, prefill):
        manager = new_manager(4)
        first, second = new_request("a", "SSSS x"), new_request("b", "SSSS y")
        prefill(manager, first)
        prefill(manager, second)
        manager.free(first)
        assert prefill(manager, new_request("c", "TTTT tttt ttt")) is None
        manager.free(second)
        assert prefill(manager, new_request("c", "TTTT tttt ttt")) is not None

    def test_evicted_blocks_are_kept_by_their_holders_and_found_by_no_one(self, new_manager, new_request, prefill):
        manager = new_manager(4)
        request = new_request("a", "SSSS pppp x")
        prefill(manager, request)
        manager.evict_blocks([2])
        assert manager.get_block_ids("a") == ([1, 2, 3],)
        assert hit_tokens(manager, new_request("b", "SSSS pppp x")) == 4
        manager.check_integrity()

    def test_reset_is_refused_while_blocks_are_in_use(self, new_manager, new_request, prefill):
        manager = new_manager(4)
        request = new_request("a", "SSSS x")
        prefill(manager, request)
        assert not manager.reset_prefix_cache()
        assert hit_tokens(manager, new_request("b", "SSSS x")) == 4
        manager.free(request)
        assert manager.reset_prefix_cache()
        assert hit_tokens(manager, new_request("b", "SSSS x")) == 0
        manager.check_integrity()

    def test_freeing_a_request_that_holds_nothing_is_no_error(self, new_manager, new_request):
        manager = new_manager(4)
        manager.free(new_request("aborted before it got blocks", "SSSS"))
        manager.check_integrity()


class TestLoads:
    """Blocks whose content comes from kvstore."""

    def test_blocks_on_their_way_can_not_be_hit_or_given_to_others(self, new_manager, new_request, prefill):
        manager = new_manager(3)
        request = new_request("a", "SSSS pppp x")
        assert external(manager, request, 8) is not None
        assert manager.get_block_ids("a") == ([1, 2],)
        assert hit_tokens(manager, new_request("b", "SSSS pppp y")) == 0
        assert prefill(manager, new_request("c", "TTTT t")) is None

    def test_a_load_that_arrived_is_hit_by_others(self, new_manager, new_request):
        manager = new_manager(4)
        request = new_request("a", "SSSS pppp x")
        external(manager, request, 8)
        assert manager.complete_load(request) == 8
        assert hit_tokens(manager, new_request("b", "SSSS pppp y")) == 8
        assert manager.allocate_slots(request, 1).get_block_ids() == ([3],)
        manager.check_integrity()

    def test_a_load_continues_a_local_hit(self, new_manager, new_request, prefill):
        manager = new_manager(6)
        prefill(manager, new_request("a", "SSSS x"))
        request = new_request("b", "SSSS pppp qqqq r")
        external(manager, request, 8)
        assert manager.get_block_ids("b") == ([1, 3, 4],)
        assert manager.complete_load(request) == 12
        assert hit_tokens(manager, new_request("c", "SSSS pppp qqqq s")) == 12

    def test_a_failed_load_ends_at_the_first_bad_block(self, new_manager, new_request):
        manager = new_manager(6)
        request = new_request("a", "SSSS pppp qqqq x")
        external(manager, request, 12)
        assert manager.complete_load(request, {2, 77}) == 4
        request.num_computed_tokens = 4
        assert hit_tokens(manager, new_request("b", "SSSS pppp qqqq y")) == 4
        assert manager.get_block_ids("a") == ([1, 2, 3],)  # they keep their place and are computed
        assert manager.allocate_slots(request, 9).get_block_ids() == ([4],)
        assert hit_tokens(manager, new_request("b", "SSSS pppp qqqq y")) == 12
        manager.check_integrity()

    def test_a_load_that_failed_from_its_first_block_on_starts_over(self, new_manager, new_request, prefill):
        manager = new_manager(4)
        request = new_request("a", "SSSS pppp x")
        external(manager, request, 8)
        assert manager.complete_load(request, {1, 2}) == 0
        assert manager.usage == 0.0
        request.num_computed_tokens = 0
        assert hit_tokens(manager, request) == 0
        assert prefill(manager, request) is not None

    def test_a_failed_load_behind_a_local_hit_keeps_the_hit(self, new_manager, new_request, prefill):
        manager = new_manager(6)
        prefill(manager, new_request("a", "SSSS x"))
        request = new_request("b", "SSSS pppp r")
        external(manager, request, 4)
        assert manager.complete_load(request, manager.get_block_ids("b")[0][1:]) == 4
        assert manager.get_block_ids("b")[0][0] == 1

    def test_a_request_that_is_aborted_when_its_load_is_over_leaves_nothing_behind(self, new_manager, new_request):
        manager = new_manager(4)
        request = new_request("a", "SSSS pppp x")
        external(manager, request, 8)
        manager.free(request)
        manager.check_integrity()
        assert manager.usage == 0.0
        assert hit_tokens(manager, new_request("b", "SSSS pppp y")) == 0

    def test_pages_that_are_there_at_once_are_cached_at_once(self, new_manager, new_request):
        manager = new_manager(4)
        external(manager, new_request("a", "SSSS pppp x"), 8, delay=False)
        assert hit_tokens(manager, new_request("b", "SSSS pppp y")) == 8

    def test_no_room_for_a_load_changes_nothing(self, new_manager, new_request):
        manager = new_manager(1)
        request = new_request("a", "SSSS pppp x")
        assert external(manager, request, 8) is None
        assert manager.usage == 0.0


class TestStatistics:
    def test_requests_are_counted_when_they_get_blocks_not_when_they_look(self, new_manager, new_request, prefill):
        manager = new_manager(4)
        prefill(manager, new_request("a", "SSSS x"))
        waiting = new_request("b", "SSSS yyyy yyyy yyy")
        for _ in range(3):
            assert prefill(manager, waiting) is None
        prefill(manager, new_request("c", "SSSS z"))
        assert manager.make_prefix_cache_stats() == PrefixCacheStatistics(requests=2, queries=10, hits=4)
        assert manager.make_prefix_cache_stats() == PrefixCacheStatistics()


class TestBadInput:
    def test_numbers_that_do_not_fit_are_refused_and_change_nothing(self, new_manager, new_request, prefill):
        manager = new_manager(4)
        prefill(manager, new_request("a", "SSSS x"))
        request = new_request("b", "SSSS y")
        hit, _ = manager.get_computed_blocks(request)
        for arguments, message in [
            ((0,), "at least one token"),
            ((-1,), "must not be negative"),
            ((1, 3, hit), "3 computed tokens do not fill 1 blocks of 4"),
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
        with pytest.raises(InvalidRequestError, match="request a holds blocks"):
            manager.allocate_slots(request, 1, num_hit, hit)

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

    def test_configurations_name_what_is_wrong(self):
        spec = FullAttentionSpec(block_size=16, page_bytes=1024)
        with pytest.raises(ConfigError, match="at least 2, got 1"):
            CacheConfig(num_blocks=1, groups=(spec,))
        with pytest.raises(ConfigError, match="got 2 groups"):
            CacheConfig(num_blocks=8, groups=(spec, spec))
        with pytest.raises(ConfigError, match="block_size must be an integer of at least 1, got 0"):
            FullAttentionSpec(block_size=0, page_bytes=1024)


def test_results_add_up(new_manager, new_request, prefill):
    manager: KVCacheManager = new_manager(4)
    prefill(manager, new_request("a", "SSSS x"))
    both = manager.get_blocks("a") + manager.get_blocks("a")
    assert isinstance(both, KVCacheBlocks)
    assert both.get_block_ids() == ([1, 2, 1, 2],)
    assert manager.get_blocks("unknown").get_block_ids() == ([],)
