"""What is read out of vLLM's objects, from plain objects that look like them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="reads an engine's tensors")

from kvstore.connector.engine.values import (  # noqa: E402
    cache_group,
    check_groups,
    check_model,
    layers_of,
    model_of,
    rows_by_part,
    rows_of,
    touches_early,
)
from kvstore.errors import ConfigError, ResourceError  # noqa: E402
from kvstore.gpu.mixed import paged_kv  # noqa: E402


def test_a_block_that_is_one_run_of_bytes_is_a_row() -> None:
    whole = torch.arange(4 * 2 * 8 * 6, dtype=torch.int16).view(4, 2, 8, 6)
    rows = rows_of(whole, 2 * 8 * 6 * 2)
    assert torch.equal(rows[3].view(torch.int16), whole[3].flatten())
    turned = whole.view(4, 8, 2, 6).transpose(1, 2)  # shown in another order than it lies
    assert torch.equal(rows_of(turned, 192), rows)
    padded = torch.zeros(4, 256, dtype=torch.uint8)[:, :192].view(4, 2, 96)
    assert rows_of(padded, 256).shape == (4, 256)
    assert rows_of(padded, 192).stride() == (256, 1)


def test_a_block_of_which_parts_lie_elsewhere_is_refused() -> None:
    heads_outside = torch.zeros(2, 4, 8, 6).transpose(0, 1)  # all blocks of one head, then of the next
    with pytest.raises(ResourceError, match="not one run of bytes"):
        rows_of(heads_outside, 2 * 8 * 6 * 4)
    with pytest.raises(ResourceError, match="not one run of bytes"):
        rows_of(torch.zeros(4, 96, dtype=torch.uint8), 128)  # pages longer than from block to block


@dataclass(frozen=True)
class Spec:
    """As much of a ``FullAttentionSpec`` as is read."""

    num_kv_heads: int
    block_size: int = 8
    head_size: int = 6
    page_size_bytes: int = 0
    dtype: torch.dtype = torch.float32


def group_of(heads: int) -> SimpleNamespace:
    return SimpleNamespace(kv_cache_spec=Spec(heads), layer_names=["0", "1"])


def test_heads_are_cut_into_what_ranks_have() -> None:
    whole = {name: torch.randn(5, 4, 8, 6) for name in ("0", "1")}
    first, second = rows_by_part(group_of(4), whole, 2)
    of_rank = {name: blocks[:, 2:].contiguous() for name, blocks in whole.items()}
    (alone,) = rows_by_part(group_of(2), of_rank, 1)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(second, alone, strict=True))
    assert first[0].shape == (5, 2 * 8 * 6 * 4)
    # So both have one name, and are told from what is cut otherwise.
    described = cache_group(group_of(4), whole, 2 * 384, ["vllm"], lambda _: "", 2)
    assert described == cache_group(group_of(2), of_rank, 2 * 384, ["vllm"], lambda _: "", 1)
    assert described == cache_group(group_of(2), of_rank, 2 * 384, ["vllm"], lambda _: "")
    assert described != cache_group(group_of(4), whole, 4 * 384, ["vllm"], lambda _: "")


def unlike_group(heads: Sequence[int]) -> SimpleNamespace:
    """As vLLM puts layers of several shapes into one."""
    specs = {str(number): Spec(count, page_size_bytes=count * 8 * 6 * 4) for number, count in enumerate(heads)}
    return SimpleNamespace(kv_cache_spec=SimpleNamespace(kv_cache_specs=specs, block_size=8), layer_names=[*specs])


def test_layers_of_one_size_lie_beside_each_other_and_else_in_the_engines_order() -> None:
    assert [name for name, _ in layers_of(unlike_group([4, 2, 4, 6, 2]))] == ["0", "2", "1", "4", "3"]
    assert [name for name, _ in layers_of(unlike_group([4, 4, 4]))] == ["0", "1", "2"]
    alike = SimpleNamespace(kv_cache_spec=Spec(4), layer_names=["b", "a", "c"])
    assert [name for name, _ in layers_of(alike)] == ["b", "a", "c"]


def test_pages_of_layers_with_other_heads_are_those_of_ranks_that_have_a_part_of_each() -> None:
    whole = {name: torch.randn(5, heads, 8, 6) for name, heads in (("0", 4), ("1", 2), ("2", 4))}
    of_rank = {name: blocks[:, blocks.shape[1] // 2 :].contiguous() for name, blocks in whole.items()}
    _, second = rows_by_part(unlike_group([4, 2, 4]), whole, 2)
    (alone,) = rows_by_part(unlike_group([2, 1, 2]), of_rank, 0)
    pages = [np.zeros(5 * 8 * 6 * 4, np.uint8) for _ in range(2)]
    for rows, page in zip((second, alone), pages, strict=True):
        paged_kv(rows).gather([3], [page])
    assert pages[0].tobytes() == pages[1].tobytes()
    assert pages[0].tobytes() == b"".join(of_rank[name][3].numpy().tobytes() for name in ("0", "2", "1"))
    described = cache_group(unlike_group([2, 1, 2]), of_rank, 960, ["vllm"], lambda _: "")
    assert described != cache_group(unlike_group([2, 2, 1]), of_rank, 960, ["vllm"], lambda _: "")


@pytest.mark.parametrize(
    ("blocks", "parts", "says"),
    [
        (torch.zeros(5, 4, 8, 6), 3, "4 KV heads of 0 can't be cut into 3"),
        (torch.zeros(5, 8, 4, 6).transpose(1, 2), 2, "do not come first in a block"),
        (torch.zeros(5, 2, 4, 4, 6), 2, "don't show their KV heads"),
        (torch.zeros(5, 8, 6), 2, "don't show their KV heads"),
    ],
)
def test_heads_that_can_not_be_cut_are_refused(blocks: torch.Tensor, parts: int, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        rows_by_part(group_of(4), {"0": blocks, "1": blocks}, parts)


@pytest.fixture
def config(tmp_path: Path) -> SimpleNamespace:
    (tmp_path / "model.bin").write_bytes(b"weights")
    model = SimpleNamespace(
        model=str(tmp_path),
        revision=None,
        dtype="bf16",
        quantization=None,
        quantization_config=None,
        model_impl="auto",
        override_attention_dtype=None,
        max_model_len=10,
        multimodal_config=None,
        hf_config=SimpleNamespace(to_dict=lambda: {"architectures": ["A"]}),
    )
    return SimpleNamespace(
        model_config=model,
        load_config=SimpleNamespace(download_dir=None, load_format="auto", model_loader_extra_config={}),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        lora_config=None,
        speculative_config=None,
    )


@pytest.mark.parametrize(
    ("part", "field", "value"),
    [
        ("model_config", "dtype", "f16"),
        ("model_config", "quantization", "fp8"),
        ("model_config", "quantization_config", {"bits": 4}),
        ("model_config", "model_impl", "transformers"),
        ("model_config", "override_attention_dtype", "f16"),
        (
            "model_config",
            "multimodal_config",
            SimpleNamespace(mm_processor_kwargs={"crops": 4}, video_pruning_rate=None),
        ),
        ("model_config", "multimodal_config", SimpleNamespace(mm_processor_kwargs=None, video_pruning_rate=0.5)),
        ("model_config", "hf_config", SimpleNamespace(to_dict=lambda: {"architectures": ["B"]})),
        ("load_config", "load_format", "dummy"),
        ("load_config", "model_loader_extra_config", {"tensorizer_uri": "s3://bucket/other"}),
        ("cache_config", "cache_dtype", "fp8"),
    ],
)
def test_what_changes_numbers_changes_the_model(config: SimpleNamespace, part: str, field: str, value: Any) -> None:
    before = model_of(config).version
    assert model_of(config).version == before
    setattr(getattr(config, part), field, value)
    assert model_of(config).version != before


def test_a_drafter_counts_where_its_layers_are_in_the_pages(config: SimpleNamespace) -> None:
    plain = model_of(config).version
    for has_layers in (False, True):
        config.speculative_config = SimpleNamespace(
            method="any", draft_model_config=None, uses_draft_kv_cache=lambda has_layers=has_layers: has_layers
        )
        assert (model_of(config).version != plain) is has_layers


def test_weights_that_are_nowhere_here_are_an_error_of_ours(config: SimpleNamespace) -> None:
    pytest.importorskip("huggingface_hub", reason="looks into the hub's cache")
    for model in ("org/repo:Q4_K_M", "s3://bucket/model", "org/none-such"):
        config.model_config.model = model
        with pytest.raises(ResourceError, match="in no folder on this machine"):
            model_of(config)


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ({"pooler_config": object(), "is_prefix_caching_supported": False}, "does not serve this pooling model"),
        ({"is_diffusion": True}, "diffusion"),
        ({"pooler_config": object()}, None),
        ({"is_prefix_caching_supported": False}, None),  # states alone: kvstore finds them by prefix
    ],
)
def test_models_that_compute_their_tokens_at_once_are_refused(model: dict[str, Any], says: str | None) -> None:
    plain = {"pooler_config": None, "is_prefix_caching_supported": True, "is_diffusion": False}
    with pytest.raises(ResourceError, match=says) if says else nullcontext():
        check_model(SimpleNamespace(**(plain | model)))


def test_layers_in_which_tokens_attend_to_later_ones_are_refused() -> None:
    class FullAttentionSpec(SimpleNamespace):
        pass

    for non_causal in (False, True):
        spec = FullAttentionSpec(non_causal=non_causal, prefix_replay_tokens=0, page_size_bytes=64)
        groups = [SimpleNamespace(kv_cache_spec=spec, layer_names=["0"])]
        of_model = SimpleNamespace(kv_cache_groups=groups, prefix_cacheable_group_ids=(0,))
        with pytest.raises(ResourceError, match="attends to later ones") if non_causal else nullcontext():
            check_groups(of_model)


class MambaSpec(SimpleNamespace):
    """As much of vLLM's as is read."""


def caches(*specs: Any, **fields: Any) -> SimpleNamespace:
    groups = [SimpleNamespace(kv_cache_spec=spec, layer_names=["0"]) for spec in specs]
    return SimpleNamespace(kv_cache_groups=groups, **fields)


PLAIN: dict[str, Any] = {"needs_kv_cache_zeroing": False}


@pytest.mark.parametrize(
    ("config", "hash_block_size", "early"),
    [
        (caches(Spec(1), **PLAIN), 8, False),
        (caches(Spec(1), Spec(2), **PLAIN), 8, False),
        (caches(Spec(1), needs_kv_cache_zeroing=True), 8, True),
        (caches(Spec(1)), 8, True),  # a release that does not say
        (caches(Spec(1), MambaSpec(block_size=8, page_size_bytes=0), **PLAIN), 8, True),
        (caches(Spec(1), **PLAIN), 4, True),  # hits may end inside a block, which is copied then
    ],
)
def test_whether_blocks_may_be_touched_before_they_are_told_of(
    config: SimpleNamespace, hash_block_size: int, early: bool
) -> None:
    assert touches_early(config, hash_block_size, True) is early
    assert touches_early(config, hash_block_size, False) is False
