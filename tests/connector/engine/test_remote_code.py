"""Code beside a model's weights: what an engine runs of it names the model, and nothing else there does."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from engine_objects import HfConfig, ModelConfig, SpeculativeConfig, VllmConfig

from kvstore.connector.engine.identity import model_of


class Remote:
    """A model with code beside its weights, which an engine runs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = ModelConfig(str(folder), trust_remote_code=True, hf_config=HfConfig(self.values()))
        self.write("configuration_chat.py", "class ChatConfig: pass")
        self.write("modeling_chat.py", "from .layers import Layer\nfrom .parts.attention import Attention as A\n")
        self.write(
            "layers.py", "def use():\n    try:\n        from . import kernels\n    except ImportError:\n        pass\n"
        )
        self.write("kernels.py", "one = 1")
        self.write("parts/__init__.py", "")
        self.write("parts/attention.py", "from ..norms import Norm\nfrom .rope import Rope, Other\n")
        self.write("parts/rope.py", "import torch")
        self.write("norms.py", "two = 2")
        self.write("unused.py", "from .modeling_chat import Chat")
        self.write("preprocessor_config.json", '{"auto_map": {"AutoProcessor": "processing_chat.Processor"}}')
        self.write("processing_chat.py", "three = 3")

    @staticmethod
    def values(before: str = "") -> dict[str, Any]:
        names = {"AutoConfig": "configuration_chat.ChatConfig", "AutoModel": "modeling_chat.Chat"}
        return {"architectures": ["Chat"], "auto_map": {key: before + value for key, value in names.items()}}

    def write(self, name: str, text: str) -> None:
        (self.folder / name).parent.mkdir(exist_ok=True)
        (self.folder / name).write_text(text)

    def version(self) -> str:
        return model_of(VllmConfig(self.config)).version


@pytest.fixture
def remote(tmp_path: Path) -> Remote:
    (tmp_path / "chat").mkdir()
    (tmp_path / "chat" / "model.bin").write_bytes(b"weights")
    return Remote(tmp_path / "chat")


USED = (
    "configuration_chat.py",
    "modeling_chat.py",
    "layers.py",
    "kernels.py",
    "parts/__init__.py",
    "parts/attention.py",
    "parts/rope.py",
    "norms.py",
    "processing_chat.py",
)


@pytest.mark.parametrize("name", USED)
def test_code_that_an_engine_runs_changes_the_model(remote: Remote, name: str) -> None:
    before = remote.version()
    text = (remote.folder / name).read_text()
    remote.write(name, text + "# changed\n")
    assert remote.version() != before
    remote.write(name, text)
    assert remote.version() == before
    (remote.folder / name).unlink()
    assert remote.version() != before


def test_other_files_beside_it_change_nothing(remote: Remote) -> None:
    before = remote.version()
    for name in ("unused.py", "new.py", "README.md", "parts/more.py", "tokenization_chat.py"):
        remote.write(name, "other = 4")
    assert remote.version() == before


def test_code_that_an_engine_does_not_run_changes_nothing(remote: Remote) -> None:
    remote.config.trust_remote_code = False
    before = remote.version()
    for name in USED:
        remote.write(name, "changed = 5")
    assert remote.version() == before


def test_leave_to_run_code_changes_nothing_where_there_is_none(remote: Remote) -> None:
    remote.config.hf_config = HfConfig({"architectures": ["Chat"]})
    (remote.folder / "preprocessor_config.json").write_text("{}")
    before = remote.version()
    remote.config.trust_remote_code = False
    assert remote.version() == before


def test_the_same_code_at_another_path_is_the_same(remote: Remote, tmp_path: Path) -> None:
    before = remote.version()
    remote.config.model = str(shutil.copytree(remote.folder, tmp_path / "elsewhere"))
    assert remote.version() == before
    remote.config.hf_config = HfConfig(remote.values(f"{remote.config.model}--"))  # as a hub's name stands before it
    assert remote.version() == before


def test_code_of_another_repository_counts(remote: Remote, tmp_path: Path) -> None:
    other = tmp_path / "code"
    other.mkdir()
    (other / "modeling_chat.py").write_text("from .ops import op")
    (other / "ops.py").write_text("one = 1")
    remote.config.hf_config = HfConfig(
        {"architectures": ["Chat"], "auto_map": {"AutoModel": f"{other}--modeling_chat.Chat"}}
    )
    before = remote.version()
    (other / "ops.py").write_text("one = 2")
    assert remote.version() != before


def test_the_code_of_a_draft_model_counts_where_its_layers_are_in_the_pages(remote: Remote, tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "model.bin").write_bytes(b"weights")
    config = VllmConfig(ModelConfig(str(tmp_path / "target")))
    for has_layers in (True, False):
        config.speculative_config = SpeculativeConfig(has_layers, draft_model_config=remote.config)
        remote.write("layers.py", "one = 1")
        before = model_of(config).version
        remote.write("layers.py", "one = 2")
        assert (model_of(config).version != before) is has_layers


@pytest.mark.parametrize(
    "named",
    [
        None,
        "modeling_chat",
        "..x.Chat",
        "../modeling_chat.Chat",
        "a--",
        "--",
        [None, "modeling_chat.Chat"],
        {"a": 1},
        7,
    ],
)
def test_a_map_that_names_no_code_is_no_error(remote: Remote, named: Any) -> None:
    remote.config.hf_config = HfConfig({"architectures": ["Chat"], "auto_map": {"AutoModel": named}})
    (remote.folder / "preprocessor_config.json").write_text("{" * 9000)
    assert remote.version()


@pytest.mark.parametrize(
    "code", ["def (", "from .modeling_chat import x", "from .......up import y", "x = '\0'", "from . import *"]
)
def test_code_that_can_not_be_run_is_no_error(remote: Remote, code: str) -> None:
    before = remote.version()
    remote.write("modeling_chat.py", code)
    assert remote.version() != before
