"""An engine on a device that does what is queued on it later, in any order that its streams and events allow: nothing
that is stored, loaded and computed may be wrong, whenever the engine tells of a step, whatever fails, and however
stores, loads, preemptions, aborts and sleep meet. ``SIMULATIONS`` says how many lives of an engine there are."""

from __future__ import annotations

import logging
import os
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from simulated_device import Device, SimulatedStreams
from simulated_engine import MODES, Case, engine_of
from simulated_threads import Threads

import kvstore.gpu.paged_kv
from kvstore.gpu.cuda import CudaEvent, DeviceCopies
from kvstore.gpu.paged_kv import PagedKV

SIMULATIONS = int(os.environ.get("SIMULATIONS", "30"))
ORDERS = {"told first": False, "touched first": True}
KINDS = [(order, mode) for order in ORDERS for mode in MODES]


@pytest.fixture(autouse=True)
def _failures_are_not_logged() -> None:
    logging.getLogger("kvstore.connector").setLevel(logging.CRITICAL)


@pytest.mark.simulated
@pytest.mark.timeout(300 + 2 * SIMULATIONS)
@pytest.mark.parametrize(("order", "mode"), KINDS)
def test_nothing_is_wrong(
    order: str, mode: str, tmp_path: Path, shm_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, stored, loaded, read, overlapping = KINDS.index((order, mode)) * 1_000_000, 0, 0, 0, 0
    for seed in range(first, first + -(-SIMULATIONS // len(KINDS))):
        case = Case.drawn(seed, mode=mode, touches_first=ORDERS[order])
        with engine_of(case, tmp_path / str(seed), shm_folder, monkeypatch) as engine:
            engine.run()
        assert engine.wrong == [], case
        assert engine.compared >= engine.worker.statistics().pages_stored > 0, case
        stored, loaded, read = stored + engine.compared, loaded + engine.loaded, read + engine.read
        overlapping += engine.overlapping
    assert stored > SIMULATIONS, "pages that were stored, found and compared"
    assert loaded > SIMULATIONS / 4, "that were loaded"
    assert read > SIMULATIONS * 10, "that the device attended to"
    assert overlapping > SIMULATIONS / 4 or mode in ("eager", "random"), "batches that began beside the one before"
    print(f"{order}, {mode}: {stored} pages compared in the store, {loaded} loaded, {read} looked at on the device")
    print(f"{overlapping} batches whose copy began while the one before was under way")


@pytest.mark.parametrize("mode", MODES)
def test_a_seed_is_one_run(mode: str, tmp_path: Path, shm_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a failure could not be looked at."""
    runs = set()
    for number in range(2):
        with engine_of(Case.drawn(3, mode=mode), tmp_path / str(number), shm_folder, monkeypatch) as engine:
            engine.run()
        runs.add((engine.threads.switches, engine.threads.now, engine.compared, engine.read, engine.loaded))
    assert len(runs) == 1


def fill(layers: list[torch.Tensor], value: int) -> None:
    for layer in layers:
        layer[1] = value


@pytest.mark.parametrize("waits", [True, False], ids=["waits", "would be found out"])
@pytest.mark.parametrize("direction", ["gather", "scatter"])
def test_copies_wait_for_the_engine_on_the_device_alone(
    direction: str, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker half waits for the engine in its own thread as well, and either is enough: here nobody does."""
    threads = Threads(1, "lazy")
    device = Device(threads)
    device.install(monkeypatch)
    layers = [torch.zeros((4, 64), dtype=torch.uint8) for _ in range(2)]
    with monkeypatch.context() as patch:
        streams = SimulatedStreams(device)
        patch.setattr(kvstore.gpu.paged_kv, "HostCopies", lambda *each: DeviceCopies(*each, streams))
        kv = PagedKV(layers, "block dim")
    wrong = 0
    if not waits:
        monkeypatch.setattr(CudaEvent, "wait", lambda self, stream: None)
    for value in range(1, 21):
        page = np.full(kv.page_bytes, 200, np.uint8)
        device.compute(partial(fill, layers, value))
        copy = partial(kv.gather, [1], [page]) if direction == "gather" else partial(kv.scatter, [page], [1])
        copying = threads.begin("copying", partial(copy, after=kv.mark()))
        threads.switch(partial(getattr, copying, "is_over"))
        device.engine.synchronize()
        wrong += page[0] != value if direction == "gather" else int(layers[0][1, 0]) != 200
    threads.stop()
    assert (wrong == 0) == waits
