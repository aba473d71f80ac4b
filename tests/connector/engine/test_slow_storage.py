"""Load or compute, with a real node whose pages are in object storage: a slow one is not waited for, a fast one is."""

from __future__ import annotations

import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_objects import BlockState, NewRequest, Request, SchedulerOutput
from fake_clock import FakeClock
from s3_server import URL, Faults, S3Server, running_s3

torch = pytest.importorskip("torch", reason="moves an engine's tensors")
pytest.importorskip("obstore", reason="the extra `objects` is not installed")

import kvstore  # noqa: E402
from kvstore.connector.engine import load_cost  # noqa: E402
from kvstore.connector.engine.groups import Group  # noqa: E402
from kvstore.connector.engine.load_admission import LoadAdmission  # noqa: E402
from kvstore.connector.engine.request_hashes import RequestHashes  # noqa: E402
from kvstore.connector.engine.request_tickets import RequestTickets  # noqa: E402
from kvstore.connector.engine.requests import EngineRequests  # noqa: E402
from kvstore.connector.scheduler import SchedulerConnector  # noqa: E402
from kvstore.connector.worker import WorkerConnector  # noqa: E402
from kvstore.gpu.paged_kv import PagedKV  # noqa: E402
from kvstore.node.node import Node  # noqa: E402

BLOCK = 16
PAGES = 4
PROMPT = BLOCK * PAGES
PREFILL = 2.0
"""Seconds that a prompt takes to compute, by the engine's clock."""
SLOW = 3.0
"""Seconds of a request to the slow bucket."""
WIDTH = 1024
"""Numbers in a block."""
ENOUGH = 2


class TinyEngine:
    """The connector's halves for an engine without a model: one group, and a worker in this process. Its clock moves
    when it computes; loads take the time that they take."""

    def __init__(self, client: kvstore.Client, clock: FakeClock) -> None:
        self._clock = clock
        self._kv = torch.zeros(1 + PAGES, WIDTH)
        pages = PagedKV([self._kv], "block dim")
        layout = kvstore.Layout(model="m", block_size=BLOCK, page_bytes=pages.page_bytes)
        self.namespace = client.namespace(layout)
        groups = [Group(BLOCK, keeps=True, num_skipped=lambda num_tokens: 0)]
        hashes = RequestHashes(BLOCK)
        self._requests = EngineRequests(
            SchedulerConnector(client, [self.namespace], lookup_budget=60.0),
            groups,
            hashes,
            tickets=RequestTickets(None, hashes),
            load_admission=LoadAdmission(groups, 1 + PAGES),
            may_store=False,
            clock=clock.monotonic,
        )
        self._worker = WorkerConnector([self.namespace], [pages], load_deadline=60.0)

    def answer(self, number: int, eventually: Callable[..., None]) -> bool:
        """Answer a prompt. Returns whether it was loaded; else it was computed."""
        request = Request(f"request {number}", tokens_of(number))
        blocks = [*range(1, 1 + PAGES)]
        answers: list[tuple[int | None, bool]] = []

        def told() -> bool:
            answers.append(self._requests.get_num_new_matched_tokens(request, 0))
            return answers[-1][0] is not None

        eventually(told)
        tokens = answers[-1][0]
        assert tokens in (0, PROMPT)
        self._kv.zero_()
        self._requests.update_state_after_alloc(request, (blocks,), tokens)
        if tokens:
            self._load(eventually)
            assert torch.equal(self._kv[1:], kv_of(number))
        else:
            step = self._plan_step(
                SchedulerOutput([NewRequest(request.request_id, (blocks,))], {request.request_id: PROMPT}, STATE)
            )
            self._clock.now += PREFILL
            self._requests.note(step, (), ())
        request.num_computed_tokens = PROMPT
        self._requests.request_finished(request, (blocks,))
        return tokens == PROMPT

    @property
    def declined(self) -> float:
        """Loads that took too long, as far as the engine knows."""
        return self._requests.counts()["loads_declined"]

    def close(self) -> None:
        self._worker.shutdown()
        self._requests.shutdown()

    def _plan_step(self, output: SchedulerOutput) -> int:
        plan, step = self._requests.plan_step(output)
        self._worker.start_load_kv(plan)
        return step

    def _load(self, eventually: Callable[..., None]) -> None:
        self._plan_step(SchedulerOutput([], {}, STATE))
        received: set[str] = set()

        def ended() -> bool:
            received.update(self._worker.get_finished()[1])
            return bool(received)

        eventually(ended)
        self._requests.update_connector_output((), received, self._worker.get_block_ids_with_load_errors(), ())
        self._requests.note(0, self._worker.take_load_timings(), ())


STATE = BlockState(lambda name: ([],), {})


def tokens_of(number: int) -> list[int]:
    return [*range(number * PROMPT, (number + 1) * PROMPT)]


def kv_of(number: int) -> Any:
    return torch.rand(PAGES, WIDTH, generator=torch.Generator().manual_seed(number))


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    with running_s3(monkeypatch) as running:
        yield running


@pytest.fixture
def engine(
    server: S3Server, start_node: Callable[..., Node], tmp_path: Path, shm_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[TinyEngine]:
    """An engine beside a node that has nothing but what another one wrote into the bucket."""
    monkeypatch.setattr(load_cost, "ENOUGH", ENOUGH)
    settings = {
        "arena": "16MiB",
        "arena_dir": str(shm_folder / "other"),
        "disk_limit": "0",
        "objects": URL,
        "objects_limit": "64MiB",
        "objects_admit": "all",
        "objects_deadline": "20",
    }
    clock = FakeClock()
    with kvstore.connect(f"embedded://{tmp_path}?{urllib.parse.urlencode(settings)}", timeout=60.0) as other:
        writer = TinyEngine(other, clock)
        for number in range(10):
            rows = kv_of(number).view(torch.uint8).numpy()
            assert writer.namespace.store(kvstore.hash_blocks(tokens_of(number), BLOCK), rows).stored == PAGES
        other.flush()
        writer.close()
    node = start_node(objects=URL, objects_limit=64 << 20, objects_deadline=20.0, disk_limit=0)
    with kvstore.connect(f"unix://{node.config.socket}", timeout=60.0) as client:
        engine = TinyEngine(client, clock)
        yield engine
        engine.close()


def test_an_engine_computes_while_object_storage_is_slow_and_loads_once_it_is_fast(
    engine: TinyEngine, server: S3Server, eventually: Callable[..., None]
) -> None:
    clock = engine._clock
    nowhere = range(100, 100 + ENOUGH)
    assert not any(engine.answer(number, eventually) for number in nowhere), "so it knows how fast it computes"
    server.faults = Faults(delay=SLOW, only=lambda method, name: method == "GET" and "/packs/" in name)
    assert [engine.answer(number, eventually) for number in range(ENOUGH)] == [True] * ENOUGH, "it tries"
    assert engine.declined == 0
    assert not engine.answer(2, eventually), "and has seen that it is slower than computing"
    assert not engine.answer(3, eventually)
    assert engine.declined == 2
    server.faults = Faults()
    clock.now += load_cost.LIFETIME + 1
    assert not any(engine.answer(number, eventually) for number in range(200, 200 + ENOUGH))
    assert [engine.answer(number, eventually) for number in range(4, 4 + ENOUGH)] == [True] * ENOUGH, "it tries again"
    assert engine.answer(8, eventually), "and has seen that it is faster"
    assert engine.answer(9, eventually)
    assert engine.declined == 2
