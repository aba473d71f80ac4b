import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.connector.blocks.specs import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    Limits,
    MambaSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from kvstore.errors import ConfigError

FULL = FullAttentionSpec(block_size=16, token_bytes=8)
WINDOW = SlidingWindowSpec(block_size=16, token_bytes=8, sliding_window=40)
CHUNKED = ChunkedLocalAttentionSpec(block_size=16, token_bytes=8, attention_chunk_size=64)
CROSS = CrossAttentionSpec(block_size=16, token_bytes=8)
MAMBA = MambaSpec(block_size=16, state_bytes=1000)


def test_an_attention_page_has_all_tokens_of_a_block():
    assert FULL.page_size_bytes == FULL.unpadded_page_size_bytes == 128


def test_a_state_is_as_large_as_it_is_however_long_the_block():
    assert MAMBA.page_size_bytes == MambaSpec(block_size=512, state_bytes=1000).page_size_bytes == 1000


def test_a_padded_page_takes_its_padding_too():
    padded = FullAttentionSpec(block_size=16, token_bytes=8, page_size_padded=200)
    assert (padded.page_size_bytes, padded.unpadded_page_size_bytes) == (200, 128)


def test_a_window_needs_its_tokens_and_those_under_way():
    # 39 before and 26 under way are 65 tokens in 5 blocks, and the first of them may be in the middle of a sixth.
    assert WINDOW.max_admission_blocks_per_request(Limits(max_model_len=10_000, max_in_flight_tokens=26)) == 6
    assert WINDOW.max_admission_blocks_per_request(Limits(max_model_len=10_000, max_in_flight_tokens=25)) == 5


def test_a_window_never_needs_more_than_the_whole_request():
    assert WINDOW.max_admission_blocks_per_request(Limits(max_model_len=48, max_in_flight_tokens=512)) == 4
    assert WINDOW.max_admission_blocks_per_request(Limits(max_model_len=48)) == 4


@given(st.integers(1, 8), st.integers(1, 40), st.integers(1, 40), st.integers(1, 120), st.integers(0, 120))
def test_the_blocks_of_a_window_are_enough_at_each_step(block_size, window, in_flight, max_model_len, computed):
    spec = SlidingWindowSpec(block_size=block_size, token_bytes=1, sliding_window=window)
    first, end = max(0, computed - window + 1), min(computed + in_flight, max_model_len)
    held = {token // block_size for token in range(first, end)}
    assert len(held) <= spec.max_admission_blocks_per_request(
        Limits(max_model_len=max_model_len, max_in_flight_tokens=in_flight)
    )


def test_chunks_need_one_chunk_and_the_tokens_under_way():
    assert CHUNKED.max_admission_blocks_per_request(Limits(max_model_len=10_000, max_in_flight_tokens=32)) == 6
    assert CHUNKED.max_admission_blocks_per_request(Limits(max_model_len=80, max_in_flight_tokens=32)) == 5


@pytest.mark.parametrize(
    ("spec", "other", "same"),
    [
        (FULL, FullAttentionSpec(block_size=16, token_bytes=24), True),
        (FULL, FullAttentionSpec(block_size=16, token_bytes=8, sliding_window=40), True),
        (FULL, FullAttentionSpec(block_size=32, token_bytes=8), False),
        (FULL, WINDOW, False),
        (WINDOW, FULL, False),
        (WINDOW, SlidingWindowSpec(block_size=16, token_bytes=24, sliding_window=40), True),
        (WINDOW, SlidingWindowSpec(block_size=16, token_bytes=8, sliding_window=41), False),
        (CHUNKED, ChunkedLocalAttentionSpec(block_size=16, token_bytes=24, attention_chunk_size=64), True),
        (CHUNKED, ChunkedLocalAttentionSpec(block_size=16, token_bytes=8, attention_chunk_size=32), False),
        (CROSS, CrossAttentionSpec(block_size=16, token_bytes=24), True),
        (CROSS, FULL, False),
        (MAMBA, MambaSpec(block_size=16, state_bytes=900, page_size_padded=1000), True),
        (MAMBA, MambaSpec(block_size=16, state_bytes=900), False),
        (MAMBA, MambaSpec(block_size=16, state_bytes=1000, mamba_cache_mode="align"), False),
        (MAMBA, MambaSpec(block_size=16, state_bytes=1000, num_speculative_blocks=1), False),
    ],
)
def test_layers_of_one_type_always_need_the_same_blocks(spec, other, same):
    assert spec.is_same_type(other) is same


def test_layers_of_one_type_stand_behind_one_table_with_pages_of_their_own():
    large = FullAttentionSpec(block_size=16, token_bytes=24)
    both = UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={"small": FULL, "large": large})
    assert both.page_size_bytes == 128 + 384
    assert both.is_same_type(FULL) and both.is_same_type(both) and not both.is_same_type(WINDOW)


def test_layers_of_several_types_do_not_stand_behind_one_table():
    with pytest.raises(ConfigError, match="layer window is not of the same type"):
        UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={"full": FULL, "window": WINDOW})
    with pytest.raises(ConfigError, match="layer full is not of the same type"):
        UniformTypeKVCacheSpecs(block_size=32, kv_cache_specs={"full": FULL})
    with pytest.raises(ConfigError, match="at least 1 layer"):
        UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={})


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: FullAttentionSpec(block_size=0, token_bytes=8), "block_size must be an integer of at least 1, got 0"),
        (lambda: FullAttentionSpec(block_size=16, token_bytes=0), "token_bytes .* got 0"),
        (lambda: FullAttentionSpec(block_size=16, token_bytes=8, page_size_padded=127), "at least the 128 .* got 127"),
        (lambda: FullAttentionSpec(block_size=16, token_bytes=8, sliding_window=0), "sliding_window .* got 0"),
        (lambda: FullAttentionSpec(block_size=16, token_bytes=8, attention_chunk_size=0), "chunk_size .* got 0"),
        (
            lambda: FullAttentionSpec(block_size=16, token_bytes=8, sliding_window=4, attention_chunk_size=8),
            "sliding_window 4 and attention_chunk_size 8",
        ),
        (lambda: SlidingWindowSpec(block_size=16, token_bytes=8, sliding_window=0), "sliding_window .* got 0"),
        (lambda: ChunkedLocalAttentionSpec(block_size=16, token_bytes=8, attention_chunk_size=0), "chunk_size .* 0"),
        (lambda: MambaSpec(block_size=16, state_bytes=0), "state_bytes .* got 0"),
        (lambda: MambaSpec(block_size=16, state_bytes=8, mamba_cache_mode="some"), "mamba_cache_mode .* got 'some'"),
        (lambda: MambaSpec(block_size=16, state_bytes=8, num_speculative_blocks=-1), "speculative_blocks .* got -1"),
        (lambda: Limits(max_model_len=0), "max_model_len .* got 0"),
        (lambda: Limits(max_model_len=1, max_in_flight_tokens=0), "max_in_flight_tokens .* got 0"),
        (lambda: Limits(max_model_len=1, context_parallel_size=0), "context_parallel_size .* got 0"),
        (lambda: Limits(max_model_len=True), "max_model_len .* got True"),
    ],
)
def test_a_value_out_of_its_range_is_named(make, named):
    with pytest.raises(ConfigError, match=named):
        make()
