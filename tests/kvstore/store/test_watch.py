"""The stream of a real store with a real disk: whoever believes it knows what is there."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.events.ring import Change, EventRing, PageEvent
from kvstore.store.watch import Complete, Start, Told
from kvstore.tiers.disk import DiskTier

PAGE = 20_000


class Knowledge:
    """A reader's: which pages are in which tier, by what it was told."""

    def __init__(self) -> None:
        self.pages: set[tuple[str, bytes, bytes]] = set()
        self.starts: list[int] = []

    def learn(self, told: Told) -> None:
        if isinstance(told, Start):
            self.pages.clear()
            self.starts.append(told.missed)
        elif not isinstance(told, Complete):
            for event in told:
                pages = {(event.tier, event.fingerprint, block_hash) for block_hash in event.hashes}
                self.pages = self.pages | pages if event.change is Change.STORED else self.pages - pages


def is_told(stream: Iterator[Told], knowledge: Knowledge) -> None:
    """Read until nothing happens any more."""
    for told in stream:
        knowledge.learn(told)
        if isinstance(told, list) and not told:
            return


def truth(store, tier) -> set[tuple[str, bytes, bytes]]:
    slots = store._state.slots
    keys = [("arena", slots.key(slot)) for slot in store._state.catalog.resident()]
    keys += [("disk", key) for known in store.namespaces.known() for key in tier.keys(known.fingerprint)]
    return {(name, key[:32], key[32:]) for name, key in keys}


@pytest.fixture
def disk(tmp_path: Path) -> DiskTier:
    return DiskTier(tmp_path / "disk", 3 << 20, segment_bytes=512 << 10)


@pytest.fixture
def store(open_store, disk):
    store = open_store(frames=64, tiers=[disk])
    yield store
    disk.close()


def test_a_stored_page_is_told_with_its_parent_and_again_by_the_disk(store, disk, kv):
    known = store.open_namespace(kv.layout("m", PAGE))
    stream = store.follow()
    knowledge = Knowledge()
    is_told(stream, knowledge)
    kv.put(store, known, [1, 2])
    store.flush()
    events = next(stream)
    fingerprint, pages = known.fingerprint, (kv.hash_of(1), kv.hash_of(2))
    assert [event for event in events if event.tier == "arena"] == [
        PageEvent(Change.STORED, "arena", fingerprint, pages, b"")
    ]
    assert [event for event in events if event.tier == "disk"] == [
        PageEvent(Change.STORED, "disk", fingerprint, pages[:1], b""),
        PageEvent(Change.STORED, "disk", fingerprint, pages[1:], pages[0]),
    ]
    reserved = store.prepare_store(0, fingerprint, [kv.hash_of(3)], 10.0, direct=True, parent=kv.hash_of(2))
    kv.fill(store, known, [kv.hash_of(3)], reserved)
    store.complete_store(0, reserved.ticket, publish=True)
    assert next(stream) == [PageEvent(Change.STORED, "arena", fingerprint, (kv.hash_of(3),), kv.hash_of(2))]
    stream.close()
    assert not store._state.events.wanted, "a stream that was closed still costs"


def test_whoever_comes_later_is_told_what_is_there(store, disk, kv):
    known = store.open_namespace(kv.layout("m", PAGE))
    kv.put(store, known, [1, 2, 3])
    store.flush()
    store.evict(known.fingerprint, [kv.hash_of(2)])
    stream = store.follow()
    told = [next(stream)]
    while not isinstance(told[-1], Complete):
        told.append(next(stream))
    assert told[0] == Start(0)
    knowledge = Knowledge()
    for each in told:
        knowledge.learn(each)
    assert knowledge.pages == truth(store, disk) != set()
    stream.close()


def test_others_namespaces_are_not_told(store, kv):
    mine, other = (store.open_namespace(kv.layout(name, PAGE)) for name in "mo")
    kv.put(store, other, [1])
    stream = store.follow(lambda fingerprint: fingerprint == mine.fingerprint)
    knowledge = Knowledge()
    is_told(stream, knowledge)
    kv.put(store, mine, [2])
    kv.put(store, other, [3])
    store.flush()
    is_told(stream, knowledge)
    assert {(fingerprint, block_hash) for _, fingerprint, block_hash in knowledge.pages} == {
        (mine.fingerprint, kv.hash_of(2))
    }
    stream.close()


def test_who_misses_something_begins_anew(store, disk, kv, monkeypatch):
    store._state.events = ring = EventRing(most_pages=4)
    store._state.residency._events = ring
    disk.tell(ring)
    known = store.open_namespace(kv.layout("m", PAGE))
    knowledge = Knowledge()
    stream = store.follow()
    is_told(stream, knowledge)
    for number in range(20):
        kv.put(store, known, [number])
    is_told(stream, knowledge)
    assert knowledge.starts == [0, 24]
    assert knowledge.pages == truth(store, disk)
    stream.close()


@pytest.mark.parametrize("life", range(3))
def test_a_reader_that_believes_everything_knows_what_is_there(store, disk, kv, seed, life):
    """Stores, evictions by tiny tiers, drops and clears, while a stream is read by another thread."""
    rng = random.Random(f"{seed} {life}")
    names = ["a", "b"]
    spaces = {name: store.open_namespace(kv.layout(name, PAGE)) for name in names}
    knowledge, quiet, done = Knowledge(), threading.Event(), threading.Event()

    def read() -> None:
        for told in stream:
            knowledge.learn(told)
            if isinstance(told, list) and not told and done.is_set():
                break
        quiet.set()

    for number in range(5):
        kv.put(store, spaces["a"], [number])
    stream = store.follow()
    next(stream)  # the first piece of what is there is read while it changes
    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(400):
        known = spaces[rng.choice(names)]
        match rng.randrange(8):
            case 0:
                store.evict(known.fingerprint, [kv.hash_of(rng.randrange(300))])
            case 1 | 2:
                store.flush()
            case 3:
                kv.get(store, known, [rng.randrange(300)])
            case 4 if rng.random() < 0.1:
                store.clear(known.fingerprint)
                spaces[known.layout.model] = store.open_namespace(known.layout)
            case _:
                first = rng.randrange(300)
                kv.put(store, known, range(first, first + rng.randrange(1, 4)))
    done.set()
    assert quiet.wait(60.0)
    reader.join()
    assert disk.statistics().evicted and store.statistics().counters["evicted"], "nothing left by itself"
    assert knowledge.pages == truth(store, disk)
