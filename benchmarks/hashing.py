"""How fast a prompt's blocks are hashed, beside vLLM's own hashing in the same run.

Each side hashes the same 131072 token ids (a list, 16 a block) in a process of its own, in turns; the time is that of
the hashing alone, without making a request of the tokens. Medians; a ratio is the median of their time over ours, turn
by turn. vLLM is measured where a Python that has it is named (`--vllm-python`, or VLLM_PYTHON).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial

from sides import worker

BLOCK_SIZE = 16
TOKENS = 128 << 10
IMAGES = [(f"{image:064x}", image * 640, 576) for image in range(TOKENS // 640)]  # identifier, offset, length
KEYS = ("none", "images")
THEIRS = ("sha256", "sha256_cbor")

Timed = Callable[[], float]
"""Hashes the prompt once and gives the seconds that it took."""


def timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def kvstore_side(prompt: list[int]) -> dict[str, Timed]:
    from kvstore.connector.blocks import BlockHashChain, MultimodalInput, PrefixKeys

    images = tuple(MultimodalInput(identifier=name, offset=at, length=length) for name, at, length in IMAGES)

    def hash_prompt(keys: PrefixKeys) -> None:
        chain = BlockHashChain(BLOCK_SIZE, keys)
        chain.extend(prompt)
        assert len(chain.hashes) == TOKENS // BLOCK_SIZE

    return {
        "none": lambda: timed(lambda: hash_prompt(PrefixKeys())),
        "images": lambda: timed(lambda: hash_prompt(PrefixKeys(multimodal=images))),
    }


def vllm_side(prompt: list[int]) -> dict[str, Timed]:
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    images = [
        MultiModalFeatureSpec(
            data=None, modality="image", identifier=name, mm_position=PlaceholderRange(offset=at, length=length)
        )
        for name, at, length in IMAGES
    ]

    def hash_prompt(name: str, keys: str) -> float:
        function = get_hash_fn_by_name(name)
        init_none_hash(function)
        request = Request(
            request_id="request",
            prompt_token_ids=prompt,
            sampling_params=SamplingParams(max_tokens=1),
            pooling_params=None,
            mm_features=images if keys == "images" else None,
        )
        hasher = get_request_block_hasher(BLOCK_SIZE, function)
        start = time.perf_counter()
        hashes = hasher(request)  # what the constructor calls when it is given a hasher
        seconds = time.perf_counter() - start
        assert len(hashes) == TOKENS // BLOCK_SIZE
        return seconds

    return {f"{name} {keys}": partial(hash_prompt, name, keys) for name in THEIRS for keys in KEYS}


def serve(side: str) -> None:
    """Hashes the prompt once for each line on standard input, which names how, and answers with the seconds."""
    generator = random.Random(0)
    prompt = [generator.randrange(150_000) for _ in range(TOKENS)]
    measures = (kvstore_side if side == "kvstore" else vllm_side)(prompt)
    print("ready", flush=True)
    for line in sys.stdin:
        print(measures[line.strip()](), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="counted rounds (default: 15)")
    parser.add_argument("--vllm-python", default=os.environ.get("VLLM_PYTHON"), help="a Python that has vLLM")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--side", choices=("kvstore", "vllm"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        serve(options.side)
        return

    times: dict[tuple[str, str], list[float]] = {}  # by keys and hash
    with contextlib.ExitStack() as stack:
        ours = stack.enter_context(worker(sys.executable, __file__, "kvstore"))
        theirs = stack.enter_context(worker(options.vllm_python, __file__, "vllm")) if options.vllm_python else None
        for turn in range(-2, options.rounds):
            for keys in KEYS:
                taken = {"kvstore": float(ours(keys))}
                if theirs is not None:
                    taken |= {f"vLLM {name}": float(theirs(f"{name} {keys}")) for name in THEIRS}
                for name, seconds in taken.items():
                    if turn >= 0:  # the first two rounds only warm up
                        times.setdefault((keys, name), []).append(seconds)
    rows = [
        {
            "keys": keys,
            "hash": name,
            "milliseconds": statistics.median(taken) * 1e3,
            "ratio": statistics.median(their / our for their, our in zip(taken, times[keys, "kvstore"], strict=True)),
        }
        for (keys, name), taken in times.items()
    ]
    if options.json:
        print(json.dumps({"tokens": TOKENS, "block_size": BLOCK_SIZE, "vllm": theirs is not None, "rows": rows}))
        return

    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, header_style="bold")
    for column in ("keys", "hash", "ms", "times kvstore's"):
        table.add_column(column, justify="left" if column in ("keys", "hash") else "right")
    for row in rows:
        table.add_row(str(row["keys"]), str(row["hash"]), f"{row['milliseconds']:.2f}", f"{row['ratio']:.2f}")
    Console().print(table)
    if theirs is None:
        print("vLLM was not measured: name a Python that has it with --vllm-python or VLLM_PYTHON.")


if __name__ == "__main__":
    main()
