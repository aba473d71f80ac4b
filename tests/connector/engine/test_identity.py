"""Equal weights and settings make the same namespace, at whatever path; any difference makes another one."""

from __future__ import annotations

import fcntl
import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from engine_objects import HfConfig, ModelConfig, MultiModalConfig, SpeculativeConfig, VllmConfig

from kvstore.connector.engine import weights
from kvstore.connector.engine.identity import (
    CacheGroup,
    Model,
    Place,
    layouts,
    model_of,
)
from kvstore.connector.engine.weights import weights_fingerprint
from kvstore.errors import ResourceError


def write_safetensors(file: Path, tensors: dict[str, bytes]) -> None:
    header, at = {}, 0
    for name, data in tensors.items():
        header[name] = {"dtype": "U8", "shape": [len(data)], "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(tensors.values()))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    numbers = np.random.default_rng(0)
    write_safetensors(folder / "a.safetensors", {"one": numbers.bytes(100_000), "two": numbers.bytes(40)})
    (folder / "config.json").write_text("{}")
    return folder


def test_the_same_weights_at_another_path_are_the_same(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "elsewhere"
    shutil.copytree(folder, copy)
    (copy / "README.md").write_text("more")
    assert weights_fingerprint(copy) == weights_fingerprint(folder)


def test_a_change_of_any_bit_is_seen(folder: Path) -> None:
    file = folder / "a.safetensors"
    data = bytearray(file.read_bytes())
    seen = {weights_fingerprint(folder)}
    for place in (9, len(data) // 3, len(data) - 1):
        data[place] ^= 1
        file.write_bytes(data)
        seen.add(weights_fingerprint(folder))
        data[place] ^= 1
    assert len(seen) == 4


def test_a_change_in_any_chunk_of_a_long_file_is_seen(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "CHUNK", 1000)
    (folder / "a.safetensors").unlink()
    file = folder / "pytorch_model.bin"
    data = bytearray(2500)
    file.write_bytes(data)
    seen = {weights_fingerprint(folder)}
    for place in (0, 1500, 2499):
        data[place] ^= 1
        file.write_bytes(data)
        seen.add(weights_fingerprint(folder))
    file.write_bytes(data[1000:2000] + data[:1000] + data[2000:])
    assert len(seen | {weights_fingerprint(folder)}) == 5


def test_files_that_are_as_they_were_are_not_read_again(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = tmp_path / "memory"
    monkeypatch.setattr(weights, "SETTLED", -1.0)
    before = weights_fingerprint(folder, memory)
    reads: list[object] = []
    read = weights._read
    monkeypatch.setattr(weights, "_read", lambda files: reads.append(files) or read(files))
    assert weights_fingerprint(folder, memory) == before
    assert reads == []
    assert memory.stat().st_mode & 0o077 == 0
    data = (folder / "a.safetensors").read_bytes()
    (folder / "a.safetensors").write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert weights_fingerprint(folder, memory) != before
    assert len(reads) == 1


def test_files_that_may_still_be_written_are_read_each_time(folder: Path, tmp_path: Path) -> None:
    memory = tmp_path / "memory"
    assert weights_fingerprint(folder, memory) == weights_fingerprint(folder, memory)
    assert [each.read_bytes() for each in memory.iterdir()] == [b""]


def test_files_whose_times_are_whole_seconds_are_read_each_time(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in an image, where other weights may have the same."""
    memory, stat = tmp_path / "memory", Path.stat

    def stat_in_image(path: Path, **how: bool) -> SimpleNamespace:
        told = stat(path, **how)
        fields = {name: getattr(told, name) for name in dir(told) if name.startswith("st_")}
        return SimpleNamespace(**(fields | {"st_mtime_ns": 0, "st_ctime_ns": 0, "st_mtime": 0.0, "st_ctime": 0.0}))

    monkeypatch.setattr(Path, "stat", stat_in_image)
    before = weights_fingerprint(folder, memory)
    data = (folder / "a.safetensors").read_bytes()
    (folder / "a.safetensors").write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert weights_fingerprint(folder, memory) != before


def test_another_process_that_reads_the_same_files_is_waited_for_but_not_for_ever(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = tmp_path / "memory"
    before = weights_fingerprint(folder, memory)
    (lock,) = memory.iterdir()
    monkeypatch.setattr(weights, "PATIENCE", 0.1)
    with lock.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert weights_fingerprint(folder, memory) == before


def test_without_a_place_to_remember_it_is_read(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "a file").write_text("")
    assert weights_fingerprint(folder, tmp_path / "a file" / "memory") == weights_fingerprint(folder)


def test_without_weights_there_is_no_fingerprint(tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match="no file of weights"):
        weights_fingerprint(tmp_path)
    with pytest.raises(ResourceError, match="can't be read"):
        weights_fingerprint(tmp_path / "nowhere")


def test_everything_that_changes_numbers_changes_the_model(folder: Path) -> None:
    def version(config: dict[str, object], **settings: str) -> str:
        return Model.describe(str(folder), [folder], config, settings).version

    plain = version({"rope_theta": 10000.0, "_name_or_path": "/here"}, dtype="torch.float32")
    assert plain == version({"rope_theta": 10000.0, "_name_or_path": "/there"}, dtype="torch.float32")
    assert plain != version({"rope_theta": 5000.0}, dtype="torch.float32")
    assert plain != version({"rope_theta": 10000.0}, dtype="torch.bfloat16")
    with pytest.raises(ResourceError, match="in no folder"):
        Model.describe("some/model", [], {}, {})


def test_each_rank_and_group_has_a_namespace_of_its_own() -> None:
    model = Model(name="m", version="v")
    group = CacheGroup(
        block_size=16,
        page_bytes=64,
        dtype="bfloat16",
        layers=2,
        kv_heads=4,
        head_size=8,
        details=["vllm-1", "FLASH", "x"],
    )
    other_inside = replace(group, details=["vllm-1", "FLASH", "y"])
    made = [
        layout.fingerprint
        for groups in ([group, group], [other_inside])
        for rank in (0, 1)
        for tenant in ("", "t")
        for layout in layouts(model, groups, Place(tp_size=2, tp_rank=rank), tenant)
    ]
    assert len(set(made)) == len(made) == 12
    assert layouts(model, [group], Place(), "")[0].format.startswith("vllm-1 FLASH ")


@pytest.fixture
def config(tmp_path: Path) -> VllmConfig:
    (tmp_path / "model.bin").write_bytes(b"weights")
    return VllmConfig(ModelConfig(str(tmp_path)))


@pytest.mark.parametrize(
    ("part", "field", "value"),
    [
        ("model_config", "dtype", "f16"),
        ("model_config", "quantization", "fp8"),
        ("model_config", "quantization_config", {"bits": 4}),
        ("model_config", "model_impl", "transformers"),
        ("model_config", "override_attention_dtype", "f16"),
        ("model_config", "multimodal_config", MultiModalConfig(mm_processor_kwargs={"crops": 4})),
        ("model_config", "multimodal_config", MultiModalConfig(video_pruning_rate=0.5)),
        ("model_config", "hf_config", HfConfig({"architectures": ["B"]})),
        ("load_config", "load_format", "dummy"),
        ("load_config", "model_loader_extra_config", {"tensorizer_uri": "s3://bucket/other"}),
        ("cache_config", "cache_dtype", "fp8"),
    ],
)
def test_what_changes_numbers_changes_the_model(config: VllmConfig, part: str, field: str, value: Any) -> None:
    before = model_of(config).version
    assert model_of(config).version == before
    setattr(getattr(config, part), field, value)
    assert model_of(config).version != before


def test_a_drafter_counts_where_its_layers_are_in_the_pages(config: VllmConfig) -> None:
    plain = model_of(config).version
    for has_layers in (False, True):
        config.speculative_config = SpeculativeConfig(has_layers)
        assert (model_of(config).version != plain) is has_layers


def test_weights_that_are_nowhere_here_are_an_error_of_ours(config: VllmConfig) -> None:
    pytest.importorskip("huggingface_hub", reason="looks into the hub's cache")
    for model in ("org/repo:Q4_K_M", "s3://bucket/model", "org/none-such"):
        config.model_config.model = model
        with pytest.raises(ResourceError, match="in no folder on this machine"):
            model_of(config)
