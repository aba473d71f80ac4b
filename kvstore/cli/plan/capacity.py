"""``kvstore plan``: says what one more GiB of arena, disk or Redis would have brought on a request trace."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from kvstore.cli.bench.flags import add_output_flags
from kvstore.cli.bench.plot import line_plot, write_plot
from kvstore.cli.bench.stack_distance import NEVER, needed_pages
from kvstore.cli.bench.trace import TracedRequest, read_trace, unique_blocks
from kvstore.cli.plan import fleet
from kvstore.cli.progress import Progress
from kvstore.cli.tables import figures_table, print_table
from kvstore.errors import InvalidRequestError
from kvstore.units import format_size, parse_size

_GIB = 1 << 30
_EPILOG = """\
How it counts: every page is also in the tiers below, so sizes don't add up, and a tier that is no larger than the one
above it brings no hits. One more GiB saves prefill only in the largest tier (or in one that becomes the largest); in a
smaller, faster tier it brings hits up from below. All tiers evict the least recently used page; what a node's own
policy gains over that comes on top. Redis is counted as if this trace had it to itself. Every token is taken to cost
the same prefill; attention makes later ones dearer, so a hit on a long prefix saves more than is shown.

exit codes:
  0  done
  1  the plot could not be written
  2  a flag or the trace is wrong; the line on stderr names file, line and field
"""


@dataclass(frozen=True, slots=True)
class Point:
    """What a cache of one size would have done."""

    bytes: int
    hit_ratio: float
    """Hit blocks over all blocks."""
    hit_blocks: int
    prefill_seconds: float
    """Of prefill saved over the whole trace."""


@dataclass(frozen=True, slots=True)
class TierPlan:
    """One tier at its size, and what one GiB more of it would bring over the whole trace."""

    tier: str
    bytes: int
    hit_ratio: float
    """Blocks found in this tier over all blocks."""
    more_hit_blocks: int
    """Of all tiers together: none while another tier is larger."""
    more_prefill_seconds: float
    more_from_this_tier: int
    """Hits that this tier gains, that were misses or hits of lower tiers."""


class Curve:
    """Hits and prefill saved by the size of a cache.

    Args:
        requests: of a trace.
        needed: for each block the fewest pages of a cache that hits it.
        block_tokens: tokens of a block.
    """

    def __init__(self, requests: Sequence[TracedRequest], needed: Sequence[Sequence[int]], block_tokens: int) -> None:
        self.blocks = sum(len(request.hash_ids) for request in requests)
        most = max((max(row, default=NEVER) for row in needed), default=NEVER)
        blocks, tokens = [0] * (most + 1), [0] * (most + 1)
        for request, row in zip(requests, needed, strict=True):
            for place, pages in enumerate(row):
                if pages != NEVER:
                    blocks[pages] += 1
                    tokens[pages] += max(0, min(block_tokens, request.input_length - place * block_tokens))
        self._blocks = list(accumulate(blocks))
        self._tokens = list(accumulate(tokens))

    @property
    def enough(self) -> int:
        """Pages of the smallest cache that hits all that any would."""
        return len(self._blocks) - 1

    def hits(self, pages: int) -> int:
        """Blocks hit by a cache of so many pages."""
        return self._blocks[min(pages, self.enough)]

    def tokens(self, pages: int) -> int:
        """Tokens in those blocks."""
        return self._tokens[min(pages, self.enough)]


def add_to(commands: argparse._SubParsersAction[Any]) -> None:
    """Add its parser."""
    plan = commands.add_parser(
        "plan",
        help="what one more GiB of arena, disk or Redis would bring, by a request trace",
        description="Replay a request trace and say what one more GiB of arena, disk or Redis would have brought, in"
        " blocks hit and in seconds of prefill saved.",
        epilog=_EPILOG,
    )
    plan.add_argument(
        "trace",
        metavar="TRACE",
        help="a file with one JSON object per line: timestamp (ms), input_length (tokens), hash_ids (one per block)",
    )
    plan.add_argument(
        "--block-tokens",
        metavar="N",
        type=int,
        default=512,
        help="tokens per block of the trace (default: %(default)s)",
    )
    size = plan.add_mutually_exclusive_group()
    size.add_argument(
        "--token-bytes",
        metavar="SIZE",
        default="128KiB",
        help="KV cache of one token (default: %(default)s, 32 layers of 8 KV heads of size 128 in 16 bits)",
    )
    size.add_argument(
        "--page-bytes", metavar="SIZE", help="KV cache of one block of the trace, instead of --token-bytes"
    )
    plan.add_argument(
        "--prefill-rate",
        metavar="N",
        type=float,
        default=10_000.0,
        help="tokens per second that an engine prefills (default: 10000)",
    )
    plan.add_argument("--arena", metavar="SIZE", default="64GiB", help="size of the arena now (default: %(default)s)")
    plan.add_argument("--disk", metavar="SIZE", default="0", help="size of the disk tier now (default: none)")
    plan.add_argument("--redis", metavar="SIZE", default="0", help="size of the Redis tier now (default: none)")
    fleet.add_flags(plan)
    add_output_flags(plan, "write the curve by capacity, as SVG")
    plan.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Plan, print, and return the exit code."""
    if options.block_tokens < 1:
        raise InvalidRequestError(f"--block-tokens must be at least 1, got {options.block_tokens}")
    if not 0 < options.prefill_rate < float("inf"):
        raise InvalidRequestError(f"--prefill-rate must be more than 0, got {options.prefill_rate}")
    if options.page_bytes is not None:
        block_bytes = parse_size(options.page_bytes)
    else:
        block_bytes = parse_size(options.token_bytes) * options.block_tokens
    if block_bytes < 1:
        raise InvalidRequestError("a block of 0 bytes: --token-bytes or --page-bytes must be more")
    sizes = {tier: parse_size(getattr(options, tier)) for tier in ("arena", "disk", "redis")}
    requests = read_trace(Path(options.trace))
    if options.fleet is not None:
        return fleet.run(options, requests, block_bytes)
    progress = Progress("kvstore plan", len(requests))
    needed = needed_pages([request.hash_ids for request in requests], progress.advance)
    progress.end()
    curve = Curve(requests, needed, options.block_tokens)
    tiers = plan_tiers(curve, sizes, block_bytes, options.prefill_rate)
    points = plan_curve(curve, block_bytes, options.prefill_rate)
    if options.plot is not None:
        lines = {"LRU": [(float(place), point.hit_ratio) for place, point in enumerate(points)]}
        labels = [format_size(point.bytes) for point in points]
        title, x_label = "Prefix hits by capacity", "capacity of the largest tier"
        write_plot(Path(options.plot), line_plot(title, x_label, "hit blocks / all blocks", labels, lines))
    if options.json:
        found = {"block_bytes": block_bytes, "blocks": curve.blocks, "prefill_tokens_a_second": options.prefill_rate}
        answer = {"tiers": [asdict(tier) for tier in tiers], "curve": [asdict(point) for point in points]}
        print(json.dumps(found | answer, indent=2))
        return 0
    hours = (requests[-1].timestamp - requests[0].timestamp) / 3_600_000
    print(
        f"{len(requests):,} requests in {hours:.1f} h, {curve.blocks:,} blocks, {unique_blocks(requests):,} of them"
        f" different; a block is {format_size(block_bytes)}"
    )
    _print(tiers, points)
    return 0


def plan_tiers(curve: Curve, sizes: dict[str, int], block_bytes: int, rate: float) -> list[TierPlan]:
    """Each tier, the fastest first, at ``sizes`` (bytes by name), and with one GiB more.

    Tiers are inclusive: together they hit what the largest one would, and each what no faster one does.

    Args:
        curve: of the trace.
        sizes: bytes of each tier.
        block_bytes: of one block.
        rate: tokens of prefill a second.
    """
    largest = max(sizes.values())
    plans = []
    above = 0
    for tier, size in sizes.items():
        higher, now_pages, more_pages = (max(above, each) // block_bytes for each in (0, size, size + _GIB))
        now, more = largest // block_bytes, max(largest, size + _GIB) // block_bytes
        mine = curve.hits(now_pages) - curve.hits(higher)
        gained = curve.hits(more_pages) - curve.hits(now_pages)
        seconds = (curve.tokens(more) - curve.tokens(now)) / rate
        plans.append(TierPlan(tier, size, mine / curve.blocks, curve.hits(more) - curve.hits(now), seconds, gained))
        above = max(above, size)
    return plans


def plan_curve(curve: Curve, block_bytes: int, rate: float) -> list[Point]:
    """Sizes that double, from one GiB (or one block) to what holds all that could be hit."""
    points = []
    size = max(_GIB, 1 << (block_bytes - 1).bit_length())
    while True:
        pages = size // block_bytes
        points.append(Point(size, curve.hits(pages) / curve.blocks, curve.hits(pages), curve.tokens(pages) / rate))
        if pages >= curve.enough:
            return points
        size *= 2


def _print(tiers: list[TierPlan], points: list[Point]) -> None:
    columns = ("now", "hits from it", "1 GiB more: hits", "prefill saved", "hits from it")
    table = figures_table("tier", *columns, left=("tier",))
    for tier in tiers:
        gains = (f"+{tier.more_hit_blocks:,}", f"{tier.more_prefill_seconds:,.1f} s", f"+{tier.more_from_this_tier:,}")
        table.add_row(tier.tier, format_size(tier.bytes), f"{tier.hit_ratio:.2%}", *gains)
    print_table(table)
    print()
    table = figures_table("largest tier", "hits", "blocks", "prefill saved", "a further GiB saves")
    for point, following in zip(points, [*points[1:], None], strict=True):
        each = "–"
        if following is not None:
            gib = (following.bytes - point.bytes) / _GIB
            each = f"{(following.prefill_seconds - point.prefill_seconds) / gib:,.1f} s"
        seconds = f"{point.prefill_seconds:,.0f} s"
        table.add_row(format_size(point.bytes), f"{point.hit_ratio:.2%}", f"{point.hit_blocks:,}", seconds, each)
    print_table(table)
