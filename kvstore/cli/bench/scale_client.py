"""One of the clients of ``kvstore bench scale``, in a process of its own.

Its command line says the node's URL, its number, how many prompts are stored, and for how many seconds it works. It
writes a line when it is connected; for each line with the name of a work it does that work, and writes a line of JSON:
how many pages were found, loaded or stored, and the seconds of each call.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

import kvstore
from kvstore.cli.bench.prompts import (
    PAGE_BYTES,
    PROMPT_PAGES,
    prompt_hashes,
    prompt_layout,
)

BATCH_PAGES = 64
"""Pages a call, of loads and stores."""


def main(url: str, number: int, prompts: int, seconds: float) -> None:
    """Serve the lines of standard input."""
    chosen = random.Random(number)  # noqa: S311 - which prompt is asked for
    buffer = np.zeros(BATCH_PAGES * PAGE_BYTES, np.uint8)
    unused = iter(range((number + 1) << 32, (number + 2) << 32))
    with kvstore.connect(url, timeout=60.0) as client:
        namespace = client.namespace(prompt_layout())

        def look_up(hashes: list[bytes]) -> int:
            return namespace.lookup(hashes).prefix

        def load(hashes: list[bytes]) -> int:
            return namespace.load(hashes, buffer)

        def store(hashes: list[bytes]) -> int:
            return namespace.store(hashes, buffer).stored

        def calls(work: str) -> Iterator[Callable[[], int]]:
            while True:
                prompt = next(unused) if work == "store" else chosen.randrange(prompts)
                hashes = prompt_hashes(prompt)
                if work == "lookup":
                    yield partial(look_up, hashes)
                    continue
                for start in range(0, PROMPT_PAGES, BATCH_PAGES):
                    yield partial(store if work == "store" else load, hashes[start : start + BATCH_PAGES])

        for prompt in range(min(prompts, 256)):  # the mapping is touched before the clock runs
            namespace.lookup(prompt_hashes(prompt))
        print("ready", flush=True)
        for line in sys.stdin:
            print(json.dumps(_work(calls(line.strip()), seconds)), flush=True)


def _work(calls: Iterator[Callable[[], int]], seconds: float) -> dict[str, object]:
    times, pages = [], 0
    end = time.perf_counter() + seconds
    for call in calls:
        start = time.perf_counter()
        if start >= end:
            break
        pages += call()
        times.append(time.perf_counter() - start)
    return {"pages": pages, "times": times}


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
