"""Adapters: SGLang's keys have an id that is made of an adapter's name and path, and the namespace what lies there."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from made_models import ModelFolders
from node_process import NodeProcess

from tests.sglang.server import PAGE_SIZE, ServerProcess, backend

pytestmark = pytest.mark.timeout(600)

TOKENS = 400
WHOLE = TOKENS - PAGE_SIZE
LORA = ("--enable-lora", "--lora-backend", "torch_native", "--max-lora-rank", "8")


def put(adapter: Path, into: Path) -> None:
    """Other weights in a folder, of the same size."""
    shutil.copyfile(adapter / "adapter_model.safetensors", into / "adapter_model.safetensors")


def test_another_adapter_under_the_same_name_finds_nothing(
    node: NodeProcess,
    start_server: Callable[..., Any],
    models: ModelFolders,
    prompt: Callable[..., list[int]],
    tmp_path: Path,
) -> None:
    folder = Path(shutil.copytree(models("lora"), tmp_path / "adapter"))
    flags = (*LORA, "--lora-paths", f"a={folder}")
    tokens = prompt(TOKENS)
    server = start_server(backend(node.url), flags=flags)
    plain = server.answer(tokens)
    adapted = server.answer(tokens, lora_path="a")
    assert adapted.tokens != plain.tokens
    assert adapted.stored == 0, "the model's own pages were taken"
    server.flush()
    for lora, expected in ((None, plain), ("a", adapted)):
        again = server.answer(tokens, lora_path=lora)
        assert (again.tokens, again.stored) == (expected.tokens, WHOLE)
    server.stop()
    server.start()
    restarted = server.answer(tokens, lora_path="a")
    assert (restarted.tokens, restarted.stored) == (adapted.tokens, WHOLE)
    server.stop()
    put(models("lora", seed=8), folder)
    alone = start_server(None, flags=flags)
    expected = alone.answer(tokens, lora_path="a")
    alone.stop()
    assert expected.tokens != adapted.tokens, "the other adapter would not be told from the first one"
    server.start()
    changed = server.answer(tokens, lora_path="a")
    assert (changed.tokens, changed.stored) == (expected.tokens, 0)
    assert server.wait_stored(tokens, WHOLE, lora_path="a").tokens == expected.tokens
    server.stop()
    put(models("lora"), folder)
    server.start()
    back = server.answer(tokens, lora_path="a")
    assert (back.tokens, back.stored) == (adapted.tokens, WHOLE)


def load(server: ServerProcess, name: str, folder: Path) -> None:
    """Load an adapter into a server that runs."""
    status, text = server.request("POST", "/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)}, 60.0)
    assert status == 200, text


def test_an_adapter_that_is_loaded_later(
    node: NodeProcess,
    start_server: Callable[..., Any],
    models: ModelFolders,
    prompt: Callable[..., list[int]],
    tmp_path: Path,
) -> None:
    folder = Path(shutil.copytree(models("lora"), tmp_path / "adapter"))
    tokens = prompt(TOKENS)
    server = start_server(backend(node.url), flags=(*LORA, "--lora-target-modules", "q_proj", "v_proj"))
    load(server, "a", folder)
    first = server.answer(tokens, lora_path="a")
    found = server.wait_stored(tokens, WHOLE, lora_path="a")
    assert found.tokens == first.tokens
    status, text = server.request("POST", "/unload_lora_adapter", {"lora_name": "a"}, 60.0)
    assert status == 200, text
    put(models("lora", seed=8), folder)
    load(server, "a", folder)
    server.flush()
    changed = server.answer(tokens, lora_path="a")
    assert changed.stored == 0
    assert changed.tokens != first.tokens
