"""What the manager tells of its prefix cache, for those who route requests by it."""

import pytest

from kvstore.connector.blocks import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    FullAttentionSpec,
    MambaSpec,
    MultimodalInput,
    PrefixKeys,
    SlidingWindowSpec,
)

FULL = FullAttentionSpec(block_size=4, token_bytes=8)
WINDOW = SlidingWindowSpec(block_size=4, token_bytes=8, sliding_window=6)


def tokens(text: str) -> tuple[int, ...]:
    return tuple(ord(letter) for letter in text if letter != " ")


@pytest.fixture
def manager(new_manager):
    return new_manager(6, enable_kv_cache_events=True)


def test_stored_names_the_blocks_and_their_tokens(manager, new_request, prefill):
    request = new_request("a", "SSSS pppp x")
    prefill(manager, request)
    assert manager.take_events() == [
        BlockStored(
            block_hashes=tuple(request.block_hashes),
            parent_block_hash=None,
            token_ids=tokens("SSSS pppp"),
            block_size=4,
            lora_name=None,
            extra_keys=(None, None),
            group_idx=0,
            kv_cache_spec_kind="full_attention",
            kv_cache_spec_sliding_window=None,
        )
    ]
    assert manager.take_events() == []


def test_a_later_piece_names_the_block_before_it(manager, new_request, compute):
    request = new_request("a", "SSSS pppp qqqq")
    compute(manager, request, 6)
    compute(manager, request)
    first, second = manager.take_events()
    assert (first.parent_block_hash, first.token_ids) == (None, tokens("SSSS"))
    assert (second.parent_block_hash, second.token_ids) == (request.block_hashes[0], tokens("pppp qqqq"))
    assert second.block_hashes == tuple(request.block_hashes[1:])


def test_blocks_that_were_hits_are_not_stored_again(manager, new_request, prefill):
    prefill(manager, new_request("a", "SSSS x"))
    manager.take_events()
    request = new_request("b", "SSSS pppp y")
    prefill(manager, request)
    (event,) = manager.take_events()
    assert event.parent_block_hash == request.block_hashes[0]
    assert event.block_hashes == (request.block_hashes[1],)


def test_a_step_that_fills_no_block_says_nothing(manager, new_request, prefill, compute):
    request = new_request("a", "SS")
    prefill(manager, request)
    request.append([1])
    compute(manager, request)
    assert manager.take_events() == []


def test_what_else_the_kv_depends_on_is_told(manager, new_request, prefill):
    image = MultimodalInput(identifier="cat", offset=6, length=4)
    keys = PrefixKeys(lora_name="adapter", lora_path="/adapters/1", multimodal=(image,), cache_salt="salt")
    prefill(manager, new_request("a", "SSSS ppii iixx y", keys=keys))
    (event,) = manager.take_events()
    assert event.lora_name == "adapter"
    assert event.extra_keys == (("adapter", "salt"), ("adapter", ("cat", 2)), ("adapter", ("cat", -2)))


def test_a_block_is_removed_when_it_is_given_to_someone_else(manager, new_request, prefill):
    first = new_request("a", "SSSS pppp")
    prefill(manager, first)
    manager.free(first)
    manager.take_events()
    second = new_request("b", "TTTT tttt uuuu uuuu vvvv")
    prefill(manager, second)
    removed, stored = manager.take_events()
    assert removed == BlockRemoved(first.block_hashes[1], 0)
    assert stored.block_hashes == tuple(second.block_hashes)


def test_a_block_is_removed_when_it_is_evicted(manager, new_request, prefill):
    request = new_request("a", "SSSS pppp x")
    prefill(manager, request)
    manager.take_events()
    manager.evict_blocks([2, 3])
    assert manager.take_events() == [BlockRemoved(request.block_hashes[1], 0)]


def test_a_reset_clears(manager, new_request, prefill):
    request = new_request("a", "SSSS")
    prefill(manager, request)
    manager.take_events()
    assert not manager.reset_prefix_cache()
    assert manager.take_events() == []
    manager.free(request)
    assert manager.reset_prefix_cache()
    assert manager.take_events() == [AllBlocksCleared()]


def test_pages_of_kvstore_are_stored_when_they_have_come(manager, new_request, prefill, start_load, end_load):
    prefill(manager, new_request("a", "SSSS x"))
    manager.take_events()
    request = new_request("b", "SSSS pppp qqqq y")
    start_load(manager, request, "0111")
    assert manager.take_events() == []
    end_load(manager, request)
    (event,) = manager.take_events()
    assert event.parent_block_hash == request.block_hashes[0]
    assert event.block_hashes == tuple(request.block_hashes[1:])


def test_pages_that_did_not_come_are_not_stored(manager, new_request, start_load, end_load):
    request = new_request("b", "SSSS pppp qqqq y")
    start_load(manager, request, "111")
    end_load(manager, request, 2)
    (event,) = manager.take_events()
    assert event.block_hashes == (request.block_hashes[0],)
    start_over = new_request("c", "TTTT tttt u")
    start_load(manager, start_over, "11")
    end_load(manager, start_over, manager.get_block_ids("c")[0][0])
    assert manager.take_events() == []


def test_every_group_tells_its_own(new_manager, new_request, prefill):
    manager = new_manager(12, FULL, WINDOW, enable_kv_cache_events=True)
    request = new_request("a", "SSSS pppp x")
    prefill(manager, request)
    full, window = manager.take_events()
    assert (full.group_idx, full.kv_cache_spec_kind, full.kv_cache_spec_sliding_window) == (0, "full_attention", None)
    assert (window.group_idx, window.kv_cache_spec_kind, window.kv_cache_spec_sliding_window) == (
        1,
        "sliding_window",
        6,
    )
    manager.evict_blocks([manager.get_block_ids("a")[1][0]])
    assert manager.take_events() == [BlockRemoved(request.block_hashes[0], 1)]


def test_blocks_that_can_serve_no_hit_are_left_out_and_their_tokens_are_not(new_manager, new_request, prefill):
    states = MambaSpec(block_size=4, state_bytes=8, mamba_cache_mode="align")
    manager = new_manager(12, states, enable_kv_cache_events=True)
    request = new_request("a", "SSSS pppp qqqq")
    prefill(manager, request)
    (event,) = manager.take_events()
    assert event.block_hashes == (request.block_hashes[2],)
    assert event.token_ids == tokens("SSSS pppp qqqq")
    assert event.extra_keys == (None,)
    assert event.kv_cache_spec_kind == "mamba"


def test_a_longer_block_has_the_block_before_it_as_its_parent(new_manager, new_request, compute):
    long = SlidingWindowSpec(block_size=8, token_bytes=8, sliding_window=100)
    manager = new_manager(12, FULL, long, enable_kv_cache_events=True)
    request = new_request("a", "SSSS pppp qqqq rrrr")
    compute(manager, request, 8)
    manager.take_events()
    compute(manager, request)
    full, window = manager.take_events()
    assert full.block_hashes == tuple(request.block_hashes[2:])
    assert window.block_hashes == (request.block_hashes[3],)
    assert full.parent_block_hash == window.parent_block_hash == request.block_hashes[1]
    assert full.token_ids == window.token_ids == tokens("qqqq rrrr")


def test_nothing_is_told_unless_it_is_asked_for(new_manager, new_request, prefill):
    manager = new_manager(6)
    request = new_request("a", "SSSS pppp")
    prefill(manager, request)
    manager.evict_blocks([1])
    manager.free(request)
    assert manager.reset_prefix_cache()
    assert manager.take_events() == []


def test_a_request_may_have_its_hits_told(new_manager, new_request, prefill):
    manager = new_manager(12, enable_kv_cache_events=True)
    prefill(manager, new_request("a", "SSSS pppp x"))
    manager.take_events()
    manager.get_computed_blocks(new_request("b", "SSSS pppp y"))
    assert manager.take_events() == []
    request = new_request("c", "SSSS pppp z")
    request.kv_cache_report_mode = "full"
    manager.get_computed_blocks(request)
    manager.get_computed_blocks_with(request, {})
    (event,) = manager.take_events()
    assert event.block_hashes == tuple(request.block_hashes)
    assert (event.parent_block_hash, len(event.token_ids), event.block_size) == (None, 8, 4)
    other = new_request("d", "TTTT x")
    other.kv_cache_report_mode = "full"
    manager.get_computed_blocks(other)
    assert manager.take_events() == []
