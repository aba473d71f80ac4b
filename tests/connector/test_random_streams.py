"""A device that does what is queued on it later, in any order that its streams and events allow, below the real worker
half, copies and store. Blocks go from request to request all the time; every page that is found must be what its
request computed, whether the engine tells of a step before it touches the step's new blocks (vLLM's V1 model runner) or
behind (V2), and whether it zeroes them or not."""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from worker_pages import is_idle

import kvstore
import kvstore.gpu.paged_kv
from kvstore.connector.plan import StepPlan, StorePlan
from kvstore.connector.worker import WorkerConnector
from kvstore.gpu.cuda import DeviceCopies
from kvstore.gpu.paged_kv import PagedKV

STEPS = 200
BLOCKS = 6
SEEDS = 3


class Point:
    """An event."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._done = threading.Event()

    @property
    def is_done(self) -> bool:
        return self._done.is_set()

    def reach(self) -> None:
        self._done.set()

    def synchronize(self) -> None:
        self._device.awaited = self
        assert self._done.wait(60), "the device never came here"

    def wait(self, stream: object) -> None:
        raise AssertionError("streams wait by what is queued on them")


class Device:
    """It works while it is told to; which stream goes on is random."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._working = threading.RLock()
        self._streams: dict[str, deque[tuple[Point | None, Callable[[], None]]]] = {
            name: deque() for name in ("engine", "gather", "scatter")
        }
        self.at_once = True
        self.awaited: Point | None = None
        """What a thread has waited for last."""

    def compute(self, what: Callable[[], None]) -> None:
        self._push("engine", None, what)

    def mark(self) -> Point:
        point = Point(self)
        self._push("engine", None, point.reach)
        return point

    def queue(
        self, direction: str, copies: Iterable[Callable[[], None]], after: Point | None = None
    ) -> Iterator[Point]:
        start: Point | None = self.mark() if after is None else after
        for copy in copies:
            point = Point(self)
            self._push(direction, start, copy)
            self._push(direction, None, point.reach)
            start = None
            yield point

    def work(self, most: float) -> None:
        """Do so much of what is queued, at most."""
        done = 0
        with self._working:
            while done < most and (ready := self._ready()):
                with self._lock:
                    _, what = self._streams[self._random.choice(ready)].popleft()
                what()
                done += 1

    def _ready(self) -> list[str]:
        with self._lock:
            return [
                name
                for name, queued in self._streams.items()
                if queued and (queued[0][0] is None or queued[0][0].is_done)
            ]

    def _push(self, stream: str, after: Point | None, what: Callable[[], None]) -> None:
        with self._lock:
            self._streams[stream].append((after, what))
        if self.at_once:
            self.work(np.inf)


class Engine:
    """Gives a block to another request in each step."""

    def __init__(
        self, client: kvstore.Client, seed: int, *, early: bool, zeroes: bool, overlap: bool, says_so: bool = True
    ) -> None:
        self.random = random.Random(seed)
        self.device = Device(seed + 1)
        self.early, self.zeroes, self.overlap = early, zeroes, overlap
        self.layers = [torch.zeros((BLOCKS, 64), dtype=torch.uint8) for _ in range(2)]
        kvstore.gpu.paged_kv.HostCopies = lambda layers, layout: DeviceCopies(layers, layout, self.device)
        kv = PagedKV(self.layers, "block dim")
        self.device.at_once = False
        self.namespace = client.namespace(
            kvstore.Layout(model=f"m{seed}", block_size=16, page_bytes=kv.page_bytes, format=kv.layout.format)
        )
        self.worker = WorkerConnector(
            [self.namespace], [kv], store_deadline=60.0, touched_early=early and zeroes and says_so
        )
        self.owners: dict[int, str] = {}
        self.held: dict[str, int] = {}
        self.computed: dict[bytes, int] = {}
        self.marks: deque[Point] = deque()

    def run(self) -> None:
        for number in range(STEPS):
            self.step(number)
        while True:
            self.device.work(np.inf)
            self.worker.handle_preemptions(StepPlan())
            self.worker.get_finished()
            self.wait_until_still()
            if not self.worker._stores._table.live():
                return

    def step(self, number: int) -> None:
        free = sorted(set(range(BLOCKS)) - set(self.held.values()))
        finished: tuple[str, ...] = ()
        held: tuple[tuple[int, ...], ...] = ()
        if free:
            block = self.random.choice(free)
            owner = self.owners.get(block)
            gone = self.random.choice(["preempted", "overwritten"])
            plan = StepPlan(
                preempted=(owner,) if owner is not None and gone == "preempted" else (),
                overwritten=(block,) if owner is not None and gone == "overwritten" else (),
            )
            self.begin(block, plan)
            name, value = f"r{number}", number % 250 + 1
            self.owners[block] = name
            self.device.compute(lambda: self.fill(block, value))
            (block_hash,) = kvstore.hash_blocks([number] * 16, 16)
            self.computed[block_hash] = value
            store = StorePlan(name, (block_hash,), (block,))
            if self.random.random() < 0.3:  # it ends, and holds its block until it may be given away
                finished, self.held[name] = (name,), block
                del self.owners[block]
                held = ((block,),) if self.random.random() < 0.7 else ((),)
            self.worker.start_save_kv(StepPlan(stores=(store,), finished=finished, held=held))
        else:
            self.worker.handle_preemptions(StepPlan())
        sent, _ = self.worker.get_finished()
        for name in sent:
            del self.held[name]
        self.marks.append(self.device.mark())
        while len(self.marks) > self.overlap:
            mark = self.marks.popleft()
            while not mark.is_done:
                self.device.work(1)
        if self.random.random() < 0.3:
            self.wait_until_still()

    def begin(self, block: int, plan: StepPlan) -> None:
        if not self.early:
            self.worker.handle_preemptions(plan)
        if self.zeroes:
            self.device.compute(lambda: self.fill(block, 0))
        if self.early:
            for _ in range(self.random.randrange(4)):  # inputs are prepared meanwhile
                self.device.work(self.random.randrange(8))
                self.wait_until_still()
            self.worker.handle_preemptions(plan)

    def fill(self, block: int, value: int) -> None:
        for layer in self.layers:
            layer[block] = value

    def wait_until_still(self) -> None:
        """Until the thread that copies has nothing to do, or waits for the device."""
        queue = self.worker._stores
        while True:
            with queue._changed:
                told = any(copy.confirmed or copy.transfer.over for copy in queue._copies._copies)
                if is_idle(queue) and not told:
                    return
            if self.device.awaited is not None and not self.device.awaited.is_done:
                return
            time.sleep(0)

    def wrong(self) -> list[tuple[int, list[int]]]:
        wrong = []
        for block_hash, value in self.computed.items():
            page = np.zeros(self.namespace.layout.page_bytes, np.uint8)
            if self.namespace.load([block_hash], [page]) and not (page == value).all():
                wrong.append((value, sorted(set(page.tolist()))))
        return wrong


@contextmanager
def running(engine: Engine) -> Iterator[Engine]:
    """All of its steps are done."""
    try:
        engine.run()
        yield engine
    finally:
        engine.device.at_once = True
        engine.device.work(np.inf)
        engine.worker.shutdown()


@pytest.fixture
def client(tmp_path: Path, shm_folder: Path) -> Iterator[kvstore.Client]:
    url = f"embedded://{tmp_path}/store?arena=16MiB&disk_limit=0&arena_dir={shm_folder}/arena"
    with kvstore.connect(url) as client:
        yield client


@pytest.fixture(autouse=True)
def _no_other_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an engine here puts into its place is taken back."""
    monkeypatch.setattr(kvstore.gpu.paged_kv, "HostCopies", kvstore.gpu.paged_kv.HostCopies)


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("overlap", [False, True], ids=["one by one", "overlapped"])
@pytest.mark.parametrize("zeroes", [False, True], ids=["as they are", "zeroed"])
@pytest.mark.parametrize("early", [False, True], ids=["told first", "touched first"])
def test_every_page_is_what_its_request_computed(
    client: kvstore.Client, early: bool, zeroes: bool, overlap: bool, seed: int
) -> None:
    with running(Engine(client, seed, early=early, zeroes=zeroes, overlap=overlap)) as engine:
        assert engine.wrong() == []
        assert engine.worker.statistics().pages_stored > STEPS / 5


@pytest.mark.parametrize("overlap", [False, True], ids=["one by one", "overlapped"])
def test_an_engine_that_touches_first_and_does_not_say_so_would_be_found_out(
    client: kvstore.Client, overlap: bool
) -> None:
    """The device above finds this fault: pages of zeros under the hashes of blocks that were computed."""
    found: list[list[int]] = []
    for seed in range(SEEDS):
        with running(Engine(client, seed, early=True, zeroes=True, overlap=overlap, says_so=False)) as engine:
            found += [content for _, content in engine.wrong()]
    assert [0] in found
