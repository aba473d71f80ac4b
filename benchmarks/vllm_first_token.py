"""Time to the first token of real vLLM: with every page in kvstore, and with none while it stores them.

Hits: a prompt whose pages the node has, beside what bounds it: one and a half times the memcpy of its pages, one step
over the tokens that no page covers (vLLM without a connector that has the prefix in its own blocks), and 10 ms.
Misses: new prompts, each given to vLLM with kvstore and to vLLM without a connector, in pairs of random order; told is
the mean of the logarithm of the ratio, with its 95 % interval, as percent. vLLM with kvstore stores meanwhile.

In the same run, other connectors on the same prompts: vLLM's file connector (``ExampleConnector``: a sample, as its own
documentation says), vLLM's own offloading to memory, and LMCache where an environment has it (``--lmcache-python``).

Each vLLM is a process of its own, with one thread to compute; so is the node. The model is made on the spot.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from made_models import write_llama

import kvstore
from kvstore.cli.bench.node_process import serving
from kvstore.cli.bench.timing import ProcessorCaches, seconds_of
from kvstore.layout import Layout
from tests.vllm.engine import BLOCK_SIZE, EngineError, EngineProcess, transfer_config

ARENA_BYTES = 4 << 30
MODEL = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 8192,
}
WARM_UP = 2


@dataclass(slots=True)
class Hits:
    """Medians, in milliseconds."""

    first_token_ms: float
    hit_tokens: int


@dataclass(slots=True)
class Misses:
    """New prompts, with a connector and without."""

    pairs: int
    with_ms: float
    without_ms: float
    later_percent: float
    low_percent: float
    high_percent: float
    """The 95 % interval of ``later_percent``."""


@dataclass(slots=True)
class Result:
    """What was measured."""

    prompt_tokens: int
    page_bytes: int = 0
    pages: int = 0
    memcpy_ms: float = 0.0
    uncovered_step_ms: float = 0.0
    computed_ms: float = 0.0
    hits: dict[str, Hits] = field(default_factory=dict)
    misses: dict[str, Misses] = field(default_factory=dict)
    not_started: dict[str, str] = field(default_factory=dict)

    @property
    def allowed_ms(self) -> float:
        """1.5 times the memcpy, the step, and 10 ms."""
        return 1.5 * self.memcpy_ms + self.uncovered_step_ms + 10


class Bench:
    """vLLM without a connector, vLLM with each of several, and prompts that no one has seen."""

    def __init__(self, tokens: int, plain: EngineProcess) -> None:
        self.plain = plain
        self.result = Result(tokens)
        self._random = random.Random(0)

    def prompt(self) -> list[int]:
        """A new one."""
        return [self._random.randrange(2, 1024) for _ in range(self.result.prompt_tokens)]

    def first_token(self, engine: EngineProcess, prompt: list[int], *, keep: bool = False) -> float:
        """Seconds to it. Afterwards the stores are done, and the engine has nothing itself, unless told to keep it."""
        (answer,) = engine.run([prompt], max_tokens=1).answers
        engine.drain()
        if not keep:
            engine.forget()
        assert answer.first_token is not None
        return answer.first_token

    def bounds(self, prompt: list[int], url: str, rounds: int) -> None:
        """What a hit can't be faster than."""
        with kvstore.connect(url) as client:
            layout = Layout.from_json(client.status().namespaces[0].layout)
        result = self.result
        result.page_bytes, result.pages = layout.page_bytes, len(prompt) // BLOCK_SIZE
        source = np.ones(result.pages * layout.page_bytes, np.uint8)
        target = np.ones_like(source)
        caches = ProcessorCaches()
        copied, steps = [], []
        computed = self.first_token(self.plain, prompt, keep=True)
        for _ in range(rounds):
            caches.sweep()
            copied.append(seconds_of(lambda: np.copyto(target, source)))
            steps.append(self.first_token(self.plain, prompt, keep=True))
        self.plain.forget()
        result.memcpy_ms, result.uncovered_step_ms = statistics.median(copied) * 1e3, statistics.median(steps) * 1e3
        result.computed_ms = computed * 1e3

    def hits(self, name: str, engine: EngineProcess, prompt: list[int], rounds: int) -> None:
        """A prompt whose pages the connector's store has, again and again."""
        self.first_token(engine, prompt)
        times, found = [], 0
        for number in range(-WARM_UP, rounds):
            answers = engine.run([prompt], max_tokens=1)
            engine.drain()
            engine.forget()
            if not answers.external_hits:
                raise EngineError("it starts, but nothing is loaded from it")
            if number >= 0:
                times.append(answers.answers[0].first_token or math.nan)
                found = answers.external_hits
            progress(f"{name}: hit {number + 1} of {rounds}")
        self.result.hits[name] = Hits(statistics.median(times) * 1e3, found)

    def misses(self, name: str, engine: EngineProcess, pairs: int) -> None:
        """New prompts, each by both engines."""
        both = []
        for number in range(-WARM_UP, pairs):
            prompt = self.prompt()
            engines = [engine, self.plain]
            order = self._random.choice((1, -1))
            times = [self.first_token(each, prompt) for each in engines[::order]][::order]
            if number >= 0:
                both.append((times[0], times[1]))
            progress(f"{name}: miss {number + 1} of {pairs}")
        logs = [math.log(beside / alone) for beside, alone in both]
        mean = statistics.mean(logs)
        half = 1.96 * statistics.stdev(logs) / math.sqrt(len(logs))
        self.result.misses[name] = Misses(
            pairs,
            statistics.median(beside for beside, _ in both) * 1e3,
            statistics.median(alone for _, alone in both) * 1e3,
            *(math.expm1(value) * 100 for value in (mean, mean - half, mean + half)),
        )


def progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def others(folder: Path, lmcache_python: str) -> dict[str, dict[str, Any]]:
    """Other connectors: what :class:`EngineProcess` takes for each."""

    def transfer(connector: str, **extra: Any) -> dict[str, Any]:
        return {"kv_connector": connector, "kv_role": "kv_both", "kv_connector_extra_config": extra}

    found: dict[str, dict[str, Any]] = {
        "vLLM's file connector (a sample)": {
            "transfer": transfer("ExampleConnector", shared_storage_path=str(folder / "files"))
        },
        "vLLM's offloading to memory": {
            "transfer": transfer("OffloadingConnector", cpu_bytes_to_use=ARENA_BYTES, block_size=BLOCK_SIZE)
        },
    }
    if lmcache_python:
        found["LMCache"] = {
            "transfer": transfer("LMCacheConnectorV1"),
            "python": lmcache_python,
            "environment": {
                "LMCACHE_CHUNK_SIZE": "256",
                "LMCACHE_LOCAL_CPU": "True",
                "LMCACHE_MAX_LOCAL_CPU_SIZE": "4",
            },
        }
    return found


def measure(options: argparse.Namespace) -> Result:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvstore-bench-")))
        model = write_llama(folder / "model", **MODEL)
        url = stack.enter_context(serving(ARENA_BYTES))

        def engine(name: str, **how: Any) -> EngineProcess:
            progress(f"starting {name}")
            arguments: Mapping[str, Any] = {
                "max_model_len": options.tokens + BLOCK_SIZE,
                "max_num_batched_tokens": options.step_tokens,
                "num_gpu_blocks_override": 4 * (options.tokens // BLOCK_SIZE + 2),
            }
            started = EngineProcess(model, folder / f"{name}.log", **arguments, **how)
            stack.callback(started.kill)
            return started

        bench = Bench(options.tokens, engine("plain"))
        prompt = bench.prompt()
        beside = engine("kvstore", transfer=transfer_config(url))
        bench.hits("kvstore", beside, prompt, options.rounds)
        bench.bounds(prompt, url, options.rounds)
        bench.misses("kvstore", beside, options.pairs)
        beside.close()
        for number, (name, how) in enumerate(others(folder, options.lmcache_python).items()):
            if options.alone:
                break
            try:
                other = engine(f"other-{number}", **how)
                bench.hits(name, other, prompt, options.rounds)
                bench.misses(name, other, options.pairs)
                other.close()
            except EngineError as error:
                bench.result.hits.pop(name, None)
                bench.result.not_started[name] = str(error).splitlines()[0]
        return bench.result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1500, help="tokens of a prompt (default: %(default)s)")
    parser.add_argument("--step-tokens", type=int, default=2048, help="tokens of a step (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=15, help="hits (default: %(default)s)")
    parser.add_argument("--pairs", type=int, default=40, help="pairs of misses, at least 2 (default: %(default)s)")
    parser.add_argument("--alone", action="store_true", help="no other connectors")
    parser.add_argument("--lmcache-python", default="", help="a Python that has vLLM and LMCache")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    if options.tokens < 2 * BLOCK_SIZE or options.rounds < 1 or options.pairs < 2:
        parser.error(f"--tokens must be {2 * BLOCK_SIZE} at least, --rounds 1 and --pairs 2")
    result = measure(options)
    progress("")
    if options.json:
        print(json.dumps(asdict(result) | {"allowed_ms": result.allowed_ms}, indent=2))
        return
    print(f"a prompt of {result.prompt_tokens:,} tokens, {result.pages} pages of {result.page_bytes:,} bytes")
    print(
        f"  a hit is allowed {result.allowed_ms:.1f} ms: 1.5 x memcpy ({result.memcpy_ms:.1f})"
        f" + a step over the rest ({result.uncovered_step_ms:.1f}) + 10; computed it takes {result.computed_ms:.0f} ms"
    )
    for name, hit in result.hits.items():
        miss = result.misses[name]
        print(f"  {name}: first token after {hit.first_token_ms:.1f} ms, {hit.hit_tokens} tokens from it")
        print(
            f"    {miss.pairs} new prompts: {miss.with_ms:.0f} ms, without {miss.without_ms:.0f} ms: later by"
            f" {miss.later_percent:+.2f} %, 95 % interval {miss.low_percent:+.2f} to {miss.high_percent:+.2f} %"
        )
    for name, why in result.not_started.items():
        print(f"  {name}: did not run: {why}")


if __name__ == "__main__":
    main()
