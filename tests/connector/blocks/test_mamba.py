"""Groups of recurrent states, one a block of 4 tokens."""

import pytest

from kvstore.connector.blocks import FullAttentionSpec, MambaSpec


def states(mode: str, speculative: int = 0, block_size: int = 4) -> MambaSpec:
    return MambaSpec(block_size=block_size, state_bytes=32, mamba_cache_mode=mode, num_speculative_blocks=speculative)


PROMPT = "SSSS pppp qqqq rrrr"


class TestHits:
    def test_the_last_state_is_all_that_a_hit_needs(self, new_manager, new_request, prefill):
        manager = new_manager(12, states("all"))
        prefill(manager, new_request("a", PROMPT))
        manager.evict_blocks([1, 2, 3])
        hit, num_hit = manager.get_computed_blocks(new_request("b", PROMPT + "x"))
        assert (hit.get_block_ids(), num_hit) == (([0, 0, 0, 4],), 16)

    def test_an_earlier_one_serves_where_the_last_is_missing(self, new_manager, new_request, prefill):
        manager = new_manager(12, states("all"))
        prefill(manager, new_request("a", PROMPT))
        manager.evict_blocks([4])
        hit, num_hit = manager.get_computed_blocks(new_request("b", PROMPT + "x"))
        assert (hit.get_block_ids(), num_hit) == (([0, 0, 3],), 12)

    def test_the_last_token_is_computed_again_when_everything_hits(self, new_manager, new_request, prefill):
        manager = new_manager(12, states("all"))
        prefill(manager, new_request("a", PROMPT))
        hit, num_hit = manager.get_computed_blocks(new_request("b", PROMPT))
        assert (hit.get_block_ids(), num_hit) == (([0, 0, 3],), 12)

    def test_a_running_state_inside_a_block_is_never_hit(self, new_manager, new_request, prefill, hit_tokens):
        for mode in ("all", "align"):
            manager = new_manager(12, states(mode))
            prefill(manager, new_request("a", "SSS"))
            assert hit_tokens(manager, new_request("b", "SSSS x")) == 0

    def test_a_state_that_is_written_in_this_step_is_read_in_the_next(self, new_manager, new_request, prefill):
        manager = new_manager(12, FullAttentionSpec(block_size=4, token_bytes=8), states("all"))
        prefill(manager, new_request("a", "SSSS x"))
        late = new_request("b", "SSSS y")
        hit, num_hit = manager.get_computed_blocks(late)
        assert num_hit == 4
        before = manager.pool.free_block_ids()
        assert manager.allocate_slots(late, 1, num_hit, hit) is None
        assert manager.pool.free_block_ids() == before
        manager.check_integrity()
        manager.new_step_starts()
        assert manager.allocate_slots(late, 1, num_hit, hit).get_block_ids() == ([5], [6])

    def test_the_same_in_aligned_steps(self, new_manager, new_request, compute):
        manager = new_manager(12, states("align"))
        compute(manager, new_request("a", "SSSS pppp"))
        late = new_request("b", "SSSS pppp y")
        hit, num_hit = manager.get_computed_blocks(late)
        assert (hit.get_block_ids(), num_hit) == (([0, 1],), 8)
        assert manager.allocate_slots(late, 1, num_hit, hit) is None
        manager.new_step_starts()
        assert manager.allocate_slots(late, 1, num_hit, hit) is not None


class TestAllStates:
    def test_states_behind_a_request_are_freed_and_can_be_hit(self, new_manager, new_request, prefill, hit_tokens):
        manager = new_manager(12, states("all"))
        prefill(manager, new_request("a", PROMPT), chunk=4)
        assert manager.get_block_ids("a") == ([0, 0, 3, 4],)
        manager.remove_skipped_blocks("a", 16)
        assert manager.get_block_ids("a") == ([0, 0, 0, 4],)
        assert hit_tokens(manager, new_request("b", "SSSS pppp x")) == 8

    def test_drafts_have_states_of_their_own(self, new_manager, new_request, prefill):
        manager = new_manager(12, states("all", speculative=2))
        assert prefill(manager, new_request("a", "SSSS x")) == ([1, 2, 3, 4],)

    def test_they_need_free_blocks(self, new_manager, new_request, prefill):
        assert prefill(new_manager(3, states("all", speculative=2)), new_request("a", "SSSS x")) is None

    def test_leading_states_do_not_last(self, new_manager, new_request, prefill):
        manager = new_manager(12, states("all"))
        prefill(manager, new_request("a", "SSSS x"))
        prefill(manager, new_request("b", "SSSS y"))
        assert manager.get_num_common_prefix_blocks("a") == [0]


class TestOneState:
    def test_without_caching_one_block_serves_a_request_of_any_length(self, new_manager, new_request, prefill, compute):
        manager = new_manager(2, states("none", block_size=1000), enable_caching=False)
        request = new_request("a", PROMPT, hash_block_size=1000)
        assert prefill(manager, request) == ([1],)
        for token in range(5):
            request.append([token])
            assert compute(manager, request) == ([],)


class TestAlignedStates:
    """A request holds the state that its step starts from and the one that it ends with."""

    def test_null_blocks_stand_for_what_a_step_passes(self, new_manager, new_request, compute):
        manager = new_manager(12, states("align"))
        request = new_request("a", PROMPT + "xxxx")
        tables = []
        for num_tokens in (8, 8, 4):
            compute(manager, request, num_tokens)
            tables.append(manager.get_block_ids("a")[0])
        assert tables == [[0, 1], [0, 1, 0, 2], [0, 0, 0, 2, 3]]

    def test_the_state_that_a_step_started_from_is_freed_by_the_next_one(
        self, new_manager, new_request, compute, hit_tokens
    ):
        manager = new_manager(2, states("align"))
        request = new_request("a", 10 * "ssss")
        for _ in range(10):
            assert compute(manager, request, 4) is not None
        assert manager.usage == 1.0
        manager.new_step_starts()
        assert hit_tokens(manager, new_request("b", 10 * "ssss" + "x")) == 40

    def test_tokens_inside_a_block_are_added_in_place(self, new_manager, new_request, compute):
        manager = new_manager(12, states("align"))
        request = new_request("a", "SSSS p")
        compute(manager, request, 4)
        compute(manager, request, 1)
        table = manager.get_block_ids("a")[0]
        for token in range(3):
            request.append([token])
            assert compute(manager, request) == ([],)
        assert table == [1, 2]
        assert manager.get_block_ids("a")[0] == [0, 2]  # the first one served its turn

    def test_a_hit_goes_on_in_a_block_of_its_own(self, new_manager, new_request, compute, prefill):
        manager = new_manager(12, states("align"))
        compute(manager, new_request("a", "SSSS pppp"))
        second = new_request("b", "SSSS pppp xx")
        assert prefill(manager, second) == ([0, 1, 2],)
        manager.new_step_starts()
        second.append([1])
        compute(manager, second)
        assert manager.get_block_ids("b") == ([0, 0, 2],)
        assert manager.get_block_ids("a") == ([0, 1],)

    def test_blocks_for_drafts_move_along(self, new_manager, new_request, compute):
        manager = new_manager(12, states("align", speculative=2))
        request = new_request("a", PROMPT)
        tables = []
        for _ in range(4):
            compute(manager, request, 4)
            tables.append(manager.get_block_ids("a")[0])
        # The running state takes the first draft's block, a new one is added at the end.
        assert tables == [[1, 2, 3], [1, 2, 3, 4], [0, 2, 3, 4, 5], [0, 0, 3, 4, 5, 6]]

    def test_a_request_never_needs_more_than_two_states_and_those_of_its_drafts(
        self, new_manager, new_request, compute
    ):
        manager = new_manager(4, states("align", speculative=2))
        request = new_request("a", 10 * "ssss")
        for num_tokens in (4, 8, 4, 12, 8, 4):
            assert compute(manager, request, num_tokens) is not None
            assert len([block_id for block_id in manager.get_block_ids("a")[0] if block_id]) <= 4

    def test_look_ahead_needs_no_block(self, new_manager, new_request):
        manager = new_manager(1, states("align"))
        added = manager.allocate_slots(new_request("a", "SSSS"), 4, num_lookahead_tokens=4)
        assert added.get_block_ids() == ([1],)

    @pytest.mark.parametrize("num_blocks", [1, 2])
    def test_a_hit_and_a_running_state_are_counted_together(self, new_manager, new_request, compute, num_blocks):
        manager = new_manager(num_blocks, states("align"))
        first = new_request("a", "SSSS pppp")
        compute(manager, first)
        manager.free(first)
        manager.new_step_starts()
        second = new_request("b", "SSSS pppp x")
        hit, num_hit = manager.get_computed_blocks(second)
        assert num_hit == 8
        assert (manager.allocate_slots(second, 1, num_hit, hit) is not None) == (num_blocks == 2)
        manager.check_integrity()

    def test_a_whole_prompt_needs_no_more_blocks_than_its_last_state(self, new_manager, new_request):
        manager = new_manager(1, states("align"))
        assert manager.allocate_slots(new_request("a", PROMPT), 16, full_sequence_must_fit=True) is not None

    def test_freeing_leaves_nothing_behind(self, new_manager, new_request, compute, prefill):
        manager = new_manager(6, states("align", speculative=1))
        for round_number in range(3):
            request = new_request("a", PROMPT + "x")
            assert prefill(manager, request, chunk=4) is not None
            manager.free(request)
            manager.check_integrity()
            assert manager.usage == 0.0, round_number
