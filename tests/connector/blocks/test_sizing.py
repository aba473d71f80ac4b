import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.connector.blocks.cache_config import KVCacheConfig, KVCacheGroupSpec
from kvstore.connector.blocks.grouping import get_kv_cache_groups
from kvstore.connector.blocks.sizing import (
    bytes_per_block,
    estimate_max_model_len,
    get_kv_cache_configs,
    max_concurrency,
    max_memory_bytes,
    scheduler_config,
)
from kvstore.connector.blocks.specs import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    Limits,
    MambaSpec,
    SlidingWindowSpec,
    UniformTypeSpecs,
)
from kvstore.errors import ConfigError

FULL = FullAttentionSpec(block_size=16, token_bytes=8)  # pages of 128 bytes
LARGE = FullAttentionSpec(block_size=16, token_bytes=24)
WINDOW = SlidingWindowSpec(block_size=16, token_bytes=8, sliding_window=33)
LIMITS = Limits(max_model_len=64)  # 4 blocks of full attention

TWO_FULL = {"a": FULL, "b": FULL}  # blocks of 256 bytes


# The number of blocks


def test_the_memory_is_filled_with_whole_blocks():
    (config,) = get_kv_cache_configs([TWO_FULL], [2559], LIMITS)
    assert config == KVCacheConfig(9, (KVCacheGroupSpec(("a", "b"), FULL),))


def test_pages_of_several_sizes_make_one_block():
    layers = {"a": FULL, "b": LARGE}
    (config,) = get_kv_cache_configs([layers], [5120], LIMITS)
    assert config == KVCacheConfig(10, (KVCacheGroupSpec(("a", "b"), UniformTypeSpecs(block_size=16, specs=layers)),))


def test_groups_share_the_memory_of_a_block():
    layers = {"s0": WINDOW, "s1": WINDOW, "f0": FULL}
    (config,) = get_kv_cache_configs([layers], [12_800], LIMITS)
    assert len(config.kv_cache_groups) == 3
    assert config.num_blocks == 100


def test_an_override_wins_over_the_memory():
    for available in (0, 2560, 10**9):
        (config,) = get_kv_cache_configs([TWO_FULL], [available], LIMITS, num_blocks_override=7)
        assert config.num_blocks == 7


def test_a_model_without_attention_has_the_null_block_alone():
    assert get_kv_cache_configs([{}, {}], [0, 10**9], LIMITS) == [KVCacheConfig(1, ())] * 2
    assert get_kv_cache_configs([{}], [0], LIMITS, num_blocks_override=7) == [KVCacheConfig(1, ())]


# Workers


def test_the_worker_with_least_room_decides():
    configs = get_kv_cache_configs([TWO_FULL, TWO_FULL], [25_600, 5120], LIMITS)
    assert [config.num_blocks for config in configs] == [20, 20]


def test_each_stage_of_a_pipeline_has_its_own_layers_of_the_same_groups():
    first = {"s0": WINDOW, "s1": WINDOW, "f2": FULL}
    second = {"s3": WINDOW, "s4": WINDOW, "f5": FULL}
    configs = get_kv_cache_configs([first, second], [12_800, 25_600], LIMITS)
    assert configs == [
        KVCacheConfig(
            100,
            (
                KVCacheGroupSpec(("s0",), WINDOW),
                KVCacheGroupSpec(("s1",), WINDOW),
                KVCacheGroupSpec(("f2",), FULL),
            ),
        ),
        KVCacheConfig(
            100,
            (
                KVCacheGroupSpec(("s3",), WINDOW),
                KVCacheGroupSpec(("s4",), WINDOW),
                KVCacheGroupSpec(("f5",), FULL),
            ),
        ),
    ]


def test_a_stage_takes_memory_for_its_own_layers_only():
    # 3 layers here, 1 there: equal memory is 3 times as many blocks there, and the fewer win.
    configs = get_kv_cache_configs([{"a": FULL, "b": LARGE, "c": FULL}, {"d": FULL}], [6400, 6400], LIMITS)
    assert [config.num_blocks for config in configs] == [10, 10]
    assert [bytes_per_block(config.kv_cache_groups) for config in configs] == [640, 128]
    (group,) = configs[0].kv_cache_groups
    assert group.kv_cache_spec == UniformTypeSpecs(block_size=16, specs={"a": FULL, "b": LARGE, "c": FULL})


def test_a_stage_without_layers_has_no_say():
    configs = get_kv_cache_configs([{}, TWO_FULL], [0, 2560], LIMITS)
    assert configs == [
        KVCacheConfig(10, (KVCacheGroupSpec((), FULL),)),
        KVCacheConfig(10, (KVCacheGroupSpec(("a", "b"), FULL),)),
    ]
    configs = get_kv_cache_configs([{"a": FULL, "b": LARGE}, {}], [5120, 0], LIMITS)
    assert [config.num_blocks for config in configs] == [10, 10]
    assert [group.layer_names for group in configs[1].kv_cache_groups] == [()]


def test_a_layer_that_differs_between_workers_is_named():
    with pytest.raises(ConfigError, match=r"layer b differs between workers: .*token_bytes=8.*token_bytes=24"):
        get_kv_cache_configs([TWO_FULL, {"a": FULL, "b": LARGE}], [10**6, 10**6], LIMITS)


def test_every_worker_has_a_number_of_bytes():
    with pytest.raises(ConfigError, match="got 2 workers and 1 numbers"):
        get_kv_cache_configs([TWO_FULL, TWO_FULL], [10**6], LIMITS)
    with pytest.raises(ConfigError, match="at least 1 worker"):
        get_kv_cache_configs([], [], LIMITS)


def test_options_reach_the_groups():
    layers = {"s0": WINDOW, "f0": FULL}
    (config,) = get_kv_cache_configs(
        [layers], [10**6], LIMITS, disable_hybrid_kv_cache_manager=True, eagle_layers=["f0"]
    )
    assert config.kv_cache_groups == get_kv_cache_groups(
        layers, disable_hybrid_kv_cache_manager=True, eagle_layers=["f0"]
    )
    assert len(config.kv_cache_groups) == 1


def test_a_group_of_the_drafting_head_is_marked_on_all_workers():
    configs = get_kv_cache_configs(
        [{"s0": WINDOW}, {"s1": WINDOW, "d2": FULL}], [10**6] * 2, LIMITS, eagle_layers=["d2"]
    )
    for config in configs:
        assert [group.is_eagle_group for group in config.kv_cache_groups] == [False, False, True]


@pytest.mark.parametrize(
    "spec", [WINDOW, ChunkedLocalAttentionSpec(block_size=16, token_bytes=8, attention_chunk_size=32)]
)
def test_ranks_do_not_share_the_blocks_of_windows_and_chunks(spec):
    limits = Limits(max_model_len=64, context_parallel_size=2)
    with pytest.raises(ConfigError, match=f"context_parallel_size must be 1 with layers of {spec.kind} like s, got 2"):
        get_kv_cache_configs([{"s": spec}], [10**6], limits)
    layers = {"f": FULL, "m": MambaSpec(block_size=32, state_bytes=128)}
    (config,) = get_kv_cache_configs([layers], [1280], limits)
    assert config.num_blocks == 10


# The memory check


def test_one_request_and_the_null_block_must_fit():
    (config,) = get_kv_cache_configs([TWO_FULL], [5 * 256], LIMITS)
    assert config.num_blocks == 5
    with pytest.raises(ConfigError) as refused:
        get_kv_cache_configs([TWO_FULL], [5 * 256 - 1], LIMITS)
    assert str(refused.value) == (
        "a request of max_model_len = 64 tokens needs 1280 bytes of KV cache (256 of them for the null block),"
        " worker 0 has 1279 bytes available; the longest that fits has about 48 tokens"
    )


@pytest.mark.parametrize("available", [-1, 0, 256, 511])
def test_without_room_for_one_token_no_length_is_estimated(available):
    with pytest.raises(ConfigError, match=f"worker 0 has {available} bytes available; not even one of 1 token fits"):
        get_kv_cache_configs([TWO_FULL], [available], LIMITS)


def test_the_worker_that_lacks_memory_is_named():
    with pytest.raises(ConfigError, match=r"worker 1 has 768 bytes available; .* about 32 tokens"):
        get_kv_cache_configs([TWO_FULL, TWO_FULL], [10**6, 768], LIMITS)


def test_an_override_must_hold_a_request_too():
    with pytest.raises(ConfigError, match=r"768 bytes in num_blocks_override = 3 blocks; .* about 32 tokens"):
        get_kv_cache_configs([TWO_FULL], [10**6], LIMITS, num_blocks_override=3)
    with pytest.raises(ConfigError, match="num_blocks_override must be an integer of at least 1, got 0"):
        get_kv_cache_configs([TWO_FULL], [10**6], LIMITS, num_blocks_override=0)


# Requests


def test_a_request_takes_blocks_of_every_group():
    groups = get_kv_cache_groups({"s0": WINDOW, "s1": WINDOW, "f0": FULL})
    limits = Limits(max_model_len=160, max_in_flight_tokens=16)
    # 10 blocks of full attention; in each window 32 tokens before, 16 under way, and one block more.
    assert max_memory_bytes(groups, limits) == (10 + 4 + 4) * 128
    assert max_concurrency(KVCacheConfig(45, groups), limits) == 2.5


def test_the_estimated_length_is_the_longest_that_fits():
    groups = get_kv_cache_groups({"s0": WINDOW, "f0": FULL})
    limits = Limits(max_model_len=1000, max_in_flight_tokens=16)
    assert max_memory_bytes(groups, limits) == (63 + 4) * 128
    assert estimate_max_model_len(groups, limits, 67 * 128) == 1000
    assert estimate_max_model_len(groups, limits, 67 * 128 - 1) == 62 * 16
    assert estimate_max_model_len(groups, limits, 2 * 128) == 0  # a window of one token has two blocks
    assert estimate_max_model_len(groups, limits, 3 * 128) == 16


def test_a_recurrent_model_holds_requests_of_any_length():
    groups = get_kv_cache_groups({"m": MambaSpec(block_size=16, state_bytes=100)})
    assert estimate_max_model_len(groups, Limits(max_model_len=10**9), 100) == 10**9
    assert max_concurrency(KVCacheConfig(8, groups), Limits(max_model_len=10**9)) == 8.0


def test_requests_that_need_no_blocks_are_unlimited():
    assert max_concurrency(KVCacheConfig(1, ()), LIMITS) == math.inf
    cross = KVCacheGroupSpec(("x",), CrossAttentionSpec(block_size=16, token_bytes=8))
    assert max_concurrency(KVCacheConfig(1, (cross,)), LIMITS) == math.inf


# The scheduler's configuration


def test_the_scheduler_has_one_spec_a_group():
    layers = {"a": LARGE, "b": FULL}
    configs = get_kv_cache_configs([layers, {"c": FULL}], [10**6, 10**6], LIMITS, eagle_layers=["c"])
    assert scheduler_config(configs) == KVCacheConfig(
        configs[0].num_blocks, (KVCacheGroupSpec(("a", "b"), LARGE, is_eagle_group=True),)
    )
    assert max_concurrency(scheduler_config(configs), LIMITS) == max_concurrency(configs[0], LIMITS)


def test_configurations_of_several_engines_are_refused():
    group = KVCacheGroupSpec(("a",), FULL)
    with pytest.raises(ConfigError, match="workers differ in num_blocks: 5 and 6"):
        scheduler_config([KVCacheConfig(5, (group,)), KVCacheConfig(6, (group,))])
    with pytest.raises(ConfigError, match="workers differ in their groups: 1 and 0"):
        scheduler_config([KVCacheConfig(5, (group,)), KVCacheConfig(5, ())])
    with pytest.raises(ConfigError, match="at least 1 worker"):
        scheduler_config([])


# What holds for all models

MODELS = st.lists(
    st.sampled_from([FULL, LARGE, WINDOW, MambaSpec(block_size=16, state_bytes=300)]), min_size=1, max_size=12
).map(lambda specs: {str(index): spec for index, spec in enumerate(specs)})


def worker_bytes(config: KVCacheConfig) -> int:
    return config.num_blocks * bytes_per_block(config.kv_cache_groups)


@given(
    layers=MODELS,
    available=st.lists(st.integers(0, 300_000), min_size=1, max_size=3),
    max_model_len=st.integers(1, 300),
)
def test_blocks_never_take_more_than_the_memory(layers, available, max_model_len):
    limits = Limits(max_model_len=max_model_len, max_in_flight_tokens=32)
    workers: list[dict[str, KVCacheSpec]] = [{} for _ in available]
    for index, name in enumerate(layers):
        workers[index % len(workers)][name] = layers[name]
    try:
        configs = get_kv_cache_configs(workers, available, limits)
    except ConfigError:
        return
    assert len({config.num_blocks for config in configs}) == 1
    for config, layers_here, room in zip(configs, workers, available, strict=True):
        if layers_here:
            assert worker_bytes(config) <= room
        assert {name for group in config.kv_cache_groups for name in group.layer_names} == set(layers_here)
    # One block more would not fit on some worker.
    assert any(
        room < worker_bytes(config) + bytes_per_block(config.kv_cache_groups)
        for config, room in zip(configs, available, strict=True)
    )
    # A request fits beside the null block.
    assert max_concurrency(configs[0], limits) > 1


@given(layers=MODELS, available=st.integers(0, 300_000), more=st.integers(0, 100_000))
def test_more_memory_never_holds_less(layers, available, more):
    limits = Limits(max_model_len=200, max_in_flight_tokens=32)
    groups = get_kv_cache_groups(layers)
    assert estimate_max_model_len(groups, limits, available) <= estimate_max_model_len(groups, limits, available + more)
    try:
        (less,) = get_kv_cache_configs([layers], [available], limits)
    except ConfigError:
        return
    (greater,) = get_kv_cache_configs([layers], [available + more], limits)
    assert less.num_blocks <= greater.num_blocks


@given(layers=MODELS, available=st.integers(0, 300_000))
def test_the_estimate_is_what_the_check_accepts(layers, available):
    limits = Limits(max_model_len=300, max_in_flight_tokens=32)
    groups = get_kv_cache_groups(layers)
    longest = estimate_max_model_len(groups, limits, available - bytes_per_block(groups))
    if longest:
        get_kv_cache_configs([layers], [available], Limits(max_model_len=longest, max_in_flight_tokens=32))
    if longest < limits.max_model_len:
        with pytest.raises(ConfigError):
            get_kv_cache_configs([layers], [available], Limits(max_model_len=longest + 1, max_in_flight_tokens=32))
