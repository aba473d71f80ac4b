"""``kvstore warm``: loads pages from lower tiers into the arena before an engine asks for them."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from kvstore.cli.connect import add_url_to, connect_to_node
from kvstore.cli.namespace_choice import add_namespace_to, find_namespace
from kvstore.cli.pages import add_pages_to, check_pages_of, words_of
from kvstore.cli.prompts import read_prompts
from kvstore.client.namespace import Namespace
from kvstore.hashing import parse_hashes
from kvstore.limits import MOST_LOOKUP_PAGES
from kvstore.units import format_size

_CODES = """\
exit codes:
  0  every page that some tier had is in the arena now
  1  some pages could not be brought up, or were pushed out again because the arena is too small for all
  2  a flag, a hash or a file is wrong

examples:
  kvstore warm my-model --tokens prompts.jsonl   one JSON array of token ids per line, or what vLLM's /tokenize answers
  kvstore warm my-model - < hashes               block hashes, separated by spaces or newlines
"""


@dataclass(slots=True)
class Warmed:
    """What became of the pages of one call."""

    asked: int = 0
    already: int = 0
    """In the arena before."""
    disk: int = 0
    """Loaded from there."""
    redis: int = 0
    objects: int = 0
    absent: int = 0
    """In no tier; of a prompt, with all that is behind the first such page, which nobody can use."""
    failed: int = 0
    """In a lower tier, but not loaded: the arena has no free slot, or the tier fails."""
    pushed_out: int = 0
    """Loaded, and evicted again for others of this call."""
    bytes: int = 0
    seconds: float = 0.0

    @property
    def came(self) -> int:
        """Pages that were loaded."""
        return self.disk + self.redis + self.objects


def add_to(commands: argparse._SubParsersAction[Any]) -> None:
    """Add its parser."""
    warm = commands.add_parser(
        "warm",
        help="bring pages up into the arena, by hash or by prompt",
        description="Bring pages up from the lower tiers into the arena before anybody asks for them. Run it on the"
        " node's host: from anywhere else every page crosses the network.",
        epilog=_CODES,
    )
    add_namespace_to(warm)
    add_pages_to(warm, "prompts instead of hashes, one JSON array of token ids per line; - reads standard input")
    add_url_to(warm)
    warm.add_argument("--json", action="store_true", help="print one JSON object")
    warm.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Load, print, and return the exit code."""
    check_pages_of(options)
    prompts = read_prompts(Path(options.tokens), options.extra_key) if options.tokens is not None else None
    hashes = parse_hashes(words_of(options.hashes))
    with connect_to_node(options.url) as client:
        namespace = find_namespace(client, options.namespace)
        size = namespace.layout.block_size
        runs = [hashes] if prompts is None else [prompt.hashes(size) for prompt in prompts]
        began = time.monotonic()
        warmed = _warm(namespace, runs, whole=prompts is not None)
        warmed.seconds = time.monotonic() - began
    if options.json:
        print(json.dumps(asdict(warmed), indent=2))
    else:
        _print(warmed)
    if warmed.pushed_out:
        print(
            f"kvstore warm: {warmed.pushed_out} pages were pushed out again: the arena is too small for all of them;"
            " warm fewer, or enlarge it (--arena)",
            file=sys.stderr,
        )
    return 1 if warmed.failed or warmed.pushed_out else 0


def _warm(namespace: Namespace, runs: Sequence[Sequence[bytes]], *, whole: bool) -> Warmed:
    """Load pages into the arena.

    Args:
        namespace: theirs.
        runs: hashes, run by run.
        whole: what is behind an absent page of a run is of no use.
    """
    warmed = Warmed()
    came: list[bytes] = []
    with _progress() as progress:
        task = progress.add_task("warm", total=sum(map(len, runs)))
        for run in runs:
            for start in range(0, len(run), MOST_LOOKUP_PAGES):
                part = run[start : start + MOST_LOOKUP_PAGES]
                came += _warm_part(namespace, part, warmed, progress, task, whole=whole)
    for start in range(0, len(came), MOST_LOOKUP_PAGES):
        tiers = namespace.lookup(came[start : start + MOST_LOOKUP_PAGES], counts=False).tiers
        warmed.pushed_out += sum(tier != "arena" for tier in tiers)
    return warmed


def _warm_part(
    namespace: Namespace, hashes: Sequence[bytes], warmed: Warmed, progress: Progress, task: TaskID, *, whole: bool
) -> list[bytes]:
    found = namespace.lookup(hashes, counts=False)
    usable = found.prefix if whole else len(hashes)
    lower = [h for h, tier in zip(hashes[:usable], found.tiers, strict=False) if tier not in (None, "arena")]
    here = sum(tier == "arena" for tier in found.tiers[:usable])
    warmed.asked += len(hashes)
    warmed.already += here
    warmed.absent += len(hashes) - here - len(lower)
    progress.advance(task, len(hashes) - len(lower))
    came: list[bytes] = []
    while lower:
        batch = lower[: namespace.batch_pages]
        with namespace.prepare_load(batch, counts=False) as pending:
            tiers = pending.tiers
        for tier in tiers:
            warmed.already += tier == "arena"  # another client loaded it meanwhile
            warmed.disk += tier == "disk"
            warmed.redis += tier == "redis"
            warmed.objects += tier == "objects"
            warmed.bytes += namespace.layout.page_bytes * (tier != "arena")
        came += batch[: len(tiers)]
        passed = len(tiers) + (len(tiers) < len(batch))  # one that can't be loaded must not stop the others
        warmed.failed += passed - len(tiers)
        lower = lower[passed:]
        progress.advance(task, passed)
    return came


def _progress() -> Progress:
    """On stderr, and only where that is a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("kvstore warm:"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def _print(warmed: Warmed) -> None:
    rate = f", {format_size(int(warmed.bytes / max(warmed.seconds, 1e-9)))}/s" if warmed.bytes else ""
    print(f"{warmed.came:,} of {warmed.asked:,} pages brought up ({format_size(warmed.bytes)}{rate})")
    parts = {"disk": warmed.disk, "redis": warmed.redis, "objects": warmed.objects}
    said = [f"{count:,} from {tier}" for tier, count in parts.items() if count]
    parts = {"already there": warmed.already, "in no tier": warmed.absent, "did not come": warmed.failed}
    said += [f"{count:,} {what}" for what, count in parts.items() if count]
    print(", ".join(said) or "nothing was asked for")
