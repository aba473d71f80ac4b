"""What an engine's side does with a node that is a process of its own, on a device: sections of `device.py`."""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

import kvstore
from kvstore.cli.bench.node_process import serving
from kvstore.connector.reference.engine import Engine
from kvstore.connector.reference.model import Llama
from kvstore.gpu.strategies import tensor_over

GIB = 1 << 30
ARENA_GIB = (64, 48, 32, 16, 8)
"""The largest that there is memory for is registered."""
RANKS = 2
ARENA_SECONDS = 300.0
ANSWER_TOKENS = 8


def is_all_pinned(arena: npt.NDArray[np.uint8]) -> bool:
    """Whether CUDA knows every part of an arena as registered; it may have been registered in several."""
    starts = [*range(0, arena.size, 64 << 20), arena.size - 1]
    return all(tensor_over(arena[start : start + 1]).is_pinned() for start in starts)


def await_all_pinned(arena: npt.NDArray[np.uint8], seconds: float) -> bool:
    """Wait until then; False: in vain."""
    end = time.monotonic() + seconds
    while not is_all_pinned(arena):
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def free_shared_memory() -> int:
    """Bytes that a file there may take."""
    folder = os.statvfs("/dev/shm")
    available = 0
    with Path("/proc/meminfo").open() as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) << 10
    return min(folder.f_bavail * folder.f_frsize, available)


def arena_of_several(device: torch.device) -> dict[str, object]:
    """Seconds in which several processes register one node's arena, as the ranks of an engine do, all at once."""
    if device.type != "cuda":
        return {"skipped": "needs a CUDA device"}
    gib = next((each for each in ARENA_GIB if each * GIB + 2 * GIB < free_shared_memory()), 0)
    if not gib:
        return {"skipped": f"/dev/shm, or memory, has no {ARENA_GIB[-1]} GiB"}
    command = [sys.executable, str(Path(__file__).with_name("register_arena.py"))]
    with contextlib.ExitStack() as stack:
        url = stack.enter_context(serving(gib * GIB))
        ranks = [
            stack.enter_context(
                subprocess.Popen([*command, url, str(device)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
            )
            for _ in range(RANKS)
        ]
        told: dict[str, list[object]] = {}
        for step in ("connected", "registered", "unregistered"):
            for rank in ranks:
                assert rank.stdin is not None
                with contextlib.suppress(BrokenPipeError):  # its end is told below
                    rank.stdin.write(b"go\n")
            told[step] = []
            for rank in ranks:
                assert rank.stdout is not None
                line = rank.stdout.readline()
                told[step].append(json.loads(line) if line else f"ended with {rank.wait()}")
    return {"gib": gib, "registered": told["registered"], "unregistered": told["unregistered"]}


def engines_over_a_node(model: Llama, tokens: int, rounds: int) -> dict[str, object]:
    """Milliseconds to the first token of a prompt, medians, and the answers to it that differ; pages of hits."""
    times: dict[str, list[float]] = {"without kvstore": [], "with kvstore, no hit": [], "with kvstore, a hit": []}
    differ, loaded = 0, []
    with serving(GIB) as url, kvstore.connect(url) as client:
        for turn in range(-1, rounds):
            prompt = np.random.default_rng([2, turn + 1]).integers(0, model.config.vocab_size, tokens).tolist()
            answers = []
            for name, with_client in zip(times, (None, client, client), strict=True):
                blocks = tokens // 16 + 8
                patient = {"lookup_budget": 10.0, "load_deadline": 30.0}
                engine = Engine(model, num_blocks=blocks, token_budget=tokens, client=with_client, **patient)
                if with_client is not None and model.device.type == "cuda":
                    assert with_client.arena is not None
                    if not await_all_pinned(with_client.arena, 60.0):
                        engine.close()
                        return {"skipped": "the arena could not be pinned: figures would be those of a detour"}
                engine.add_request(name, prompt, ANSWER_TOKENS)
                (answer,) = engine.run()
                engine.close()
                answers.append(answer.token_ids)
                if turn >= 0:
                    times[name].append(1e3 * answer.time_to_first_token)
            loaded.append(answer.tokens_loaded)
            differ += len({*answers}) - 1
    milliseconds = {name: statistics.median(values) for name, values in times.items()}
    return {"ms": milliseconds, "tokens_loaded": min(loaded), "answers_that_differ": differ, "answers": 3 * len(loaded)}
