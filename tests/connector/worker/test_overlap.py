"""Two batches of a transfer under way at once, on a device that is done when the test says so, over a real store.

Whatever fails, and whoever ends the transfer, at whatever point: a page that is found is what was computed, no slot and
no block is given away under a copy, and nothing stays leased.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from held_device import PATIENCE, HeldDevice

import kvstore
from kvstore.client.namespace import Namespace
from kvstore.client.paths.pending import PendingLoad, PendingStore
from kvstore.connector import unconfirmed_copies
from kvstore.connector.plan import LoadPlan, StepPlan, StorePlan
from kvstore.connector.transfers import State
from kvstore.connector.worker import WorkerConnector
from kvstore.errors import UnavailableError
from kvstore.gpu.begun import BegunCopy
from kvstore.gpu.cuda import DeviceCopies
from kvstore.gpu.mixed import MixedKV
from kvstore.gpu.paged_kv import PagedKV
from kvstore.gpu.pinned_arena import PinnedArena

BATCH = 3
PAGES = 4 * BATCH - 1
BLOCKS = 64
HASHES = tuple(kvstore.hash_blocks(list(range(16 * PAGES)), 16))
LOADED_INTO = tuple(range(40, 40 + PAGES))
STORED_FROM = tuple(range(1, 1 + PAGES))
DEADLINE = 5.0
GIVEN_AWAY = 0xEE
"""What the next owner of a block writes into it."""


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Unpinned:
    """Memory that a device reaches by itself."""

    pinned, reason = True, ""

    def release(self) -> None:
        pass


class Engine:
    """A worker half with blocks on the device. Calls fail, or stop, where a test says."""

    def __init__(
        self,
        client: kvstore.Client,
        device: HeldDevice,
        *,
        sizes: Sequence[int] = (4096, 4096),
        pinned: bool = True,
        **options: Any,
    ) -> None:
        self.device, self.clock = device, Clock()
        self.layers = [torch.zeros((BLOCKS, size), dtype=torch.uint8) for size in sizes]
        for block in range(BLOCKS):
            self.fill(block, block)
        same = [layer for layer in self.layers if layer.shape[1] == sizes[0]]
        others = self.layers[len(same) :]
        stretches = [PagedKV(each, "block dim") for each in (same, others) if each]
        self.kv = stretches[0] if len(stretches) == 1 else MixedKV(stretches)
        self.layout = kvstore.Layout(model="m", block_size=16, page_bytes=self.kv.page_bytes, format="b")
        self.namespace = client.namespace(self.layout)
        self.copies: list[tuple[set[int], BegunCopy]] = []
        """With the addresses of the pages."""
        self.calls: dict[str, int] = {}
        self.fails_at: dict[str, int] = {}
        """By the call its number, from 0 on."""
        self.stops_at: tuple[str, int] = ("", 0)
        self.stopped, self.go_on = threading.Event(), threading.Event()
        self.open = 0
        """Pages' reservations and loans that were not given back."""
        self.most_open = 0
        self.faults: list[str] = []
        self._watch()
        arena = PinnedArena(lambda: client.arena, lambda memory: Unpinned()) if pinned else None  # type: ignore[arg-type,return-value]
        options = {"load_deadline": DEADLINE, "store_deadline": DEADLINE, "clock": self.clock} | options
        self.worker = WorkerConnector([self.namespace], [self.kv], arena=arena, **options)

    def fill(self, block: int, value: int) -> None:
        for layer in self.layers:
            layer[block] = value

    def content(self, block: int) -> set[int]:
        return {int(each) for layer in self.layers for each in layer[block].unique()}

    def store(self, request_id: str = "a", finished: Sequence[str] = ()) -> None:
        self.worker.start_save_kv(
            StepPlan(stores=(StorePlan(request_id, HASHES, STORED_FROM),), finished=tuple(finished))
        )

    def load(self, request_id: str = "a") -> None:
        self.worker.start_load_kv(StepPlan(loads=(LoadPlan(request_id, HASHES, LOADED_INTO),)))

    def settle(self) -> None:
        """Until the threads have let go of everything."""
        end = time.monotonic() + PATIENCE
        for queue in self.worker._queues:
            with queue._changed:
                done = queue._changed.wait_for(
                    lambda queue=queue: not queue._is_busy and not queue._table.in_state(State.QUEUED),
                    end - time.monotonic(),
                )
                assert done
                assert not queue._table._begun

    def found(self) -> dict[int, set[int]]:
        """By its number each page that a lookup finds: the bytes in it."""
        found = {}
        for number, block_hash in enumerate(HASHES):
            page = np.full(self.layout.page_bytes, 0xAB, np.uint8)
            if self.namespace.load([block_hash], page):
                found[number] = set(page.tolist())
        return found

    def pass_through(self, call: str) -> None:
        number = self.calls.get(call, 0)
        self.calls[call] = number + 1
        if self.stops_at == (call, number):
            self.stopped.set()
            assert self.go_on.wait(PATIENCE), "a test left a call waiting"
        if self.fails_at.get(call) == number:
            raise UnavailableError("gone")

    def _watch(self) -> None:
        """Nothing is given back under a copy; each call goes through :meth:`pass_through`."""
        namespace, kv = self.namespace, self.kv
        asks: dict[str, Any] = {"prepare_store": namespace.prepare_store, "borrow": namespace.borrow}
        begins: dict[str, Any] = {"begin_gather": kv.begin_gather, "begin_scatter": kv.begin_scatter}

        def ask(call: str, *arguments: Any, **named: Any) -> PendingStore | PendingLoad:
            self.pass_through(call)
            pending: PendingStore | PendingLoad = asks[call](*arguments, **named)
            self.open += 1
            self.most_open = max(self.most_open, self.open)
            pages = {page.ctypes.data for page in pending.pages if page is not None}
            finish = pending._finish
            assert finish is not None

            def watched(*publish: bool) -> Any:
                self.open -= 1
                for theirs, copy in self.copies:
                    if not copy.is_done and not pages.isdisjoint(theirs):
                        self.faults.append("pages are given back under a copy")
                try:
                    if publish != (False,):
                        self.pass_through("complete")
                finally:
                    done = finish(*publish)
                return done

            pending._finish = watched
            return pending

        def begin(call: str, *arguments: Any) -> BegunCopy:
            pages = arguments[1 if call == "begin_gather" else 0]
            copy: BegunCopy = begins[call](*arguments)
            self.copies.append(({page.ctypes.data for page in pages}, copy))
            return copy

        for call in asks:
            setattr(namespace, call, lambda *arguments, call=call, **named: ask(call, *arguments, **named))
        for call in begins:
            setattr(kv, call, lambda *arguments, call=call: begin(call, *arguments))


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> HeldDevice:
    device = HeldDevice()
    monkeypatch.setattr("kvstore.gpu.paged_kv.HostCopies", lambda layers, layout: DeviceCopies(layers, layout, device))
    monkeypatch.setattr(DeviceCopies, "_measure", lambda copies: None)
    monkeypatch.setattr(Namespace, "batch_pages", BATCH)
    return device


@pytest.fixture(params=["embedded", "node"])
def client(
    request: pytest.FixtureRequest, tmp_path: Path, shm_folder: Path, start_node: Callable[..., Any]
) -> Iterator[kvstore.Client]:
    if request.param == "embedded":
        url = f"embedded://{tmp_path}/store?arena=16MiB&disk_limit=0&arena_dir={shm_folder}/arena"
    else:
        url = f"unix://{start_node().config.socket}"
    with kvstore.connect(url) as client:
        yield client


@pytest.fixture
def make(client: kvstore.Client, device: HeldDevice) -> Iterator[Callable[..., Engine]]:
    engines: list[Engine] = []

    def run(**options: Any) -> Engine:
        engines.append(Engine(client, device, **options))
        device.begun = {"gather": 0, "scatter": 0}
        return engines[-1]

    yield run
    for engine in engines:
        engine.go_on.set()
        device.release()
        engine.worker.shutdown()
        assert not any(queue._thread.is_alive() for queue in engine.worker._queues)
        assert engine.open == 0, "pages stay leased"
        assert not engine.faults
        assert device.under_way("gather") == device.under_way("scatter") == 0


@pytest.fixture
def stocked(client: kvstore.Client, make: Callable[..., Engine]) -> Engine:
    """The store has all pages: page n is full of 100 + n."""
    engine = make()
    page_bytes = engine.layout.page_bytes
    pages = [np.full(page_bytes, 100 + number, np.uint8) for number in range(PAGES)]
    assert engine.namespace.store(HASHES[:PAGES], pages).stored == PAGES
    engine.calls.clear()
    return engine


RIGHT = {number: {block} for number, block in enumerate(STORED_FROM)}


def test_a_store_queues_its_second_batch_before_the_first_one_is_copied(
    make: Callable[..., Engine], device: HeldDevice
) -> None:
    engine = make()
    device.hold()
    engine.store(finished=["a"])

    device.wait_under_way("gather", 2)
    assert engine.worker.get_finished() == (set(), set()), "its blocks are being read"
    for _ in range(2):
        device.complete("gather")
        device.wait_under_way("gather", 2)
    device.release()
    engine.settle()

    assert engine.found() == RIGHT
    assert engine.most_open == 2
    assert engine.worker.get_finished() == ({"a"}, set())
    assert engine.worker.statistics().pages_stored == PAGES


def test_a_load_queues_its_second_batch_before_the_first_one_is_copied(stocked: Engine, device: HeldDevice) -> None:
    device.hold()
    stocked.load()

    device.wait_under_way("scatter", 2)
    assert stocked.worker.get_finished() == (set(), set()), "its blocks are being written"
    device.release()
    stocked.settle()

    assert [stocked.content(block) for block in LOADED_INTO] == [{100 + number} for number in range(PAGES)]
    assert stocked.worker.get_finished() == (set(), {"a"})
    assert stocked.worker.get_block_ids_with_load_errors() == set()
    assert stocked.most_open == 2


def test_what_two_batches_took_at_once_is_not_counted_twice(stocked: Engine, device: HeldDevice) -> None:
    began = time.monotonic()
    stocked.load()
    stocked.settle()
    whole = time.monotonic() - began

    timings = stocked.worker.take_load_timings()

    assert [(tier, pages) for tier, pages, _ in timings] == [("arena", 3), ("arena", 3), ("arena", 3), ("arena", 2)]
    assert sum(seconds for _, _, seconds in timings) <= whole


@pytest.mark.parametrize("why", ["not pinned", "an arena too small"])
def test_else_one_batch_is_under_way_at_a_time(
    make: Callable[..., Engine], device: HeldDevice, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    if why != "not pinned":
        monkeypatch.setattr("kvstore.connector.worker._ARENA_SHARE", 1 << 30)
    engine = make(pinned=why != "not pinned")
    engine.store()
    engine.settle()
    engine.load()
    engine.settle()
    assert engine.found() == RIGHT
    assert [engine.content(block) for block in LOADED_INTO] == [{block} for block in STORED_FROM]
    assert engine.most_open == 1


@pytest.mark.parametrize("batch", range(4))
@pytest.mark.parametrize("step", ["prepare_store", "to queue", "to copy", "complete"])
def test_a_store_that_fails_at_any_step_keeps_what_was_stored_before_and_nothing_behind(
    make: Callable[..., Engine], device: HeldDevice, step: str, batch: int
) -> None:
    engine = make()
    if step == "to queue":
        device.fails_to_queue = lambda direction, number: number == batch
    elif step == "to copy":
        device.fails = lambda direction, number: number == batch
    else:
        engine.fails_at[step] = batch
    engine.store(finished=["a"])
    engine.settle()

    stored = batch * BATCH
    kept = range(stored) if step != "complete" else [*range(min(PAGES, stored + BATCH))]
    assert engine.found() == {number: RIGHT[number] for number in kept}
    assert engine.open == 0
    assert engine.worker.get_finished() == ({"a"}, set())
    statistics = engine.worker.statistics()
    assert statistics.store_failures == 1
    assert (statistics.pages_stored, statistics.pages_dropped) == (stored, PAGES - stored)


@pytest.mark.parametrize("batch", range(4))
@pytest.mark.parametrize("step", ["borrow", "to queue", "to copy", "complete"])
def test_a_load_that_fails_at_any_step_keeps_the_pages_before(
    stocked: Engine, device: HeldDevice, step: str, batch: int
) -> None:
    if step == "to queue":
        device.fails_to_queue = lambda direction, number: number == batch
    elif step == "to copy":
        device.fails = lambda direction, number: number == batch
    else:
        stocked.fails_at[step] = batch
    stocked.load()
    stocked.settle()

    assert stocked.worker.get_finished() == (set(), {"a"})
    assert stocked.worker.get_block_ids_with_load_errors() == set(LOADED_INTO[batch * BATCH :])
    for number in range(batch * BATCH):
        assert stocked.content(LOADED_INTO[number]) == {100 + number}
    assert stocked.worker.statistics().load_failures == 1
    assert stocked.open == 0


@pytest.mark.parametrize("end", ["revoked", "withdrawn", "stopped"])
@pytest.mark.parametrize("completed", range(4))
def test_a_store_that_ends_with_two_batches_under_way_publishes_neither(
    make: Callable[..., Engine], device: HeldDevice, end: str, completed: int
) -> None:
    engine = make()
    device.hold()
    engine.store()
    for _ in range(completed):
        device.wait_under_way("gather", 1)
        device.complete("gather")
    if completed < 3:
        device.wait_under_way("gather", 2)
    published = engine.calls.get("complete", 0) * BATCH
    if end == "stopped":
        stopping = threading.Thread(target=engine.worker.shutdown)
        stopping.start()
        while not engine.worker._stores._table.is_stopped:
            time.sleep(0.001)
    elif end == "revoked":
        engine.worker.handle_preemptions(StepPlan(preempted=("a",)))
    else:
        engine.worker.handle_preemptions(StepPlan(overwritten=STORED_FROM))
    for block in STORED_FROM:
        if end != "stopped":  # until its blocks are reported nobody else gets them
            engine.fill(block, GIVEN_AWAY)
    device.release()
    engine.settle()
    if end == "stopped":
        stopping.join()
    found = engine.found() if end != "stopped" else {}
    assert all(found[number] == RIGHT[number] for number in found)
    # One that was being published meanwhile may be there.
    assert end == "stopped" or len(found) <= max(published, completed * BATCH)
    assert engine.open == 0


def test_blocks_that_are_withdrawn_under_two_copies_are_missing_and_the_others_are_stored(
    make: Callable[..., Engine], device: HeldDevice
) -> None:
    engine = make()
    device.hold()
    engine.store(finished=["a"])
    device.wait_under_way("gather", 2)

    engine.worker.handle_preemptions(StepPlan(overwritten=(STORED_FROM[1], STORED_FROM[4])))
    engine.fill(STORED_FROM[1], GIVEN_AWAY)
    engine.fill(STORED_FROM[4], GIVEN_AWAY)
    assert engine.worker.get_finished() == (set(), set())
    device.release()
    engine.settle()

    assert engine.found() == {number: RIGHT[number] for number in range(PAGES) if number not in (1, 4)}
    assert engine.worker.get_finished() == ({"a"}, set())


@pytest.mark.parametrize("call", ["prepare_store", "complete"])
def test_a_store_whose_node_hangs_beside_a_copy_lets_its_request_go_when_the_copy_is_done(
    make: Callable[..., Engine], device: HeldDevice, call: str
) -> None:
    engine = make()
    device.hold()
    engine.stops_at = (call, 1) if call == "prepare_store" else (call, 0)
    engine.store(finished=["a"])
    if call == "complete":
        device.wait_under_way("gather", 2)
        device.complete("gather")
    assert engine.stopped.wait(PATIENCE)
    engine.clock.now += DEADLINE
    assert device.under_way("gather") == 1
    assert engine.worker.get_finished() == (set(), set()), "its blocks are being read"

    device.complete("gather")
    assert engine.worker.get_finished() == ({"a"}, set())
    for block in STORED_FROM:
        engine.fill(block, GIVEN_AWAY)
    engine.go_on.set()
    device.release()
    engine.settle()
    assert all(bytes_found == RIGHT[number] for number, bytes_found in engine.found().items())
    assert engine.worker.statistics().stores_late == 1


def test_a_load_whose_node_hangs_beside_a_copy_is_given_up_when_the_copy_is_done(
    stocked: Engine, device: HeldDevice
) -> None:
    device.hold()
    stocked.stops_at = ("borrow", 1)
    stocked.load()
    assert stocked.stopped.wait(PATIENCE)
    stocked.clock.now += DEADLINE
    assert stocked.worker.get_finished() == (set(), set()), "its blocks are being written"

    device.complete("scatter")
    assert stocked.worker.get_finished() == (set(), {"a"})
    assert stocked.worker.get_block_ids_with_load_errors() == set(LOADED_INTO)
    for block in LOADED_INTO:
        stocked.fill(block, GIVEN_AWAY)
    stocked.go_on.set()
    device.release()
    stocked.settle()
    assert {value for block in LOADED_INTO for value in stocked.content(block)} == {GIVEN_AWAY}


@pytest.mark.parametrize("revoked", [False, True])
def test_a_rest_waits_for_a_copy_while_the_thread_hangs_in_a_call(
    make: Callable[..., Engine], device: HeldDevice, revoked: bool
) -> None:
    engine = make()
    device.hold()
    engine.stops_at = ("prepare_store", 1)
    engine.store()
    assert engine.stopped.wait(PATIENCE)
    engine.clock.now += DEADLINE
    if revoked:
        engine.worker.handle_preemptions(StepPlan(preempted=("a",)))
    order: list[str] = []
    resting = threading.Thread(target=lambda: (engine.worker.rest(), order.append("at rest")))
    resting.start()
    resting.join(0.1)
    order.append("copied")
    device.complete("gather")
    resting.join(PATIENCE)
    assert order == ["copied", "at rest"]


def test_past_the_deadline_no_batch_is_begun_beside_another(make: Callable[..., Engine], device: HeldDevice) -> None:
    """Else there would be no moment at which it could be given up."""
    engine = make()
    device.hold()
    engine.store(finished=["a"])
    device.wait_under_way("gather", 2)
    engine.clock.now += DEADLINE
    engine.stops_at = ("prepare_store", 2)
    device.release()
    assert engine.stopped.wait(PATIENCE)

    assert device.under_way("gather") == 0
    assert engine.worker.get_finished() == ({"a"}, set())
    engine.go_on.set()
    engine.settle()
    assert engine.found() == {number: RIGHT[number] for number in range(2 * BATCH)}


def test_a_layer_is_told_when_the_batches_before_it_are_known_to_be_there(
    client: kvstore.Client, make: Callable[..., Engine], stocked: Engine, device: HeldDevice
) -> None:
    engine = make(by_layer=True)
    engine.stops_at = ("complete", 2)
    device.hold()
    engine.load()
    for _ in range(2):
        device.wait_under_way("scatter", 2)
        device.complete("scatter")
    device.wait_under_way("scatter", 2)
    device.complete("scatter")
    assert engine.stopped.wait(PATIENCE)
    device.complete("scatter")  # the last batch's first layer
    [load] = engine.worker._loads._table.live()
    assert load.layers_done == 0, "the batch before it is not known to be right"
    engine.go_on.set()
    device.release()
    assert engine.worker.wait_for_layer_load(1) == set()
    engine.settle()
    assert engine.worker.get_finished() == (set(), {"a"})
    assert [engine.content(block) for block in LOADED_INTO] == [{100 + number} for number in range(PAGES)]


def test_a_load_that_is_given_up_tells_of_no_layer_and_queues_none(
    make: Callable[..., Engine], stocked: Engine, device: HeldDevice
) -> None:
    engine = make(by_layer=True)
    engine.stops_at = ("complete", 2)
    engine.load()
    assert engine.stopped.wait(PATIENCE)
    engine.clock.now += DEADLINE
    queued_by_now = device.begun["scatter"]
    assert engine.worker.wait_for_layer_load(0) == {"a"}
    engine.go_on.set()
    engine.settle()
    assert device.begun["scatter"] == queued_by_now
    assert engine.worker.get_finished() == (set(), {"a"})
    assert engine.worker.get_block_ids_with_load_errors() == set(LOADED_INTO[2 * BATCH :])


@pytest.mark.parametrize("most", [BATCH, 2 * BATCH, 3 * BATCH])
def test_what_waits_to_be_confirmed_is_bounded_as_ever(
    make: Callable[..., Engine], device: HeldDevice, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    engine = make(touched_early=True)
    monkeypatch.setattr(unconfirmed_copies, "MOST_BYTES", most * engine.layout.page_bytes)
    engine.store(finished=["a"])
    end = time.monotonic() + PATIENCE
    while not engine.worker.get_finished()[0]:
        assert time.monotonic() < end
        engine.worker.handle_preemptions(StepPlan())
    engine.settle()
    assert engine.found() == RIGHT
    assert engine.most_open <= most // BATCH


def test_a_batch_that_finds_no_room_beside_another_is_asked_for_again_behind_it(
    make: Callable[..., Engine], device: HeldDevice
) -> None:
    engine = make()
    prepare = engine.namespace.prepare_store

    def refusing(hashes: Sequence[bytes], *, parent: bytes = b"") -> PendingStore:
        beside = engine.open > 0
        pending: PendingStore = prepare(hashes, parent=parent)
        if beside:
            pending._before = kvstore.StoreResult(refused=1)
            pending.pages[-1] = None
        return pending

    engine.namespace.prepare_store = refusing  # type: ignore[method-assign]
    engine.store()
    engine.settle()
    assert engine.found() == RIGHT
    assert engine.worker.statistics().pages_refused == 0
    assert engine.calls["prepare_store"] == 5, "it tries that once"


def test_layers_that_differ_are_all_queued_before_one_is_waited_for(
    make: Callable[..., Engine], device: HeldDevice
) -> None:
    engine = make(sizes=(4096, 4096, 1024))
    device.hold()
    engine.store()
    device.wait_under_way("gather", 4)  # two batches of two stretches
    device.release()
    engine.settle()
    assert engine.found() == RIGHT


@pytest.mark.parametrize("touched_early", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_in_any_order_no_wrong_byte_and_nothing_is_kept(
    make: Callable[..., Engine], device: HeldDevice, seed: int, touched_early: bool
) -> None:
    """Requests' blocks hold what was computed until they are given away: behind a preemption, or when the request was
    reported. Then others write into them."""
    dice = random.Random(f"{seed} {touched_early}")
    engine = make(touched_early=touched_early, by_layer=dice.random() < 0.3)
    failing = dice.random() < 0.6
    device.fails = lambda direction, number: failing and dice.random() < 0.05
    device.fails_to_queue = lambda direction, number: failing and dice.random() < 0.05
    running, loading = False, False

    def give_away(blocks: Sequence[int]) -> None:
        for block in blocks:
            engine.fill(block, GIVEN_AWAY)

    for _ in range(150):
        event = dice.choice(["store", "load", "step", "copies", "copies", "collect", "preempt", "window", "late"])
        engine.worker._store_health.succeeded()
        engine.worker._load_health.succeeded()
        if failing and dice.random() < 0.1:
            call = dice.choice(["prepare_store", "borrow", "complete"])
            engine.fails_at = {call: engine.calls.get(call, 0) + dice.randrange(3)}
        device.hold() if dice.random() < 0.5 else device.release()
        if event == "store" and not running:
            running = True
            for block in STORED_FROM:
                engine.fill(block, block)
            engine.store(finished=["a"] if dice.random() < 0.5 else [])
        elif event == "load" and not loading:
            loading = True
            give_away(LOADED_INTO)
            engine.load("b")
        elif event == "step":
            engine.worker.handle_preemptions(StepPlan())
        elif event == "copies":
            for direction in ("gather", "scatter"):
                device.complete(direction)
        elif event == "collect":
            sent, received = engine.worker.get_finished()
            missing = engine.worker.get_block_ids_with_load_errors()
            if "a" in sent:
                running = False
                give_away(STORED_FROM)
            if "b" in received:
                loading = False
                for number, block in enumerate(LOADED_INTO):
                    if block not in missing:
                        assert engine.content(block) == RIGHT[number], "a load brought other bytes"
        elif event == "preempt" and running:
            if touched_early:
                give_away(STORED_FROM)
            engine.worker.handle_preemptions(StepPlan(preempted=("a",)))
            give_away(STORED_FROM)
            engine.worker.start_save_kv(StepPlan(finished=("a",)))
        elif event == "window" and running:
            leaving = STORED_FROM[: dice.randrange(1, PAGES)]
            if touched_early:
                give_away(leaving)
            engine.worker.handle_preemptions(StepPlan(overwritten=leaving))
            give_away(leaving)
            engine.worker.start_save_kv(StepPlan(finished=("a",)))
        elif event == "late" and dice.random() < 0.3:
            engine.clock.now += DEADLINE
        if dice.random() < 0.1:
            engine.namespace.evict(HASHES[: dice.randrange(PAGES)])
    device.release()
    engine.fails_at = {}
    engine.worker.rest()
    give_away(STORED_FROM)
    engine.settle()
    assert all(found == RIGHT[number] for number, found in engine.found().items())
