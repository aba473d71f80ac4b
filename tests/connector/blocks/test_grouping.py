"""Models are written as one letter a layer; a layer is named by its letter and its place: ``s0 s1 f2``."""

from collections.abc import Mapping

import pytest
from hypothesis import given
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

FULL = FullAttentionSpec(block_size=16, token_bytes=8)
WINDOW = SlidingWindowSpec(block_size=16, token_bytes=8, sliding_window=40)
CHUNKED = ChunkedLocalAttentionSpec(block_size=16, token_bytes=8, attention_chunk_size=64)
CROSS = CrossAttentionSpec(block_size=16, token_bytes=8)
MAMBA = MambaSpec(block_size=16, state_bytes=100)


def model(pattern: str, **kinds: KVCacheSpec) -> dict[str, KVCacheSpec]:
    return {f"{letter}{index}": kinds[letter] for index, letter in enumerate(pattern)}


def written(groups: tuple[KVCacheGroupSpec, ...]) -> list[tuple[str, KVCacheSpec]]:
    return [(" ".join(group.layer_names), group.kv_cache_spec) for group in groups]


def one_group(layers: Mapping[str, KVCacheSpec], spec: KVCacheSpec) -> list[tuple[str, KVCacheSpec]]:
    return [(" ".join(layers), spec)]


# One kind


def test_a_model_without_attention_has_no_group():
    assert get_kv_cache_groups({}) == ()
    assert get_kv_cache_groups({}, disable_hybrid_kv_cache_manager=True) == ()


@pytest.mark.parametrize("spec", [FULL, WINDOW, CHUNKED, CROSS, MAMBA])
def test_equal_layers_are_one_group(spec):
    layers = model("xxx", x=spec)
    assert written(get_kv_cache_groups(layers)) == [("x0 x1 x2", spec)]


def test_a_window_of_full_attention_does_not_part_it_from_others():
    local = FullAttentionSpec(block_size=16, token_bytes=8, sliding_window=40)
    assert written(get_kv_cache_groups(model("fwf", f=FULL, w=local))) == [("f0 w1 f2", local)]


def test_full_attention_with_windows_of_two_sizes_is_refused():
    layers = model(
        "vw",
        v=FullAttentionSpec(block_size=16, token_bytes=8, sliding_window=40),
        w=FullAttentionSpec(block_size=16, token_bytes=8, sliding_window=80),
    )
    with pytest.raises(ConfigError, match=r"several sliding_window: \[40, 80\]"):
        get_kv_cache_groups(layers)


def test_layers_of_one_type_with_pages_of_several_sizes_are_one_group():
    layers = model("lss", l=FullAttentionSpec(block_size=16, token_bytes=24), s=FULL)
    assert written(get_kv_cache_groups(layers)) == one_group(
        layers, UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs=layers)
    )


# Several kinds


def test_five_windows_to_one_full_attention():
    # As Gemma 3 does: the 3 full layers are the repetitions, and each of the 5 windows between has a group.
    layers = model("sssssf" * 3, s=WINDOW, f=FULL)
    assert written(get_kv_cache_groups(layers)) == [
        ("s0 s6 s12", WINDOW),
        ("s1 s7 s13", WINDOW),
        ("s2 s8 s14", WINDOW),
        ("s3 s9 s15", WINDOW),
        ("s4 s10 s16", WINDOW),
        ("f5 f11 f17", FULL),
    ]


def test_three_chunked_layers_to_one_full_attention():
    # As Llama 4 does.
    layers = model("cccf" * 2, c=CHUNKED, f=FULL)
    assert written(get_kv_cache_groups(layers)) == [
        ("c0 c4", CHUNKED),
        ("c1 c5", CHUNKED),
        ("c2 c6", CHUNKED),
        ("f3 f7", FULL),
    ]


def test_states_are_padded_to_the_pages_of_attention():
    # As Jamba does. 128 bytes of attention a block are more than the 100 of a state.
    layers = model("mmmmfmmm" * 2, m=MAMBA, f=FULL)
    padded = MambaSpec(block_size=16, state_bytes=100, page_size_padded=128)
    assert written(get_kv_cache_groups(layers)) == [
        ("m0 m8", padded),
        ("m1 m9", padded),
        ("m2 m10", padded),
        ("m3 m11", padded),
        ("m5 m13", padded),
        ("m6 m14", padded),
        ("m7 m15", padded),
        ("f4 f12", FULL),
    ]


def test_a_state_is_padded_even_if_several_would_fill_the_page():
    layers = model("mf", m=MambaSpec(block_size=16, state_bytes=64), f=FULL)
    assert written(get_kv_cache_groups(layers)) == [
        ("m0", MambaSpec(block_size=16, state_bytes=64, page_size_padded=128)),
        ("f1", FULL),
    ]


def test_attention_takes_more_tokens_a_block_to_fill_the_page_of_a_state():
    layers = model("mf", m=MambaSpec(block_size=64, state_bytes=512), f=FULL)
    assert written(get_kv_cache_groups(layers)) == [
        ("m0", layers["m0"]),
        ("f1", FullAttentionSpec(block_size=64, token_bytes=8)),
    ]


def test_attention_is_padded_where_no_number_of_tokens_fills_the_page():
    layers = model("mf", m=MambaSpec(block_size=64, state_bytes=500), f=FULL)
    assert written(get_kv_cache_groups(layers)) == [
        ("m0", layers["m0"]),
        ("f1", FullAttentionSpec(block_size=16, token_bytes=8, page_size_padded=500)),
    ]


def test_a_padded_page_grows_with_its_padding():
    window = SlidingWindowSpec(block_size=16, token_bytes=7, page_size_padded=128, sliding_window=40)
    layers = model("sf", s=window, f=FullAttentionSpec(block_size=16, token_bytes=16))
    assert written(get_kv_cache_groups(layers)) == [
        ("s0", SlidingWindowSpec(block_size=32, token_bytes=7, page_size_padded=256, sliding_window=40)),
        ("f1", layers["f1"]),
    ]


def test_nearly_equal_numbers_of_layers_are_two_groups_and_not_three():
    # As gpt-oss with a drafting head: 12 windows and 13 full layers, the first group is padded by one layer.
    layers = model("sf" * 12 + "f", s=WINDOW, f=FULL)
    windows, full = get_kv_cache_groups(layers, eagle_layers=["f24"])
    assert windows.layer_names == tuple(f"s{index}" for index in range(0, 24, 2))
    assert full.layer_names == (*(f"f{index}" for index in range(1, 24, 2)), "f24")
    assert not windows.is_eagle_group
    assert full.is_eagle_group


def test_from_one_and_a_half_times_the_layers_on_the_rarest_kind_decides():
    assert [len(group.layer_names) for group in get_kv_cache_groups(model("ssfffff", s=WINDOW, f=FULL))] == [2, 2, 2, 1]
    assert [len(group.layer_names) for group in get_kv_cache_groups(model("ssfff", s=WINDOW, f=FULL))] == [2, 2, 1]
    assert [len(group.layer_names) for group in get_kv_cache_groups(model("sssffff", s=WINDOW, f=FULL))] == [3, 4]


def test_every_stage_of_a_pipeline_has_its_share_of_every_group():
    layers = model("ssfssf", s=WINDOW, f=FULL)
    assert [names for names, _ in written(get_kv_cache_groups(layers))] == ["s0 s3", "s1 s4", "f2 f5"]


def test_kinds_that_one_spec_can_stand_for_are_one_kind_of_a_hybrid_model_too():
    local = FullAttentionSpec(block_size=16, token_bytes=8, sliding_window=40)
    layers = model("fwss", f=FULL, w=local, s=WINDOW)
    assert written(get_kv_cache_groups(layers)) == [("f0 w1", local), ("s2 s3", WINDOW)]


def test_an_encoder_s_layers_are_groups_of_their_own():
    layers = model("fxfx", f=FULL, x=CROSS)
    assert written(get_kv_cache_groups(layers)) == [("f0 f2", FULL), ("x1 x3", CROSS)]


def test_every_group_with_a_layer_of_the_drafting_head_is_marked():
    layers = model("ssf" * 2, s=WINDOW, f=FULL)
    groups = get_kv_cache_groups(layers, eagle_layers=["s3", "f5"])
    assert [group.is_eagle_group for group in groups] == [True, False, True]
    (group,) = get_kv_cache_groups(model("ff", f=FULL), eagle_layers=["f1"])
    assert group.is_eagle_group


def test_a_drafting_head_of_another_model_is_refused():
    with pytest.raises(ConfigError, match=r"eagle_layers has f9, which is none of the layers \['f0'\]"):
        get_kv_cache_groups(model("f", f=FULL), eagle_layers=["f9"])


# From hybrid to full


def test_windows_are_kept_as_full_attention_when_asked():
    layers = model("sf", s=WINDOW, f=FULL)
    assert written(get_kv_cache_groups(layers, disable_hybrid_kv_cache_manager=True)) == [
        ("s0 f1", FullAttentionSpec(block_size=16, token_bytes=8, sliding_window=40))
    ]


def test_chunks_are_kept_as_full_attention_when_asked():
    layers = model("ccf", c=CHUNKED, f=FULL)
    assert written(get_kv_cache_groups(layers, disable_hybrid_kv_cache_manager=True)) == [
        ("c0 c1 f2", FullAttentionSpec(block_size=16, token_bytes=8, attention_chunk_size=64))
    ]


def test_windows_take_the_block_size_of_full_attention_when_they_are_kept_so():
    window = SlidingWindowSpec(block_size=4, token_bytes=24, page_size_padded=128, sliding_window=40)
    layers = model("sf", s=window, f=FULL)
    as_full = FullAttentionSpec(block_size=16, token_bytes=24, page_size_padded=384, sliding_window=40)
    assert written(get_kv_cache_groups(layers, disable_hybrid_kv_cache_manager=True)) == [
        ("s0 f1", UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={"s0": as_full, "f1": FULL}))
    ]


def test_windows_and_chunks_together_are_kept_as_full_attention():
    layers = model("scf", s=WINDOW, c=CHUNKED, f=FULL)
    ((names, spec),) = written(get_kv_cache_groups(layers, disable_hybrid_kv_cache_manager=True))
    assert names == "s0 c1 f2"
    assert isinstance(spec, UniformTypeKVCacheSpecs)
    assert all(isinstance(layer, FullAttentionSpec) for layer in spec.kv_cache_specs.values())


@pytest.mark.parametrize("spec", [WINDOW, CHUNKED, MAMBA])
def test_a_model_of_one_kind_stays_as_it_is(spec):
    assert get_kv_cache_groups(model("xx", x=spec), disable_hybrid_kv_cache_manager=True) == get_kv_cache_groups(
        model("xx", x=spec)
    )


@pytest.mark.parametrize(
    ("layers", "named"),
    [
        (model("mmf", m=MAMBA, f=FULL), "2 x mamba in blocks of 16, 1 x full_attention in blocks of 16"),
        (model("fx", f=FULL, x=CROSS), "cross_attention"),
        (model("sc", s=WINDOW, c=CHUNKED), "1 x sliding_window in blocks of 16, 1 x chunked_local_attention"),
        (model("fg", f=FULL, g=FullAttentionSpec(block_size=32, token_bytes=8)), "1 x full_attention in blocks of 32"),
        (
            model("fst", f=FULL, s=WINDOW, t=SlidingWindowSpec(block_size=16, token_bytes=8, sliding_window=80)),
            r"several sliding_window: \[40, 80\]",
        ),
    ],
)
def test_what_can_not_be_kept_as_full_attention_is_refused(layers, named):
    with pytest.raises(ConfigError, match=named):
        get_kv_cache_groups(layers, disable_hybrid_kv_cache_manager=True)


def test_the_layers_that_are_given_stay_as_they_are():
    layers = model("smf", s=WINDOW, m=MambaSpec(block_size=16, state_bytes=512), f=FULL)
    before = dict(layers)
    get_kv_cache_groups(layers)
    assert layers == before


# What holds for all models

SPECS = st.one_of(
    st.builds(
        FullAttentionSpec,
        block_size=st.sampled_from([16, 32]),
        token_bytes=st.sampled_from([8, 16, 24]),
        sliding_window=st.sampled_from([None, None, 40]),
    ),
    st.builds(
        SlidingWindowSpec,
        block_size=st.just(16),
        token_bytes=st.sampled_from([8, 24]),
        sliding_window=st.sampled_from([40, 80]),
    ),
    st.builds(
        ChunkedLocalAttentionSpec,
        block_size=st.just(16),
        token_bytes=st.just(8),
        attention_chunk_size=st.just(64),
        page_size_padded=st.sampled_from([None, 150]),
    ),
    st.builds(MambaSpec, block_size=st.sampled_from([16, 64]), state_bytes=st.sampled_from([100, 500, 1024])),
)


@given(st.lists(SPECS, min_size=1, max_size=4).flatmap(lambda kinds: st.lists(st.sampled_from(kinds), max_size=24)))
def test_groups_of_any_model(specs):
    layers = {str(index): spec for index, spec in enumerate(specs)}
    groups = get_kv_cache_groups(layers)

    # Each layer is in exactly one group, and still of its kind there.
    assert sorted(name for group in groups for name in group.layer_names) == sorted(layers)
    for group in groups:
        for name, spec in zip(group.layer_names, group.layer_specs, strict=True):
            assert type(spec) is type(layers[name])
            assert spec.unpadded_page_size_bytes >= layers[name].unpadded_page_size_bytes

    # A block takes the same bytes in each group, the padding layers counted: as many layers of equal pages.
    if len(groups) > 1:
        assert len({spec.page_size_bytes for group in groups for spec in group.layer_specs}) == 1
        assert max(spec.page_size_bytes for spec in specs) == groups[0].kv_cache_spec.page_size_bytes
