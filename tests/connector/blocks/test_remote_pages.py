"""Hits of which some pages are here and some come from kvstore: found, loaded, failed, given up.

Blocks hold 4 tokens. What kvstore has is a word for each group: "0110" has the second and the third page.
"""

import pytest

from kvstore.connector.blocks import FullAttentionSpec, MambaSpec, SlidingWindowSpec
from kvstore.errors import InvalidRequestError

FULL = FullAttentionSpec(block_size=4, token_bytes=8)
WINDOW = SlidingWindowSpec(block_size=4, token_bytes=8, sliding_window=8)  # 7 tokens before the next: 2 blocks
STATES = MambaSpec(block_size=4, state_bytes=32, mamba_cache_mode="all")

PROMPT = "SSSS pppp qqqq rrrr"


def places(manager, request_id: str) -> list[list[int]]:
    """Where the pages to be loaded belong, by group."""
    return [[place for place, _ in blocks] for blocks in manager.get_blocks_to_load(request_id)]


def look_up(manager, request, *presence: str):
    present = {group: [page == "1" for page in word] for group, word in enumerate(presence)}
    blocks, local, external = manager.get_computed_blocks_with(request, present)
    return blocks.get_block_ids(), local, external


class TestOneGroup:
    def test_remote_pages_continue_a_local_hit(self, new_manager, new_request, prefill):
        manager = new_manager(8)
        prefill(manager, new_request("a", "SSSS x"))
        assert look_up(manager, new_request("b", PROMPT + "x"), "0110") == (([1, -1, -1],), 4, 8)

    def test_local_blocks_behind_a_remote_page_are_used(self, new_manager, new_request, prefill, start_load):
        manager = new_manager(8)
        prefill(manager, new_request("a", PROMPT))
        manager.evict_blocks([2])
        request = new_request("b", PROMPT + "x")
        assert start_load(manager, request, "0100") == (4, 12)
        assert manager.get_block_ids("b") == ([1, 5, 3, 4],)
        assert places(manager, "b") == [[1]]

    def test_nothing_in_kvstore_changes_nothing(self, new_manager, new_request, prefill):
        manager = new_manager(8)
        prefill(manager, new_request("a", "SSSS x"))
        request = new_request("b", PROMPT + "x")
        for presence in ((), ("",), ("0000",), ("1",), ("0010",)):
            assert look_up(manager, request, *presence) == (([1],), 4, 0)

    def test_the_last_token_is_computed_even_when_everything_is_in_kvstore(self, new_manager, new_request):
        assert look_up(new_manager(8), new_request("a", PROMPT), "1111") == (([-1, -1, -1],), 0, 12)

    def test_pages_beyond_the_prompt_are_no_business_of_its(self, new_manager, new_request):
        assert look_up(new_manager(8), new_request("a", "SSSS p"), "1111111") == (([-1],), 0, 4)

    def test_without_caching_nothing_is_asked_of_kvstore(self, new_manager, new_request):
        assert look_up(new_manager(8, enable_caching=False), new_request("a", PROMPT), "111") == (([],), 0, 0)


class TestFullAndWindow:
    def test_full_is_here_and_the_windows_tail_is_in_kvstore(
        self, new_manager, new_request, prefill, start_load, end_load, hit_tokens
    ):
        manager = new_manager(12, FULL, WINDOW)
        prefill(manager, new_request("a", PROMPT))
        manager.evict_blocks([7, 8])  # the window's last two
        request = new_request("b", PROMPT + "x")
        assert hit_tokens(manager, request) == 8
        assert start_load(manager, request, "", "0011") == (8, 8)
        assert manager.get_block_ids("b") == ([1, 2, 3, 4], [0, 0, 9, 10])
        assert places(manager, "b") == [[], [2, 3]]
        assert end_load(manager, request) == 16
        assert hit_tokens(manager, new_request("c", PROMPT + "y")) == 16

    def test_the_window_is_here_and_full_is_in_kvstore(self, new_manager, new_request, prefill, start_load, end_load):
        manager = new_manager(16, FULL, WINDOW)
        prefill(manager, new_request("a", PROMPT))
        manager.evict_blocks([1, 2, 3, 4])
        request = new_request("b", PROMPT + "x")
        assert start_load(manager, request, "1111", "") == (0, 16)
        assert manager.get_block_ids("b") == ([9, 10, 11, 12], [0, 0, 7, 8])
        assert places(manager, "b") == [[0, 1, 2, 3], []]
        assert end_load(manager, request) == 16

    def test_a_window_that_is_nowhere_shortens_what_full_has(self, new_manager, new_request, prefill):
        manager = new_manager(12, FULL, WINDOW)
        prefill(manager, new_request("a", PROMPT))
        manager.evict_blocks([7, 8])
        request = new_request("b", PROMPT + "x")
        assert look_up(manager, request, "1111", "0001") == (([1, 2], [5, 6]), 8, 0)
        assert look_up(manager, request, "1111", "0010") == (([1, 2, 3], [0, 6, -1]), 8, 4)

    def test_when_the_windows_tail_does_not_come_the_request_starts_over_from_what_is_here(
        self, new_manager, new_request, prefill, start_load, end_load, hit_tokens
    ):
        manager = new_manager(12, FULL, WINDOW)
        prefill(manager, new_request("a", PROMPT))
        manager.evict_blocks([7, 8])
        request = new_request("b", PROMPT + "x")
        start_load(manager, request, "", "0011")
        assert end_load(manager, request, 10) == 0
        assert manager.get_block_ids("b") == ([], [])
        assert hit_tokens(manager, request) == 8
        assert manager.pool.num_free_blocks == 4

    def test_a_failed_load_ends_where_all_groups_can_go_on(
        self, new_manager, new_request, start_load, end_load, compute
    ):
        wide = SlidingWindowSpec(block_size=4, token_bytes=8, sliding_window=100)
        manager = new_manager(12, FULL, wide)
        request = new_request("a", PROMPT + "x")
        assert start_load(manager, request, "1111", "1111") == (0, 16)
        full, window = manager.get_block_ids("a")
        assert end_load(manager, request, full[3], window[2]) == 8
        assert compute(manager, request) == ([9], [10])
        assert manager.get_block_ids("a") == ([*full, 9], [*window, 10])

    def test_a_load_never_takes_the_hit_of_another_group(self, new_manager, new_request, prefill, start_load):
        manager = new_manager(8, FULL, WINDOW)
        first = new_request("a", PROMPT)
        prefill(manager, first)
        manager.evict_blocks([3, 4])
        manager.free(first)
        prefill(manager, new_request("c", "TTTT"))  # takes 4 and 3
        # Once full attention holds 2 and 1, the window's hits are the first to leave.
        assert manager.pool.free_block_ids() == [2, 1, 8, 7, 6, 5]
        assert start_load(manager, new_request("b", PROMPT + "x"), "0011", "") == (8, 8)
        assert manager.get_block_ids("b") == ([1, 2, 6, 5], [0, 0, 7, 8])

    def test_hits_and_loads_that_do_not_fit_together_change_nothing(
        self, new_manager, new_request, prefill, start_load
    ):
        manager = new_manager(8, FULL, WINDOW)
        first = new_request("a", PROMPT)
        prefill(manager, first)
        manager.evict_blocks([1, 2, 3, 4])
        manager.free(first)
        prefill(manager, new_request("c", "TTTT tttt"))  # takes 4 … 1
        before = manager.pool.free_block_ids()
        # 4 are free, two of them the hit, but 4 more are to be loaded to.
        assert start_load(manager, new_request("b", PROMPT + "x"), "1111", "") is None
        assert manager.pool.free_block_ids() == before == [8, 7, 6, 5]

    def test_pages_of_different_lengths(self, new_manager, new_request, start_load, end_load):
        long = SlidingWindowSpec(block_size=8, token_bytes=8, sliding_window=8)
        manager = new_manager(12, FULL, long)
        request = new_request("a", PROMPT + "x")
        assert look_up(manager, request, "1110", "11") == (([-1, -1], [-1]), 0, 8)
        assert start_load(manager, request, "1111", "01") == (0, 16)
        assert manager.get_block_ids("a") == ([1, 2, 3, 4], [0, 5])
        assert places(manager, "a") == [[0, 1, 2, 3], [1]]
        assert end_load(manager, request) == 16


class TestRecurrentStates:
    def test_a_state_from_kvstore_stands_for_all_tokens_before_it(
        self, new_manager, new_request, prefill, start_load, end_load, compute
    ):
        manager = new_manager(12, FULL, STATES)
        prefill(manager, new_request("a", PROMPT))
        manager.new_step_starts()
        manager.evict_blocks([7, 8])
        request = new_request("b", PROMPT + "x")
        assert start_load(manager, request, "", "0001") == (8, 8)
        assert manager.get_block_ids("b") == ([1, 2, 3, 4], [0, 0, 0, 9])
        assert places(manager, "b") == [[], [3]]
        assert end_load(manager, request) == 16
        assert compute(manager, request) == ([10], [11])

    def test_without_the_state_the_rest_is_worth_nothing(
        self, new_manager, new_request, start_load, end_load, hit_tokens
    ):
        manager = new_manager(12, FULL, STATES)
        request = new_request("b", PROMPT + "x")
        start_load(manager, request, "1111", "0001")
        (full, states) = manager.get_block_ids("b")
        assert end_load(manager, request, states[3]) == 0
        assert manager.usage == 0.0
        assert hit_tokens(manager, request) == 0
        start_load(manager, request, "1111", "0001")
        assert end_load(manager, request, full[0]) == 0

    def test_aligned_states_go_on_from_a_loaded_one(self, new_manager, new_request, start_load, end_load, compute):
        aligned = MambaSpec(block_size=4, state_bytes=32, mamba_cache_mode="align")
        manager = new_manager(12, FULL, aligned)
        request = new_request("b", PROMPT + "xxxx y")
        assert start_load(manager, request, "1111", "0001") == (0, 16)
        assert manager.get_block_ids("b") == ([1, 2, 3, 4], [0, 0, 0, 5])
        assert end_load(manager, request) == 16
        assert compute(manager, request, 4) == ([6], [7])
        compute(manager, request, 1)
        assert manager.get_block_ids("b")[1] == [0, 0, 0, 0, 7, 9]

    def test_a_state_from_elsewhere_and_new_tokens_need_two_blocks(self, new_manager, new_request):
        aligned = MambaSpec(block_size=4, state_bytes=32, mamba_cache_mode="align")
        for num_blocks in (1, 2):
            manager = new_manager(num_blocks, aligned)
            added = manager.allocate_slots(new_request("a", "SSSS pppp qqqq"), 4, num_external_computed_tokens=8)
            manager.check_integrity()
            assert (added is not None) == (num_blocks == 2)


class TestUnderWay:
    """Blocks that wait for their pages hold nothing, are found by no one and belong to one request."""

    @pytest.fixture
    def manager(self, new_manager):
        return new_manager(16, FULL, WINDOW)

    @pytest.fixture
    def loading(self, manager, new_request, prefill, start_load):
        """Its first two blocks are here, the others on their way."""
        prefill(manager, new_request("holder", "SSSS pppp h"))
        request = new_request("loading", PROMPT + "x")
        assert start_load(manager, request, "1111", "1111") == (8, 8)
        return request

    def test_they_are_not_hit(self, manager, loading, new_request, hit_tokens):
        assert hit_tokens(manager, new_request("b", PROMPT + "y")) == 8

    def test_they_are_loaded_once_more_for_a_second_request(self, manager, loading, new_request, start_load, end_load):
        twin = new_request("twin", PROMPT + "y")
        start_load(manager, twin, "1111", "1111")
        mine, its = manager.get_blocks_to_load("twin"), manager.get_blocks_to_load("loading")
        assert not {block.block_id for group in mine for _, block in group} & {
            block.block_id for group in its for _, block in group
        }
        assert end_load(manager, twin) == end_load(manager, loading) == 16

    def test_they_are_given_to_no_one(self, manager, loading, new_request, prefill):
        held = {block_id for table in manager.get_block_ids("loading") for block_id in table}
        request = new_request("greedy", 3 * "gggg")
        given = prefill(manager, request)
        assert not held & {block_id for table in given for block_id in table}

    def test_they_are_evicted_by_no_one(self, manager, loading, end_load, new_request, hit_tokens):
        manager.evict_blocks(block.block_id for group in manager.get_blocks_to_load("loading") for _, block in group)
        assert end_load(manager, loading) == 16
        assert hit_tokens(manager, new_request("b", PROMPT + "y")) == 16

    def test_a_reset_is_refused(self, manager, loading):
        assert not manager.reset_prefix_cache()

    @pytest.mark.parametrize("ends", ["before", "after", "failed", "after a step"])
    @pytest.mark.parametrize("deferred", [False, True])
    def test_a_request_may_end_at_any_moment(
        self, manager, loading, new_request, compute, end_load, hit_tokens, ends, deferred
    ):
        if ends == "failed":
            end_load(manager, loading, *manager.get_block_ids("loading")[1])
        elif ends != "before":
            end_load(manager, loading)
        if ends == "after a step":
            compute(manager, loading)
        if deferred:
            popped = manager.pop_blocks_for_free(loading)
            manager.check_integrity()
            manager.free_popped(popped)
        else:
            manager.free(loading)
        manager.check_integrity()
        assert manager.get_blocks_to_load("loading") == ((), ())
        hits = {"before": 8, "failed": 8, "after": 16, "after a step": 16}
        assert hit_tokens(manager, new_request("b", PROMPT + "y")) == hits[ends]
        manager.free(new_request("holder", ""))
        assert manager.usage == 0.0

    def test_an_aborted_load_may_be_reported_later(self, manager, loading, end_load):
        manager.free(loading)
        loading.num_computed_tokens = 0
        assert end_load(manager, loading) == 0

    def test_a_preempted_request_loads_again(self, manager, loading, start_load, end_load):
        manager.free(loading)
        loading.num_computed_tokens, loading.num_preemptions = 0, 1
        assert start_load(manager, loading, "1111", "1111") == (8, 8)
        assert end_load(manager, loading) == 16
        assert manager.make_prefix_cache_stats().preempted_external_hits == 8


class TestFailures:
    def test_bad_blocks_are_never_cached(self, new_manager, new_request, start_load, end_load, hit_tokens):
        manager = new_manager(8)
        request = new_request("a", PROMPT + "x")
        start_load(manager, request, "1111")
        assert end_load(manager, request, 3) == 8
        assert [block.block_hash is None for block in manager.get_blocks("a").blocks[0]] == [False, False, True, True]
        assert hit_tokens(manager, new_request("b", PROMPT + "y")) == 8

    def test_what_came_behind_a_bad_block_is_computed_again(
        self, new_manager, new_request, start_load, end_load, compute, hit_tokens
    ):
        manager = new_manager(8)
        request = new_request("a", PROMPT + "x")
        start_load(manager, request, "1111")
        end_load(manager, request, 2)
        assert manager.get_block_ids("a") == ([1, 2, 3, 4],)
        compute(manager, request, 6)
        assert hit_tokens(manager, new_request("b", PROMPT + "y")) == 8
        compute(manager, request)
        assert manager.get_block_ids("a") == ([1, 2, 3, 4, 5],)
        assert hit_tokens(manager, new_request("b", PROMPT + "y")) == 16

    def test_shared_blocks_behind_a_bad_one_are_given_back(
        self, new_manager, new_request, prefill, start_load, end_load, compute
    ):
        manager = new_manager(12)
        prefill(manager, new_request("a", PROMPT))
        manager.evict_blocks([2])
        request = new_request("b", PROMPT + "x")
        start_load(manager, request, "0100")
        assert manager.get_block_ids("b") == ([1, 5, 3, 4],)
        assert end_load(manager, request, 5) == 4
        assert manager.get_block_ids("b") == ([1, 5],)
        assert manager.pool.blocks[3].ref_cnt == manager.pool.blocks[4].ref_cnt == 1
        compute(manager, request)
        assert manager.get_block_ids("b") == ([1, 5, 6, 7, 8],)

    def test_also_those_that_were_evicted_meanwhile(
        self, new_manager, new_request, prefill, start_load, end_load, compute
    ):
        manager = new_manager(12)
        prefill(manager, new_request("a", PROMPT))
        manager.evict_blocks([2])
        request = new_request("b", PROMPT + "x")
        start_load(manager, request, "0100")
        manager.evict_blocks([3, 4])  # no one finds them any longer; both requests hold them
        assert end_load(manager, request, 5) == 4
        compute(manager, request)
        mine, others = manager.get_block_ids("b")[0], manager.get_block_ids("a")[0]
        assert set(mine) & set(others) == {1}  # nothing that the other one reads is written again

    def test_loaded_blocks_between_shared_ones_are_given_back_with_them(
        self, new_manager, new_request, prefill, start_load, end_load
    ):
        manager = new_manager(12)
        prefill(manager, new_request("a", PROMPT))
        manager.evict_blocks([1, 3])
        request = new_request("b", PROMPT + "x")
        start_load(manager, request, "1010")
        assert manager.get_block_ids("b") == ([5, 2, 6, 4],)
        assert end_load(manager, request, 5) == 0
        assert manager.pool.num_free_blocks == 8
        start_load(manager, request, "1010")
        assert end_load(manager, request, manager.get_block_ids("b")[0][2]) == 8
        assert manager.pool.num_free_blocks == 6

    def test_a_local_hit_that_is_said_to_be_bad_is_found_by_no_one_any_longer(
        self, new_manager, new_request, prefill, start_load, end_load, hit_tokens
    ):
        manager = new_manager(12)
        prefill(manager, new_request("a", "SSSS pppp x"))
        request = new_request("b", PROMPT + "x")
        start_load(manager, request, "0011")
        assert end_load(manager, request, 2) == 4
        assert hit_tokens(manager, new_request("c", PROMPT)) == 4

    def test_no_look_up_is_needed_to_say_what_failed(self, new_manager, new_request, end_load):
        manager = new_manager(12, enable_caching=False)
        request = new_request("a", PROMPT)
        manager.allocate_slots(request, 0, num_external_computed_tokens=12, delay_cache_blocks=True)
        request.num_computed_tokens = 12
        assert end_load(manager, request, 2) == 4
        several = new_manager(12, FULL, WINDOW, enable_caching=False)
        request.num_computed_tokens = 0
        several.allocate_slots(request, 0, num_external_computed_tokens=12, delay_cache_blocks=True)
        request.num_computed_tokens = 12
        assert end_load(several, request, several.get_block_ids("a")[0][2]) == 0
        assert several.usage == 0.0


class TestCallsThatComeTooSoonOrTooLate:
    def test_slots_before_the_load_is_over_are_refused(self, new_manager, new_request, start_load, hit_tokens):
        manager = new_manager(8)
        request = new_request("a", PROMPT)
        start_load(manager, request, "1100")
        with pytest.raises(InvalidRequestError, match="request a: it waits for its load"):
            manager.allocate_slots(request, 4)
        assert hit_tokens(manager, new_request("b", PROMPT + "x")) == 0
        assert manager.complete_load(request) == 8
        assert manager.allocate_slots(request, 4) is not None

    def test_caching_what_came_ends_the_wait_too(self, new_manager, new_request, start_load, hit_tokens):
        manager = new_manager(8)
        request = new_request("a", PROMPT)
        start_load(manager, request, "1100")
        manager.cache_blocks(request, 8)
        assert hit_tokens(manager, new_request("b", PROMPT + "x")) == 8
        assert places(manager, "a") == [[]]
        assert manager.allocate_slots(request, 4) is not None

    def test_an_answer_for_a_request_that_was_aborted_is_no_error(self, new_manager, new_request, start_load):
        manager = new_manager(8)
        request = new_request("a", PROMPT)
        start_load(manager, request, "1100")
        manager.free(request)
        assert manager.complete_load(request, [1]) == 0
        with pytest.raises(InvalidRequestError, match="8 tokens to be cached, it holds 0 blocks of 4"):
            manager.cache_blocks(request, 8)
        manager.check_integrity()

    def test_blocks_to_be_loaded_need_external_tokens(self, new_manager, new_request):
        manager = new_manager(8)
        request = new_request("a", PROMPT)
        hit, _, _ = manager.get_computed_blocks_with(request, {0: [True, True]})
        with pytest.raises(InvalidRequestError, match="no tokens are external"):
            manager.allocate_slots(request, 4, 8, hit)
        assert manager.usage == 0.0

    def test_a_page_that_a_drafting_head_drops_need_not_be_loaded(self, new_manager, new_request, prefill):
        manager = new_manager(8, use_eagle=True)
        prefill(manager, new_request("a", "SSSS x"))
        assert look_up(manager, new_request("b", "SSSS pppp x"), "11") == (([1],), 4, 0)
