"""What each copy strategy does on a device, and what it does to whatever runs beside it: sections of `device.py`."""

from __future__ import annotations

import contextlib
import mmap
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Self

import numpy as np
import torch
from copy_strategies import SHAPES, Shape, Workload, all_strategies

from kvstore.gpu.cuda import cuda_streams
from kvstore.gpu.cudart import cuda_runtime
from kvstore.gpu.pinned import PinnedMapping
from kvstore.gpu.strategies import CopyStrategy
from kvstore.gpu.tuning import measure

GIB = 1 << 30
PINNED_GIB = (1, 8, 32)
SIZES = (16 << 20, 128 << 20)
"""Bytes a call in one direction."""
DECODE = "32 layers x 64 KiB", "61 layers x 18 KiB (MLA)"
DECODE_STEPS = 150


def both(first: Callable[[], None], second: Callable[[], None]) -> None:
    """At once."""
    other = threading.Thread(target=second)
    other.start()
    first()
    other.join()


def copy_once(device: torch.device, direction: str, copy: Callable[[], None]) -> None:
    """Queue one copy on its stream, and wait for it."""
    if device.type == "cuda":
        (done,) = cuda_streams(device).queue(direction, [copy])
        done.synchronize()
    else:
        copy()


def directions(work: Workload, strategy: CopyStrategy) -> tuple[Callable[[], None], Callable[[], None]]:
    """A strategy's copies of the workload, out and in; each is done when it returns."""
    device, every = work.layers[0].device, [range(len(work.layers))]

    def scatter() -> None:
        next(strategy.scatter(work.coming, work.in_ids, every))

    gather = partial(strategy.gather, work.out_ids, work.leaving)
    return partial(copy_once, device, "gather", gather), partial(copy_once, device, "scatter", scatter)


def is_right(work: Workload, out: Callable[[], None], into: Callable[[], None]) -> bool:
    """Whether every page and every block has the bytes that it should have."""
    wanted = [work.content(block) for block in work.out_ids]
    work.memory[:] = 0xA5
    out()
    if [page.tobytes() for page in work.leaving] != wanted:
        return False
    for number, page in enumerate(work.coming):
        page[:] = np.random.default_rng(number).integers(0, 256, page.size, np.uint8)
    into()
    return [work.content(block) for block in work.in_ids] == [page.tobytes() for page in work.coming]


@contextlib.contextmanager
def workload(device: torch.device, name: str, size: int) -> Iterator[tuple[Workload, bool]]:
    """One model's KV with pages of so many bytes, and whether they are pinned; smaller without a device."""
    shape = SHAPES[name]
    if device.type != "cuda":
        shape, size = Shape(shape.layers, 16, shape.run_bytes, shape.layers_inside), size >> 4
    work = Workload(shape, device, size)
    with PinnedMapping(work.memory, cuda_runtime(device)) as mapping:
        yield work, mapping.pinned


def strategy_copies(device: torch.device, name: str, size: int, rounds: int) -> dict[str, object]:
    """Bandwidths of each strategy for one model, GB/s, and ratios."""
    with workload(device, name, size) as (work, pinned):
        strategies, skipped = all_strategies(work, pinned=pinned)
        calls: dict[str, Callable[[], None]] = {}
        for key, strategy in strategies.items():
            out, into = directions(work, strategy)
            try:
                if not is_right(work, out, into):
                    skipped[key] = "other bytes than the specification's"
                    continue
            except Exception as error:  # noqa: BLE001 - one that this machine can't do says so, the others are measured
                skipped[key] = f"{type(error).__name__}: {error}"
                continue
            calls |= {f"{key}/out": out, f"{key}/in": into, f"{key}/both": partial(both, out, into)}
        measured = sorted({key.partition("/")[0] for key in calls}, key=list(strategies).index)
        with plain_copies(device, work.size) as plain:
            calls |= {"limit/out": partial(plain, "out"), "limit/in": partial(plain, "in")}
            calls["limit/both"] = partial(plain, "out", "in")
            seconds = {key: statistics.median(times) for key, times in measure(calls, rounds=rounds).items()}
    rows: dict[str, dict[str, dict[str, float]]] = {}
    for key in measured:
        rows[key] = {
            way: {
                "gbps": moved / seconds[f"{key}/{way}"] / 1e9,
                "limit_gbps": moved / seconds[f"limit/{way}"] / 1e9,
                "ratio": seconds[f"limit/{way}"] / seconds[f"{key}/{way}"],
            }
            for way, moved in (("out", work.size), ("in", work.size), ("both", 2 * work.size))
        }
    return {"shape": name, "bytes": work.size, "pinned": pinned, "strategies": rows, "skipped": skipped}


@contextlib.contextmanager
def plain_copies(device: torch.device, size: int) -> Iterator[Callable[..., None]]:
    """What bounds us: one copy of one block of so many bytes, pinned where there is a device, out, in, or both."""
    cuda = device.type == "cuda"
    host = [torch.zeros(size, dtype=torch.uint8, pin_memory=cuda) for _ in range(2)]
    there = [torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2)]
    streams = [torch.cuda.Stream(device) for _ in range(2)] if cuda else []

    def plain(*ways: str) -> None:
        for number, way in enumerate(ways):
            with torch.cuda.stream(streams[number]) if cuda else contextlib.nullcontext():
                pair = (host[number], there[number]) if way == "out" else (there[number], host[number])
                pair[0].copy_(pair[1], non_blocking=True)
        for stream in streams:
            stream.synchronize()

    yield plain


def pin_seconds(device: torch.device) -> list[dict[str, object]]:
    """Seconds to register shared memory with the device, as an engine does with a node's arena, and to unregister."""
    rows: list[dict[str, object]] = []
    runtime = cuda_runtime(device)
    if runtime is None:
        return [{"skipped": "needs a CUDA device"}]
    for gib in PINNED_GIB:
        folder = os.statvfs("/dev/shm")
        if folder.f_bavail * folder.f_frsize < gib * GIB:
            rows.append({"gib": gib, "skipped": "/dev/shm has less"})
            continue
        with tempfile.TemporaryFile(dir="/dev/shm") as file:
            os.posix_fallocate(file.fileno(), 0, gib * GIB)
            memory = np.frombuffer(mmap.mmap(file.fileno(), gib * GIB), np.uint8)
        start = time.perf_counter()
        mapping = PinnedMapping(memory, runtime)
        registered = time.perf_counter()
        reason = mapping.reason
        mapping.release()
        unregistered = time.perf_counter()
        del memory  # before the next one is made
        if reason:
            rows.append({"gib": gib, "skipped": reason})
        else:
            rows.append({"gib": gib, "register_s": registered - start, "unregister_s": unregistered - registered})
    return rows


class DecodeStep:
    """A CUDA graph of small kernels that read all of their weights, as a decode step does."""

    def __init__(self, device: torch.device) -> None:
        state = torch.randn(64, 8192, device=device, dtype=torch.bfloat16)
        weights = [torch.randn(8192, 8192, device=device, dtype=torch.bfloat16) for _ in range(16)]

        def step() -> torch.Tensor:
            found = state
            for weight in weights:
                found = torch.nn.functional.silu(found @ weight) * 1e-2
            return found

        step()
        torch.cuda.synchronize(device)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            step()

    def milliseconds(self) -> float:
        """A step, on average over many without a pause."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(DECODE_STEPS):
            self._graph.replay()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / DECODE_STEPS


class Repeated:
    """Copies again and again in a thread of its own."""

    def __init__(self, device: torch.device, copy: Callable[[], None], size: int) -> None:
        self._end = threading.Event()
        self._once = threading.Event()
        self._moved, self._size = 0, size
        self._thread = threading.Thread(target=self._run, args=(device, copy))

    def during(self, work: Callable[[], float]) -> tuple[float, float]:
        """What some work answers, and the GB/s that were copied meanwhile."""
        before, start = self._moved, time.perf_counter()
        found = work()
        return found, (self._moved - before) / (time.perf_counter() - start) / 1e9

    def __enter__(self) -> Self:
        self._thread.start()
        self._once.wait(60)
        return self

    def __exit__(self, *error: object) -> None:
        self._end.set()
        self._thread.join()

    def _run(self, device: torch.device, copy: Callable[[], None]) -> None:
        torch.cuda.set_device(device)
        with torch.cuda.stream(torch.cuda.Stream(device)):  # the mark is made on it: not behind the steps
            while not self._end.is_set():
                copy()
                self._moved += self._size
                self._once.set()


def decode_steps(device: torch.device) -> list[dict[str, object]]:
    """A decode-like step alone, and beside each strategy's copies in each direction."""
    if device.type != "cuda":
        return [{"skipped": "needs a CUDA device"}]
    rows: list[dict[str, object]] = []
    step = DecodeStep(device)
    for name in DECODE:
        with workload(device, name, SIZES[-1]) as (work, pinned):
            step.milliseconds()
            alone = step.milliseconds()
            strategies, skipped = all_strategies(work, pinned=pinned)
            for key, strategy in strategies.items():
                row: dict[str, object] = {"shape": name, "strategy": key, "alone_ms": alone}
                out, into = directions(work, strategy)
                try:
                    for way, copy in (("out", out), ("in", into)):
                        copy()
                        with Repeated(device, copy, work.size) as copies:
                            beside, gbps = copies.during(step.milliseconds)
                        row[way] = {"step_ms": beside, "slower": beside / alone, "gbps": gbps}
                except Exception as error:  # noqa: BLE001 - as in strategy_copies
                    row["skipped"] = f"{type(error).__name__}: {error}"
                rows.append(row)
            rows += [{"shape": name, "strategy": key, "skipped": reason} for key, reason in skipped.items()]
    return rows


def beside_python(device: torch.device, rounds: int) -> list[dict[str, object]]:
    """Milliseconds of each strategy's copy out, alone and beside a thread that computes in Python."""
    with workload(device, next(iter(SHAPES)), SIZES[0]) as (work, pinned):
        strategies, skipped = all_strategies(work, pinned=pinned)
        calls = {}
        for key, strategy in strategies.items():
            out, into = directions(work, strategy)
            try:
                if is_right(work, out, into):
                    calls[key] = out
                else:
                    skipped[key] = "other bytes than the specification's"
            except Exception as error:  # noqa: BLE001 - as in strategy_copies
                skipped[key] = f"{type(error).__name__}: {error}"
        alone = measure(calls, rounds=rounds)
        end = threading.Event()

        def compute() -> None:
            total = 0
            while not end.is_set():
                for number in range(1000):
                    total += number

        busy = threading.Thread(target=compute)
        busy.start()
        try:
            beside = measure(calls, rounds=rounds)
        finally:
            end.set()
            busy.join()
    found: list[dict[str, object]] = [
        {
            "strategy": key,
            "alone_ms": 1e3 * statistics.median(alone[key]),
            "beside_ms": 1e3 * statistics.median(beside[key]),
        }
        for key in calls
    ]
    return found + [{"strategy": key, "skipped": reason} for key, reason in skipped.items()]
