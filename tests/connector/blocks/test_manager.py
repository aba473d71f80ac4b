"""The block manager, scenario by scenario: hits, allocation, eviction and frees, with one group of full attention.

Blocks hold 4 tokens; a request's text has one token a letter.
"""

import pytest

from kvstore.connector.blocks import PrefixKeys, SharedPrefix
from kvstore.errors import InvalidRequestError


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

    def test_salts_share_a_prefix_that_both_of_them_name(self, new_manager, new_request, prefill, hit_tokens):
        def keys(salt: str) -> PrefixKeys:
            return PrefixKeys(cache_salt=salt, shared_prefix=SharedPrefix(identifier="p", num_tokens=5))

        manager = new_manager(8)
        prefill(manager, new_request("a", "SSSS pppp x", keys=keys("mine")))
        assert hit_tokens(manager, new_request("b", "SSSS pppp x", keys=keys("mine"))) == 8
        assert hit_tokens(manager, new_request("b", "SSSS pppp x", keys=keys("yours"))) == 4
        for alone in (PrefixKeys(cache_salt="mine"), PrefixKeys()):
            assert hit_tokens(manager, new_request("b", "SSSS pppp x", keys=alone)) == 0


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

    def test_hits_that_someone_holds_take_no_blocks(self, new_manager, new_request, prefill):
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

    def test_look_ahead_slots_need_blocks(self, new_manager, new_request, prefill):
        manager = new_manager(2)
        assert prefill(manager, new_request("a", "SSSS pppp"), num_lookahead_tokens=1) is None
        assert prefill(manager, new_request("a", "SSSS pppp")) is not None

    def test_drafts_are_given_slots_and_cached_when_they_turn_out_right(
        self, new_manager, new_request, prefill, compute, hit_tokens, unhashed_ids
    ):
        manager = new_manager(4)
        request = new_request("a", "SSSS pp")
        prefill(manager, request)
        request.append([1])
        assert compute(manager, request, 1 + 3) == ([3],)  # one token and three drafts
        assert unhashed_ids(manager, "a") == [[2, 3]]
        request.num_computed_tokens -= 2  # one of them was right
        request.append([2, 3])
        compute(manager, request)
        assert unhashed_ids(manager, "a") == [[3]]
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

    def test_the_watermark_stays_free_behind_the_whole_sequence_and_the_reserve_behind_the_step(
        self, new_manager, new_request
    ):
        manager = new_manager(3)
        request = new_request("a", "SSSS pppp qqqq")
        assert manager.allocate_slots(request, 4, full_sequence_must_fit=True, watermark_blocks=1) is None
        assert manager.allocate_slots(request, 8, watermark_blocks=2) is None
        assert manager.allocate_slots(request, 8, reserved_blocks=1, watermark_blocks=1) is None
        assert manager.usage == 0.0
        assert manager.allocate_slots(request, 4, full_sequence_must_fit=True, reserved_blocks=1) is not None


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
