"""Groups of cross-attention: blocks for an encoder's tokens. All blocks hold 4 tokens."""

import pytest

from kvstore.connector.blocks import CrossAttentionSpec, FullAttentionSpec

FULL = FullAttentionSpec(block_size=4, token_bytes=8)
CROSS = CrossAttentionSpec(block_size=4, token_bytes=8)


@pytest.fixture
def manager(new_manager):
    return new_manager(8, FULL, CROSS, enable_caching=False)


def test_all_blocks_for_the_encoder_are_given_at_once(manager, new_request, compute):
    request = new_request("a", "SSSS x")
    assert compute(manager, request, 4, num_encoder_tokens=9) == ([1], [2, 3, 4])
    assert compute(manager, request, 1) == ([5], [])
    assert manager.get_block_ids("a") == ([1, 5], [2, 3, 4])


def test_they_need_room(manager, new_request, compute):
    request = new_request("a", "SSSS x")
    assert compute(manager, request, 5, num_encoder_tokens=25) is None
    assert manager.usage == 0.0
    assert compute(manager, request, 5, num_encoder_tokens=24) is not None
    assert manager.usage == 1.0


def test_they_count_where_a_whole_request_must_fit(manager, new_request, compute):
    request = new_request("a", "SSSS pppp qqqq")
    assert compute(manager, request, 4, num_encoder_tokens=24, full_sequence_must_fit=True) is None
    assert compute(manager, request, 4, num_encoder_tokens=20, full_sequence_must_fit=True) is not None


def test_equal_inputs_share_nothing(manager, new_request, compute):
    compute(manager, new_request("a", "SSSS"), num_encoder_tokens=4)
    twin = new_request("b", "SSSS")
    assert manager.get_computed_blocks(twin)[1] == 0
    assert compute(manager, twin, num_encoder_tokens=4) == ([3], [4])
    assert manager.get_num_common_prefix_blocks("a") == [0, 0]


def test_they_are_kept_until_the_request_is_over(manager, new_request, compute):
    request = new_request("a", "SSSS x")
    compute(manager, request, num_encoder_tokens=9)
    manager.remove_skipped_blocks("a", 5)
    assert manager.get_block_ids("a")[1] == [3, 4, 5]
    manager.free(request)
    manager.check_integrity()
    assert manager.usage == 0.0


def test_a_request_without_an_input_holds_none(manager, new_request, compute):
    assert compute(manager, new_request("a", "SSSS")) == ([1], [])


def test_tokens_from_elsewhere_are_the_decoders(manager, new_request):
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


def test_ranks_do_not_share_the_encoders_tokens(new_manager):
    manager = new_manager(8, FULL, CROSS, enable_caching=False, dcp_world_size=2)
    assert manager.block_sizes == (8, 4)


def test_an_estimate_of_what_is_cached_leaves_the_encoder_out(new_manager, new_request, compute):
    manager = new_manager(8, CROSS, enable_caching=False)
    request = new_request("a", "SSSS")
    assert compute(manager, request, num_encoder_tokens=4) == ([1],)
    assert manager.estimate_cached_tokens(request) == 0
