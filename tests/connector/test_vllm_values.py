"""What is read out of vLLM's objects, from plain objects that look like them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="reads an engine's tensors")

from connector.vllm_values import model_of, rows_of  # noqa: E402
from kvstore.errors import ResourceError  # noqa: E402


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
        load_config=SimpleNamespace(download_dir=None, load_format="auto"),
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
        ("cache_config", "cache_dtype", "fp8"),
    ],
)
def test_what_changes_numbers_changes_the_model(config: SimpleNamespace, part: str, field: str, value: Any) -> None:
    before = model_of(config).version
    assert model_of(config).version == before
    setattr(getattr(config, part), field, value)
    assert model_of(config).version != before


def test_weights_that_are_nowhere_here_are_an_error_of_ours(config: SimpleNamespace) -> None:
    pytest.importorskip("huggingface_hub", reason="looks into the hub's cache")
    for model in ("org/repo:Q4_K_M", "s3://bucket/model", "org/none-such"):
        config.model_config.model = model
        with pytest.raises(ResourceError, match="in no folder of this machine"):
            model_of(config)
