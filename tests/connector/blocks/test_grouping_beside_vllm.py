"""Groups of random models, compared with vLLM where it is installed."""

import warnings
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.connector.blocks.cache_config import KVCacheGroupSpec
from kvstore.connector.blocks.grouping import get_kv_cache_groups
from kvstore.connector.blocks.specs import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from kvstore.errors import ConfigError

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what vLLM's own imports warn of
    torch = pytest.importorskip("torch", reason="vLLM needs torch")
    pytest.importorskip("vllm", reason="vLLM can't be imported", exc_type=ImportError)
    import vllm.v1.kv_cache_interface as theirs
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.kv_cache_layout import KVCacheLayout

pytestmark = pytest.mark.filterwarnings("ignore")


def vllm_config(*, disable: bool, mamba_cache_mode: str) -> SimpleNamespace:
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=disable),
        attention_config=SimpleNamespace(hisparse_config=None),
        cache_config=SimpleNamespace(
            get_resolved_kv_cache_layout=lambda: KVCacheLayout.LBNHC,
            prefix_cache_retention_interval=None,
            mamba_cache_mode=mamba_cache_mode,
        ),
        model_config=SimpleNamespace(max_model_len=100, original_max_model_len=100, hf_config=None),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1, tensor_parallel_size=1),
        max_in_flight_tokens=100,
        num_prefill_lookahead_tokens=0,
        speculative_config=None,
    )


def to_vllm(spec: KVCacheSpec) -> object:
    shared = {"block_size": spec.block_size, "page_size_padded": spec.page_size_padded}
    if isinstance(spec, MambaSpec):
        return theirs.MambaSpec(
            **shared,
            shapes=((spec.state_bytes,),),
            dtypes=(torch.int8,),
            mamba_cache_mode=spec.mamba_cache_mode,
            num_speculative_blocks=spec.num_speculative_blocks,
        )
    shared |= {"num_kv_heads": 1, "head_size": spec.token_bytes, "head_size_v": 0, "dtype": torch.int8}
    match spec:
        case FullAttentionSpec():
            return theirs.FullAttentionSpec(
                **shared, sliding_window=spec.sliding_window, attention_chunk_size=spec.attention_chunk_size
            )
        case SlidingWindowSpec():
            return theirs.SlidingWindowSpec(**shared, sliding_window=spec.sliding_window)
        case ChunkedLocalAttentionSpec():
            return theirs.ChunkedLocalAttentionSpec(**shared, attention_chunk_size=spec.attention_chunk_size)
        case CrossAttentionSpec():
            return theirs.CrossAttentionSpec(**shared)
    raise AssertionError(spec)


def specs_as_vllm(group: KVCacheGroupSpec) -> object:
    spec = group.kv_cache_spec
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return {name: to_vllm(layer) for name, layer in spec.kv_cache_specs.items()}
    return to_vllm(spec)


def ours(groups) -> list[tuple[list[str], object]]:
    return [(list(group.layer_names), specs_as_vllm(group)) for group in groups]


def as_theirs(groups) -> list[tuple[list[str], object]]:
    return [
        (
            group.layer_names,
            group.kv_cache_spec.kv_cache_specs
            if isinstance(group.kv_cache_spec, theirs.UniformTypeKVCacheSpecs)
            else group.kv_cache_spec,
        )
        for group in groups
    ]


@st.composite
def kinds(draw: st.DrawFn, mamba_cache_mode: str) -> KVCacheSpec:
    """A kind of layer, of so few sizes that kinds often agree in some of them."""
    block_size = draw(st.sampled_from([16, 16, 16, 32]))
    token_bytes = draw(st.sampled_from([8, 8, 8, 16, 24]))
    attention = {"block_size": block_size, "token_bytes": token_bytes}
    kind = draw(st.sampled_from(["full", "full", "local full", "window", "window", "chunked", "mamba", "cross"]))
    match kind:
        case "full":
            # A page that is padded and must grow: vLLM fails, so it is as large as the largest that occurs.
            return FullAttentionSpec(**attention, page_size_padded=draw(st.sampled_from([None, None, None, 32 * 24])))
        case "local full":
            size = draw(st.sampled_from([32, 64]))
            return FullAttentionSpec(
                **attention, **{draw(st.sampled_from(["sliding_window", "attention_chunk_size"])): size}
            )
        case "window":
            return SlidingWindowSpec(**attention, sliding_window=draw(st.sampled_from([32, 64])))
        case "chunked":
            return ChunkedLocalAttentionSpec(**attention, attention_chunk_size=draw(st.sampled_from([32, 64])))
        case "cross":
            return CrossAttentionSpec(**attention)
    state_bytes = draw(st.sampled_from([100, 128, 384]))
    return MambaSpec(
        block_size=block_size,
        state_bytes=state_bytes,
        page_size_padded=draw(st.sampled_from([None, 384])),
        mamba_cache_mode=mamba_cache_mode,
        num_speculative_blocks=draw(st.integers(0, 1)),
    )


@st.composite
def models(draw: st.DrawFn) -> tuple[dict[str, KVCacheSpec], str]:
    mode = draw(st.sampled_from(["none", "all", "align"]))
    pattern = draw(st.lists(kinds(mode), min_size=1, max_size=4))
    counts = draw(st.lists(st.integers(1, 7), min_size=len(pattern), max_size=len(pattern)))
    specs = [spec for spec, count in zip(pattern, counts, strict=True) for _ in range(count)]
    if draw(st.booleans()):
        specs = draw(st.permutations(specs))
    return {f"layer.{index}": spec for index, spec in enumerate(specs)}, mode


@settings(max_examples=400, deadline=None)
@given(model=models(), disable=st.booleans())
def test_the_groups_are_vllms(model, disable):
    layers, mode = model
    try:
        expected = kv_cache_utils.get_kv_cache_groups(
            vllm_config(disable=disable, mamba_cache_mode=mode),
            {name: to_vllm(spec) for name, spec in layers.items()},
        )
    except ValueError:
        with pytest.raises(ConfigError):
            get_kv_cache_groups(layers, disable_hybrid_kv_cache_manager=disable)
        return
    assert ours(get_kv_cache_groups(layers, disable_hybrid_kv_cache_manager=disable)) == as_theirs(expected)
