"""How fast pages cross between a device and pinned memory, what that costs beside it, and what a hit saves.

`--only` names sections:

- `layouts`: pages out, in, and both at once, by the strategies that the product chooses, for four layouts;
- `strategies`: the same for each copy strategy (`copy_strategies.py`), for models as vLLM lays them out;
- `pin`: seconds to register 1, 8 and 32 GiB of shared memory with the device, and to unregister it;
- `decode`: how much a CUDA graph of a decode-like step slows while each strategy copies without a pause;
- `python`: each strategy alone, and beside a thread that computes in Python, as an engine's does;
- `first-token`: the reference engine answers a prompt without kvstore, with it and nothing stored, and with every page
  there, over an embedded store;
- `node`: the same over a node that is a process of its own, and whether the answers are the same;
- `arena`: seconds in which two processes register one node's arena, of 64 GiB where there is so much, all at once.

Bandwidths stand beside one asynchronous copy (`cudaMemcpyAsync`) of one pinned block of as many bytes, in turns in the
same run; medians. A ratio is that copy's time over ours. What a machine can't show is skipped, with the reason.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from copy_strategies import SHAPES
from device_node import arena_of_several, engines_over_a_node
from device_strategies import SIZES, beside_python, both, decode_steps, pin_seconds, plain_copies, strategy_copies

import kvstore
from kvstore.connector.reference.engine import Engine
from kvstore.connector.reference.model import Llama, LlamaConfig
from kvstore.gpu.cudart import cuda_runtime
from kvstore.gpu.paged_kv import PagedKV
from kvstore.gpu.pinned import PinnedMapping, pinned_bytes
from kvstore.gpu.tuning import measure

BLOCKS = 256
ANY = -1
"""So many blocks."""
LAYOUTS = {
    "a tensor a layer, keys first": ("kv block token head dim", (2, ANY, 16, 8, 128)),
    "a tensor a layer, blocks first": ("block kv token head dim", (ANY, 2, 16, 8, 128)),
    "one tensor, heads before tokens": ("layer block head token dim", (32, ANY, 8, 16, 256)),
    "latent (MLA)": ("block token dim", (ANY, 16, 576)),
}


def layout_copies(device: torch.device, name: str, pages: int, rounds: int) -> dict[str, object]:
    """Bandwidths of one layout with 32 layers, GB/s, and ratios."""
    axes, shape = LAYOUTS[name]
    count = 1 if "layer" in axes else 32
    blocks = max(BLOCKS, 2 * pages) if device.type == "cuda" else 2 * pages
    shape = tuple(blocks if size == ANY else size for size in shape)
    paged = PagedKV([torch.zeros(shape, dtype=torch.bfloat16, device=device) for _ in range(count)], axes)
    order = np.random.default_rng(0).permutation(blocks).tolist()
    out_ids, in_ids = order[:pages], order[pages : 2 * pages]
    size = pages * paged.page_bytes
    memory = np.zeros(2 * size, np.uint8)
    with PinnedMapping(memory, cuda_runtime(device)) as mapping, plain_copies(device, size) as plain:
        pinned = mapping.pinned
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
    row: dict[str, object] = {"layout": name, "page_bytes": paged.page_bytes, "pages": pages, "pinned": pinned}
    if paged.strategies:
        row["strategies"] = {direction: names[0] for direction, names in paged.strategies.items()}
    for key, moved in (("out", size), ("in", size), ("both", 2 * size)):
        row[key] = {
            "gbps": moved / median[key] / 1e9,
            "limit_gbps": moved / median[f"{key} limit"] / 1e9,
            "ratio": median[f"{key} limit"] / median[key],
        }
    return row


def await_pinned(arena: npt.NDArray[np.uint8], seconds: float = 60.0) -> None:
    """An engine's arena is registered in the background."""
    end = time.monotonic() + seconds
    while pinned_bytes(arena) < arena.nbytes:
        if time.monotonic() > end:
            raise SystemExit("the arena could not be pinned: these figures would be those of a detour")
        time.sleep(0.01)


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
                if with_client is not None and model.device.type == "cuda":
                    await_pinned(with_client.arena)
                engine.add_request(name, prompt, 1)
                (answer,) = engine.run()
                engine.close()
                assert bool(answer.tokens_loaded) == (name == "with kvstore, a hit")
                if turn >= 0:
                    times[name].append(1e3 * answer.time_to_first_token)
    return {name: statistics.median(values) for name, values in times.items()}


SECTIONS = ("layouts", "strategies", "pin", "decode", "python", "first-token", "node", "arena")


def section(name: str, device: torch.device, options: argparse.Namespace) -> object:
    """What one section has measured."""
    print(name, file=sys.stderr, flush=True)
    match name:
        case "layouts":
            return [layout_copies(device, layout, options.pages, options.rounds) for layout in LAYOUTS]
        case "strategies":
            return [strategy_copies(device, shape, size, options.rounds) for shape in SHAPES for size in SIZES]
        case "pin":
            return pin_seconds(device)
        case "decode":
            return decode_steps(device)
        case "python":
            return beside_python(device, options.rounds)
        case "arena":
            return arena_of_several(device)
        case "node":
            return engines_over_a_node(Llama(LlamaConfig(seed=2)).to(device), options.tokens, options.rounds)
        case _:
            return first_token(Llama(LlamaConfig(seed=2)).to(device), options.tokens, options.rounds)


def print_section(name: str, found: object) -> None:
    """As a table."""
    ways = ("out", "in", "both")
    print(f"{name}:")
    match name, found:
        case "layouts", list(rows):
            print(f"  {'GB/s':33}{'page':>10}  " + "".join(f"{way:>6}{'of copy':>9}  " for way in ways))
            for row in rows:
                cells = "".join(f"{row[way]['gbps']:6.1f}{row[way]['ratio']:9.2f}  " for way in ways)
                names = ", ".join(f"{direction} {each}" for direction, each in row.get("strategies", {}).items())
                print(f"  {row['layout']:33}{row['page_bytes'] >> 10:>6} KiB  {cells}{names}")
        case "strategies", list(rows):
            for row in rows:
                print(f"  {row['shape']}, {row['bytes'] / (1 << 20):.0f} MiB a call, GB/s")
                for key, figures in row["strategies"].items():
                    cells = "".join(
                        f"{way:>6}{figures[way]['gbps']:7.1f}{figures[way]['ratio']:6.2f} of copy" for way in ways
                    )
                    print(f"    {key:20}{cells}")
                print_skipped(row["skipped"])
        case "pin", list(rows):
            for row in rows:
                if "skipped" in row:
                    print_skipped({f"{row['gib']} GiB" if "gib" in row else "all": row["skipped"]})
                else:
                    print(f"  {row['gib']:3} GiB: register {row['register_s']:.2f} s, {row['unregister_s']:.2f} s")
        case "decode", list(rows):
            for row in rows:
                label = ", ".join(str(row[key]) for key in ("shape", "strategy") if key in row) or "all"
                if "skipped" in row:
                    print_skipped({label: row["skipped"]})
                    continue
                cells = "".join(
                    f"  {way} {row[way]['slower']:.2f} x the step, {row[way]['gbps']:.1f} GB/s" for way in ways[:2]
                )
                print(f"  {label:50}{row['alone_ms']:7.2f} ms alone{cells}")
        case "python", list(rows):
            for row in rows:
                if "skipped" in row:
                    print_skipped({row["strategy"]: row["skipped"]})
                else:
                    print(f"  {row['strategy']:20}{row['alone_ms']:9.2f} ms alone {row['beside_ms']:9.2f} ms beside")
        case _, {"skipped": str(reason)}:
            print_skipped({"all": reason})
        case "arena", dict(row):
            print(f"  {row['gib']} GiB: registered {row['registered']}, unregistered {row['unregistered']}")
        case "node", dict(row):
            for key, milliseconds in row["ms"].items():
                print(f"  {key:24}{milliseconds:9.1f} ms")
            differ = f"{row['answers_that_differ']} of {row['answers']} answers differ"
            print(f"  {row['tokens_loaded']} tokens came with each hit; {differ}")
        case _, dict(times):
            for key, milliseconds in times.items():
                print(f"  {key:24}{milliseconds:9.1f} ms")


def print_skipped(skipped: dict[str, str]) -> None:
    for name, reason in skipped.items():
        print(f"    {name}: skipped: {reason}")


def names_of_sections(text: str) -> Sequence[str]:
    """For argparse."""
    names = text.split(",")
    if unknown := [name for name in names if name not in SECTIONS]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(SECTIONS)}")
    return names


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="cuda, or cpu to see that everything runs (default: cuda)")
    parser.add_argument("--only", type=names_of_sections, default=SECTIONS, help="sections, with commas (default: all)")
    parser.add_argument("--pages", type=int, default=64, help="pages a call of `layouts` (default: 64)")
    parser.add_argument("--tokens", type=int, default=2048, help="tokens of the prompt (default: 2048)")
    parser.add_argument("--rounds", type=int, default=20, help="counted rounds (default: 20)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("skipped: this needs a CUDA device, and torch finds none")
        return
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    if device.type == "cpu":
        torch.set_num_threads(1)
    hardware = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    found = {name: section(name, device, options) for name in options.only}
    versions = {"torch": torch.__version__, "cuda": torch.version.cuda or ""}
    if options.json:
        print(json.dumps({"device": hardware, **versions, "time": time.strftime("%Y-%m-%d"), **found}, indent=2))
        return
    print(f"{hardware}, torch {versions['torch']}, CUDA {versions['cuda'] or '-'}")
    for name, result in found.items():
        print_section(name, result)


if __name__ == "__main__":
    main()
