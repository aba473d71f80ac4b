"""vLLM and SGLang on one node: arena and disk are one, and each finds its own pages behind a restart, no other's.

vLLM is in an environment of its own: ``TEST_VLLM_PYTHON`` names its Python; without it, that of ``make test-vllm``.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from made_models import ModelFolders
from node_process import NodeProcess

import kvstore
from kvstore.layout import Layout
from tests.sglang.server import PAGE_SIZE, backend
from tests.vllm.engine import BLOCK_SIZE, PATIENT, EngineProcess, transfer_config

pytestmark = pytest.mark.timeout(900)

TOKENS = 400
WHOLE = TOKENS - PAGE_SIZE
BLOCKS = (TOKENS - 1) // BLOCK_SIZE * BLOCK_SIZE
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def vllm_python() -> str:
    python = Path(os.environ.get("TEST_VLLM_PYTHON", ROOT / ".venv-vllm" / "bin" / "python"))
    if not python.exists():
        pytest.skip(f"needs vLLM beside SGLang, and there is no {python} (make test-vllm, or TEST_VLLM_PYTHON)")
    return str(python)


@pytest.fixture
def start_vllm(
    vllm_python: str, node: NodeProcess, models: ModelFolders, tmp_path: Path
) -> Iterator[Callable[[], EngineProcess]]:
    """Start vLLM on the node, with the model that SGLang has."""
    engines: list[EngineProcess] = []

    def start() -> EngineProcess:
        log = tmp_path / f"vllm-{len(engines)}.log"
        engines.append(EngineProcess(models(), log, transfer=transfer_config(node.url, **PATIENT), python=vllm_python))
        return engines[-1]

    yield start
    for engine in engines:
        engine.kill()


def test_each_finds_its_own_pages_alone(
    node: NodeProcess,
    start_server: Callable[..., Any],
    start_vllm: Callable[[], EngineProcess],
    prompt: Callable[..., list[int]],
) -> None:
    tokens = prompt(TOKENS)
    server = start_server(backend(node.url))
    expected = server.answer(tokens).tokens
    assert server.wait_stored(tokens, WHOLE).tokens == expected
    vllm = start_vllm()
    first = vllm.run([tokens])
    assert first.external_hits == 0, "a page of SGLang's was taken"
    vllm.close()
    server.stop()
    # Both anew: what they have is the node's.
    vllm = start_vllm()
    second = vllm.run([tokens])
    assert (second.tokens, second.external_hits) == (first.tokens, BLOCKS)
    server.start()
    again = server.answer(tokens)
    assert (again.tokens, again.stored) == (expected, WHOLE)
    with kvstore.connect(node.url, timeout=60.0) as client:
        status = client.status()
    pages = {Layout.from_json(space.layout).block_size: space.arena_pages for space in status.namespaces}
    assert pages.keys() == {PAGE_SIZE, BLOCK_SIZE}
    assert pages[PAGE_SIZE] >= WHOLE // PAGE_SIZE
    assert pages[BLOCK_SIZE] >= BLOCKS // BLOCK_SIZE
    command = [sys.executable, "-m", "kvstore.cli", "status", "--url", node.url]
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "SGLang 0.5.23 rank 0 (shm)" in told
    assert "vLLM " in told.partition("connected:")[2]
    assert all(space.name in told for space in status.namespaces)
