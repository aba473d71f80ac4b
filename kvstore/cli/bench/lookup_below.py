"""Lookups beside a disk tier, or one that nodes share: which make a call, and how long they take."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from kvstore.cli.bench.node_process import without_settings
from kvstore.cli.tables import figures_table, print_table
from kvstore.errors import ResourceError
from kvstore.tiers.redis.format.key_names import page_name
from kvstore.tiers.redis.net.address import Kind, parse_address

ARENA_PROMPTS = 16
"""Prompts that the arena holds."""
KINDS = ("new", "half in the arena", "half on disk", "on disk")


@dataclass(frozen=True, slots=True)
class BelowFigure:
    """Lookups of one kind beside so many pages on disk."""

    on_disk: int
    shared: bool
    """Whether the node shares a tier with others: they may have what it lacks."""
    pages: int
    here: str
    """Where they are: one of ``KINDS``."""
    cold: bool
    calls: float
    """Of the node, a lookup."""
    p50_us: float
    p99_us: float
    redis_us: float | None
    """Median of a bare client's request for as many names, in turns with the lookups; None without one server."""


def measure_below(on_disk: int, redis: str, rounds: int, progress: Callable[[int], None]) -> list[BelowFigure]:
    """Look prompts up at a node with so many pages on disk, which shares ``redis`` where that is given."""
    import kvstore
    from kvstore.cli.bench.prompts import PROMPT_PAGES, prompt_hashes, prompt_layout, store_prompts
    from kvstore.cli.bench.redis_baseline import BareClient
    from kvstore.cli.bench.timing import ProcessorCaches, percentile, seconds_of

    prompts = on_disk // PROMPT_PAGES
    first_on_disk, new = ARENA_PROMPTS, ARENA_PROMPTS + prompts
    chosen = random.Random(0)  # noqa: S311 - which prompt is looked up
    caches = ProcessorCaches()
    half = PROMPT_PAGES // 2

    def prompt(kind: str) -> list[bytes]:
        nowhere = prompt_hashes(new + chosen.randrange(1 << 30))
        here, below = chosen.randrange(ARENA_PROMPTS), first_on_disk + chosen.randrange(prompts)
        if kind == "new":
            return nowhere
        known = prompt_hashes(here if kind == "half in the arena" else below)
        return known if kind == "on disk" else known[:half] + nowhere[half:]

    figures = []
    with (
        _serving(on_disk, redis) as url,
        kvstore.connect(url, timeout=60.0) as client,
        closing(BareClient(redis)) if _is_one_server(redis) else nullcontext() as bare,
    ):
        namespace = client.namespace(prompt_layout())
        store_prompts(namespace, ARENA_PROMPTS, lambda pages: None)
        progress(on_disk)
        for kind in KINDS:
            for cold in (False, True):
                times, own, calls = [], [], 0
                for _ in range(rounds):
                    hashes = prompt(kind)
                    calls += client.lookup_here([(namespace, hashes)], counts=False) is None
                    if cold:
                        caches.sweep()
                    times.append(seconds_of(partial(namespace.lookup, hashes)) * 1e6)
                    if bare is not None:
                        names = [page_name(namespace.fingerprint + block_hash) for block_hash in prompt("new")]
                        if cold:
                            caches.sweep()
                        own.append(seconds_of(partial(bare.miss, names)) * 1e6)
                figure = percentile(times, 50), percentile(times, 99), percentile(own, 50) if own else None
                figures.append(BelowFigure(on_disk, bool(redis), PROMPT_PAGES, kind, cold, calls / rounds, *figure))
    return figures


def print_below(figures: Sequence[BelowFigure]) -> None:
    """Print them as a table."""
    words = ("besides", "where", "")
    shared = any(each.shared for each in figures)
    own = ("Redis' own µs",) if shared else ()
    table = figures_table("pages on disk", *words, "calls", "p50 µs", "p99 µs", *own, left=words)
    for each in figures:
        kind, besides = "cold" if each.cold else "warm", "Redis" if each.shared else ""
        row = (f"{each.on_disk:,}", besides, each.here, kind, f"{each.calls:.2f}")
        own = (f"{each.redis_us:.0f}" if each.redis_us is not None else "",) if shared else ()
        table.add_row(*row, f"{each.p50_us:.0f}", f"{each.p99_us:.0f}", *own)
    print_table(table)


def _is_one_server(redis: str) -> bool:
    return bool(redis) and parse_address(redis).kind is Kind.SINGLE


@contextmanager
def _serving(on_disk: int, redis: str) -> Iterator[str]:
    """A node of :mod:`kvstore.cli.bench.lookup_node`; it ends with the context, and its files go. Returns its URL."""
    from kvstore.cli.bench.prompts import PROMPT_PAGES, arena_for

    with (
        tempfile.TemporaryDirectory(prefix="kvstore-bench-") as folder,
        tempfile.TemporaryDirectory(prefix="kvstore-bench-", dir="/dev/shm") as shm,
    ):
        flags = {
            "folder": folder,
            "arena-dir": str(Path(shm, "arena")),
            "arena": str(arena_for(2 * ARENA_PROMPTS * PROMPT_PAGES)),
            "pages": str(on_disk),
            "first": str(ARENA_PROMPTS),
            "redis": redis,
        }
        command = [sys.executable, "-m", "kvstore.cli.bench.lookup_node"]
        command += [f"--{name}={value}" for name, value in flags.items()]
        with subprocess.Popen(  # noqa: S603 - this interpreter, this package
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=without_settings()
        ) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            try:
                if not process.stdout.readline().startswith("ready"):
                    raise ResourceError(f"the node does not start: {process.stderr.read().strip()}")
                yield f"unix://{folder}/s"
            finally:
                process.send_signal(signal.SIGTERM)
                process.stdout.read()
