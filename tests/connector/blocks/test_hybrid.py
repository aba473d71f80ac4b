"""Models with several kinds of attention: the longest hit that all groups agree on, and what each of them holds."""

import pytest

from kvstore.connector.blocks import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheManager,
    MambaSpec,
    SlidingWindowSpec,
)


def full(block_size: int = 4) -> FullAttentionSpec:
    return FullAttentionSpec(block_size=block_size, token_bytes=8)


def window(tokens: int, block_size: int = 4) -> SlidingWindowSpec:
    return SlidingWindowSpec(block_size=block_size, token_bytes=8, sliding_window=tokens)


def states(mode: str = "all", block_size: int = 4) -> MambaSpec:
    return MambaSpec(block_size=block_size, state_bytes=32, mamba_cache_mode=mode)


PROMPT = "SSSS pppp qqqq rrrr"


class TestAgreement:
    def test_every_group_has_blocks_of_its_own(self, new_manager, new_request, prefill):
        manager = new_manager(12, full(), window(6))
        assert prefill(manager, new_request("a", "SSSS pppp x")) == ([1, 2, 3], [4, 5, 6])

    def test_a_hit_is_what_full_attention_has_and_the_window_can_go_on_from(self, new_manager, new_request, prefill):
        manager = new_manager(12, full(), window(6))
        prefill(manager, new_request("a", PROMPT))
        request = new_request("b", PROMPT + "x")
        assert manager.get_computed_blocks(request)[0].get_block_ids() == ([1, 2, 3, 4], [0, 0, 7, 8])
        manager.evict_blocks([4])
        assert manager.get_computed_blocks(request)[0].get_block_ids() == ([1, 2, 3], [0, 6, 7])
        manager.evict_blocks([7])
        assert manager.get_computed_blocks(request)[0].get_block_ids() == ([1, 2], [5, 6])
        manager.evict_blocks([1])
        assert manager.get_computed_blocks(request)[0].get_block_ids() == ([], [])

    def test_the_order_of_the_groups_does_not_matter(self, new_manager, new_request, prefill):
        manager = new_manager(12, window(6), full())
        prefill(manager, new_request("a", PROMPT))
        manager.evict_blocks([4, 7])
        hit, num_hit = manager.get_computed_blocks(new_request("b", PROMPT + "x"))
        assert (hit.get_block_ids(), num_hit) == (([1, 2], [5, 6]), 8)

    def test_three_kinds_take_turns_until_all_agree(self, new_manager, new_request, prefill):
        manager = new_manager(30, full(), window(6), window(10))
        prefill(manager, new_request("a", PROMPT + "ssss tttt"))
        # Full attention has 20 tokens; the narrow window goes on from 24, 20 and 8, the wide one from 16, 12 and 8.
        manager.evict_blocks([6, 9, 10, 17])
        request = new_request("b", PROMPT + "ssss tttt x")
        hit, num_hit = manager.get_computed_blocks(request)
        assert (hit.get_block_ids(), num_hit) == (([1, 2], [7, 8], [13, 14]), 8)

    def test_equal_groups_are_hit_together(self, new_manager, new_request, prefill):
        manager = new_manager(30, full(), window(6), window(6))
        prefill(manager, new_request("a", PROMPT))
        manager.evict_blocks([8])  # of the second group; the third one has it
        hit, num_hit = manager.get_computed_blocks(new_request("b", PROMPT + "x"))
        assert (hit.get_block_ids(), num_hit) == (([1, 2, 3], [0, 6, 7], [0, 10, 11]), 12)

    def test_a_recurrent_group_decides_where_a_hit_ends(self, new_manager, new_request, prefill):
        manager = new_manager(12, full(), states("align"))
        first = new_request("a", PROMPT + "x")
        prefill(manager, first, chunk=8)  # states at 8 and 16
        manager.new_step_starts()
        hit, num_hit = manager.get_computed_blocks(new_request("b", "SSSS pppp qqqq x"))
        assert (hit.get_block_ids(), num_hit) == (([1, 2], [0, 3]), 8)

    def test_chunks_need_what_lies_in_the_chunk_that_a_hit_ends_in(self, new_manager, new_request, prefill):
        chunks = ChunkedLocalAttentionSpec(block_size=4, token_bytes=8, attention_chunk_size=8)
        manager = new_manager(12, full(), chunks)
        prefill(manager, new_request("a", "SSSS pppp qqqq r"))
        manager.evict_blocks([5, 6])
        hit, num_hit = manager.get_computed_blocks(new_request("b", PROMPT))
        assert (hit.get_block_ids(), num_hit) == (([1, 2, 3], [0, 0, 7]), 12)

    def test_without_full_attention(self, new_manager, new_request, prefill):
        manager = new_manager(12, window(6), states())
        prefill(manager, new_request("a", PROMPT))
        manager.evict_blocks([8])
        hit, num_hit = manager.get_computed_blocks(new_request("b", PROMPT + "x"))
        assert (hit.get_block_ids(), num_hit) == (([0, 2, 3], [0, 0, 7]), 12)


class TestBlockSizes:
    """Hashes lie where the blocks of some group may end, hits where those of all do."""

    def test_lengths_that_all_groups_share(self, new_manager):
        manager = new_manager(12, full(4), window(10, 8))
        assert (manager.block_sizes, manager.hash_block_size, manager.scheduler_block_size) == ((4, 8), 4, 8)
        manager = new_manager(12, full(6), window(10, 4))
        assert (manager.block_sizes, manager.hash_block_size, manager.scheduler_block_size) == ((6, 4), 2, 12)

    def test_a_hit_ends_where_both_have_whole_blocks(self, new_manager, new_request, prefill):
        manager = new_manager(12, full(4), window(10, 8))
        prefill(manager, new_request("a", PROMPT + "ssss t"))
        hit, num_hit = manager.get_computed_blocks(new_request("b", PROMPT + "ssss x"))
        assert (hit.get_block_ids(), num_hit) == (([1, 2, 3, 4], [7, 8]), 16)
        manager.evict_blocks([4])
        hit, num_hit = manager.get_computed_blocks(new_request("b", PROMPT + "ssss x"))
        assert (hit.get_block_ids(), num_hit) == (([1, 2], [7]), 8)

    def test_the_same_the_other_way_round(self, new_manager, new_request, prefill):
        manager = new_manager(12, full(8), window(5, 4))
        prefill(manager, new_request("a", PROMPT + "ssss t"))
        hit, num_hit = manager.get_computed_blocks(new_request("b", PROMPT + "ssss x"))
        assert (hit.get_block_ids(), num_hit) == (([1, 2], [0, 0, 0, 7]), 16)

    def test_blocks_that_no_hit_asks_for_are_not_cached(self, new_manager, new_request, prefill, unhashed_ids):
        manager = new_manager(12, full(8), window(5, 4))
        prefill(manager, new_request("a", PROMPT + "ssss t"))
        # Hits end at 8 and 16: the window needs one block before each; the last block of 4 can be part of none.
        assert unhashed_ids(manager, "a") == [[3], [4, 6, 8, 9]]

    def test_blocks_behind_the_last_place_for_a_hit_are_cached_when_it_has_moved_on(
        self, new_manager, new_request, prefill, compute, unhashed_ids
    ):
        manager = new_manager(12, full(4), window(10, 8))
        request = new_request("a", "SSSS pppp qqqq r")
        prefill(manager, request)
        assert unhashed_ids(manager, "a") == [[3, 4], [6]]
        request.append([1, 2, 3])
        compute(manager, request)
        assert unhashed_ids(manager, "a") == [[], []]

    def test_a_longer_block_is_named_by_the_hash_of_its_end(self, new_manager, new_request, prefill):
        manager = new_manager(12, full(4), window(10, 8))
        request = new_request("a", PROMPT)
        prefill(manager, request)
        _, blocks = manager.get_blocks("a").blocks
        assert [block.block_hash for block in blocks] == [request.block_hashes[1], request.block_hashes[3]]

    def test_the_state_of_a_long_block_bounds_the_hit(self, new_manager, new_request, prefill):
        manager = new_manager(12, full(4), states(block_size=8))
        prefill(manager, new_request("a", PROMPT))
        manager.new_step_starts()
        hit, num_hit = manager.get_computed_blocks(new_request("b", PROMPT))
        assert (hit.get_block_ids(), num_hit) == (([1, 2], [5]), 8)

    def test_two_kinds_of_full_attention_agree_on_whole_blocks_of_both(self, new_manager, new_request, prefill):
        manager = new_manager(20, full(4), full(6))
        prefill(manager, new_request("a", PROMPT + "ssss tttt x", hash_block_size=2))
        manager.evict_blocks([6])  # 20 tokens are left in blocks of 4, 18 of them in whole blocks of 6
        hit, num_hit = manager.get_computed_blocks(new_request("b", PROMPT + "ssss tttt y", hash_block_size=2))
        assert (hit.get_block_ids(), num_hit) == (([1, 2, 3], [8, 9]), 12)

    def test_a_state_inside_a_longer_block_is_no_hit(self, new_manager, new_request, prefill):
        manager = new_manager(12, full(8), states(block_size=4))
        prefill(manager, new_request("a", PROMPT))
        manager.new_step_starts()
        manager.evict_blocks([6])  # the last state; those at 12, 8 and 4 are there
        hit, num_hit = manager.get_computed_blocks(new_request("b", PROMPT + "x"))
        assert (hit.get_block_ids(), num_hit) == (([1], [0, 4]), 8)

    def test_ranks_share_the_blocks_of_full_attention_and_not_the_states(self, new_manager):
        manager = new_manager(12, full(4), states(block_size=8), dcp_world_size=2)
        assert manager.block_sizes == (8, 8)
        assert manager.scheduler_block_size == 8


class TestEagle:
    def make(self, *groups: tuple[object, bool]) -> KVCacheManager:
        config = KVCacheConfig(
            31,
            tuple(
                KVCacheGroupSpec((f"layer {index}",), spec, is_eagle_group=is_eagle)
                for index, (spec, is_eagle) in enumerate(groups)
            ),
        )
        return KVCacheManager(config, 1000, use_eagle=True)

    def test_where_no_group_has_the_head_all_drop_the_last_block(self, new_request, prefill):
        manager = self.make((full(), False), (window(6), False))
        prefill(manager, new_request("a", PROMPT))
        hit, num_hit = manager.get_computed_blocks(new_request("b", PROMPT + "x"))
        assert (hit.get_block_ids(), num_hit) == (([1, 2, 3], [0, 6, 7]), 12)

    def test_the_block_behind_the_hit_has_to_be_there_in_the_heads_group_alone(self, new_request, prefill):
        manager = self.make((full(), True), (window(6), False))
        prefill(manager, new_request("a", PROMPT))
        manager.evict_blocks([8])  # the window's last one
        hit, num_hit = manager.get_computed_blocks(new_request("b", PROMPT + "x"))
        assert (hit.get_block_ids(), num_hit) == (([1, 2, 3], [0, 6, 7]), 12)
        manager.evict_blocks([4])
        assert manager.get_computed_blocks(new_request("b", PROMPT + "x"))[1] == 8

    def test_the_same_with_the_head_in_the_windows_group(self, new_request, prefill):
        manager = self.make((full(), False), (window(6), True))
        prefill(manager, new_request("a", PROMPT))
        manager.evict_blocks([4])  # full attention's last one
        hit, num_hit = manager.get_computed_blocks(new_request("b", PROMPT + "x"))
        assert (hit.get_block_ids(), num_hit) == (([1, 2, 3], [0, 6, 7]), 12)

    def test_a_block_is_dropped_once_however_many_groups_shorten_the_hit(self, new_request, prefill):
        manager = self.make((full(), False), (window(6), False), (window(10), False))
        prefill(manager, new_request("a", PROMPT + "ssss tttt"))
        manager.evict_blocks([11])  # of the narrow window: it goes on from 16 and drops to 12
        assert manager.get_computed_blocks(new_request("b", PROMPT + "ssss tttt x"))[1] == 12

    def test_it_is_dropped_again_where_another_group_shortens_the_hit(self, new_request, prefill):
        manager = self.make((full(), False), (window(6), True), (window(10), False))
        prefill(manager, new_request("a", PROMPT + "ssss tttt u"))
        # The head's group goes on from 20 and, with the block behind it gone, not from 8; the other one from 8.
        manager.evict_blocks([10, 17])
        assert manager.get_computed_blocks(new_request("b", PROMPT + "ssss tttt x"))[1] == 4

    def test_groups_that_are_searched_together_drop_it_together(self, new_request, prefill):
        manager = self.make((full(), False), (window(6), False), (window(6), True))
        prefill(manager, new_request("a", PROMPT))
        assert manager.get_computed_blocks(new_request("b", PROMPT + "x"))[1] == 12

    def test_a_failed_load_drops_nothing_more(self, new_request, start_load, end_load):
        manager = self.make((full(), True), (window(100), True))
        request = new_request("a", PROMPT + "ssss x")
        assert start_load(manager, request, "11111", "11111") == (0, 16)
        assert end_load(manager, request, manager.get_block_ids("a")[0][3]) == 12

    def test_one_more_block_than_a_hit_may_have_is_cached(self, new_request, prefill):
        manager = self.make((full(8), False), (window(5), True))
        prefill(manager, new_request("a", PROMPT + "ssss t"))
        # Hits end at 8 and 16: the head's group needs one block before that and the one behind it, 16 … 19.
        hit, num_hit = manager.get_computed_blocks(new_request("b", PROMPT + "ssss x"))
        assert (hit.get_block_ids(), num_hit) == (([1, 2], [0, 0, 0, 7]), 16)


class TestHolding:
    def test_groups_leave_blocks_behind_each_by_its_own_rule(self, new_manager, new_request, prefill):
        manager = new_manager(20, full(), window(6), states("align"))
        prefill(manager, new_request("a", PROMPT + "x"), chunk=4)
        full_blocks, window_blocks, state_blocks = manager.get_block_ids("a")
        assert 0 not in full_blocks
        assert [bool(block_id) for block_id in window_blocks] == [False, False, True, True, True]
        assert [bool(block_id) for block_id in state_blocks] == [False, False, False, True, True]

    def test_room_is_counted_over_all_groups(self, new_manager, new_request, prefill):
        assert prefill(new_manager(5, full(), window(6)), new_request("a", "SSSS pppp x")) is None
        assert prefill(new_manager(6, full(), window(6)), new_request("a", "SSSS pppp x")) is not None

    def test_a_hit_of_one_group_is_not_given_away_as_new_to_another(self, new_manager, new_request, prefill):
        manager = new_manager(6, full(), window(6))
        first = new_request("a", "SSSS pppp x")
        prefill(manager, first)
        manager.free(first)
        second = new_request("b", "SSSS pppp y")
        assert manager.pool.free_block_ids() == [6, 3, 2, 1, 5, 4]
        assert prefill(manager, second) == ([1, 2, 6], [4, 5, 3])

    def test_common_prefixes_are_told_by_group(self, new_manager, new_request, prefill):
        manager = new_manager(20, full(), window(6))
        prefill(manager, new_request("a", "SSSS pppp x"))
        prefill(manager, new_request("b", "SSSS pppp y"))
        assert manager.get_num_common_prefix_blocks("a") == [2, 0]

    def test_an_estimate_is_that_of_the_group_furthest_behind(self, new_manager, new_request, prefill):
        manager = new_manager(20, full(4), window(10, 8))
        request = new_request("a", PROMPT + "ssss")
        prefill(manager, request)
        assert manager.estimate_cached_tokens(request) == 16
        manager.evict_blocks([manager.get_block_ids("a")[1][1]])
        assert manager.estimate_cached_tokens(request) == 8

    @pytest.mark.parametrize("specs", [(full(), window(6)), (full(8), window(6), states("align", 8))])
    def test_all_is_given_back(self, new_manager, new_request, prefill, specs):
        manager = new_manager(30, *specs)
        requests = [new_request(letter, PROMPT + letter) for letter in "abc"]
        for request in requests:
            prefill(manager, request, chunk=8)
        for request in requests:
            manager.free(request)
            manager.check_integrity()
        assert manager.usage == 0.0
        assert manager.reset_prefix_cache()


def test_the_end_of_a_prompt_inside_a_long_block_is_told_to_those_who_follow_the_events(
    new_manager, new_request, compute
):
    manager = new_manager(
        8,
        FullAttentionSpec(block_size=8, token_bytes=8),
        SlidingWindowSpec(block_size=4, token_bytes=16, sliding_window=5),
        enable_kv_cache_events=True,
    )
    request = new_request("a", "SSSS pppp qqqq r")  # the last whole step before the last token ends at 12
    compute(manager, request, 13)
    request.append([1, 2, 3])
    compute(manager, request, 3)
    tails = [event for event in manager.take_events() if getattr(event, "group_idx", 1) == 0]
    assert [type(event).__name__ for event in tails] == ["BlockStored", "BlockStored", "BlockStored"]
    full, rest, tail = tails
    assert (full.block_size, len(full.block_hashes)) == (8, 1)
    assert rest.parent_block_hash == full.block_hashes[0]
    assert (tail.block_size, tail.block_hashes, tail.token_ids) == (
        4,
        (request.block_hashes[2],),
        tuple(request.token_ids[8:12]),
    )
    assert tail.parent_block_hash == request.block_hashes[1]
    assert manager.get_computed_blocks(new_request("b", "SSSS pppp qqqq x"))[1] == 8  # no hit ends there
    manager.free(request)
    manager.evict_blocks(range(9))
    manager.check_integrity()
    assert not any(map(list, manager.pool.cached))
