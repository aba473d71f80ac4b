from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

Script = Callable[[str], ModuleType]


@pytest.fixture
def odds(script: Script) -> ModuleType:
    return script("eviction_odds")


def chats(seed: int, requests: int = 400) -> list[tuple[int, ...]]:
    """Prompts of chats that go on, some of them for long: each begins as its last one did. A third is seen once."""
    source = random.Random(seed)
    prompts: list[tuple[int, ...]] = []
    grown: list[tuple[int, ...]] = []
    number = 0
    for _ in range(requests):
        if grown and source.random() < 0.5:
            place = source.randrange(min(len(grown), 8))
            chain = grown.pop(-1 - place)
        else:
            chain = ()
        more = source.randint(1, 6)
        chain = (*chain, *range(number, number + more))
        number += more
        prompts.append(chain)
        if source.random() < 0.7:
            grown.append(chain)
    return prompts


def unbounded_ratio(prompts: list[tuple[int, ...]]) -> float:
    seen: set[int] = set()
    hits = 0
    for chain in prompts:
        hits += next((place for place, block in enumerate(chain) if block not in seen), len(chain))
        seen.update(chain)
    return hits / sum(map(len, prompts))


def test_a_cache_for_all_blocks_hits_whatever_was_there_before(odds: ModuleType) -> None:
    prompts = chats(1)
    unique = len({block for chain in prompts for block in chain})
    assert odds.hit_ratio(prompts, unique) == unbounded_ratio(prompts)


@pytest.mark.parametrize("capacity", [1, 7, 60])
def test_only_ends_of_chains_leave_and_no_more_is_here_than_fits(odds: ModuleType, capacity: int) -> None:
    cache = odds.OddsCache(capacity)
    before: dict[int, int] = {}
    for chain in chats(2):
        before |= dict(zip(chain[1:], chain, strict=False))
        cache.request(chain)
        here = set(cache._here)
        assert len(here) <= capacity
        assert all(before.get(block, block) in here for block in here)
        assert len(cache._gone) <= odds.GHOSTS * capacity


def test_what_is_wanted_again_and_again_stays_beside_what_is_seen_once(odds: ModuleType) -> None:
    cache = odds.OddsCache(12)
    prompt, hits = tuple(range(8)), 0
    for number in range(200):
        hits += cache.request(prompt)
        for other in range(2):  # more than fits beside it: the least recently used would be the prompt
            first = 1000 + 12 * (2 * number + other)
            cache.request(tuple(range(first, first + 6)))
    assert hits > 0.8 * 199 * len(prompt)


def test_a_trace_gives_the_same_figures_each_time(printed_json: Callable[..., Any], tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = [
        json.dumps({"timestamp": place, "input_length": 1, "output_length": 1, "hash_ids": chain})
        for place, chain in enumerate(chats(3))
    ]
    trace.write_text("\n".join(lines))

    first, second = (printed_json("eviction_odds", str(trace))["hit_ratio_by_percent"] for _ in range(2))

    assert first == second
    assert list(first) == ["1", "2", "5", "10", "20", "50"]
    assert 0 < first["5"] < first["50"] <= unbounded_ratio(chats(3))
