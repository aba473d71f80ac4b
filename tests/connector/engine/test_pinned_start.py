"""A worker's start does not wait until its node's arena is registered, and its end leaves nothing registered. CUDA's
account is replaced; node, shared memory and transfers are real."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="moves an engine's tensors")

from cuda_memory import CudaMemory  # noqa: E402

import kvstore  # noqa: E402
from kvstore.connector.engine import setup  # noqa: E402
from kvstore.connector.engine.options import Options  # noqa: E402
from kvstore.connector.plan import LoadPlan, StepPlan, StorePlan  # noqa: E402
from kvstore.gpu import pinned_arena  # noqa: E402
from kvstore.gpu.paged_kv import PagedKV  # noqa: E402
from kvstore.gpu.pinned import PinnedMapping  # noqa: E402

LAYOUT = kvstore.Layout(model="m", block_size=16, page_bytes=16 * 32 * 4)
HASHES = tuple(kvstore.hash_blocks(list(range(16)), 16))


def test_pages_go_out_and_in_while_the_arena_is_being_registered_in_whole_units(
    node_process: Callable[..., Any], eventually: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    node, cuda = node_process(), CudaMemory()
    with kvstore.connect(node.url) as client:
        client.namespace(LAYOUT)
        units, unit_bytes = client.arena_units.shape
        pages = Path(client.status().arena_directory) / "pages"
    monkeypatch.setattr(pinned_arena, "CHUNK_BYTES", 8 * unit_bytes + unit_bytes // 2)
    connection = setup.NodeClients(Options.parse({"url": node.url}), {})
    blocks = torch.rand(4, 16 * 32)
    paged = PagedKV([blocks], "block dim")
    another = os.open(pages, os.O_RDONLY)
    fcntl.flock(another, fcntl.LOCK_EX)  # another rank's turn

    worker = connection.worker_half([[LAYOUT]], [[paged]], partial(PinnedMapping, runtime=cuda))
    worker.start_save_kv(StepPlan(stores=(StorePlan("a", HASHES, (1,)),)))
    eventually(lambda: worker.statistics().pages_stored == 1)
    assert not cuda.registered
    os.close(another)
    eventually(lambda: len(cuda.registered) == units // 8)
    assert set(cuda.registered.values()) == {8 * unit_bytes}
    worker.start_load_kv(StepPlan(loads=(LoadPlan("b", HASHES, (2,)),)))
    eventually(lambda: worker.statistics().pages_loaded == {"arena": 1})
    assert torch.equal(blocks[1], blocks[2])

    worker.shutdown()
    connection.close()
    assert not cuda.registered
    assert not cuda.faults
