"""Who reads what a node would like to write over: lines, epochs, and who is waited for."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from fake_clock import FakeClock
from local_clients import LocalClient
from memory_tier import MemoryTier
from tiny_stores import fill_reserved, kill_store, layout_of, load_pages, page_hashes, put_pages

from kvstore.arena import epochs as epochs_module
from kvstore.arena.arena import Arena
from kvstore.arena.clients import MOST_CLIENTS, Clients
from kvstore.arena.epochs import (
    LINE_WORDS,
    LONGEST_READ,
    READERS_BYTES,
    ReaderEpochs,
    ReadingLine,
)
from kvstore.namespaces.registry import KnownNamespace
from kvstore.page_codes import StoreOutcome
from kvstore.store import state as state_module
from kvstore.store.leases import NODE
from kvstore.store.residency import QUARANTINE_SECONDS
from kvstore.store.store import Store

FRAME = 4096


class Clock:
    """In place of the ``time`` module, in seconds that a test moves by itself."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def monotonic_ns(self) -> int:
        return int(self.now * 1e9)

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


class SleepsAreTold:
    """In place of the ``time`` module: who would sleep calls ``told`` instead."""

    monotonic = staticmethod(time.monotonic)
    monotonic_ns = staticmethod(time.monotonic_ns)

    def __init__(self, told: Callable[[float], None]) -> None:
        self.sleep = told


@dataclass
class FullStore:
    """A store whose arena is full of pages 0 to 15, and a client with its line."""

    store: Store
    known: KnownNamespace
    line: ReadingLine


class Lines:
    """The file of lines, the node's epoch, and clients that this process plays."""

    def __init__(self, folder: Path) -> None:
        (folder / "clients").mkdir()
        self._folder = folder
        self.words = memoryview(bytearray(READERS_BYTES)).cast("Q")
        self.epoch = memoryview(bytearray(8)).cast("Q")
        self.epoch[0] = 1
        self.clients = Clients(folder / "clients")
        self.node = ReaderEpochs(self.words, self.clients)

    def attach(self) -> tuple[Any, ReadingLine]:
        client = LocalClient(self._folder)
        number = self.clients.attach(client.name)
        start = number % MOST_CLIENTS * LINE_WORDS
        return client, ReadingLine(self.words[start : start + LINE_WORDS], self.epoch)


@pytest.fixture
def lines(shm: Path) -> Lines:
    return Lines(shm)


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """A clock of this test's own, in seconds."""
    clock = Clock()
    monkeypatch.setattr(epochs_module, "time", clock)
    return clock


def test_what_left_at_a_readers_epoch_or_before_waits_for_it(lines: Lines, now: Clock) -> None:
    client, line = lines.attach()
    assert lines.node.passed(1)
    lines.epoch[0] = 5
    read = line.begin(now.now + 1)
    lines.epoch[0] = 9
    assert [epoch for epoch in range(1, 9) if not lines.node.passed(epoch)] == [5, 6, 7, 8]
    line.end(read)
    assert all(lines.node.passed(epoch) for epoch in range(9))
    client.die()


def test_of_several_reads_the_oldest_counts_and_the_last_deadline(lines: Lines, now: Clock) -> None:
    client, line = lines.attach()
    reads = []
    for epoch, deadline in ((3, 10), (4, 30), (7, 20)):
        lines.epoch[0] = epoch
        reads.append(line.begin(now.now + deadline))
    assert not lines.node.passed(3)
    line.end(reads[0])
    assert lines.node.passed(3)
    assert not lines.node.passed(4)
    now.now += 29
    assert not lines.node.passed(4)
    line.end(reads[1])
    assert lines.node.passed(7), "the one of epoch 7 is past its deadline, and nobody else is there"
    line.end(reads[2])
    client.die()


def test_a_read_that_never_ends_does_not_live_on_those_that_come_after_it(lines: Lines, now: Clock) -> None:
    client, line = lines.attach()
    line.begin(now.now + 1)
    for epoch in range(2, 30):
        lines.epoch[0] = epoch
        now.now += 0.1
        line.end(line.begin(now.now + 1))
    assert lines.node.passed(1)
    line.begin(now.now + 1)
    assert lines.node.passed(28)
    assert not lines.node.passed(29)
    client.die()


@pytest.mark.parametrize("end", ["dead", "overdue", "nonsense"])
def test_nobody_waits_for_ever(lines: Lines, now: Clock, end: str) -> None:
    client, line = lines.attach()
    read = line.begin(now.now + (LONGEST_READ + 1 if end == "nonsense" else 5))
    if end != "nonsense":
        assert not lines.node.passed(1)
    if end == "dead":
        client.die()
    if end == "overdue":
        now.now += 5
    assert lines.node.passed(1)
    line.end(read)
    client.die()


def test_a_new_client_does_not_read_what_the_line_said_before_it(lines: Lines, now: Clock) -> None:
    client, line = lines.attach()
    line.begin(now.now + 5)
    client.die()
    lines.clients.forget(1)
    for _ in range(MOST_CLIENTS - 1):  # until the same line comes again
        lines.clients._last += 1
    other, _ = lines.attach()
    [number] = lines.clients.numbers()
    assert number == 1 + MOST_CLIENTS
    assert not lines.node.passed(1)
    lines.node.welcome(number)
    assert lines.node.passed(1)
    other.die()


def test_no_two_clients_share_a_line(lines: Lines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.arena.clients.MOST_CLIENTS", 3)
    here = [lines.attach()[0] for _ in range(3)]
    for turn in range(7):
        leaving = lines.clients.numbers()[turn % 3]
        here[[*lines.clients.numbers()].index(leaving)].die()
        place = lines.clients.numbers().index(leaving)
        lines.clients.forget(leaving)
        del here[place]
        here.append(lines.attach()[0])
        assert len({number % 3 for number in lines.clients.numbers()}) == 3
    for client in here:
        client.die()


# -- the store waits ---------------------------------------------------------------------------------------------------


@pytest.fixture
def full(open_store: Callable[..., Store], shm: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FullStore]:
    """A store whose arena is full of pages 0 to 15, and a client with its line."""
    monkeypatch.setattr(state_module, "LONGEST_WAIT_FOR_READERS", 0.01)
    store = open_store(16)
    known = store.open_namespace(layout_of("a", FRAME))
    for number in range(16):
        put_pages(store, known, [number])
    client = LocalClient(shm / "arena")
    number = store.attach(client.name) & 0xFFFF
    start = number % MOST_CLIENTS * LINE_WORDS
    line = ReadingLine(store.arena.lines[start : start + LINE_WORDS], store.arena._epoch)
    yield FullStore(store, known, line)
    client.die()


def test_a_slot_that_somebody_reads_is_not_lent_and_the_refusal_is_counted(full: FullStore) -> None:
    before = full.store.statistics().counters["refused"]
    read = full.line.begin(time.monotonic() + 30)
    reserved = full.store.prepare_store(NODE, full.known.fingerprint, page_hashes([100, 101]), 9.0, direct=True)
    assert reserved == (0, bytes([StoreOutcome.REFUSED, StoreOutcome.REFUSED]), [])
    assert full.store.statistics().counters["refused"] == before + 2
    full.store.check_integrity()
    full.line.end(read)
    assert put_pages(full.store, full.known, [100, 101]) == (2, 0, 0)
    full.store.check_integrity()


def test_a_slot_that_was_free_before_the_reader_came_is_lent(full: FullStore) -> None:
    """What comes behind the first slot that is being read is refused with it."""
    full.store.evict(full.known.fingerprint, page_hashes([3]))
    full.line.begin(time.monotonic() + 30)
    reserved = full.store.prepare_store(NODE, full.known.fingerprint, page_hashes([100, 101]), 9.0, direct=True)
    assert list(reserved.outcomes) == [StoreOutcome.RESERVED, StoreOutcome.REFUSED]
    assert len(reserved.frames) == 1
    fill_reserved(full.store, full.known, page_hashes([100, 101]), reserved)
    assert full.store.complete_store(NODE, reserved.lease, publish=True) == (1, 0, 0)
    full.store.check_integrity()


def test_a_reservation_waits_for_a_reader_that_is_nearly_done(full: FullStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_module, "LONGEST_WAIT_FOR_READERS", 30.0)
    read = full.line.begin(time.monotonic() + 30)
    looks: list[float] = []

    def sleep(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 3:
            full.line.end(read)

    clock = SleepsAreTold(sleep)
    monkeypatch.setattr(epochs_module, "time", clock)
    assert put_pages(full.store, full.known, [100]) == (1, 0, 0)
    assert len(looks) == 3


def test_pages_of_a_lower_tier_are_not_promoted_over_what_somebody_reads(
    open_store: Callable[..., Store], shm: Path, tier: MemoryTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_module, "LONGEST_WAIT_FOR_READERS", 0.01)
    store = open_store(16, [tier])
    known = store.open_namespace(layout_of("a", FRAME))
    for number in range(20):
        put_pages(store, known, [number])
        store.write_back.write_back()
    client = LocalClient(shm / "arena")
    number = store.attach(client.name) & 0xFFFF
    line = ReadingLine(store.arena.lines[number * LINE_WORDS :][:LINE_WORDS], store.arena._epoch)
    read = line.begin(time.monotonic() + 30)
    assert load_pages(store, known, [0]) == 0, "a miss, not a wait"
    store.check_integrity()
    line.end(read)
    assert load_pages(store, known, [0]) == 1
    client.die()


def test_a_dead_client_that_was_to_be_refused_leaves_nothing(full: FullStore, shm: Path, clock: FakeClock) -> None:
    """It dies while its reservation waits for a reader, and is swept away."""
    writer = LocalClient(shm / "arena")
    owner = full.store.attach(writer.name) & 0xFFFF
    full.line.begin(time.monotonic() + 30)
    wait = full.store._state.readers.wait

    def sweep_first(epoch: int, seconds: float) -> bool:
        writer.die()
        full.store.sweep()
        return bool(wait(epoch, seconds))

    full.store._state.readers.wait = sweep_first
    reserved = full.store.prepare_store(owner, full.known.fingerprint, page_hashes([100]), 9.0, direct=True)
    assert reserved == (0, bytes([StoreOutcome.REFUSED]), [])
    full.store.check_integrity()
    clock.now += QUARANTINE_SECONDS
    full.store.sweep()
    full.store.check_integrity()
    assert full.store.statistics().arena_used_bytes == 15 * FRAME


def test_what_was_free_waits_for_the_readers_that_an_earlier_node_left(full: FullStore, shm: Path) -> None:
    full.store.evict(full.known.fingerprint, page_hashes(range(16)))
    epoch = full.store.arena._epoch[0]
    read = full.line.begin(time.monotonic() + 30)
    kill_store(full.store)
    again = Store(Arena(shm / "arena", 16 * FRAME), [], [shm / "arena"])
    assert again.arena._epoch[0] > epoch
    assert put_pages(again, again.open_namespace(full.known.layout), [100])[2] == 1
    full.line.end(read)
    assert put_pages(again, again.open_namespace(full.known.layout), [100])[0] == 1
    kill_store(again)
