"""How fast pages cross between a device and pinned memory, and what a hit saves before the first token.

Pages: out, in, and both at once, beside one asynchronous copy (`cudaMemcpyAsync`) of one pinned block of as many bytes,
in turns in the same run; medians. A ratio is that copy's time over ours. Then the reference engine on the device
answers a prompt without kvstore, with it and nothing stored, and with every page there, over an embedded store.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

import kvstore
from kvstore.connector.reference.engine import Engine
from kvstore.connector.reference.model import Llama, LlamaConfig
from kvstore.gpu.paged_kv import PagedKV
from kvstore.gpu.pinned import PinnedMapping, is_pinned
from kvstore.gpu.tuning import measure

BLOCKS = 256
LAYOUTS = {
    "a tensor a layer, keys first": ("kv block token head dim", (2, BLOCKS, 16, 8, 128)),
    "a tensor a layer, blocks first": ("block kv token head dim", (BLOCKS, 2, 16, 8, 128)),
    "one tensor, heads before tokens": ("layer block head token dim", (32, BLOCKS, 8, 16, 256)),
    "latent (MLA)": ("block token dim", (BLOCKS, 16, 576)),
}


def both(first: Callable[[], None], second: Callable[[], None]) -> None:
    """At once."""
    other = threading.Thread(target=second)
    other.start()
    first()
    other.join()


def copies(device: torch.device, name: str, pages: int, rounds: int) -> dict[str, object]:
    """Bandwidths of one layout with 32 layers, GB/s, and ratios."""
    axes, shape = LAYOUTS[name]
    count = 1 if "layer" in axes else 32
    paged = PagedKV([torch.zeros(shape, dtype=torch.bfloat16, device=device) for _ in range(count)], axes)
    order = np.random.default_rng(0).permutation(BLOCKS).tolist()
    out_ids, in_ids = order[:pages], order[pages : 2 * pages]
    size = pages * paged.page_bytes
    cuda = device.type == "cuda"
    memory = np.zeros(2 * size, np.uint8)
    host = [torch.zeros(size, dtype=torch.uint8, pin_memory=cuda) for _ in range(2)]
    there = [torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2)]
    streams = [torch.cuda.Stream(device) for _ in range(2)] if cuda else []

    def plain(*directions: str) -> None:
        for number, direction in enumerate(directions):
            with torch.cuda.stream(streams[number]) if cuda else contextlib.nullcontext():
                pair = (host[number], there[number]) if direction == "out" else (there[number], host[number])
                pair[0].copy_(pair[1], non_blocking=True)
        for stream in streams:
            stream.synchronize()

    with PinnedMapping(memory) as mapping:
        leaving, coming = (list(half.reshape(pages, -1)) for half in np.split(memory, 2))

        def gather() -> None:
            paged.gather(out_ids, leaving)

        def scatter() -> None:
            paged.scatter(coming, in_ids)

        seconds = measure(
            {
                "out": gather,
                "out limit": lambda: plain("out"),
                "in": scatter,
                "in limit": lambda: plain("in"),
                "both": lambda: both(gather, scatter),
                "both limit": lambda: plain("out", "in"),
            },
            rounds=rounds,
        )
    median = {key: statistics.median(times) for key, times in seconds.items()}
    row: dict[str, object] = {"layout": name, "page_bytes": paged.page_bytes, "pages": pages, "pinned": mapping.pinned}
    if paged.strategies:
        row["ways"] = {direction: names[0] for direction, names in paged.strategies.items()}
    for key, moved in (("out", size), ("in", size), ("both", 2 * size)):
        row[key] = {
            "gbps": moved / median[key] / 1e9,
            "limit_gbps": moved / median[f"{key} limit"] / 1e9,
            "ratio": median[f"{key} limit"] / median[key],
        }
    return row


def first_token(model: Llama, tokens: int, rounds: int) -> dict[str, float]:
    """Milliseconds to the first token of a prompt, medians, in turns."""
    times: dict[str, list[float]] = {"without kvstore": [], "with kvstore, no hit": [], "with kvstore, a hit": []}
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvstore-bench-")))
        memory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvstore-bench-", dir="/dev/shm")))
        url = f"embedded://{folder}/store?arena={1 << 30}&disk_limit=0&arena_dir={memory}/arena"
        client = stack.enter_context(kvstore.connect(url))
        for turn in range(-1, rounds):
            prompt = np.random.default_rng([1, turn + 1]).integers(0, model.config.vocab_size, tokens).tolist()
            for name, with_client in zip(times, (None, client, client), strict=True):
                engine = Engine(model, num_blocks=tokens // 16 + 8, token_budget=tokens, client=with_client)
                if with_client is not None and model.device.type == "cuda" and not is_pinned(with_client.arena):
                    raise SystemExit("the arena could not be pinned: these figures would be those of a detour")
                engine.add_request(name, prompt, 1)
                (answer,) = engine.run()
                engine.close()
                assert bool(answer.tokens_loaded) == (name == "with kvstore, a hit")
                if turn >= 0:
                    times[name].append(1e3 * answer.time_to_first_token)
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="cuda, or cpu to see that everything runs (default: cuda)")
    parser.add_argument("--pages", type=int, default=64, help="pages a call (default: 64)")
    parser.add_argument("--tokens", type=int, default=2048, help="tokens of the prompt (default: 2048)")
    parser.add_argument("--rounds", type=int, default=20, help="counted rounds (default: 20)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("skipped: this needs a CUDA device, and torch finds none")
        return
    hardware = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    rows = []
    for name in LAYOUTS:
        print(name, file=sys.stderr, flush=True)
        rows.append(copies(device, name, options.pages, options.rounds))
    print("first token", file=sys.stderr, flush=True)
    model = Llama(LlamaConfig(seed=2)).to(device)
    first = first_token(model, options.tokens, options.rounds)
    versions = {"torch": torch.__version__, "cuda": torch.version.cuda or ""}
    if options.json:
        found = {
            "device": hardware,
            **versions,
            "time": time.strftime("%Y-%m-%d"),
            "copies": rows,
            "first_token": first,
        }
        print(json.dumps(found, indent=2))
        return
    print(f"{hardware}, torch {versions['torch']}, CUDA {versions['cuda'] or '-'}, {options.pages} pages a call, GB/s:")
    print(f"{'layout':33}{'page':>10}  " + "".join(f"{key:>6}{'of copy':>9}  " for key in ("out", "in", "both")))
    for row in rows:
        cells = "".join(f"{row[key]['gbps']:6.1f}{row[key]['ratio']:9.2f}  " for key in ("out", "in", "both"))
        ways = ", ".join(f"{direction} {name}" for direction, name in row.get("ways", {}).items())
        print(f"{row['layout']:33}{row['page_bytes'] >> 10:>6} KiB  {cells}{ways}")
    print(f"first token of a prompt of {options.tokens} tokens, ms:")
    for name, milliseconds in first.items():
        print(f"  {name:24}{milliseconds:9.1f}")


if __name__ == "__main__":
    main()
