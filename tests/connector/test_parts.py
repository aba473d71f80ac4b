"""Pages that are cut by KV heads: one engine's parts are the pages of the ranks of another one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="moves an engine's tensors")

import kvstore  # noqa: E402
from kvstore.connector.engine.identity import (  # noqa: E402
    CacheGroup,
    Model,
    Place,
    layouts_by_part,
    parts_a_rank,
)
from kvstore.connector.plan import LoadPlan, StepPlan, StorePlan  # noqa: E402
from kvstore.connector.worker import WorkerConnector  # noqa: E402
from kvstore.errors import ConfigError  # noqa: E402
from kvstore.gpu.paged_kv import PagedKV  # noqa: E402

LAYERS, BLOCKS, HEADS, TOKENS, DIM = 3, 8, 8, 4, 6
HASHES = kvstore.hash_blocks(list(range(5 * TOKENS)), TOKENS)


@pytest.fixture
def client(tmp_path: Path, shm_folder: Path) -> Iterator[kvstore.Client]:
    with kvstore.connect(f"embedded://{tmp_path}/node?arena=8MiB&arena_dir={shm_folder}/arena") as client:
        yield client


@pytest.fixture
def start_ranks(client: kvstore.Client) -> Iterator[Callable[[int, int], list[tuple[WorkerConnector, list]]]]:
    """Workers of an engine with so many ranks, each with its tensors; pages have so many parts in all."""
    workers: list[WorkerConnector] = []

    def start(tp_size: int, kv_parts: int) -> list[tuple[WorkerConnector, list]]:
        ranks = []
        cut = parts_a_rank(kv_parts, tp_size)
        heads = HEADS // kv_parts
        described = CacheGroup(
            block_size=TOKENS,
            page_bytes=LAYERS * heads * TOKENS * DIM * 4,
            dtype="float32",
            layers=LAYERS,
            kv_heads=heads,
            head_size=DIM,
            details=["engine", "backend"],
        )
        for rank in range(tp_size):
            tensors = [torch.zeros(BLOCKS, HEADS // tp_size, TOKENS, DIM) for _ in range(LAYERS)]
            place = Place(tp_size=tp_size, tp_rank=rank)
            parts = layouts_by_part(Model(name="m", version="1"), [described], place, "", cut)
            pages = [
                PagedKV([tensor[:, part * heads : (part + 1) * heads] for tensor in tensors], "block head token dim")
                for part in range(cut)
            ]
            worker = WorkerConnector([client.namespace(layout) for (layout,) in parts], pages, parts=cut)
            workers.append(worker)
            ranks.append((worker, tensors))
        return ranks

    yield start
    for worker in workers:
        worker.shutdown()


def run(worker: WorkerConnector, eventually: Callable[..., None], plan: StepPlan) -> set[int]:
    """Carry a plan out. Returns the blocks that were not filled."""
    worker.start_load_kv(plan)
    worker.start_save_kv(plan)
    received: set[str] = set()

    def is_over() -> bool:
        received.update(worker.get_finished()[1])
        return received == {load.request_id for load in plan.loads}

    worker.wait_for_save()
    eventually(is_over)
    return worker.get_block_ids_with_load_errors()


@pytest.mark.parametrize(("giver", "taker", "kv_parts"), [(1, 2, 2), (2, 1, 2), (1, 4, 4), (2, 4, 4), (4, 2, 8)])
def test_ranks_read_their_heads_of_what_other_ranks_have_stored(start_ranks, eventually, giver, taker, kv_parts):
    whole = torch.randn(LAYERS, BLOCKS, HEADS, TOKENS, DIM)
    blocks = (6, 1, 3, 2, 7)
    for rank, (worker, tensors) in enumerate(start_ranks(giver, kv_parts)):
        for layer, tensor in enumerate(tensors):
            tensor.copy_(whole[layer].chunk(giver, 1)[rank])
        run(worker, eventually, StepPlan(stores=(StorePlan("a", tuple(HASHES), blocks),)))
        assert worker.statistics().pages_stored == 5 * kv_parts // giver
        assert {group for group, _ in worker.take_stored()} == {0}
    for rank, (worker, tensors) in enumerate(start_ranks(taker, kv_parts)):
        plan = StepPlan(loads=(LoadPlan("b", tuple(HASHES), (0, 1, 2, 3, 4)),))
        assert run(worker, eventually, plan) == set()
        for layer, tensor in enumerate(tensors):
            assert torch.equal(tensor[:5], whole[layer].chunk(taker, 1)[rank][list(blocks)])


def test_a_page_of_which_one_part_is_missing_is_not_loaded(client, start_ranks, eventually):
    ((worker, _),) = start_ranks(1, 2)
    run(worker, eventually, StepPlan(stores=(StorePlan("a", tuple(HASHES), (0, 1, 2, 3, 4)),)))
    (second,) = (each for each in client.status().namespaces if kvstore.Layout.from_json(each.layout).tp_rank == 1)
    client.namespace(kvstore.Layout.from_json(second.layout)).evict(HASHES[3:4])
    ((other, _),) = start_ranks(1, 2)
    assert run(other, eventually, StepPlan(loads=(LoadPlan("b", tuple(HASHES), (0, 1, 2, 3, 4)),))) == {3, 4}


def test_ranks_do_not_share_a_part():
    assert [parts_a_rank(parts, 2) for parts in (0, 2, 4)] == [0, 1, 2]
    with pytest.raises(ConfigError, match="kv_parts 3: must be a multiple of the 2 ranks"):
        parts_a_rank(3, 2)
    with pytest.raises(ConfigError, match="kv_parts 1"):
        parts_a_rank(1, 2)
