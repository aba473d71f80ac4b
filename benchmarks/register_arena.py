"""One process that registers a node's arena with a device: a rank of `device.py`'s section `arena`.

It takes a line before each step and answers with one: seconds, as JSON, or in words why there are none.
"""

from __future__ import annotations

import json
import sys
import time
from functools import partial

import torch
from device_node import ARENA_SECONDS, await_all_pinned

import kvstore
from kvstore.gpu.cudart import cuda_runtime
from kvstore.gpu.pinned import PinnedMapping
from kvstore.gpu.pinned_arena import PinnedArena


def say(found: object) -> None:
    print(json.dumps(found), flush=True)


def main() -> None:
    url, device = sys.argv[1], torch.device(sys.argv[2])
    torch.zeros(1, device=device)  # the device's context is not what is timed
    sys.stdin.readline()
    with kvstore.connect(url) as client:
        client.namespace(kvstore.Layout(model="arena", block_size=16, page_bytes=4096))  # maps it
        arena = client.arena
        if arena is None:
            say("the node's arena is not mapped")
            return
        say(arena.size)
        sys.stdin.readline()
        start = time.perf_counter()
        pinned = PinnedArena(lambda: client.arena, partial(PinnedMapping, runtime=cuda_runtime(device)))
        usable = time.perf_counter() - start
        done = await_all_pinned(arena, ARENA_SECONDS)
        say({"start_s": usable, "all_s": time.perf_counter() - start} if done else "not registered: see above")
        sys.stdin.readline()
        start = time.perf_counter()
        pinned.close()
        say(time.perf_counter() - start)


if __name__ == "__main__":
    main()
