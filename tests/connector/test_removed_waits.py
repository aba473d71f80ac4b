"""Each wait of the device's copies and of the worker half taken away, one by one: the simulated device finds it."""

from __future__ import annotations

import inspect
import logging
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import simulated_device
from simulated_engine import Case, Engine, engine_of

import kvstore.connector.worker
from kvstore.connector.batches import Batch
from kvstore.connector.plan import StepPlan
from kvstore.connector.transfer_queue import TransferQueue
from kvstore.connector.transfers import Transfer, TransferTable
from kvstore.connector.unconfirmed_copies import Copy, UnconfirmedCopies
from kvstore.connector.worker import WorkerConnector
from kvstore.gpu.begun import DONE, BegunCopy
from kvstore.gpu.cuda import CudaEvent

MOST_SEEDS = 60
"""In which it is found."""

Change = Callable[[Engine, pytest.MonkeyPatch], None]


@dataclass
class Removal:
    """What is taken away, and the engine that finds it."""

    change: Change
    given: dict[str, Any]
    first: int
    """The seed that is known to find it."""


REMOVALS: dict[str, Removal] = {}


def removal(first: int, **given: Any) -> Callable[[Change], Change]:
    def add(change: Change) -> Change:
        REMOVALS[change.__name__.replace("_", " ")] = Removal(change, given, first)
        return change

    return add


def nothing(*_: Any) -> None:
    pass


def change(patch: pytest.MonkeyPatch, owner: type, name: str, old: str, new: str) -> None:
    """A function's source is another one at one place."""
    function = inspect.getattr_static(owner, name)
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(old) == 1, f"{owner.__name__}.{name} has another text now: {old}"
    made: dict[str, Any] = {}
    exec("from __future__ import annotations\n" + source.replace(old, new), function.__globals__, made)
    patch.setattr(owner, name, made[name])


def _not_synchronized(direction: str, patch: pytest.MonkeyPatch) -> None:
    synchronize = CudaEvent.synchronize
    patch.setattr(
        CudaEvent,
        "synchronize",
        lambda self: None if self._event.stream.name == direction else synchronize(self),
    )


@removal(4)
def copies_wait_for_the_engine(engine: Engine, patch: pytest.MonkeyPatch) -> None:
    """Neither on the device nor in the thread that copies; ``test_simulated_device.py`` has the first alone."""
    patch.setattr(CudaEvent, "wait", nothing)
    patch.setattr(kvstore.connector.worker, "_wait_for_engine", nothing)


@removal(4)
def the_mark_is_made_in_the_engines_thread(engine: Engine, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(WorkerConnector, "_mark", nothing)


@removal(3)
def a_copy_out_is_waited_for(engine: Engine, patch: pytest.MonkeyPatch) -> None:
    _not_synchronized("gather", patch)


@removal(0)
def a_copy_in_is_waited_for(engine: Engine, patch: pytest.MonkeyPatch) -> None:
    _not_synchronized("scatter", patch)


@removal(1)
def an_event_is_recorded_behind_its_copy(engine: Engine, patch: pytest.MonkeyPatch) -> None:
    launch, record = engine.device.launch, simulated_device.Event.record
    launched: dict[str, list[Callable[[], None]]] = {}

    def early(event: simulated_device.Event, stream: simulated_device.Stream | None = None) -> None:
        record(event, stream)
        assert event.stream is not None
        for copy in launched.pop(event.stream.name, []):
            with engine.device.use(event.stream):
                launch(copy)

    patch.setattr(
        engine.device, "launch", lambda copy: launched.setdefault(engine.device.current.name, []).append(copy)
    )
    patch.setattr(simulated_device.Event, "record", early)


@removal(0, by_layer=True, fails=0.05, mode="lazy")
def what_is_queued_is_waited_for_when_a_wait_fails(engine: Engine, patch: pytest.MonkeyPatch) -> None:
    synchronize = CudaEvent.synchronize
    patch.setattr(CudaEvent, "synchronize", lambda self: None if sys.exc_info()[0] else synchronize(self))


@removal(8, fails=0.03)
def what_is_queued_is_waited_for_when_a_copy_fails(engine: Engine, patch: pytest.MonkeyPatch) -> None:
    synchronize = simulated_device.Stream.synchronize
    patch.setattr(simulated_device.Stream, "synchronize", lambda self: None if sys.exc_info()[0] else synchronize(self))


@removal(19, hangs=0.05)
def what_is_over_is_not_touched(engine: Engine, patch: pytest.MonkeyPatch) -> None:
    begin_copy = TransferTable.begin_copy
    patch.setattr(TransferTable, "begin_copy", lambda self, transfer: begin_copy(self, transfer) or True)


@removal(0, hangs=0.1, fails=0.0, mode="slow")
def a_late_copy_is_waited_for(engine: Engine, patch: pytest.MonkeyPatch) -> None:
    def give_up(table: TransferTable[Any], transfer: Transfer[Any]) -> None:
        table.late += 1
        table.end(transfer)

    def give_up_late(table: TransferTable[Any], now: float) -> None:
        for transfer in table.live():
            if now >= transfer.deadline:
                give_up(table, transfer)

    patch.setattr(TransferTable, "give_up", give_up)
    patch.setattr(TransferTable, "give_up_late", give_up_late)


@removal(7, touches_first=False)
def a_copy_is_wanted_behind_it(engine: Engine, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TransferQueue, "wanted", lambda self, transfer: True)


@removal(3)
def preempted_requests_are_not_stored(engine: Engine, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TransferQueue, "revoke", nothing)


@removal(0, names_blocks=True)
def overwritten_blocks_are_not_stored(engine: Engine, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TransferQueue, "withdraw", lambda self, block_ids: 0)


@removal(3)
def requests_are_reported_behind_their_stores(engine: Engine, patch: pytest.MonkeyPatch) -> None:
    class NoneUnderWay(Counter[str]):
        def __getitem__(self, name: str) -> int:
            return 0

    engine.worker._stores_under_way = NoneUnderWay()


@removal(11, touches_first=True, says_so=False)
def an_engine_that_touches_first_says_so(engine: Engine, patch: pytest.MonkeyPatch) -> None:
    """It is the case that does not."""


@removal(2, touches_first=True)
def copies_wait_for_the_next_step(engine: Engine, patch: pytest.MonkeyPatch) -> None:
    add = UnconfirmedCopies.add

    def add_confirmed(copies: UnconfirmedCopies[Any], copy: Copy[Any]) -> None:
        copy.confirmed = True
        add(copies, copy)

    patch.setattr(UnconfirmedCopies, "add", add_confirmed)


@removal(2, touches_first=True)
def copies_are_confirmed_behind_what_a_step_takes(engine: Engine, patch: pytest.MonkeyPatch) -> None:
    def handle_preemptions(worker: WorkerConnector, plan: StepPlan) -> None:
        worker._stores.confirm()
        worker._stores.revoke(plan.preempted)
        worker._stores.withdraw(plan.overwritten)

    patch.setattr(WorkerConnector, "handle_preemptions", handle_preemptions)


@removal(11, touches_first=True, names_blocks=True, hangs=0.05)
def only_blocks_that_are_held_need_no_further_step(engine: Engine, patch: pytest.MonkeyPatch) -> None:
    def confirm_held(copies: UnconfirmedCopies[Any], copy: Copy[Any]) -> None:
        copy.confirmed = copy.confirmed or copy.transfer.plan.request_id in copies._held

    patch.setattr(UnconfirmedCopies, "_confirm_held", confirm_held)


@removal(38, touches_first=True)
def nothing_is_held_behind_the_report(engine: Engine, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(UnconfirmedCopies, "release", nothing)


@removal(0, by_layer=True)
def a_layer_is_waited_for(engine: Engine, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TransferQueue, "wait_layer", lambda self, layer: [])


@removal(3, by_layer=True)
def a_layer_is_told_of_when_it_is_there(engine: Engine, patch: pytest.MonkeyPatch) -> None:
    pass_layer = TransferQueue.pass_layer
    patch.setattr(TransferQueue, "pass_layer", lambda self, transfer, layer: pass_layer(self, transfer, layer + 1))


@removal(0, by_layer=True)
def a_step_that_loads_ends_behind_its_loads(engine: Engine, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(WorkerConnector, "wait_for_load", nothing)


@removal(0, sleeps=True)
def a_rest_waits(engine: Engine, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TransferQueue, "rest", lambda self: setattr(self._table, "is_resting", True))


@removal(3, sleeps=True)
def a_rest_waits_for_copies_of_what_was_revoked(engine: Engine, patch: pytest.MonkeyPatch) -> None:
    change(patch, TransferQueue, "rest", "while self._table.is_copying:", "while False:")


@removal(4, is_pinned=True)
def a_copy_ends_before_its_pages_are_given_back(engine: Engine, patch: pytest.MonkeyPatch) -> None:
    """The pages of a copy that nobody wants any more."""
    change(patch, TransferQueue, "drop", "copy.end()", "pass")


@removal(0, is_pinned=True, fails=0.03)
def the_copy_behind_one_that_fails_is_waited_for(engine: Engine, patch: pytest.MonkeyPatch) -> None:
    carry_out, drop = kvstore.connector.worker.carry_out, TransferQueue.drop
    behind: list[BegunCopy] = []

    def carry_out_watched(
        begin: Callable[[bool], Batch[Any] | None],
        finish: Callable[[Batch[Any]], bool],
        may_overlap: Callable[[], bool],
    ) -> None:
        def begin_watched(alone: bool) -> Batch[Any] | None:
            if (batch := begin(alone)) is not None and not alone:
                behind.append(batch.copy)
            return batch

        def finish_watched(batch: Batch[Any]) -> bool:
            if batch.copy in behind:
                behind.remove(batch.copy)
            return finish(batch)

        carry_out(begin_watched, finish_watched, may_overlap)

    def drop_unless_behind(queue: TransferQueue[Any], copy: BegunCopy) -> None:
        drop(queue, DONE if copy in behind else copy)

    patch.setattr(kvstore.connector.worker, "carry_out", carry_out_watched)
    patch.setattr(TransferQueue, "drop", drop_unless_behind)


@removal(0, is_pinned=True, hangs=0.1, mode="slow")
def copies_that_go_on_by_themselves_are_looked_at(engine: Engine, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TransferTable, "copies_by_itself", False)


@removal(0, is_pinned=True, hangs=0.1)
def what_is_late_is_given_up(engine: Engine, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TransferTable, "give_up_late", nothing)


@removal(83, is_pinned=True, by_layer=True, fails=0.02, sleeps=False)
def a_load_whose_layers_were_told_of_is_not_carried_out_again(engine: Engine, patch: pytest.MonkeyPatch) -> None:
    change(patch, WorkerConnector, "_load", "if not tells_layers and ", "if ")


@removal(0, is_pinned=True, by_layer=True)
def layers_are_told_of_by_the_last_batch_alone(engine: Engine, patch: pytest.MonkeyPatch) -> None:
    change(patch, WorkerConnector, "_load", "self._by_layer and next_page >= len(hashes)", "self._by_layer")


@removal(6, sleeps=True)
def nothing_is_taken_during_a_rest(engine: Engine, patch: pytest.MonkeyPatch) -> None:
    submit = TransferTable.submit

    def submit_awake(table: TransferTable[Any], transfer: Transfer[Any]) -> bool:
        rests, table.is_resting = table.is_resting, False
        taken = submit(table, transfer)
        table.is_resting = rests
        return taken

    patch.setattr(TransferTable, "submit", submit_awake)


@pytest.fixture(autouse=True)
def _failures_are_not_logged() -> None:
    logging.getLogger("kvstore.connector").setLevel(logging.CRITICAL)


@pytest.mark.simulated
@pytest.mark.parametrize("name", REMOVALS)
def test_it_is_found_out_unless(name: str, tmp_path: Path, shm_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    removed = REMOVALS[name]
    seeds: Iterable[int] = [removed.first, *(seed for seed in range(MOST_SEEDS) if seed != removed.first)]
    for seed in seeds:
        case = Case.drawn(seed, **removed.given)
        with (
            engine_of(case, tmp_path / str(seed), shm_folder, monkeypatch) as engine,
            monkeypatch.context() as patch,
        ):
            removed.change(engine, patch)
            engine.run()
        if engine.wrong:
            print(f"seed {seed}: {engine.wrong[0]}")
            return
    pytest.fail(f"not found in {MOST_SEEDS} lives of an engine")
