"""How fast the block manager is, beside vLLM's own in the same run.

A cycle is a request of 32768 tokens, 16 a block, whose first half is cached: it is looked up, given blocks for the
whole prompt, goes on for 64 tokens, one a step, and is freed. The pool is full of cached blocks, so that each new one
evicts another; block hashes are there before. Each side runs in a process of its own, in turns. Medians; a ratio is the
median of their time over ours, turn by turn. vLLM is measured where a Python that has it is named (`--vllm-python`, or
VLLM_PYTHON).
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import hashlib
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

from sides import worker

BLOCK_SIZE = 16
PROMPT = 32 << 10
ANSWER = 64
NUM_BLOCKS = 8 << 10
PHASES = ("look up", "allocate", "append", "free")


class Request:
    """What both managers read of a request."""

    num_in_flight_tokens = 0
    num_preemptions = 0
    skip_reading_prefix_cache = False
    prefix_keys = None
    # vLLM's alone
    shared_prefix_boundary = 0
    status = None

    def __init__(self, number: int) -> None:
        self.request_id = f"request {number}"
        self.num_tokens = self.num_prompt_tokens = PROMPT
        self.num_computed_tokens = 0
        shared = PROMPT // BLOCK_SIZE // 2
        self.block_hashes = [
            _hash(index if index < shared else (number, index)) for index in range(PROMPT // BLOCK_SIZE)
        ]
        self.answer_hashes = [_hash((number, "answer", index)) for index in range(ANSWER // BLOCK_SIZE)]


def _hash(what: object) -> bytes:
    return hashlib.sha256(repr(what).encode()).digest()


def kvstore_manager() -> Any:
    from kvstore.connector.blocks import (
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
        KVCacheManager,
    )

    spec = FullAttentionSpec(block_size=BLOCK_SIZE, token_bytes=4096)
    return KVCacheManager(KVCacheConfig(NUM_BLOCKS, (KVCacheGroupSpec(("layer",), spec),)), PROMPT + ANSWER)


def vllm_manager() -> Any:
    import torch
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=8, head_size=128, dtype=torch.bfloat16)
    config = KVCacheConfig(NUM_BLOCKS, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])
    return KVCacheManager(config, PROMPT + ANSWER, scheduler_block_size=BLOCK_SIZE, hash_block_size=BLOCK_SIZE)


def cycle(manager: Any, request: Request) -> list[float]:
    """Seconds of each phase."""
    times = [time.perf_counter()]
    hit, num_hit, *_ = manager.get_computed_blocks(request)
    times.append(time.perf_counter())
    given = manager.allocate_slots(request, PROMPT - num_hit, num_hit, hit)
    times.append(time.perf_counter())
    assert given is not None
    request.num_computed_tokens = PROMPT
    for _ in range(ANSWER):
        request.num_tokens += 1
        if request.num_tokens % BLOCK_SIZE == 0:
            request.block_hashes.append(request.answer_hashes.pop())
        manager.allocate_slots(request, 1)
        request.num_computed_tokens += 1
    times.append(time.perf_counter())
    manager.free(request)
    times.append(time.perf_counter())
    return [after - before for before, after in pairwise(times)]


def serve(side: str) -> None:
    """Runs a cycle for each line on standard input and answers with the seconds of its phases."""
    manager = (kvstore_manager if side == "kvstore" else vllm_manager)()
    number = 0
    while number * PROMPT < 2 * NUM_BLOCKS * BLOCK_SIZE:
        cycle(manager, Request(number))  # until the pool is full
        number += 1
    gc.collect()
    gc.freeze()  # what was imported is none of the managers' business
    print("ready", flush=True)
    for _ in sys.stdin:
        number += 1
        print(json.dumps(cycle(manager, Request(number))), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100, help="counted cycles (default: 100)")
    parser.add_argument("--vllm-python", default=os.environ.get("VLLM_PYTHON"), help="a Python that has vLLM")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--side", choices=("kvstore", "vllm"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        serve(options.side)
        return

    sides: dict[str, Callable[[str], str]] = {}
    times: dict[str, list[list[float]]] = {}
    with contextlib.ExitStack() as stack:
        sides["kvstore"] = stack.enter_context(worker(sys.executable, __file__, "kvstore"))
        if options.vllm_python:
            sides["vllm"] = stack.enter_context(worker(options.vllm_python, __file__, "vllm"))
        for turn in range(-5, options.rounds):
            for side, ask in sides.items():
                taken = json.loads(ask("cycle"))
                if turn >= 0:  # the first rounds only warm up
                    times.setdefault(side, []).append([*taken, sum(taken)])
    rows = []
    for index, phase in enumerate((*PHASES, "all")):
        columns = {side: [cycle[index] for cycle in cycles] for side, cycles in times.items()}
        row: dict[str, str | float] = {"phase": phase}
        row |= {f"{side} µs": statistics.median(column) * 1e6 for side, column in columns.items()}
        if "vllm" in columns:
            row["ratio"] = statistics.median(
                their / our for our, their in zip(columns["kvstore"], columns["vllm"], strict=True)
            )
        rows.append(row)
    if options.json:
        print(json.dumps({"tokens": PROMPT, "block_size": BLOCK_SIZE, "answer": ANSWER, "rows": rows}))
        return

    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, header_style="bold")
    for column in rows[0]:
        table.add_column(column, justify="left" if column == "phase" else "right")
    for row in rows:
        table.add_row(
            *(value if isinstance(value, str) else f"{value:.{2 if value < 100 else 0}f}" for value in row.values())
        )
    Console().print(table)
    if "vllm" not in sides:
        print("vLLM was not measured: name a Python that has it with --vllm-python or VLLM_PYTHON.")


if __name__ == "__main__":
    main()
