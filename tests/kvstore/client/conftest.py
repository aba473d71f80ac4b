"""One client a path: a node's mapped arena, bulk connections, gRPC's streams, and a store in this process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

import kvstore
from kvstore.arena.epochs import LINE_WORDS
from kvstore.client.paths.control import Connection
from kvstore.client.paths.shm.connection import SocketConnection
from kvstore.store.statistics import StoreStatistics
from kvstore.store.store import Store

TIMEOUT = 30.0
PAGE_BYTES = 5000
"""Neither a multiple of a frame nor of a cache line."""


@dataclass
class Place:
    """Where a test's pages go."""

    url: str
    store: Store
    opened: list[kvstore.Client] = field(default_factory=list)

    def connect(self, timeout: float = TIMEOUT) -> kvstore.Client:
        if self.opened and self.url.startswith("embedded:"):
            self.opened[0].timeout = timeout  # there is one client, this process's own
            return self.opened[0]
        client = kvstore.connect(self.url, timeout=timeout)
        self.opened.append(client)
        return client

    def snapshot(self) -> StoreStatistics:
        """Everything that the store counts, at rest: a change means that something was done."""
        for reports in (getattr(client._session.control, "reports", None) for client in self.opened):
            report = reports.take() if reports is not None else None
            if report is not None:  # what it has read without a call
                reports._report(report, TIMEOUT)
        self.store.flush()
        return self.store.statistics()

    def check_integrity(self) -> None:
        with self.store.write_back.writing:  # or the write-back's own holds would be counted
            self.store.check_integrity()

    def used_bytes(self) -> int:
        return self.store.statistics().arena_used_bytes

    def counter(self, name: str) -> int:
        return self.store.statistics().counters[name]


@pytest.fixture
def pass_deadlines() -> Callable[[Store], None]:
    """As if the clients' timeouts, which are the deadlines of what they reserve, hold and read, were over now."""

    def run(store: Store) -> None:
        now = time.monotonic()
        with store._state.lock:
            tickets = store._state.leases
            for ticket in (*tickets.stores.values(), *tickets.loads.values()):
                assert now < ticket.deadline <= now + TIMEOUT + 0.1
                ticket.deadline = now
        lines = store._state.readers._lines
        for word in range(0, len(lines), LINE_WORDS):
            if lines[word]:
                assert 0 < lines[word + 1] - now * 1e9 <= (TIMEOUT + 0.1) * 1e9
                lines[word + 1] = int(now * 1e9)

    return run


def _place(url: str, start_node, short_folder: Path, shm_folder: Path, **settings: object) -> Place:
    if url == "embedded":
        # Kept, for what is checked behind the end of a test.
        options = {"arena": 16 << 20, "disk_limit": 64 << 20, "keep_arena": "true"} | settings
        query = "&".join(f"{name}={value}" for name, value in options.items())
        address = f"embedded://{short_folder}/e?arena_dir={shm_folder}/e&{query}"
        client = kvstore.connect(address, timeout=TIMEOUT)
        return Place(address, client._session.control._store, [client])
    node = start_node(**settings)
    if url == "grpc":
        node._bulk.stop(0.0)  # then a client has only the streams
    address = f"kv://127.0.0.1:{node.port}" if url in ("kv", "grpc") else f"unix://{node.config.socket}"
    return Place(address, node.store)


@pytest.fixture(params=["unix", "unix by calls", "kv", "grpc", "embedded"])
def make_place(
    request, start_node, short_folder: Path, shm_folder: Path, monkeypatch
) -> Iterator[Callable[..., Place]]:
    """Make a place with settings of a node; its integrity is checked when the test ends."""
    if request.param == "unix by calls":  # as on processors of another kind
        monkeypatch.setattr("kvstore.client.paths.shm.mapped_arena.CAN_READ", False)
    places: list[Place] = []

    def make(**settings: object) -> Place:
        places.append(_place(request.param, start_node, short_folder, shm_folder, **settings))
        return places[-1]

    yield make
    for place in places:
        place.check_integrity()
        for client in place.opened:
            client.close()


@pytest.fixture
def place(make_place) -> Place:
    return make_place()


@pytest.fixture
def client(place: Place) -> kvstore.Client:
    return place.connect()


@pytest.fixture
def calls(monkeypatch) -> list[str]:
    """The calls that clients make from now on, by either way; what they do in the background is left out: reports, and
    slots that are preallocated or given back."""
    made: list[str] = []

    def note(request: object) -> None:
        if isinstance(request, list):
            for packed in request:
                note(packed.request)
            return
        name = type(request).__name__
        if name != "UseReport" and not getattr(request, "ahead", 0) and getattr(request, "publish", True):
            made.append(name)

    def noting(owner: type, name: str, place: int) -> None:
        original = getattr(owner, name)

        def noted(self, *arguments):
            note(arguments[place])
            return original(self, *arguments)

        monkeypatch.setattr(owner, name, noted)

    noting(Connection, "call", 1)
    noting(SocketConnection, "post", 0)
    noting(SocketConnection, "parts", 0)
    return made


@pytest.fixture
def layout() -> kvstore.Layout:
    return kvstore.Layout(model="tiny", block_size=16, page_bytes=PAGE_BYTES)


@pytest.fixture
def pages(client: kvstore.Client, layout: kvstore.Layout) -> kvstore.Namespace:
    return client.namespace(layout)


@pytest.fixture
def hashes() -> Callable[..., list[bytes]]:
    """Block hashes of a prompt by its name, the same each time."""

    def make(count: int, name: int = 0) -> list[bytes]:
        return kvstore.hash_blocks(np.arange(count * 16) % 50_000 + name, 16)

    return make


@pytest.fixture
def payload() -> Callable[..., np.ndarray]:
    """Random bytes, ``(pages, page_bytes)``, the same for the same seed."""

    def make(count: int, seed: int = 0, page_bytes: int = PAGE_BYTES) -> np.ndarray:
        return np.random.default_rng(seed).integers(0, 256, (count, page_bytes), dtype=np.uint8)

    return make
