"""The block manager, scenario by scenario, with one group of full attention. Blocks hold 4 tokens; a request's text has
one token a letter."""

import pytest

from connector.blocks import (
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheBlocks,
    KVCacheConfig,
    KVCacheManager,
    PrefixCacheStats,
    PrefixKeys,
    ResidencySampler,
)
from kvstore.errors import ConfigError, InvalidRequestError


def external(manager, request, num_tokens, *, delay=True, num_new=0):
    """Gives a request blocks for tokens that come from elsewhere, behind those that hit, as a scheduler does."""
    hit, num_hit = manager.get_computed_blocks(request)
    added = manager.allocate_slots(
        request, num_new, num_hit, hit, num_external_computed_tokens=num_tokens, delay_cache_blocks=delay
    )
    if added is not None:
        request.num_computed_tokens = num_hit + num_tokens + num_new
    manager.check_integrity()
    return added


class TestHits:
    def test_a_second_request_shares_the_full_blocks_of_an_equal_prefix(self, new_manager, new_request, prefill):
        manager = new_manager(8)
        assert prefill(manager, new_request("a", "SSSS pppp xx")) == ([1, 2, 3],)
        assert prefill(manager, new_request("b", "SSSS pppp yyyy z")) == ([1, 2, 4, 5],)

    def test_a_block_that_is_not_full_is_never_shared(self, new_manager, new_request, prefill, hit_tokens):
        manager = new_manager(8)
        prefill(manager, new_request("a", "SSSS pp"))
        assert hit_tokens(manager, new_request("b", "SSSS pp qq r")) == 4

    def test_when_everything_hits_the_last_token_is_computed_again(self, new_manager, new_request, prefill, hit_tokens):
        manager = new_manager(8)
        prefill(manager, new_request("a", "SSSS pppp"))
        assert hit_tokens(manager, new_request("b", "SSSS pppp")) == 4
        assert hit_tokens(manager, new_request("c", "SSSS pppp q")) == 8

    def test_equal_tokens_behind_another_prefix_do_not_hit(self, new_manager, new_request, prefill, hit_tokens):
        manager = new_manager(8)
        prefill(manager, new_request("a", "SSSS pppp x"))
        assert hit_tokens(manager, new_request("b", "TTTT pppp x")) == 0

    def test_looking_up_holds_nothing(self, new_manager, new_request, prefill, hit_tokens):
        manager = new_manager(2)
        request = new_request("a", "SSSS ppp")
        prefill(manager, request)
        manager.free(request)
        assert hit_tokens(manager, new_request("b", "SSSS q")) == 4
        assert prefill(manager, new_request("c", "TTTT tttt")) == ([2, 1],)
        assert hit_tokens(manager, new_request("b", "SSSS q")) == 0

    def test_generated_tokens_can_be_hit_once_their_block_is_full(
        self, new_manager, new_request, prefill, compute, hit_tokens
    ):
        manager = new_manager(8)
        request = new_request("a", "SSSS pp")
        prefill(manager, request)
        for token in range(3):
            request.append([token])
            assert compute(manager, request) is not None
        follow_up = new_request("b", "SSSS pp")
        follow_up.append([0, 1, 2])
        assert hit_tokens(manager, follow_up) == 8

    def test_a_prompt_in_pieces_can_be_hit_as_far_as_it_is_computed(
        self, new_manager, new_request, compute, hit_tokens
    ):
        manager = new_manager(8)
        request, follower = new_request("a", "SSSS pppp qqqq"), new_request("b", "SSSS pppp qqqq r")
        seen = []
        for _ in range(2):
            compute(manager, request, 6)
            seen.append(hit_tokens(manager, follower))
        assert seen == [4, 12]

    def test_a_request_that_skips_reading_hits_nothing_and_is_hit_by_others(
        self, new_manager, new_request, prefill, hit_tokens
    ):
        manager = new_manager(8)
        prefill(manager, new_request("a", "SSSS x"))
        skips = new_request("b", "SSSS pppp y", skip_reading=True)  # wants log-probabilities of its prompt
        assert hit_tokens(manager, skips) == 0
        assert manager.get_computed_blocks_with(skips, {0: [True, True]})[1:] == (0, 0)
        assert prefill(manager, skips) == ([3, 4, 5],)
        assert hit_tokens(manager, new_request("c", "SSSS pppp z")) == 8

    def test_without_caching_every_lookup_misses(self, new_manager, new_request, prefill):
        manager = new_manager(8, enable_caching=False)
        assert prefill(manager, new_request("a", "SSSS pppp x")) == ([1, 2, 3],)
        assert prefill(manager, new_request("b", "SSSS pppp x")) == ([4, 5, 6],)

    def test_what_else_the_kv_depends_on_keeps_requests_apart(self, new_manager, new_request, prefill, hit_tokens):
        manager = new_manager(8)
        prefill(manager, new_request("a", "SSSS x", keys=PrefixKeys(cache_salt="mine")))
        assert hit_tokens(manager, new_request("b", "SSSS y", keys=PrefixKeys(cache_salt="mine"))) == 4
        assert hit_tokens(manager, new_request("b", "SSSS y", keys=PrefixKeys(cache_salt="yours"))) == 0
        assert hit_tokens(manager, new_request("b", "SSSS y")) == 0


class TestAllocation:
    def test_a_block_is_added_when_the_last_one_is_full(self, new_manager, new_request, prefill, compute):
        manager = new_manager(3)
        request = new_request("a", "SSS")
        prefill(manager, request)
        added = []
        for token in range(3):
            request.append([token])
            added.append(compute(manager, request))
        assert added == [([],), ([2],), ([],)]

    def test_a_prompt_may_be_given_slots_chunk_by_chunk(self, new_manager, new_request, compute, hit_tokens):
        manager = new_manager(4)
        request = new_request("a", "SSSS pppp qqqq")
        for chunk in (6, 6):
            assert compute(manager, request, chunk) is not None
        assert manager.get_block_ids("a") == ([1, 2, 3],)
        assert hit_tokens(manager, new_request("b", "SSSS pppp qqqq r")) == 12

    @pytest.mark.parametrize("text", ["TTTT tttt tttt", "SSSS tttt tttt t"])
    def test_no_room_changes_nothing(self, new_manager, new_request, prefill, hit_tokens, text):
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

    def test_no_room_for_the_next_token_keeps_what_a_request_has(self, new_manager, new_request, prefill, compute):
        manager = new_manager(2)
        request = new_request("a", "SSSS pppp")
        prefill(manager, request)
        request.append([1])
        assert compute(manager, request) is None
        assert manager.get_block_ids("a") == ([1, 2],)
        assert manager.estimate_cached_tokens(request) == 8

    def test_hits_that_no_one_holds_take_room_too(self, new_manager, new_request, prefill):
        manager = new_manager(3)
        gone = new_request("a", "SSSS pppp")
        prefill(manager, gone)
        manager.free(gone)
        # Three are free, two of them are the hit: only one is left for new tokens.
        assert prefill(manager, new_request("b", "SSSS pppp qqqq qqqq")) is None
        assert prefill(manager, new_request("b", "SSSS pppp qqqq")) == ([1, 2, 3],)

    def test_hits_that_someone_holds_take_no_room(self, new_manager, new_request, prefill):
        manager = new_manager(3)
        prefill(manager, new_request("a", "SSSS pppp"))
        assert prefill(manager, new_request("b", "SSSS pppp q")) == ([1, 2, 3],)

    def test_usage_counts_what_requests_hold(self, new_manager, new_request, prefill):
        manager = new_manager(4)
        request = new_request("a", "SSSS p")
        prefill(manager, request)
        assert manager.usage == 0.5
        manager.free(request)
        assert manager.usage == 0.0

    def test_look_ahead_slots_are_there_and_not_cached(self, new_manager, new_request, prefill, compute, hit_tokens):
        manager = new_manager(4)
        request = new_request("a", "SSSS pp")
        assert prefill(manager, request, num_lookahead_tokens=3) == ([1, 2, 3],)
        assert hit_tokens(manager, new_request("b", "SSSS ppqq r")) == 4
        request.append([1, 2, 3])
        assert compute(manager, request) == ([],)  # what was looked ahead is used now

    def test_look_ahead_ends_with_the_longest_request(self, new_manager, new_request, prefill):
        manager = new_manager(4, max_model_len=8)
        assert prefill(manager, new_request("a", "SSSS pp"), num_lookahead_tokens=7) == ([1, 2],)

    def test_look_ahead_slots_need_room(self, new_manager, new_request, prefill):
        manager = new_manager(2)
        assert prefill(manager, new_request("a", "SSSS pppp"), num_lookahead_tokens=1) is None
        assert prefill(manager, new_request("a", "SSSS pppp")) is not None

    def test_drafts_are_given_slots_and_cached_when_they_turn_out_right(
        self, new_manager, new_request, prefill, compute, hit_tokens
    ):
        manager = new_manager(4)
        request = new_request("a", "SSSS pp")
        prefill(manager, request)
        request.append([1])
        assert compute(manager, request, 1 + 3) == ([3],)  # one token and three drafts
        assert manager.get_blocks("a").get_unhashed_block_ids() == [2, 3]
        request.num_computed_tokens -= 2  # one of them was right
        request.append([2, 3])
        compute(manager, request)
        assert manager.get_blocks("a").get_unhashed_block_ids() == [3]
        follower = new_request("b", "SSSS pp")
        follower.append([1, 2, 9])
        assert hit_tokens(manager, follower) == 8

    def test_a_request_that_can_never_finish_may_be_kept_out(self, new_manager, new_request):
        manager = new_manager(3)
        request = new_request("a", "SSSS pppp qqqq rrrr")
        assert manager.allocate_slots(request, 4, full_sequence_must_fit=True) is None
        assert manager.usage == 0.0
        assert manager.allocate_slots(request, 4) is not None

    def test_a_request_that_fits_as_a_whole_is_let_in(self, new_manager, new_request, prefill):
        manager = new_manager(4)
        prefill(manager, new_request("a", "SSSS"))
        request = new_request("b", "SSSS pppp qqqq rrrr")
        hit, num_hit = manager.get_computed_blocks(request)
        added = manager.allocate_slots(request, 4, num_hit, hit, full_sequence_must_fit=True)
        assert added.get_block_ids() == ([2],)

    def test_free_blocks_may_be_kept_in_reserve(self, new_manager, new_request):
        manager = new_manager(3)
        request = new_request("a", "SSSS pppp")
        assert manager.allocate_slots(request, 8, reserved_blocks=2) is None
        assert manager.usage == 0.0
        assert manager.allocate_slots(request, 8, reserved_blocks=1) is not None


class TestEviction:
    def test_the_tail_of_a_prefix_leaves_before_its_head(self, new_manager, new_request, prefill, hit_tokens):
        manager = new_manager(4)
        request = new_request("a", "SSSS pppp qqqq")
        prefill(manager, request)
        manager.free(request)
        prefill(manager, new_request("b", "TTTT tttt"))  # 4, never used, and 3, the tail
        assert manager.get_block_ids("b") == ([4, 3],)
        assert hit_tokens(manager, new_request("c", "SSSS pppp qqqq r")) == 8

    def test_the_prefix_used_longest_ago_leaves_first(self, new_manager, new_request, prefill, hit_tokens):
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

    def test_evicted_blocks_are_kept_by_their_holders_and_found_by_no_one(
        self, new_manager, new_request, prefill, hit_tokens
    ):
        manager = new_manager(4)
        request = new_request("a", "SSSS pppp x")
        prefill(manager, request)
        manager.evict_blocks([2])
        assert manager.get_block_ids("a") == ([1, 2, 3],)
        assert hit_tokens(manager, new_request("b", "SSSS pppp x")) == 4
        manager.check_integrity()

    def test_an_unknown_id_is_refused_before_anything_is_evicted(self, new_manager, new_request, prefill, hit_tokens):
        manager = new_manager(4)
        prefill(manager, new_request("a", "SSSS x"))
        with pytest.raises(InvalidRequestError, match="between 0 and 4, got 5"):
            manager.evict_blocks([1, 5])
        assert hit_tokens(manager, new_request("b", "SSSS x")) == 4

    def test_reset_is_refused_while_blocks_are_in_use(self, new_manager, new_request, prefill, hit_tokens):
        manager = new_manager(4)
        request = new_request("a", "SSSS x")
        prefill(manager, request)
        assert not manager.reset_prefix_cache()
        assert hit_tokens(manager, new_request("b", "SSSS x")) == 4
        assert not manager.make_prefix_cache_stats().reset
        manager.free(request)
        assert manager.reset_prefix_cache()
        assert hit_tokens(manager, new_request("b", "SSSS x")) == 0
        assert manager.make_prefix_cache_stats().reset
        manager.check_integrity()

    def test_freeing_a_request_that_holds_nothing_is_no_error(self, new_manager, new_request):
        manager = new_manager(4)
        manager.free(new_request("aborted before it got blocks", "SSSS"))
        manager.check_integrity()

    def test_a_preempted_request_finds_its_own_blocks_again(self, new_manager, new_request, prefill):
        manager = new_manager(4)
        request = new_request("a", "SSSS pppp x")
        prefill(manager, request)
        manager.free(request)
        request.num_computed_tokens, request.num_preemptions = 0, 1
        assert prefill(manager, request) == ([1, 2, 3],)


class TestDeferredFrees:
    """Blocks that a copy still reads when their request is over."""

    def test_popped_blocks_are_given_to_no_one_until_they_are_freed(self, new_manager, new_request, prefill):
        manager = new_manager(3)
        request = new_request("a", "SSSS pppp x")
        prefill(manager, request)
        popped = manager.pop_blocks_for_free(request)
        manager.check_integrity()
        assert [block.block_id for block in popped] == [1, 2, 3]
        assert manager.get_block_ids("a") == ([],)
        assert manager.usage == 1.0
        assert prefill(manager, new_request("b", "T")) is None
        assert not manager.reset_prefix_cache()
        manager.free_popped(popped)
        manager.check_integrity()
        assert manager.usage == 0.0
        assert prefill(manager, new_request("b", "T")) is not None

    def test_they_can_be_hit_meanwhile(self, new_manager, new_request, prefill):
        manager = new_manager(4)
        request = new_request("a", "SSSS pppp x")
        prefill(manager, request)
        popped = manager.pop_blocks_for_free(request)
        assert prefill(manager, new_request("b", "SSSS pppp y")) == ([1, 2, 4],)
        manager.free_popped(popped)
        manager.check_integrity()
        assert manager.pool.free_block_ids() == [3]

    def test_they_are_freed_tail_first(self, new_manager, new_request, prefill):
        manager = new_manager(3)
        request = new_request("a", "SSSS pppp qqqq")
        prefill(manager, request)
        manager.free_popped(manager.pop_blocks_for_free(request))
        assert manager.pool.free_block_ids() == [3, 2, 1]

    def test_they_may_be_freed_piece_by_piece(self, new_manager, new_request, prefill):
        manager = new_manager(3)
        request = new_request("a", "SSSS pppp x")
        prefill(manager, request)
        popped = manager.pop_blocks_for_free(request)
        manager.free_popped(popped[2:])
        manager.check_integrity()
        assert manager.pool.free_block_ids() == [3]
        manager.free_popped(popped[:2])
        manager.check_integrity()
        assert manager.pool.free_block_ids() == [3, 2, 1]

    def test_a_block_that_is_freed_too_often_is_refused(self, new_manager, new_request, prefill):
        manager = new_manager(4)
        first, second = new_request("a", "SSSS x"), new_request("b", "SSSS y")
        prefill(manager, first)
        prefill(manager, second)
        popped = manager.pop_blocks_for_free(first)
        with pytest.raises(InvalidRequestError, match="block 1 is freed 2 times, popped 1"):
            manager.free_popped([*popped, popped[0]])
        manager.free_popped(popped)
        with pytest.raises(InvalidRequestError, match="block 1 is freed 1 times, popped 0"):
            manager.free_popped(popped[:1])  # the second request holds it
        manager.check_integrity()
        assert manager.get_block_ids("b") == ([1, 3],)

    def test_a_block_that_two_requests_left_needs_two_frees(self, new_manager, new_request, prefill):
        manager = new_manager(4)
        requests = [new_request("a", "SSSS x"), new_request("b", "SSSS y")]
        for request in requests:
            prefill(manager, request)
        popped = [manager.pop_blocks_for_free(request) for request in requests]
        manager.free_popped(popped[0])
        assert manager.pool.blocks[1].ref_cnt == 1
        manager.free_popped(popped[1])
        manager.check_integrity()
        assert manager.usage == 0.0

    def test_the_same_request_can_come_back_before_they_are_freed(self, new_manager, new_request, prefill):
        manager = new_manager(4)
        request = new_request("a", "SSSS pppp x")
        prefill(manager, request)
        popped = manager.pop_blocks_for_free(request)
        request.num_computed_tokens = 0
        assert prefill(manager, request) == ([1, 2, 4],)
        manager.free_popped(popped)
        manager.free(request)
        manager.check_integrity()
        assert manager.usage == 0.0


class TestLoads:
    """Blocks whose content comes from elsewhere, behind what hits here."""

    def test_blocks_on_their_way_can_not_be_hit_or_given_to_others(self, new_manager, new_request, prefill, hit_tokens):
        manager = new_manager(3)
        request = new_request("a", "SSSS pppp x")
        assert external(manager, request, 8) is not None
        assert manager.get_block_ids("a") == ([1, 2],)
        assert hit_tokens(manager, new_request("b", "SSSS pppp y")) == 0
        assert prefill(manager, new_request("c", "TTTT t")) is None

    def test_a_load_that_arrived_is_hit_by_others(self, new_manager, new_request, hit_tokens):
        manager = new_manager(4)
        request = new_request("a", "SSSS pppp x")
        external(manager, request, 8)
        assert manager.complete_load(request) == 8
        assert hit_tokens(manager, new_request("b", "SSSS pppp y")) == 8
        assert manager.allocate_slots(request, 1).get_block_ids() == ([3],)
        manager.check_integrity()

    def test_a_load_continues_a_local_hit(self, new_manager, new_request, prefill, hit_tokens):
        manager = new_manager(6)
        prefill(manager, new_request("a", "SSSS x"))
        request = new_request("b", "SSSS pppp qqqq r")
        external(manager, request, 8)
        assert manager.get_block_ids("b") == ([1, 3, 4],)
        assert [[(index, block.block_id) for index, block in group] for group in manager.get_blocks_to_load("b")] == [
            [(1, 3), (2, 4)]
        ]
        assert manager.complete_load(request) == 12
        assert manager.get_blocks_to_load("b") == ((),)
        assert hit_tokens(manager, new_request("c", "SSSS pppp qqqq s")) == 12

    def test_a_failed_load_ends_at_the_first_bad_block(self, new_manager, new_request, hit_tokens):
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

    def test_a_load_that_failed_from_its_first_block_on_starts_over(
        self, new_manager, new_request, prefill, hit_tokens
    ):
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

    def test_blocks_of_other_requests_do_not_make_a_load_fail(self, new_manager, new_request, prefill, hit_tokens):
        manager = new_manager(6)
        prefill(manager, new_request("a", "TTTT t"))
        request = new_request("b", "SSSS x")
        external(manager, request, 4)
        assert manager.complete_load(request, {0, 1, 2}) == 4
        assert hit_tokens(manager, new_request("c", "TTTT x")) == 4

    def test_a_request_that_is_aborted_when_its_load_is_over_leaves_nothing_behind(
        self, new_manager, new_request, hit_tokens
    ):
        manager = new_manager(4)
        request = new_request("a", "SSSS pppp x")
        external(manager, request, 8)
        manager.free(request)
        manager.check_integrity()
        assert manager.usage == 0.0
        assert hit_tokens(manager, new_request("b", "SSSS pppp y")) == 0

    def test_pages_that_are_there_at_once_are_cached_at_once(self, new_manager, new_request, hit_tokens):
        manager = new_manager(4)
        external(manager, new_request("a", "SSSS pppp x"), 8, delay=False)
        assert hit_tokens(manager, new_request("b", "SSSS pppp y")) == 8

    def test_tokens_may_be_computed_in_the_same_step_as_others_are_there_at_once(
        self, new_manager, new_request, hit_tokens
    ):
        manager = new_manager(4)
        added = external(manager, new_request("a", "SSSS pppp qqqq"), 8, delay=False, num_new=4)
        assert added.get_block_ids() == ([3],)
        assert manager.get_block_ids("a") == ([1, 2, 3],)
        assert hit_tokens(manager, new_request("b", "SSSS pppp qqqq y")) == 12

    def test_tokens_from_elsewhere_may_end_inside_a_block(self, new_manager, new_request, compute, hit_tokens):
        manager = new_manager(4)
        request = new_request("a", "SSSS ppp")
        external(manager, request, 6)
        assert manager.get_block_ids("a") == ([1, 2],)
        assert manager.complete_load(request) == 6
        assert hit_tokens(manager, new_request("b", "SSSS pppp y")) == 4
        request.append([ord("p")])
        assert compute(manager, request) == ([],)
        assert hit_tokens(manager, new_request("b", "SSSS pppp y")) == 8

    def test_no_room_for_a_load_changes_nothing(self, new_manager, new_request):
        manager = new_manager(1)
        request = new_request("a", "SSSS pppp x")
        assert external(manager, request, 8) is None
        assert manager.usage == 0.0


class TestCaching:
    def test_caching_once_more_changes_nothing(self, new_manager, new_request, prefill):
        manager = new_manager(4, enable_kv_cache_events=True)
        request = new_request("a", "SSSS pppp x")
        prefill(manager, request)
        manager.take_events()
        manager.cache_blocks(request, 8)
        manager.check_integrity()
        assert manager.take_events() == []

    def test_blocks_that_were_waited_for_are_cached_as_far_as_they_are_there(
        self, new_manager, new_request, hit_tokens
    ):
        manager = new_manager(4)
        request = new_request("a", "SSSS pppp qqqq")
        manager.allocate_slots(request, 12, delay_cache_blocks=True)
        assert hit_tokens(manager, new_request("b", "SSSS pppp qqqq y")) == 0
        manager.cache_blocks(request, 9)
        manager.check_integrity()
        assert hit_tokens(manager, new_request("b", "SSSS pppp qqqq y")) == 8

    def test_full_attention_leaves_no_block_behind(self, new_manager, new_request, prefill):
        manager = new_manager(4)
        prefill(manager, new_request("a", "SSSS pppp x"))
        manager.remove_skipped_blocks("a", 9)
        manager.remove_skipped_blocks("unknown", 9)
        assert manager.get_block_ids("a") == ([1, 2, 3],)

    def test_an_estimate_says_how_far_a_request_can_be_hit(self, new_manager, new_request, prefill):
        manager = new_manager(8)
        request = new_request("a", "SSSS pppp qqqq r")
        assert manager.estimate_cached_tokens(request) == 0
        prefill(manager, request)
        assert manager.estimate_cached_tokens(request) == 12
        manager.evict_blocks([3])
        assert manager.estimate_cached_tokens(request) == 8
        manager.free(request)
        assert manager.estimate_cached_tokens(request) == 0

    def test_the_prompts_that_all_requests_share_are_common(self, new_manager, new_request, prefill):
        manager = new_manager(16)
        first = new_request("a", "SSSS pppp x")
        prefill(manager, first)
        assert manager.get_num_common_prefix_blocks("a") == [3]
        prefill(manager, new_request("b", "SSSS pppp yyyy"))
        assert manager.get_num_common_prefix_blocks("a") == [2]
        prefill(manager, new_request("c", "SSSS zzzz"))
        assert [manager.get_num_common_prefix_blocks(request_id) for request_id in "abc"] == [[1], [1], [1]]
        manager.free(first)
        assert manager.get_num_common_prefix_blocks("b") == [1]
        prefill(manager, new_request("d", "TTTT"))
        assert manager.get_num_common_prefix_blocks("b") == [0]
        assert manager.get_num_common_prefix_blocks("unknown") == [0]

    def test_blocks_that_wait_to_be_freed_have_no_request(self, new_manager, new_request, prefill):
        manager = new_manager(8)
        first = new_request("a", "SSSS pppp x")
        prefill(manager, first)
        prefill(manager, new_request("b", "SSSS pppp y"))
        popped = manager.pop_blocks_for_free(first)
        assert manager.get_num_common_prefix_blocks("b") == [3]
        manager.free_popped(popped)
        assert manager.get_num_common_prefix_blocks("b") == [3]


class TestStatistics:
    def test_requests_are_counted_when_they_get_blocks_not_when_they_look(self, new_manager, new_request, prefill):
        manager = new_manager(4)
        prefill(manager, new_request("a", "SSSS x"))
        waiting = new_request("b", "SSSS yyyy yyyy yyy")
        for _ in range(3):
            assert prefill(manager, waiting) is None
        prefill(manager, new_request("c", "SSSS z"))
        stats = manager.make_prefix_cache_stats()
        assert (stats.requests, stats.queries, stats.hits) == (2, 10, 4)
        assert manager.make_prefix_cache_stats() == PrefixCacheStats()

    def test_only_the_first_step_of_a_request_is_counted(self, new_manager, new_request, prefill, compute):
        manager = new_manager(4)
        request = new_request("a", "SSSS x")
        prefill(manager, request, chunk=4)
        request.append([1])
        compute(manager, request)
        stats = manager.make_prefix_cache_stats()
        assert (stats.requests, stats.queries) == (1, 5)

    def test_preempted_requests_are_counted_apart(self, new_manager, new_request, prefill):
        manager = new_manager(4)
        request = new_request("a", "SSSS x")
        prefill(manager, request)
        manager.free(request)
        request.num_computed_tokens, request.num_preemptions = 0, 1
        prefill(manager, request)
        stats = manager.make_prefix_cache_stats()
        assert (stats.requests, stats.queries, stats.hits) == (1, 5, 0)
        assert (stats.preempted_requests, stats.preempted_queries, stats.preempted_hits) == (1, 5, 4)

    def test_hits_of_the_level_below_are_told_apart_from_local_ones(
        self, new_manager, new_request, prefill, start_load, end_load, compute
    ):
        manager = new_manager(8)
        prefill(manager, new_request("a", "SSSS x"))
        manager.make_prefix_cache_stats()
        request = new_request("b", "SSSS pppp qqqq r")
        assert start_load(manager, request, "110") == (4, 4)
        end_load(manager, request)
        compute(manager, request)  # no new request
        stats = manager.make_prefix_cache_stats()
        assert (stats.requests, stats.queries, stats.hits) == (1, 13, 4)
        assert (stats.external_requests, stats.external_queries, stats.external_hits) == (1, 9, 4)

    def test_requests_that_look_nothing_up_are_not_counted(self, new_manager, new_request, prefill):
        manager = new_manager(4)
        prefill(manager, new_request("a", "SSSS x", skip_reading=True))
        assert manager.make_prefix_cache_stats() == PrefixCacheStats()
        manager = new_manager(4, enable_caching=False)
        prefill(manager, new_request("a", "SSSS x"))
        assert manager.make_prefix_cache_stats() == PrefixCacheStats()

    def test_the_lives_of_sampled_blocks_are_told(self, new_manager, new_request, prefill):
        now = [0.0]
        sampler = ResidencySampler(1.0, clock=lambda: now[0])
        manager = new_manager(2, residency=sampler)
        for time, request_id in ((0.0, "a"), (1.0, "b"), (5.0, "c")):  # block 1 is hit twice, block 2 taken each time
            now[0] = time
            request = new_request(request_id, "SSSS x")
            prefill(manager, request)
            manager.free(request)
        assert [life.lifetime for life in sampler.take()] == [1.0, 4.0]
        now[0] = 7.0
        prefill(manager, new_request("d", "TTTT tttt"))
        second, first = sampler.take()
        assert (second.lifetime, second.idle, second.reuse_gaps) == (2.0, 2.0, ())
        assert (first.lifetime, first.idle, first.reuse_gaps) == (7.0, 2.0, (4.0,))


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
        assert manager.get_blocks("a").get_block_ids(allow_none=True) is None
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

    def test_there_is_always_room(self, manager, new_request, prefill):
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

    def test_pages_of_the_level_below_count_as_matched(self, new_manager, new_request, prefill, start_load, end_load):
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


def test_results_add_up(new_manager, new_request, prefill):
    manager: KVCacheManager = new_manager(4)
    prefill(manager, new_request("a", "SSSS x"))
    both = manager.get_blocks("a") + manager.get_blocks("a")
    assert isinstance(both, KVCacheBlocks)
    assert both.get_block_ids() == ([1, 2, 1, 2],)
    assert manager.get_blocks("unknown").get_block_ids() == ([],)
