"""Equal weights and settings make the same namespace, at whatever path; any difference makes another one."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from connector.identity import CacheGroup, Model, Place, layouts
from connector.weights import weights_fingerprint
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


def test_a_change_of_one_small_tensor_or_of_a_large_one_is_seen(folder: Path) -> None:
    before = weights_fingerprint(folder)
    file = folder / "a.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1  # the small one
    file.write_bytes(data)
    small = weights_fingerprint(folder)
    data[-1] ^= 1
    data[-100_040:-40] = bytes(value ^ 1 for value in data[-100_040:-40])  # as training does
    file.write_bytes(data)
    assert len({before, small, weights_fingerprint(folder)}) == 3


def test_a_file_of_another_format_is_sampled(folder: Path) -> None:
    (folder / "a.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(bytes(1_000_000))
    before = weights_fingerprint(folder)
    (folder / "pytorch_model.bin").write_bytes(b"\1" * 1_000_000)
    assert weights_fingerprint(folder) != before


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
