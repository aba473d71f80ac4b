"""Servers whose pages differ never find each other's on one node, though their keys are the same."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from node_process import NodeProcess

from tests.sglang.server import PAGE_SIZE, backend

pytestmark = pytest.mark.timeout(900)

TOKENS = 400


def test_layouts_types_models_and_revisions(
    node: NodeProcess,
    start_server: Callable[..., Any],
    models: Callable[..., Path],
    prompt: Callable[..., list[int]],
    tmp_path: Path,
) -> None:
    tokens = prompt(TOKENS)
    folder = Path(shutil.copytree(models(), tmp_path / "model"))
    first = start_server(backend(node.url), model=folder)
    cold = first.answer(tokens)
    first.flush()
    assert first.answer(tokens).stored == TOKENS - PAGE_SIZE, "there is something to be found"
    first.stop()
    others: list[tuple[str, dict[str, Any]]] = [
        ("another layout", {"model": folder, "layout": "page_first"}),
        ("another type", {"model": folder, "dtype": "bfloat16"}),
        ("another type of keys and values", {"model": folder, "flags": ("--kv-cache-dtype", "bfloat16")}),
        ("another model", {"model": models(seed=2)}),
        ("another tenant", {"model": folder, "extra": backend(node.url, tenant="somebody")}),
    ]
    for what, options in others:
        server = start_server(**({"extra": backend(node.url)} | options))
        assert server.answer(tokens).stored == 0, what
        server.stop()
    # A third revision of the weights in the same folder, of the same size.
    shutil.copyfile(models(seed=3) / "model.safetensors", folder / "model.safetensors")
    third = start_server(backend(node.url), model=folder)
    assert third.answer(tokens).stored == 0, "another revision"
    third.stop()
    # Other weights in the same folder, of the same size.
    shutil.copyfile(models(seed=2) / "model.safetensors", folder / "model.safetensors")
    revised = start_server(backend(node.url), model=folder)
    assert revised.answer(tokens).stored == TOKENS - PAGE_SIZE, "as the other model: what people call it is no matter"
    revised.stop()
    shutil.copyfile(models() / "model.safetensors", folder / "model.safetensors")
    again = start_server(backend(node.url), model=folder)
    answer = again.answer(tokens)
    assert (answer.tokens, answer.stored) == (cold.tokens, TOKENS - PAGE_SIZE)
