"""The stream of a real store with a real disk: whoever believes it knows what is there."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny_stores import OpenStore, fill_reserved, layout_of, load_pages, page_hash, put_pages

from kvstore.events.ring import Change, EventRing, PageEvent
from kvstore.store.store import Store
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


def truth(store: Store, tier: DiskTier) -> set[tuple[str, bytes, bytes]]:
    slots = store._state.slots
    keys = [("arena", slots.key(slot)) for slot in store._state.catalog.resident()]
    keys += [("disk", key) for known in store.namespaces.known() for key in tier.keys(known.fingerprint)]
    return {(name, key[:32], key[32:]) for name, key in keys}


@pytest.fixture
def disk(tmp_path: Path) -> DiskTier:
    return DiskTier(tmp_path / "disk", 3 << 20, segment_bytes=512 << 10)


@pytest.fixture
def store(open_store: OpenStore, disk: DiskTier) -> Iterator[Store]:
    store = open_store(frames=64, tiers=[disk])
    yield store
    disk.close()


def test_a_stored_page_is_told_with_its_parent_and_again_by_the_disk(store: Store, disk: DiskTier) -> None:
    known = store.open_namespace(layout_of("m", PAGE))
    stream = store.follow()
    knowledge = Knowledge()
    is_told(stream, knowledge)
    put_pages(store, known, [1, 2])
    store.flush()
    events = next(stream)
    fingerprint, pages = known.fingerprint, (page_hash(1), page_hash(2))
    assert [event for event in events if event.tier == "arena"] == [
        PageEvent(Change.STORED, "arena", fingerprint, pages, b"")
    ]
    assert [event for event in events if event.tier == "disk"] == [
        PageEvent(Change.STORED, "disk", fingerprint, pages[:1], b""),
        PageEvent(Change.STORED, "disk", fingerprint, pages[1:], pages[0]),
    ]
    reserved = store.prepare_store(0, fingerprint, [page_hash(3)], 10.0, direct=True, parent=page_hash(2))
    fill_reserved(store, known, [page_hash(3)], reserved)
    store.complete_store(0, reserved.lease, publish=True)
    assert next(stream) == [PageEvent(Change.STORED, "arena", fingerprint, (page_hash(3),), page_hash(2))]
    stream.close()
    assert not store._state.events.wanted, "a stream that was closed still costs"


def test_whoever_comes_later_is_told_what_is_there(store: Store, disk: DiskTier) -> None:
    known = store.open_namespace(layout_of("m", PAGE))
    put_pages(store, known, [1, 2, 3])
    store.flush()
    store.evict(known.fingerprint, [page_hash(2)])
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


def test_others_namespaces_are_not_told(store: Store) -> None:
    mine, other = (store.open_namespace(layout_of(name, PAGE)) for name in "mo")
    put_pages(store, other, [1])
    stream = store.follow(lambda fingerprint: fingerprint == mine.fingerprint)
    knowledge = Knowledge()
    is_told(stream, knowledge)
    put_pages(store, mine, [2])
    put_pages(store, other, [3])
    store.flush()
    is_told(stream, knowledge)
    assert {(fingerprint, block_hash) for _, fingerprint, block_hash in knowledge.pages} == {
        (mine.fingerprint, page_hash(2))
    }
    stream.close()


def test_who_misses_something_begins_anew(store: Store, disk: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    store._state.events = ring = EventRing(most_pages=4)
    store._state.residency._events = ring
    disk.tell(ring)
    known = store.open_namespace(layout_of("m", PAGE))
    knowledge = Knowledge()
    stream = store.follow()
    is_told(stream, knowledge)
    for number in range(20):
        put_pages(store, known, [number])
    is_told(stream, knowledge)
    assert knowledge.starts == [0, 24]
    assert knowledge.pages == truth(store, disk)
    stream.close()


@pytest.mark.parametrize("life", range(3))
def test_a_reader_that_believes_everything_knows_what_is_there(
    store: Store, disk: DiskTier, seed: int, life: int
) -> None:
    """Stores, evictions by tiny tiers, drops and clears, while a stream is read by another thread."""
    rng = random.Random(f"{seed} {life}")
    names = ["a", "b"]
    spaces = {name: store.open_namespace(layout_of(name, PAGE)) for name in names}
    knowledge, quiet, done = Knowledge(), threading.Event(), threading.Event()

    def read() -> None:
        for told in stream:
            knowledge.learn(told)
            if isinstance(told, list) and not told and done.is_set():
                break
        quiet.set()

    for number in range(5):
        put_pages(store, spaces["a"], [number])
    stream = store.follow()
    next(stream)  # the first piece of what is there is read while it changes
    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(400):
        known = spaces[rng.choice(names)]
        match rng.randrange(8):
            case 0:
                store.evict(known.fingerprint, [page_hash(rng.randrange(300))])
            case 1 | 2:
                store.flush()
            case 3:
                load_pages(store, known, [rng.randrange(300)])
            case 4 if rng.random() < 0.1:
                store.clear(known.fingerprint)
                spaces[known.layout.model] = store.open_namespace(known.layout)
            case _:
                first = rng.randrange(300)
                put_pages(store, known, range(first, first + rng.randrange(1, 4)))
    done.set()
    assert quiet.wait(60.0)
    reader.join()
    assert disk.statistics().evicted and store.statistics().counters["evicted"], "nothing left by itself"
    assert knowledge.pages == truth(store, disk)
