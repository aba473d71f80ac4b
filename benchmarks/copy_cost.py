"""What one batch costs the host, from the call to the end of the wait, for each copy strategy, beside a memcpy of it.

Runs of 8 bytes take no time to copy, so what is timed is Python, torch's dispatch and, on a CUDA device, launches and
events: while it lasts the engine's own thread waits for the interpreter's lock. Without a device nothing is queued and
the driver's call for a batch does nothing. The memcpy moves what the batch has with real runs (`--run-bytes`). A ratio
is its time over ours: below 1 the batch costs the host more than memory takes to move it. The best of many: what
else the machine does makes it only worse.
"""

from __future__ import annotations

import argparse
import ctypes
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from functools import partial
from timeit import repeat
from typing import Any

import numpy as np
import torch
from copy_strategies import Shape, Workload, product_strategies

from kvstore.cli.bench.machine import this_machine
from kvstore.gpu.batched import Batched
from kvstore.gpu.cuda import DeviceCopies, Event
from kvstore.gpu.cuda_driver import BatchedMemcpy
from kvstore.gpu.cudart import cuda_runtime
from kvstore.gpu.pinned import PinnedMapping
from kvstore.gpu.strategies import merging

TINY_RUN = 8
BATCHES = (
    (Shape(32, 16, TINY_RUN), 8),
    (Shape(32, 16, TINY_RUN, layers_inside=True), 8),
    (Shape(80, 6, TINY_RUN), 3),
    (Shape(61, 32, TINY_RUN), 16),
)
"""With the number of pages."""


class Registers:
    """A CUDA runtime to which all memory is pinned: where there is no device."""

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802
        """Take it as pinned."""
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        """Take it back."""
        return 0


class Queued:
    """Streams and events where there is no device: what is queued is done."""

    def mark(self) -> Event:
        """Nothing to wait for."""
        return self

    def queue(
        self, direction: str, copies: Iterable[Callable[[], None]], after: Event | None = None
    ) -> Iterator[Event]:
        """Make the calls."""
        for copy in copies:
            copy()
            yield self

    def synchronize(self) -> None:
        """Nothing."""

    def wait(self, stream: torch.cuda.Stream) -> None:
        """Nothing."""


class Driver:
    """A driver's library whose batched copy does nothing."""

    def __init__(self) -> None:
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        arguments = pointer, pointer, pointer, size, pointer, pointer, size, pointer, pointer
        self._nothing = ctypes.CFUNCTYPE(ctypes.c_int, *arguments)(lambda *_: 0)

    def cuGetProcAddress_v2(self, name: bytes, address: Any, *_: object) -> int:  # noqa: N802
        """Its address."""
        ctypes.cast(address, ctypes.POINTER(ctypes.c_void_p))[0] = ctypes.cast(self._nothing, ctypes.c_void_p)
        return 0


class Unchecked(DeviceCopies):
    """By one strategy, which was not tried before: copies that do nothing would not be right."""

    def _measure(self) -> None:
        pass


def batch(shape: Shape, pages: int, run_bytes: int, rounds: int, device: torch.device) -> dict[str, object]:
    """The best of one batch, in microseconds, by what was done."""
    work = Workload(shape, device, shape.layers * pages * shape.run_bytes)
    source = np.ones(shape.layers * pages * run_bytes, np.uint8)
    target = np.zeros_like(source)
    cuda = device.type == "cuda"
    with PinnedMapping(work.memory, cuda_runtime(device) if cuda else Registers()) as mapping:
        strategies, skipped = product_strategies(work.layers, work.layout, pinned=mapping.pinned)
        if not cuda:
            make = partial(Batched, copy_list=BatchedMemcpy(Driver(), lambda: 1))
            strategies["batch"] = merging(make, work.layers, work.layout)
            del skipped["batch"]
        calls: dict[str, Callable[[], object]] = {"memcpy": partial(np.copyto, target, source)}
        for name, strategy in strategies.items():
            copies = Unchecked(work.layers, work.layout, None if cuda else Queued(), {name: strategy})
            calls[f"{name}, out"] = partial(copies.gather, work.out_ids, work.leaving)
            calls[f"{name}, in"] = partial(copies.scatter, work.coming, work.in_ids)
            calls[f"{name}, in by layer"] = partial(copies.scatter, work.coming, work.in_ids, lambda layer: None)
        best = {name: 1e6 * min(repeat(call, number=1, repeat=rounds)) for name, call in calls.items()}
    return {
        "layers": shape.layers,
        "layers_inside": shape.layers_inside,
        "pages": pages,
        "run_bytes": run_bytes,
        "us": best,
        "skipped": skipped,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", help="cpu, or cuda to have the launches in it (default: cpu)")
    parser.add_argument("--run-bytes", type=int, default=64 << 10, help="bytes a run of the memcpy (default: 65536)")
    parser.add_argument("--rounds", type=int, default=200, help="times that each is done (default: 200)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    if options.rounds < 1 or options.run_bytes < 1:
        parser.error("--rounds and --run-bytes must be 1 at least")
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("skipped: this needs a CUDA device, and torch finds none")
        return
    torch.set_num_threads(1)
    hardware = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    machine = this_machine()
    rows = [batch(shape, pages, options.run_bytes, options.rounds, device) for shape, pages in BATCHES]
    if options.json:
        found = {"machine": asdict(machine), "device": hardware, "torch": torch.__version__, "batches": rows}
        print(json.dumps(found, indent=2))
        return
    print(f"{machine.line()}, torch {torch.__version__}; device: {hardware}")
    for row in rows:
        inside = " side by side" if row["layers_inside"] else ""
        print(f"{row['layers']} layers{inside} x {row['pages']} pages, {row['run_bytes'] >> 10} KiB:  us, memcpy / it")
        for name, micros in row["us"].items():
            print(f"  {name:20}{micros:22.0f}{row['us']['memcpy'] / micros:13.2f}")
        for name, reason in row["skipped"].items():
            print(f"  {name:20}  skipped: {reason}")


if __name__ == "__main__":
    main()
