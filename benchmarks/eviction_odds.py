"""What an order of eviction by odds would hit on a request trace: a policy in its plainest form, for comparison.

The value of a block is P(wanted again, by its class) * 2^(-age / H). Its class says how often it has been used, how
often the last block of the prefix that its request found had been, and how many blocks of its request were new; P is
what became of the blocks of that class before. H follows the ages at which blocks are wanted again. Only ends of chains
leave, the one of least value first, and blocks that left are remembered (ghosts), with their class. No node uses it:
what nodes use is in `kvstore bench eviction`, which reads the same traces and counts hits in the same way.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from kvstore.cli.bench.eviction import SIZES
from kvstore.cli.bench.machine import this_machine
from kvstore.cli.bench.trace import read_trace, unique_blocks
from kvstore.errors import InvalidRequestError

MOST_USES, MOST_PREFIX_USES, MOST_NEW = 5, 4, 8
"""Classes tell apart so many uses of the block, so many of its prefix, and so many powers of two of new blocks."""
PRIOR_WEIGHT = 20.0
"""A class is taken to be like all of them until it has been seen more often than this."""
HALF_LIFE_AGES = 4.0
"""H is so many times the geometric mean of the ages at which blocks were wanted again."""
GHOSTS = 16
"""Blocks that left are remembered, so many for each that fits."""
FEW_AGES, MOST_AGES = 50, 1000
"""The mean is believed from so many ages on, and follows the latest ones."""


@dataclass(slots=True)
class Block:
    """One that is here, or has left."""

    uses: int = 0
    kind: int = -1
    """Its class."""
    used_at: int = 0
    value: float = 0.0
    """As a logarithm to base 2, and as of the start: what lies unused needs no update while it ages."""
    parent: int | None = None
    children: int = 0


class OddsCache:
    """A cache of ``capacity`` blocks, at least 1."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._here: dict[int, Block] = {}
        self._gone: OrderedDict[int, Block] = OrderedDict()
        classes = MOST_USES * (MOST_PREFIX_USES + 1) * (MOST_NEW + 1)
        self._seen, self._again = [0.0] * classes, [0.0] * classes
        self._all_seen = self._all_again = 0.0
        self._clock = 0
        self._half_lives = 0.0  # that have passed since the start
        self._mean_log_age, self._ages = 0.0, 0
        self._ends: list[tuple[float, int]] = []

    def request(self, chain: Sequence[int]) -> int:
        """Look a prompt's blocks up, head first, and have them all here then. Returns how many leading ones were."""
        hit = _leading(chain, self._here)
        known = hit + _leading(chain[hit:], self._gone)
        self._clock += len(chain)
        blocks = self._insert_missing(chain)
        self._half_lives += len(chain) / self._half_life()
        prefix_uses = min(blocks[known - 1].uses + 1, MOST_PREFIX_USES) if known else 0
        new = min((len(chain) - known + 1).bit_length() - 1, MOST_NEW)
        first_class = (prefix_uses * (MOST_NEW + 1) + new) * MOST_USES - 1
        for block in blocks:
            block.uses += 1
        prior = (self._all_again + 1) / (self._all_seen + 4)
        value: dict[int, float] = {}
        for block in blocks:
            kind = first_class + min(block.uses, MOST_USES)
            self._seen[kind] += 1
            self._all_seen += 1
            if kind not in value:
                odds = (self._again[kind] + PRIOR_WEIGHT * prior) / (self._seen[kind] + PRIOR_WEIGHT)
                value[kind] = self._half_lives + math.log2(odds)
            block.kind, block.used_at, block.value = kind, self._clock, value[kind]
        for name, block in zip(chain, blocks, strict=True):
            if not block.children:
                heapq.heappush(self._ends, (block.value, name))
        while len(self._here) > self._capacity:
            self._evict()
        return hit

    def _insert_missing(self, chain: Sequence[int]) -> list[Block]:
        """The chain's blocks, all of them here; what is learned from those that were used before is learned."""
        blocks: list[Block] = []
        for place, name in enumerate(chain):
            block = self._here.get(name)
            if block is None:
                block = self._here[name] = self._gone.pop(name, None) or Block()
                block.parent, block.children = chain[place - 1] if place else None, 0
                if blocks:
                    blocks[-1].children += 1
            blocks.append(block)
            if block.uses:
                self._again[block.kind] += 1
                self._all_again += 1
                self._ages = min(self._ages + 1, MOST_AGES)
                self._mean_log_age += (math.log(self._clock - block.used_at + 1) - self._mean_log_age) / self._ages
        return blocks

    def _half_life(self) -> float:
        """In blocks that were asked for."""
        if self._ages < FEW_AGES:
            return 2.0 * self._capacity
        return HALF_LIFE_AGES * math.exp(self._mean_log_age)

    def _evict(self) -> None:
        while True:
            value, name = heapq.heappop(self._ends)
            block = self._here.get(name)
            if block is not None and not block.children and block.value == value:  # else it has changed since
                break
        self._gone[name] = self._here.pop(name)
        if len(self._gone) > GHOSTS * self._capacity:
            self._gone.popitem(last=False)
        if block.parent is not None:
            parent = self._here[block.parent]
            parent.children -= 1
            if not parent.children:
                heapq.heappush(self._ends, (parent.value, block.parent))


def _leading(chain: Sequence[int], names: dict[int, Block]) -> int:
    return next((place for place, name in enumerate(chain) if name not in names), len(chain))


def hit_ratio(prompts: Sequence[Sequence[int]], capacity: int) -> float:
    """Hit blocks over all blocks; a request hits its longest resident prefix."""
    cache = OddsCache(capacity)
    return sum(cache.request(chain) for chain in prompts) / sum(map(len, prompts))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path, help="as for `kvstore bench eviction`: one JSON object a line, hash_ids")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    try:
        requests = read_trace(options.trace)
    except InvalidRequestError as error:
        parser.error(str(error))
    prompts, unique = [request.hash_ids for request in requests], unique_blocks(requests)
    ratios = {size: hit_ratio(prompts, max(1, unique * size // 100)) for size in SIZES}
    machine = this_machine()
    if options.json:
        print(json.dumps({"machine": asdict(machine), "hit_ratio_by_percent": ratios}, indent=2))
        return
    print(machine.line())
    print(f"{len(prompts):,} requests, {sum(map(len, prompts)):,} blocks, {unique:,} of them different")
    for size, ratio in ratios.items():
        print(f"{size:3} %  {ratio:.4f}")


if __name__ == "__main__":
    main()
