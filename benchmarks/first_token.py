"""Time to the first token of the reference engine: with every page in kvstore, and with none while it stores them.

Hits: a prompt whose pages the node has, beside what bounds it: one and a half times the memcpy of its pages, one step
over the tokens that no page covers (an engine without kvstore that has the prefix in its own blocks), and 10 ms.
Misses: new prompts, each given to an engine with kvstore and to one without it, in pairs of random order; told is
the mean of the logarithm of the ratio, with its 95 % interval, as percent. The engine with kvstore stores meanwhile.

The node is a process of its own. One thread computes, so that a second core is left for what kvstore does beside it.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np
import torch

import kvstore
from kvstore.cli.bench.node_process import serving
from kvstore.cli.bench.timing import ProcessorCaches, seconds_of
from kvstore.connector.reference.engine import Engine
from kvstore.connector.reference.model import Llama, LlamaConfig

BLOCK_SIZE = 16
ARENA_BYTES = 2 << 30


@dataclass(frozen=True, slots=True)
class Hits:
    """Medians, in milliseconds."""

    prompt_tokens: int
    page_bytes: int
    pages: int
    first_token_ms: float
    memcpy_ms: float
    """Of all the prompt's pages."""
    uncovered_step_ms: float
    allowed_ms: float
    """1.5 times the memcpy, the step, and 10 ms."""
    computed_ms: float
    """The same prompt without any hit."""


@dataclass(frozen=True, slots=True)
class Misses:
    """New prompts, with kvstore and without."""

    prompt_tokens: int
    pairs: int
    with_ms: float
    without_ms: float
    later_percent: float
    low_percent: float
    high_percent: float
    """The 95 % interval of ``later_percent``."""


class Bench:
    """Two engines with one model, and prompts that no one has seen."""

    def __init__(self, client: kvstore.Client, tokens: int) -> None:
        self.tokens = tokens
        self.model = Llama(LlamaConfig(seed=2))
        blocks = 4 * (tokens // BLOCK_SIZE + 2)
        self.beside = Engine(self.model, num_blocks=blocks, client=client, load_deadline=30.0, lookup_budget=0.5)
        self.alone = Engine(self.model, num_blocks=blocks)
        self._random = random.Random(0)
        self._number = 0

    def prompt(self) -> list[int]:
        """A new one."""
        return [self._random.randrange(self.model.config.vocab_size) for _ in range(self.tokens)]

    def first_token(self, engine: Engine, prompt: list[int]) -> float:
        """Seconds to it."""
        self._number += 1
        engine.add_request(str(self._number), prompt, 1)
        (answer,) = engine.run()
        return answer.time_to_first_token

    def forget(self, engine: Engine) -> None:
        """What the engine has in its own blocks; waits for its stores, which hold them."""
        if engine.worker is not None:
            engine.worker.wait_for_save()
        while not engine.manager.reset_prefix_cache():
            engine.step()

    def hits(self, rounds: int, progress: Callable[[], None]) -> Hits:
        """A prompt that the node has, again and again."""
        prompt = self.prompt()
        computed = self.first_token(self.alone, prompt)
        self.first_token(self.beside, prompt)
        layout = self.beside.layouts[0]
        pages = (self.tokens - 1) // BLOCK_SIZE
        caches = ProcessorCaches()
        source = np.ones(pages * layout.page_bytes, np.uint8)
        target = np.ones_like(source)
        loaded, copied, step = [], [], []
        for number in range(-2, rounds):
            self.forget(self.beside)
            caches.sweep()
            loaded.append(self.first_token(self.beside, prompt))
            caches.sweep()
            copied.append(seconds_of(lambda: np.copyto(target, source)))
            caches.sweep()
            step.append(self.first_token(self.alone, prompt))
            if number == -1:
                loaded, copied, step = [], [], []  # those warmed up
            progress()
        assert self.beside.worker is not None
        if sum(self.beside.worker.statistics().pages_loaded.values()) < rounds * pages:
            raise SystemExit("not every page came from kvstore: there is nothing to compare")
        memcpy_ms, step_ms = statistics.median(copied) * 1e3, statistics.median(step) * 1e3
        return Hits(
            self.tokens,
            layout.page_bytes,
            pages,
            statistics.median(loaded) * 1e3,
            memcpy_ms,
            step_ms,
            1.5 * memcpy_ms + step_ms + 10,
            computed * 1e3,
        )

    def misses(self, pairs: int, progress: Callable[[], None]) -> Misses:
        """New prompts, each by both engines."""
        both: list[tuple[float, float]] = []
        for number in range(-1, pairs):
            prompt = self.prompt()
            engines = [self.beside, self.alone]
            order = self._random.choice((1, -1))
            times = [self.first_token(engine, prompt) for engine in engines[::order]][::order]
            if number >= 0:
                both.append((times[0], times[1]))
            for engine in engines:
                self.forget(engine)
            progress()
        logs = [math.log(beside / alone) for beside, alone in both]
        mean = statistics.mean(logs)
        half = 1.96 * statistics.stdev(logs) / math.sqrt(len(logs))
        return Misses(
            self.tokens,
            pairs,
            statistics.median(beside for beside, _ in both) * 1e3,
            statistics.median(alone for _, alone in both) * 1e3,
            *(math.expm1(value) * 100 for value in (mean, mean - half, mean + half)),
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1500, help="tokens of a prompt (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=15, help="hits (default: %(default)s)")
    parser.add_argument("--pairs", type=int, default=40, help="pairs of misses, at least 2 (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    if options.tokens < 2 * BLOCK_SIZE or options.rounds < 1 or options.pairs < 2:
        parser.error(f"--tokens must be {2 * BLOCK_SIZE} at least, --rounds 1 and --pairs 2")
    torch.set_num_threads(1)
    done = 0

    def progress() -> None:
        nonlocal done
        done += 1
        total = options.rounds + options.pairs + 3
        if sys.stderr.isatty():
            print(f"\rfirst token: {done} of {total}", end="\n" if done == total else "", file=sys.stderr, flush=True)

    with serving(ARENA_BYTES) as url, kvstore.connect(url) as client:
        bench = Bench(client, options.tokens)
        try:
            hits = bench.hits(options.rounds, progress)
            misses = bench.misses(options.pairs, progress)
        finally:
            bench.beside.close()
    if options.json:
        print(json.dumps({"hits": asdict(hits), "misses": asdict(misses)}, indent=2))
        return
    print(f"a prompt of {hits.prompt_tokens:,} tokens, {hits.pages} pages of {hits.page_bytes:,} bytes in the node")
    print(f"  first token on a hit      {hits.first_token_ms:8.1f} ms, computed {hits.computed_ms:.0f} ms")
    print(
        f"  allowed                   {hits.allowed_ms:8.1f} ms: 1.5 x memcpy ({hits.memcpy_ms:.1f})"
        f" + a step over the rest ({hits.uncovered_step_ms:.1f}) + 10"
    )
    print(f"{misses.pairs} new prompts, stores on: {misses.with_ms:.0f} ms, without kvstore {misses.without_ms:.0f} ms")
    print(
        f"  later by {misses.later_percent:+.2f} %, 95 % interval"
        f" {misses.low_percent:+.2f} to {misses.high_percent:+.2f} %"
    )


if __name__ == "__main__":
    main()
