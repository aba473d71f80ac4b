"""Pages that an operator pinned stay in the arena until their time is over."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import msgpack
import pytest
from fake_clock import FakeClock
from memory_tier import MemoryTier
from tiny_stores import OpenStore, kill_store, layout_of, page_hashes, put_pages

from kvstore.errors import InvalidRequestError
from kvstore.limits import LONGEST_PIN
from kvstore.namespaces.pin_table import PinTable
from kvstore.namespaces.registry import KnownNamespace
from kvstore.page_codes import PageTier
from kvstore.store.store import Store

FRAME = 4096


def arena_pages(store: Store, known: KnownNamespace, numbers: Any) -> list[int]:
    [tiers] = store.lookup([(known.fingerprint, page_hashes(numbers))])
    return [number for number, tier in zip(numbers, tiers, strict=True) if tier == PageTier.ARENA]


def put_all(store: Store, known: KnownNamespace, numbers: Any) -> None:
    for number in numbers:
        assert put_pages(store, known, [number]).stored == 1


def burst(store: Store, known: KnownNamespace, first: int = 1000, frames: int = 256) -> None:
    """Four times the arena, unless more is said."""
    put_all(store, known, range(first, first + frames))


def test_what_is_pinned_outlasts_a_burst_until_its_time_is_over(open_store: OpenStore, clock: FakeClock) -> None:
    store = open_store(64)
    known = store.open_namespace(layout_of("a", FRAME))
    put_pages(store, known, range(8))
    assert store.pin(known.fingerprint, page_hashes(range(4)), 60.0) == 4
    assert store.statistics().namespaces[0].pinned_pages == 4
    burst(store, known)
    store.check_integrity()
    assert arena_pages(store, known, range(8)) == [0, 1, 2, 3]
    clock.now += 61.0
    store.sweep()
    store.check_integrity()
    burst(store, known)
    assert arena_pages(store, known, range(8)) == []
    assert store.statistics().namespaces[0].pinned_pages == 0


def test_a_clock_that_is_set_ends_no_pin_and_what_ends_is_said(
    open_store: OpenStore, clock: FakeClock, shm: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store(64)
    known = store.open_namespace(layout_of("a", FRAME))
    put_pages(store, known, range(4))
    store.pin(known.fingerprint, page_hashes(range(4)), 1000.0)
    ahead = 3 * 86400.0
    clock.time = lambda: clock.now + ahead
    store.sweep()
    assert store.statistics().namespaces[0].pinned_pages == 4
    store.pin(known.fingerprint, page_hashes([0]), 2000.0)  # it is written down
    kill_store(store)
    again = open_store(64)
    clock.now += 1001.0
    with caplog.at_level(logging.INFO):
        again.sweep()
    assert again.statistics().namespaces[0].pinned_pages == 1
    assert "'a · block 16 · group 0': the time of 3 pins is over" in caplog.text


def test_a_later_end_wins_and_unpin_ends_all(open_store: OpenStore, clock: FakeClock) -> None:
    store = open_store(64)
    known = store.open_namespace(layout_of("a", FRAME))
    put_pages(store, known, range(4))
    store.pin(known.fingerprint, page_hashes([0, 1]), 100.0)
    store.pin(known.fingerprint, page_hashes([1, 2]), 10.0)
    clock.now += 50.0
    store.sweep()
    burst(store, known, frames=1024)  # these were a prompt of four, of whose like less is known: they stay for longer
    assert arena_pages(store, known, range(4)) == [0, 1]
    assert store.unpin(known.fingerprint, page_hashes([0, 1, 2])) == 2
    burst(store, known, first=5000, frames=1024)
    assert arena_pages(store, known, range(4)) == []
    store.check_integrity()


def test_pins_take_a_quarter_of_the_arena_at_most(open_store: OpenStore) -> None:
    store = open_store(64)
    known = store.open_namespace(layout_of("a", FRAME))
    put_all(store, known, range(40))
    assert store.pin(known.fingerprint, page_hashes(range(40)), 60.0) == 16
    assert store.pin(known.fingerprint, page_hashes(range(16)), 60.0) == 16, "these are pinned already"
    assert store.pin(known.fingerprint, page_hashes([20]), 60.0) == 0
    store.unpin(known.fingerprint, page_hashes([3]))
    assert store.pin(known.fingerprint, page_hashes([20]), 60.0) == 1
    store.check_integrity()


def test_so_many_pages_may_be_pinned_in_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.namespaces.pin_table.MOST_PINNED_PAGES", 3)
    pins = PinTable(tmp_path / "pins", 1000.0, 0.0, 100)
    keys = [bytes([number]) * 64 for number in range(5)]
    assert pins.add(keys[:2], 2000.0, 1) == 2
    assert pins.add(keys[1:], 2000.0, 1) == 2, "one that is pinned already, and one more"
    assert len(pins) == 3


def test_a_pin_brings_pages_up_and_stops_at_the_first_that_is_nowhere(open_store: OpenStore, tier: MemoryTier) -> None:
    store = open_store(64, [tier])
    known = store.open_namespace(layout_of("a", FRAME))
    put_pages(store, known, range(6))
    store.flush()
    put_all(store, known, range(100, 164))
    assert arena_pages(store, known, range(6)) == []
    assert store.pin(known.fingerprint, page_hashes([0, 1, 2, 77, 3]), 60.0) == 3
    assert arena_pages(store, known, range(6)) == [0, 1, 2]


def test_pins_outlive_the_node_and_take_hold_when_the_page_comes_back(open_store: OpenStore, clock: FakeClock) -> None:
    store = open_store(64)
    known = store.open_namespace(layout_of("a", FRAME))
    put_pages(store, known, range(4))
    store.pin(known.fingerprint, page_hashes(range(4)), 1000.0)
    kill_store(store)
    again = open_store(64)
    known = again.open_namespace(layout_of("a", FRAME))
    again.check_integrity()
    burst(again, known)
    assert arena_pages(again, known, range(4)) == [0, 1, 2, 3]
    again.close()
    clock.now += 1001.0
    late = open_store(64)
    known = late.open_namespace(layout_of("a", FRAME))
    burst(late, known)
    assert arena_pages(late, known, range(4)) == []


def test_who_drops_a_page_says_that_its_pin_ends(open_store: OpenStore) -> None:
    store = open_store(64)
    known = store.open_namespace(layout_of("a", FRAME))
    put_pages(store, known, range(4))
    store.pin(known.fingerprint, page_hashes(range(4)), 1000.0)
    assert store.evict(known.fingerprint, page_hashes([0, 1])) == 0, "pinned pages stay"
    assert arena_pages(store, known, range(4)) == [0, 1, 2, 3]
    assert store.evict(known.fingerprint, page_hashes([0, 1]), pinned=True) == 2
    assert store.statistics().namespaces[0].pinned_pages == 2
    put_pages(store, known, [0])
    burst(store, known)
    assert arena_pages(store, known, range(4)) == [2, 3]
    assert store.clear(known.fingerprint) > 0
    store.check_integrity()
    known = store.open_namespace(layout_of("a", FRAME))
    assert store.statistics().namespaces[0].pinned_pages == 0


@pytest.mark.parametrize("seconds", [0, -1, LONGEST_PIN + 1, float("nan")])
def test_a_time_out_of_range_is_named(open_store: OpenStore, seconds: float) -> None:
    store = open_store(64)
    known = store.open_namespace(layout_of("a", FRAME))
    with pytest.raises(InvalidRequestError, match="366 days"):
        store.pin(known.fingerprint, page_hashes([1]), seconds)
    put_pages(store, known, [1])
    assert store.pin(known.fingerprint, page_hashes([1]), LONGEST_PIN) == 1


@pytest.mark.parametrize("content", [b"", b"\xc1", msgpack.packb([1]), msgpack.packb({"version": 1, "pins": [[1]]})])
def test_a_damaged_file_has_no_pins(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "pins"
    path.write_bytes(content)
    assert len(PinTable(path, 0.0, 0.0, 10)) == 0


@pytest.mark.parametrize(
    "record",
    [
        [1e12, float("inf"), [b"x" * 64]],
        [1e12, 1.5, [b"x" * 64]],
        [1e12, 0, [b"x" * 64]],
        ["soon", 1, [b"x" * 64]],
        [1e12, 1, [[1] * 64]],
        [1e12, 1, ["x" * 64]],
        [1e12, 1, [b"x" * 63]],
        [1e12, 1, b"x" * 64],
        [1e12, 1],
        7,
        None,
    ],
)
def test_a_damaged_record_costs_its_own_pins_and_is_said(
    tmp_path: Path, record: object, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "pins"
    sound = [1e12, 1, [b"y" * 64]]
    path.write_bytes(msgpack.packb({"version": 1, "pins": [record, sound]}))
    pins = PinTable(path, 0.0, 0.0, 10)
    assert list(pins) == [b"y" * 64]
    assert pins.keys(b"y") == [b"y" * 64]
    assert str(path) in caplog.text


@pytest.mark.parametrize("end", [float("inf"), 1e300, 2**64 - 1])
def test_no_pin_of_a_file_lasts_longer_than_one_may(tmp_path: Path, end: float) -> None:
    path = tmp_path / "pins"
    path.write_bytes(msgpack.packb({"version": 1, "pins": [[end, 1, [b"y" * 64]]]}))
    ahead = time.time() - time.monotonic()
    pins = PinTable(path, time.monotonic(), ahead, 10)
    assert pins.overdue(time.monotonic() + LONGEST_PIN + 1) == [b"y" * 64]


@pytest.mark.parametrize("frames", [2**63, 2**64 - 1])
def test_a_pin_of_more_frames_than_there_are_pins_nothing(tmp_path: Path, frames: int) -> None:
    path = tmp_path / "pins"
    path.write_bytes(msgpack.packb({"version": 1, "pins": [[1e12, frames, [b"x" * 64]], [1e12, 1, [b"y" * 64]]]}))
    assert list(PinTable(path, 0.0, 0.0, 10)) == [b"y" * 64]
