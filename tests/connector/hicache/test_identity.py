"""What decides on the bytes of a page is in its namespace, and what does not is not."""

from __future__ import annotations

import enum
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore.connector.hicache.identity import Place, layout_of, model_of
from kvstore.errors import ResourceError
from kvstore.layout import Layout


def arguments_for(folder: Path, **changed: Any) -> SimpleNamespace:
    given = {"model_path": str(folder), "revision": None, "download_dir": None, "trust_remote_code": False}
    given |= {"context_length": 1024, "dtype": "float32", "kv_cache_dtype": "auto", "attention_backend": "torch_native"}
    return SimpleNamespace(**(given | changed))


class MHATokenToKVPoolHost:
    def __init__(self, **changed: Any) -> None:
        shape = {"page_size": 16, "layer_num": 4, "head_num": 4, "head_dim": 32, "start_layer": 0, "end_layer": 4}
        self.__dict__.update({"layout": "page_first_direct", "dtype": "torch.float32"} | shape | changed)


def storage(**changed: Any) -> SimpleNamespace:
    ranks = {"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1}
    return SimpleNamespace(**(ranks | {"is_mla_model": False} | changed))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    (model / "model.safetensors").write_bytes(b"weights")
    return model


@pytest.fixture
def layout(folder: Path) -> Callable[..., Layout]:
    def make(path: Path = folder, **changed: Any) -> Layout:
        given = {
            "arguments": {},
            "pool": {},
            "storage": {},
            "parts": (32768, 32768),
            "engine": "SGLang 0.5.23",
        } | changed
        return layout_of(
            model_of(arguments_for(path, **given["arguments"])),
            MHATokenToKVPoolHost(**given["pool"]),
            given["parts"],
            Place.of(storage(**given["storage"])),
            engine=given["engine"],
            tenant=given.get("tenant", ""),
        )

    return make


def test_a_layout_says_what_people_ask(layout: Callable[..., Layout]) -> None:
    made = layout()
    assert (made.model, made.dtype, made.block_size, made.page_bytes) == ("LlamaForCausalLM", "float32", 16, 65536)
    assert (made.layers, made.kv_heads, made.head_size) == (4, 4, 32)
    assert made.format.startswith("SGLang 0.5.23 page_first_direct ")


@pytest.mark.parametrize(
    "changed",
    [
        {"arguments": {"dtype": "bfloat16"}},
        {"arguments": {"kv_cache_dtype": "fp8_e5m2"}},
        {"arguments": {"quantization": "fp8"}},
        {"arguments": {"json_model_override_args": '{"rope_theta": 1}'}},
        {"arguments": {"attention_backend": "triton"}},
        {"arguments": {"speculative_algorithm": "EAGLE"}},
        {"pool": {"layout": "page_first"}},
        {"pool": {"layout": "layer_first"}},
        {"pool": {"dtype": "torch.bfloat16"}},
        {"pool": {"page_size": 32}},
        {"pool": {"layer_num": 5}},
        {"pool": {"start_layer": 4, "end_layer": 8}},
        {"pool": {"head_num": 2}},
        {"pool": {"storage_format_tag": "other"}},
        {"parts": (16384, 16384, 16384, 16384)},
        {"storage": {"tp_size": 2}},
        {"storage": {"tp_size": 2, "tp_rank": 1}},
        {"storage": {"pp_size": 2, "pp_rank": 1}},
        {"storage": {"attn_cp_size": 2, "attn_cp_rank": 1}},
        {"engine": "SGLang 0.5.24"},
        {"tenant": "somebody"},
    ],
    ids=str,
)
def test_what_changes_bytes_makes_another_namespace(layout: Callable[..., Layout], changed: dict[str, Any]) -> None:
    assert layout(**changed).fingerprint != layout().fingerprint


def test_a_path_decides_on_nothing_and_every_byte_of_the_weights_does(
    layout: Callable[..., Layout], folder: Path
) -> None:
    copy = Path(shutil.copytree(folder, folder.with_name("copy")))
    assert layout(copy).fingerprint == layout().fingerprint
    (copy / "model.safetensors").write_bytes(b"weighty")
    assert layout(copy).fingerprint != layout().fingerprint


def test_pages_that_all_ranks_have_are_in_one_namespace(layout: Callable[..., Layout]) -> None:
    ranks = [layout(storage={"is_mla_model": True, "tp_size": 2, "tp_rank": rank}).fingerprint for rank in range(2)]
    assert ranks[0] == ranks[1] == layout(storage={"is_mla_model": True}).fingerprint


def test_an_adapter_is_its_files(layout: Callable[..., Layout], tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    (adapter / "adapter_model.safetensors").write_bytes(b"one")
    given = {"arguments": {"lora_paths": [SimpleNamespace(lora_name="a", lora_path=str(adapter))]}}
    before = layout(**given).fingerprint
    assert before != layout().fingerprint
    assert layout(**given).fingerprint == before
    (adapter / "adapter_model.safetensors").write_bytes(b"two")  # under the same name, at the same path
    assert layout(**given).fingerprint != before
    assert layout(arguments={"uno_lora_path": str(adapter)}).fingerprint not in (before, layout().fingerprint)


def test_adapters_that_are_ignored(layout: Callable[..., Layout]) -> None:
    """Where adapters are off, SGLang leaves those that are named as they were typed."""
    given = {"enable_lora": False, "lora_paths": ["a=/nowhere", {"lora_name": "b", "lora_path": "/nowhere"}]}
    assert layout(arguments=given).fingerprint == layout().fingerprint


def test_weights_that_are_nowhere_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ResourceError, match="no file of weights"):
        model_of(arguments_for(tmp_path / "empty"))


class LoadFormat(str, enum.Enum):  # noqa: UP042 - as SGLang has it
    AUTO = "auto"
    DUMMY = "dummy"


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"checkpoint_engine_wait_weights_before_ready": True}, "--checkpoint-engine-wait-weights-before-ready the"),
        ({"weight_cache_mode": "client"}, "--weight-cache-mode the model is not what its folder says, got 'client'"),
        ({"kt_weight_path": "/other"}, "--kt-weight-path"),
        ({"modelopt_checkpoint_restore_path": "/other"}, "--modelopt-checkpoint-restore-path"),
        ({"decrypted_config_file": "/other"}, "--decrypted-config-file"),
        ({"quantization_param_path": "/scales"}, "--quantization-param-path"),
        ({"load_format": "remote_instance"}, "--load-format remote_instance the weights are not those"),
        ({"load_format": LoadFormat.DUMMY}, "--load-format dummy the weights are not those"),
        ({"speculative_draft_load_format": "dummy"}, "--speculative-draft-load-format dummy"),
    ],
    ids=str,
)
def test_weights_that_are_not_those_in_the_folder_are_an_error(
    folder: Path, changed: dict[str, Any], says: str
) -> None:
    with pytest.raises(ResourceError, match=says):
        model_of(arguments_for(folder, **changed))


def test_what_names_no_other_weights_is_taken(folder: Path) -> None:
    usual = {"weight_cache_mode": "off", "kt_weight_path": None, "checkpoint_engine_wait_weights_before_ready": False}
    assert model_of(arguments_for(folder, load_format=LoadFormat.AUTO, **usual))
