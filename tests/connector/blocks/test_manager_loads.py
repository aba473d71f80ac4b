"""The block manager, scenario by scenario: loads from elsewhere, what can be found when, and what is counted.

One group of full attention; blocks hold 4 tokens, and a request's text has one token a letter.
"""

from kvstore.connector.blocks import PrefixCacheStats


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

    def test_hits_of_kvstore_are_told_apart_from_local_ones(
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
