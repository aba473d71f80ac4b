"""What a killed node did not come to drop, and what no register knows, leaves with the next node."""

from __future__ import annotations

import json
import logging
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from fake_clock import FakeClock
from memory_tier import MemoryTier
from tiny_stores import OpenStore, found_pages, kill_store, layout_of, page_hashes, put_pages

from kvstore.arena.arena import Arena
from kvstore.errors import ResourceError
from kvstore.namespaces.registry import KnownNamespace
from kvstore.store import orphans
from kvstore.store.store import Store
from kvstore.tiers.disk import DiskTier

FRAME = 4096
LIMIT = 8 << 20
NEVER = threading.Event()

CHILD = """
import signal, sys
from pathlib import Path
import numpy as np
from kvstore.arena.arena import Arena
from kvstore.layout import Layout
from kvstore.store.store import Store
from kvstore.store.leases import NODE
from kvstore.tiers.disk import DiskTier

arena, disk = map(Path, sys.argv[1:])
tier = DiskTier(disk, 8 << 20)
store = Store(Arena(arena, 64 * 4096), [tier], [arena, disk])
for model in ("cleared", "kept"):
    known = store.open_namespace(Layout(model=model, block_size=16, page_bytes=4096))
    hashes = [number.to_bytes(32, "big") for number in (1, 2, 3)]
    reserved = store.prepare_store(NODE, known.fingerprint, hashes, 10.0, direct=True)
    for frame in reserved.frames:
        store.arena.view(frame, 4096)[:] = 7
    assert store.complete_store(NODE, reserved.lease, publish=True).stored == 3
assert store.flush() == 6

def killed_over_it(keys):
    print("removing", flush=True)
    signal.pause()

tier.remove = killed_over_it
store.clear(Layout(model="cleared", block_size=16, page_bytes=4096).fingerprint)
"""


@pytest.mark.parametrize("arena_survives", [True, False])
def test_a_node_killed_while_it_clears_does_not_bring_the_pages_back(
    shm: Path, tmp_path: Path, arena_survives: bool
) -> None:
    arena, disk = shm / "arena", tmp_path / "disk"
    command = [sys.executable, "-c", CHILD, str(arena), str(disk)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        try:
            assert child.stdout.readline() == b"removing\n"
        finally:
            child.send_signal(signal.SIGKILL)
    if not arena_survives:  # the machine was restarted since
        (arena / "namespaces.json").unlink()
    tier = DiskTier(disk, LIMIT)
    with Store(Arena(arena, 64 * FRAME), [tier], [arena, disk]) as store:
        assert [each.layout.model for each in store.namespaces.known()] == ["kept"]
        cleared, kept = (store.open_namespace(layout_of(model, FRAME)) for model in ("cleared", "kept"))
        assert found_pages(store, cleared, [1, 2, 3]) == []
        assert found_pages(store, kept, [1, 2, 3]) == [1, 2, 3]
        assert tier.fingerprints() == [kept.fingerprint]
        store.orphans.drop(NEVER)
        assert store.namespaces.leaving() == []
        put_pages(store, cleared, [1])
        store.flush()
    with Store(Arena(arena, 64 * FRAME), [DiskTier(disk, LIMIT)], [arena, disk]) as store:
        assert found_pages(store, cleared, [1, 2]) == [1], "it came to its end, and does not go on for ever"


class Killed(BaseException):
    pass


def die(*arguments: Any) -> Any:
    raise Killed


class Nodes:
    """One node after the other over the same arena, disk and Redis, all of which outlive them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.disk, self.redis = MemoryTier(), MemoryTier(name="redis")
        self.asked: list[bytes] = []
        self.answer: Callable[[bytes], int | None] = self.forget
        self.redis.expire = self.expire
        self.stores: list[Store] = []

    def expire(self, prefix: bytes, seconds: float, stop: threading.Event) -> int | None:
        self.asked.append(prefix)
        return self.answer(prefix)

    def forget(self, prefix: bytes) -> int:
        return int(self.redis.remove(self.redis.keys(prefix)))

    def away(self, prefix: bytes) -> int:
        raise ResourceError("redis is away")

    def in_use(self, prefix: bytes) -> None:
        return None

    def start(self) -> Store:
        arena = Arena(self.folder / "arena", 64 * FRAME)
        self.stores.append(Store(arena, [self.disk], [self.folder / "arena"], self.redis))
        return self.stores[-1]

    def fill(self, store: Store, model: str, numbers: Sequence[int]) -> Any:
        known = store.open_namespace(layout_of(model, FRAME))
        assert put_pages(store, known, numbers).refused == 0
        store.flush()
        return known

    def kill_while_it_clears(self, store: Store, *known: KnownNamespace) -> None:
        remove = self.redis.remove
        self.redis.remove = self.disk.remove = die
        for each in known:
            with pytest.raises(Killed):
                store.clear(each.fingerprint)
        self.redis.remove = remove
        del self.disk.remove
        kill_store(store)


@pytest.fixture
def nodes(shm: Path) -> Iterator[Nodes]:
    made = Nodes(shm)
    yield made
    for store in made.stores:
        kill_store(store)


def test_what_the_shared_tier_has_leaves_once_that_answers(nodes: Nodes, caplog: pytest.LogCaptureFixture) -> None:
    store = nodes.start()
    nodes.kill_while_it_clears(store, nodes.fill(store, "a", [1, 2]))
    assert len(nodes.redis.pages) == len(nodes.disk.pages) == 2

    nodes.answer = nodes.away
    for _ in range(2):  # Redis may be away for longer than a node
        store = nodes.start()
        assert nodes.disk.pages == {}
        with caplog.at_level(logging.WARNING):
            store.orphans.drop(NEVER)
        assert "was being dropped when the node ended: redis is away" in caplog.text
        assert len(nodes.redis.pages) == 2
        assert len(store.namespaces.leaving()) == 1
        kill_store(store)
    store = nodes.start()
    nodes.answer = nodes.forget
    store.orphans.drop(NEVER)
    assert nodes.redis.pages == {}
    assert store.namespaces.leaving() == []


def test_what_is_stored_once_it_was_opened_again_stays_everywhere(nodes: Nodes) -> None:
    store = nodes.start()
    nodes.kill_while_it_clears(store, nodes.fill(store, "a", [1, 2]))
    nodes.answer = nodes.away
    store = nodes.start()
    store.orphans.drop(NEVER)
    known = nodes.fill(store, "a", [3, 4])
    assert store.namespaces.leaving() == []
    arena = len(store.statistics().namespaces), store.statistics().arena_pages
    store.orphans.drop(NEVER)  # Redis is away still
    nodes.answer = nodes.forget
    store.orphans.drop(NEVER)
    assert (len(store.statistics().namespaces), store.statistics().arena_pages) == arena == (1, 2)
    assert found_pages(store, known, [1, 2, 3, 4]) == [1, 2, 3, 4], (
        "what is left in Redis of the old ones is right, too"
    )
    kill_store(store)
    store = nodes.start()
    store.orphans.drop(NEVER)
    assert store.statistics().arena_pages == len(nodes.disk.pages) == 2
    assert found_pages(store, known, [3, 4]) == [3, 4]


def test_a_register_that_has_a_namespace_both_ways_means_that_it_was_opened_again(nodes: Nodes) -> None:
    store = nodes.start()
    known = nodes.fill(store, "a", [1])
    kill_store(store)
    path = nodes.folder / "arena" / "namespaces.json"
    register = json.loads(path.read_text())
    register["leaving"] = [{"fingerprint": known.fingerprint.hex(), "name": "a", "shared": True}]
    path.write_text(json.dumps(register))
    store = nodes.start()
    store.orphans.drop(NEVER)
    assert (store.statistics().arena_pages, len(nodes.disk.pages), len(nodes.redis.pages)) == (1, 1, 1)
    assert nodes.asked == []


def test_what_another_node_has_used_since_stays_in_the_shared_tier(
    nodes: Nodes, caplog: pytest.LogCaptureFixture
) -> None:
    store = nodes.start()
    nodes.kill_while_it_clears(store, nodes.fill(store, "a", [1, 2]))
    nodes.answer = nodes.in_use
    store = nodes.start()
    with caplog.at_level(logging.WARNING):
        store.orphans.drop(NEVER)
    assert "is in use again: it stays in the shared tier" in caplog.text
    assert store.namespaces.leaving() == [], "it is not asked for ever"


def test_a_node_that_stops_asks_the_shared_tier_no_more(nodes: Nodes) -> None:
    store = nodes.start()
    nodes.kill_while_it_clears(store, *(nodes.fill(store, model, [1]) for model in "abc"))
    stop = threading.Event()

    def stopped_meanwhile(prefix: bytes) -> int:
        stop.set()
        return nodes.forget(prefix)

    nodes.answer = stopped_meanwhile
    store = nodes.start()
    store.orphans.drop(stop)
    assert len(nodes.asked) == 1
    assert len(store.namespaces.leaving()) == 2, "the next node's"


def test_pins_of_what_was_being_dropped_end_with_it(nodes: Nodes) -> None:
    store = nodes.start()
    known = nodes.fill(store, "a", [1, 2])
    assert store.pin(known.fingerprint, page_hashes([1, 2]), 1000.0) == 2
    pins = nodes.folder / "arena" / "pins"
    pinned = pins.read_bytes()
    nodes.kill_while_it_clears(store, known)
    assert pins.read_bytes() != pinned, "they end before the first page goes"
    pins.write_bytes(pinned)  # as if it had been killed just before that
    for _ in range(2):
        store = nodes.start()
        known = store.open_namespace(layout_of("a", FRAME))
        assert store.statistics().namespaces[0].pinned_pages == 0
        kill_store(store)


def test_pages_that_no_register_knows_stay_while_they_are_pinned(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    store = nodes.start()
    known = nodes.fill(store, "a", [1])
    store.pin(known.fingerprint, page_hashes([1]), 1e6)
    kill_store(store)
    (nodes.folder / "arena" / "namespaces.json").write_text("{damaged")
    clock = FakeClock()
    monkeypatch.setattr(orphans, "time", clock)
    store = nodes.start()
    clock.now += orphans.UNCLAIMED_SECONDS + 1
    store.orphans.drop(NEVER)
    assert len(nodes.disk.pages) == 1
    store._pins.end([*nodes.disk.pages])
    store.orphans.drop(NEVER)
    assert nodes.disk.pages == {}


def test_pages_that_no_register_knows_leave_unless_somebody_opens_their_namespace(
    open_store: OpenStore,
    tier: MemoryTier,
    shm: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = open_store(64, [tier])
    gone, wanted = (store.open_namespace(layout_of(model, FRAME)) for model in ("gone", "wanted"))
    put_pages(store, gone, [1, 2])
    put_pages(store, wanted, [1])
    store.close()
    (shm / "arena" / "namespaces.json").write_text("{damaged")
    clock = FakeClock()
    monkeypatch.setattr(orphans, "time", clock)
    with caplog.at_level(logging.WARNING):
        store = open_store(64, [tier])
    assert f"8 KiB on disk belong to namespace {gone.fingerprint.hex()[:12]}" in caplog.text
    again = store.open_namespace(layout_of("wanted", FRAME))
    clock.now += orphans.UNCLAIMED_SECONDS
    store.orphans.drop(NEVER)
    assert len(tier.pages) == 3
    clock.now += 1
    store.orphans.drop(NEVER)
    assert tier.fingerprints() == [wanted.fingerprint]
    assert found_pages(store, again, [1]) == [1]
    assert f"nobody opened namespace {gone.fingerprint.hex()[:12]}: dropped, with 2 pages" in caplog.text
