"""When a summary is made, of which size, and what becomes of it: in a real arena, of tiers that say what they hold."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from fake_clock import FakeClock
from memory_tier import MemoryTier

from kvstore.arena.arena import Arena
from kvstore.arena.summary import FEWEST_BUCKETS, SummaryReader
from kvstore.errors import ResourceError
from kvstore.store.own_summary import OwnSummary, buckets_for
from kvstore.tiers.lower_tiers import LowerTiers
from kvstore.tiers.tier import HeldKeys, TierStatistics

GIB = 1 << 30


class TellingTier(MemoryTier):
    """Says which keys it holds."""

    bound = GIB
    count = 0
    held: HeldKeys | None = None

    def tell_keys(self, held: HeldKeys, stop: threading.Event) -> bool:
        self.held = held
        held.came(list(self.pages))
        return not stop.is_set()

    def statistics(self) -> TierStatistics:
        return TierStatistics(limit_bytes=self.bound, pages=self.count or len(self.pages))


def key_of(number: int) -> bytes:
    return number.to_bytes(64, "big")


@pytest.fixture
def arena(tmp_path: Path) -> Iterator[Arena]:
    opened = Arena(tmp_path / "arena", 1 << 20)
    yield opened
    opened.close()


@pytest.fixture
def make(arena: Arena) -> Callable[..., tuple[OwnSummary, FakeClock]]:
    def run(*tiers: Any, shared: Any = None) -> tuple[OwnSummary, FakeClock]:
        clock = FakeClock()
        return OwnSummary(arena, LowerTiers(tiers, shared), lambda: clock.now), clock

    return run


def named(arena: Arena) -> int:
    return int(arena.summaries._word[0])


def may_have(arena: Arena, keys: Sequence[bytes]) -> list[bool]:
    """As a reader sees it that maps the file."""
    from kvstore.arena.summary import SummaryHeader, seed_of

    [path] = arena.directory.glob("summary-*")
    data = memoryview(path.read_bytes())
    header = SummaryHeader.unpack(data)
    assert header is not None
    reader = SummaryReader(data, header.buckets)
    return [reader.may_have_one(seed_of(key), key[32:]) for key in keys]


def test_the_size_follows_the_limit_and_the_pages_there_are() -> None:
    assert buckets_for(GIB, 0) == 4096
    assert buckets_for(GIB, 12_288) == 4096
    assert buckets_for(GIB, 30_000) == 10_000
    assert buckets_for(GIB, 10**9) == 65_536, "at most 0.2 % of the limit"
    assert buckets_for(1 << 20, 0) == FEWEST_BUCKETS
    assert buckets_for(1 << 50, 0) <= 1 << 31


def test_it_is_named_when_every_tier_has_told_its_pages(arena: Arena, make: Any) -> None:
    first, second = TellingTier(), TellingTier()
    first.pages, second.pages = {key_of(1): (0, b"")}, {key_of(1): (0, b""), key_of(2): (0, b"")}
    summary, _ = make(first, second)
    stopped, go_on = threading.Event(), threading.Event()
    stopped.set()
    summary.keep(stopped)
    assert not named(arena)
    assert not list(arena.directory.glob("summary-*"))
    summary._not_before = 0.0
    summary.keep(go_on)
    assert named(arena)
    assert may_have(arena, [key_of(1), key_of(2), key_of(3)]) == [True, True, False]
    assert first.held is second.held is not None
    first.held.left([key_of(1)])
    assert may_have(arena, [key_of(1)]) == [True], "the other tier has it"
    second.held.left([key_of(1)])
    assert may_have(arena, [key_of(1)]) == [False]


def test_another_limit_makes_another_file(arena: Arena, make: Any) -> None:
    tier, go_on = TellingTier(), threading.Event()
    summary, _ = make(tier)
    summary.keep(go_on)
    before = named(arena)
    summary.keep(go_on)
    assert named(arena) == before
    tier.bound = 2 * GIB
    summary.keep(go_on)
    assert named(arena) not in (0, before)


def test_it_grows_with_small_pages(arena: Arena, make: Any) -> None:
    tier, go_on = TellingTier(), threading.Event()
    summary, _ = make(tier)
    summary.keep(go_on)
    before = named(arena)
    tier.count = 4096 * 5
    summary.keep(go_on)
    assert named(arena) == before
    tier.count += 1
    assert not summary.is_complete
    summary.keep(go_on)
    assert named(arena) not in (0, before)
    assert summary.is_complete


def test_full_buckets_are_made_anew_but_not_all_the_time(arena: Arena, make: Any) -> None:
    tier, go_on = TellingTier(), threading.Event()
    summary, clock = make(tier)
    summary.keep(go_on)
    before = named(arena)
    assert tier.held is not None
    tier.held.came([key_of(1)] * 17)
    assert may_have(arena, [key_of(1)]) == [True]
    summary.keep(go_on)
    assert named(arena) == before
    clock.now += 601.0
    summary.keep(go_on)
    assert named(arena) not in (0, before)
    assert may_have(arena, [key_of(1)]) == [False]


def test_without_memory_for_it_clients_ask(
    arena: Arena, make: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    summary, clock = make(TellingTier())
    space = []

    def check_space(directory: Path, size: int) -> None:
        space.append(size)
        raise ResourceError("only 0 bytes are free there")

    monkeypatch.setattr("kvstore.arena.summary_file.check_space", check_space)
    for _ in range(3):
        summary.keep(threading.Event())
    assert not named(arena)
    assert space == [4096 + 4096 * 32], "it is not tried all the time"
    assert "clients ask the node for every page that is not in the arena: only 0 bytes are free there" in caplog.text
    monkeypatch.undo()
    clock.now += 601.0
    summary.keep(threading.Event())
    assert named(arena)


def test_a_tier_that_cant_tell_and_one_that_is_shared_have_none(arena: Arena, make: Any) -> None:
    summary, _ = make(MemoryTier())
    summary.keep(threading.Event())
    assert not named(arena)
    shared, _ = make(TellingTier(), shared=MemoryTier("redis"))
    shared.keep(threading.Event())
    assert not named(arena)
    assert not list(arena.directory.glob("summary-*"))


def test_behind_the_end_none_counts(arena: Arena, make: Any) -> None:
    summary, clock = make(TellingTier())
    summary.keep(threading.Event())
    summary.withdraw()
    assert not named(arena)
    assert not list(arena.directory.glob("summary-*"))
    clock.now += 601.0
    summary._file = None
    summary.keep(threading.Event())
    assert not named(arena)
    assert not list(arena.directory.glob("summary-*"))
