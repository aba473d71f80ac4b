"""A worker half, and the ways to hold it at each of its steps. Two pages a batch, 64 bytes a page."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from worker_pages import is_idle, page_of

from kvstore.connector.plan import LoadPlan, StepPlan, StorePlan
from kvstore.connector.worker import WorkerConnector


@pytest.fixture
def gates(namespace: Any, kv: Any) -> dict[str, Any]:
    """By the step that each holds up."""
    return {
        "computed": kv.computed,
        "borrow": namespace.borrow_gate,
        "scatter": kv.scatter_gate,
        "complete_load": namespace.complete_load_gate,
        "prepare_store": namespace.prepare_store_gate,
        "gather": kv.gather_gate,
        "complete_store": namespace.complete_store_gate,
    }


@pytest.fixture
def worker(namespace: Any, kv: Any, clock: Any, gates: dict[str, Any]) -> Iterator[WorkerConnector]:
    worker = WorkerConnector([namespace], [kv], clock=clock)
    yield worker
    for gate in gates.values():
        gate.open()
    worker.shutdown()
    assert not any(queue._thread.is_alive() for queue in worker._queues)
    assert namespace.held == 0


@pytest.fixture
def load(worker: WorkerConnector, hashes: list[bytes]) -> Callable[..., None]:
    """Begins a load of a request's first pages into blocks 20, 21, …"""

    def run(request_id: str = "a", count: int = 3) -> None:
        plan = LoadPlan(request_id, tuple(hashes[:count]), tuple(range(20, 20 + count)))
        worker.start_load_kv(StepPlan(loads=(plan,)))

    return run


@pytest.fixture
def store(worker: WorkerConnector, hashes: list[bytes]) -> Callable[..., None]:
    """Begins a store of blocks 1, 2, … as a request's first pages."""

    def run(request_id: str = "a", count: int = 3, finished: Sequence[str] = ()) -> None:
        plan = StorePlan(request_id, tuple(hashes[:count]), tuple(range(1, 1 + count)))
        worker.start_save_kv(StepPlan(stores=(plan,), finished=tuple(finished)))

    return run


@pytest.fixture
def settled(worker: WorkerConnector) -> Callable[[], None]:
    """Waits until all threads have let go of everything that they were given."""

    def run() -> None:
        for queue in worker._queues:
            with queue._changed:
                assert queue._changed.wait_for(lambda queue=queue: is_idle(queue), 20)

    return run


@pytest.fixture
def stocked(namespace: Any, hashes: list[bytes]) -> Any:
    """kvstore has the first six pages: page n is full of 100 + n."""
    for number, block_hash in enumerate(hashes[:6]):
        namespace.pages[block_hash] = page_of(100 + number)
    return namespace
