"""What it costs the host to queue one batch of copies, for each copy strategy, beside a memcpy of the batch's bytes.

Runs of 8 bytes take no time to copy, so what is timed is Python, torch's dispatch and, on a CUDA device, the launches:
while it lasts the engine's own thread waits for the interpreter's lock. *descriptors* is what one batched call of the
driver needs: three arrays of addresses and sizes. The memcpy moves what the batch has with real runs (`--run-bytes`). A
ratio is its time over ours: below 1 the batch takes longer to queue than memory takes to move it. Medians, in turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial

import numpy as np
import torch
from copy_strategies import Batched, Shape, Workload, product_strategies

from kvstore.cli.bench.machine import this_machine
from kvstore.gpu.cudart import cuda_runtime
from kvstore.gpu.pinned import PinnedMapping
from kvstore.gpu.strategies import CopyStrategy

BATCHES = ((32, 8), (80, 3), (61, 16))
"""Layers and pages."""
TINY_RUN = 8


def batch(layers: int, pages: int, run_bytes: int, rounds: int, device: torch.device) -> dict[str, object]:
    """Medians of one batch, in microseconds, by what was done."""
    shape = Shape(layers, 2 * pages, TINY_RUN)
    work = Workload(shape, device, layers * pages * TINY_RUN)
    source = np.ones(layers * pages * run_bytes, np.uint8)
    target = np.zeros_like(source)

    def gather(strategy: CopyStrategy) -> None:
        strategy.gather(work.out_ids, work.leaving)

    def scatter(strategy: CopyStrategy) -> None:
        for _ in strategy.scatter(work.coming, work.in_ids, [range(layers)]):
            pass

    with PinnedMapping(work.memory, cuda_runtime(device)) as mapping:
        strategies, skipped = product_strategies(work.layers, work.layout, pinned=mapping.pinned)
        calls: dict[str, Callable[[], object]] = {"memcpy": partial(np.copyto, target, source)}
        for name, strategy in strategies.items():
            calls[f"{name}, out"] = partial(gather, strategy)
            calls[f"{name}, in"] = partial(scatter, strategy)
        calls["descriptors"] = partial(Batched(work.layers).describe_copies, work.out_ids, work.leaving)
        seconds: dict[str, list[float]] = {name: [] for name in calls}
        for turn in range(-1, rounds):
            for name, call in calls.items():
                start = time.perf_counter()
                call()
                taken = time.perf_counter() - start
                if device.type == "cuda":
                    torch.cuda.synchronize(device)  # not timed: what was queued is done before the next one
                if turn >= 0:
                    seconds[name].append(taken)
    micros = {name: 1e6 * statistics.median(times) for name, times in seconds.items()}
    return {"layers": layers, "pages": pages, "run_bytes": run_bytes, "us": micros, "skipped": skipped}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", help="cpu, or cuda to have the launches in it (default: cpu)")
    parser.add_argument("--run-bytes", type=int, default=64 << 10, help="bytes a run of the memcpy (default: 65536)")
    parser.add_argument("--rounds", type=int, default=30, help="counted rounds (default: 30)")
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
    rows = [batch(layers, pages, options.run_bytes, options.rounds, device) for layers, pages in BATCHES]
    if options.json:
        found = {"machine": asdict(machine), "device": hardware, "torch": torch.__version__, "batches": rows}
        print(json.dumps(found, indent=2))
        return
    print(f"{machine.line()}, torch {torch.__version__}; device: {hardware}")
    for row in rows:
        print(f"{row['layers']} layers x {row['pages']} pages, {row['run_bytes'] >> 10} KiB a run:    us  memcpy / it")
        for name, micros in row["us"].items():
            print(f"  {name:20}{micros:22.0f}{row['us']['memcpy'] / micros:13.2f}")
        for name, reason in row["skipped"].items():
            print(f"  {name:20}  skipped: {reason}")


if __name__ == "__main__":
    main()
