"""Stores over tiny arenas in shared memory, a tier that fails as it is told, clients that live and die."""

from __future__ import annotations

import fcntl
import hashlib
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Any

import numpy as np
import pytest

from kvstore.arena.arena import Arena
from kvstore.arena.format import FRAME_BYTES
from kvstore.config.rules import NamespaceRule
from kvstore.events.ring import EventRing
from kvstore.hashing import checksum_of
from kvstore.layout import Layout
from kvstore.namespaces.registry import KnownNamespace
from kvstore.store.leases import NODE
from kvstore.store.results import Held, Published, Reserved
from kvstore.store.store import Store
from kvstore.tiers.tier import PageBytes, PageWrite, Peer, Tier, TierStatistics

PATIENCE = 60.0


class Gate:
    """A step that a thread goes through: open unless a test closes it; then the thread stops there."""

    def __init__(self) -> None:
        self._reached = threading.Event()
        self._open = threading.Event()
        self._open.set()
        self.error: BaseException | None = None

    def close(self) -> None:
        self._reached.clear()
        self._open.clear()

    def open(self) -> None:
        self._open.set()

    def wait_reached(self) -> None:
        assert self._reached.wait(PATIENCE), "no thread came here"

    def go_through(self) -> None:
        self._reached.set()
        assert self._open.wait(PATIENCE), "a test left a gate closed"
        if self.error is not None:
            raise self.error


@dataclass
class MemoryTier:
    """A tier in this process's memory, which outlives the stores that a test opens over it."""

    name: str = "disk"
    pages: dict[bytes, tuple[int, bytes]] = field(default_factory=dict)
    refuse: Callable[[bytes], bool] = lambda key: False
    """Which pages it does not take."""
    read_gate: Gate = field(default_factory=Gate)
    write_gate: Gate = field(default_factory=Gate)
    asked: list[bytes] = field(default_factory=list)
    """Every key that was read, as often as it was."""
    writes: list[list[bytes]] = field(default_factory=list)
    """The keys of each write."""
    quotas: dict[bytes, int] = field(default_factory=dict)
    limit: int = 0
    write_limit: int = 0
    touched: list[bytes] = field(default_factory=list)
    flush_error: Exception | None = None
    flushes: int = 0
    hits: int = 0
    closed: bool = False

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        return [key in self.pages for key in keys]

    def keys(self, prefix: bytes) -> list[bytes]:
        return [key for key in self.pages if key.startswith(prefix)]

    def fingerprints(self) -> list[bytes]:
        return list({key[:32] for key in self.pages})

    def write(self, pages: Sequence[PageWrite]) -> list[bool]:
        self.writes.append([page.key for page in pages])
        self.write_gate.go_through()
        taken = []
        for page in pages:
            assert checksum_of(page.payload) == page.checksum, "a checksum that is not the payload's"
            taken.append(not self.refuse(page.key) and self.keep_quota(page))
            if taken[-1]:
                self.pages.setdefault(page.key, (page.checksum, page.payload.tobytes()))
        return [here and page.key in self.pages for page, here in zip(pages, taken, strict=True)]

    def keep_quota(self, page: PageWrite) -> bool:
        """Have the page's namespace drop pages until it fits."""
        namespace = page.key[:32]
        quota = self.quotas.get(namespace, 0)
        if not quota or page.key in self.pages:
            return True
        while self.used_by(namespace) + len(page.payload) > quota and (here := self.keys(namespace)):
            del self.pages[here[0]]
        return len(page.payload) <= quota

    def touch(self, keys: Sequence[bytes]) -> list[bool]:
        self.touched += keys
        for key in keys:
            if key in self.pages:
                self.pages[key] = self.pages.pop(key)
        return self.contains(keys)

    def set_quota(self, prefix: bytes, limit_bytes: int) -> None:
        self.quotas[prefix] = limit_bytes

    def check_limit(self, limit_bytes: int) -> None:
        pass

    def set_limit(self, limit_bytes: int) -> None:
        self.limit = limit_bytes

    def set_write_limit(self, limit_bytes: int) -> None:
        self.write_limit = limit_bytes

    def tell(self, events: EventRing) -> None:
        pass

    def used_by(self, prefix: bytes) -> int:
        return sum(len(payload) for key, (_, payload) in self.pages.items() if key.startswith(prefix))

    def read(self, keys: Sequence[bytes], into: Sequence[PageBytes]) -> list[int | None]:
        self.asked += keys
        answers: list[int | None] = []
        for key, array in zip(keys, into, strict=True):
            checksum, payload = self.pages.get(key, (0, b""))
            array[: len(payload)] = np.frombuffer(payload, np.uint8)
            damaged = not payload or checksum_of(array) != checksum
            answers.append(None if damaged else checksum)
            if damaged:
                self.pages.pop(key, None)
        self.read_gate.go_through()
        self.hits += len(answers) - answers.count(None)
        return answers

    def damage(self, key: bytes) -> None:
        checksum, payload = self.pages[key]
        self.pages[key] = (checksum, bytes([payload[0] ^ 1]) + payload[1:])

    def remove(self, keys: Sequence[bytes]) -> int:
        return sum(self.pages.pop(key, None) is not None for key in keys)

    def flush(self) -> None:
        self.flushes += 1
        if self.flush_error is not None:
            raise self.flush_error

    def peers(self) -> list[Peer]:
        return []

    def statistics(self) -> TierStatistics:
        return TierStatistics(pages=len(self.pages))

    def close(self) -> None:
        self.closed = True


class FakeClock:
    """In place of the ``time`` module where a test injects it."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    time = monotonic

    def sleep(self, seconds: float) -> None:
        assert seconds <= 0.01, "a test with an injected clock waits for nothing"


class Holds:
    """A lock which counts what is done under each hold of it."""

    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock
        self.done: list[Counter[str]] = []

    def __enter__(self) -> None:
        self._lock.acquire()
        self.done.append(Counter())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()

    def counted(self, what: str, method: Any) -> Any:
        def count(*arguments: Any, **options: Any) -> Any:
            if self._lock.locked():
                self.done[-1][what] += 1
            return method(*arguments, **options)

        return count

    def most(self, what: str) -> int:
        """The most that was done under one hold."""
        return max(done[what] for done in self.done)

    def all(self, what: str) -> int:
        return sum(done[what] for done in self.done)


class LocalClient:
    """A client's lock on its file in the arena, held by a descriptor of this process."""

    def __init__(self, directory: Path) -> None:
        self.name = f"new-{secrets.token_hex(16)}"
        self._fd = os.open(directory / "clients" / self.name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._fd, fcntl.LOCK_EX)

    def die(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def leave(self) -> None:
        """It has stopped to write."""
        os.ftruncate(self._fd, 1)
        self.die()


_HOLD_A_LOCK = """
import fcntl, os, sys
fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
fcntl.flock(fd, fcntl.LOCK_EX)
print("locked", flush=True)
sys.stdin.read()
"""


class ChildClient:
    """A client's lock, held by another process, until that is killed."""

    def __init__(self, directory: Path) -> None:
        self.name = f"new-{secrets.token_hex(16)}"
        self._process = subprocess.Popen(
            [sys.executable, "-c", _HOLD_A_LOCK, str(directory / "clients" / self.name)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"locked\n"

    def die(self) -> None:
        with self._process as process:  # closes the pipes, too
            process.kill()


def layout(model: str, page_bytes: int) -> Layout:
    return Layout(model=model, block_size=16, page_bytes=page_bytes)


def hash_of(number: int) -> bytes:
    return number.to_bytes(32, "big")


def hashes_of(numbers: Sequence[int]) -> list[bytes]:
    return [hash_of(number) for number in numbers]


def payload_of(known: KnownNamespace, block_hash: bytes, version: int = 0) -> np.ndarray:
    """What the page of this key holds: bytes that no other key, and no other version, has."""
    seed = known.layout.model.encode() + block_hash + bytes([version])
    return np.frombuffer(hashlib.shake_128(seed).digest(known.layout.page_bytes), np.uint8)


def fill(store: Store, known: KnownNamespace, hashes: Sequence[bytes], reserved: Reserved, version: int = 0) -> None:
    """Write the payloads of what was reserved."""
    wanted = [h for h, outcome in zip(hashes, reserved.outcomes, strict=True) if outcome == 0]
    for block_hash, frame in zip(wanted, reserved.frames, strict=True):
        store.arena.view(frame, known.layout.page_bytes)[:] = payload_of(known, block_hash, version)


def put(store: Store, known: KnownNamespace, numbers: Sequence[int]) -> Published:
    """Store pages as one batch; what was not even reserved counts as well."""
    hashes = hashes_of(numbers)
    reserved = store.prepare_store(NODE, known.fingerprint, hashes, 10.0, direct=True)
    fill(store, known, hashes, reserved)
    done = store.complete_store(NODE, reserved.ticket, publish=True)
    outcomes = reserved.outcomes
    return Published(done.stored, done.present + outcomes.count(1), done.refused + outcomes.count(2))


def hold(store: Store, known: KnownNamespace, numbers: Sequence[int], ttl: float = 10.0, *, owner: int = NODE) -> Held:
    """Hold the leading pages, which have exactly their bytes."""
    hashes = hashes_of(numbers)
    held = store.prepare_load(owner, known.fingerprint, hashes, ttl)
    for block_hash, frame in zip(hashes, held.frames, strict=False):
        page = store.arena.view(frame, known.layout.page_bytes)
        assert np.array_equal(page, payload_of(known, block_hash)), f"wrong bytes in {block_hash.hex()}"
    return held


def get(store: Store, known: KnownNamespace, numbers: Sequence[int], *, owner: int = NODE) -> int:
    """How many leading pages can be loaded; those have exactly their bytes."""
    held = hold(store, known, numbers, owner=owner)
    if held.ticket:
        assert store.complete_load(owner, held.ticket)
    return len(held.frames)


def found(store: Store, known: KnownNamespace, numbers: Sequence[int]) -> list[int]:
    """Which pages a lookup finds."""
    [tiers] = store.lookup([(known.fingerprint, hashes_of(numbers))])
    return [number for number, tier in zip(numbers, tiers, strict=True) if tier]


def kill(store: Store) -> None:
    """What SIGKILL leaves of a store: its files, and no lock on them."""
    store.arena.close()


def put_below(store: Store, known: KnownNamespace, tier: MemoryTier, numbers: Sequence[int]) -> None:
    """Store pages, and let them be on the tier below only."""
    for number in numbers:
        put(store, known, [number])
    while store.write_back.write_back():
        pass
    keep = dict(tier.pages)
    store.evict(known.fingerprint, hashes_of(numbers))
    tier.pages.update(keep)
    tier.asked.clear()


def counts(store: Store, *names: str) -> tuple[int, ...]:
    """What the store's counters of these names say."""
    counters = store.statistics().counters
    return tuple(counters[name] for name in names)


def result(future: Future[Any]) -> Any:
    """What a thread answers."""
    return future.result(PATIENCE)


tools_of_tests = SimpleNamespace(
    Gate=Gate,
    MemoryTier=MemoryTier,
    FakeClock=FakeClock,
    Holds=Holds,
    LocalClient=LocalClient,
    ChildClient=ChildClient,
    FRAME=FRAME_BYTES,
    layout=layout,
    hash_of=hash_of,
    hashes_of=hashes_of,
    payload_of=payload_of,
    fill=fill,
    put=put,
    hold=hold,
    get=get,
    found=found,
    kill=kill,
    put_below=put_below,
    counts=counts,
    result=result,
)


@pytest.fixture(scope="session")
def kv() -> SimpleNamespace:
    """The tools above."""
    return tools_of_tests


@pytest.fixture
def shm() -> Iterator[Path]:
    """An empty folder in shared memory of this test's own."""
    path = Path(tempfile.mkdtemp(prefix="kvstore-test-", dir="/dev/shm"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


@pytest.fixture
def tier() -> MemoryTier:
    return MemoryTier()


@pytest.fixture
def open_store(shm: Path) -> Iterator[Callable[..., Store]]:
    """Opens stores over one folder; those still open in the end give it up."""
    stores: list[Store] = []

    def open_it(
        frames: int = 64,
        tiers: Sequence[Tier] = (),
        also: Sequence[Path] = (),
        rules: Sequence[NamespaceRule] = (),
        life: float = 0.0,
    ) -> Store:
        arena = Arena(shm / "arena", frames * FRAME_BYTES)
        stores.append(Store(arena, tiers, [shm / "arena", *also], rules=rules, life=life))
        return stores[-1]

    yield open_it
    for store in stores:
        kill(store)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    """Time stands still for the store but where a test moves it."""
    clock = FakeClock()
    for module in ("store", "stores", "loads", "pins", "sweeper", "write_back", "promotion"):
        monkeypatch.setattr(f"kvstore.store.{module}.time", clock)
    return clock


@pytest.fixture
def child_client() -> Iterator[Callable[[Path], ChildClient]]:
    clients: list[ChildClient] = []

    def start(directory: Path) -> ChildClient:
        clients.append(ChildClient(directory))
        return clients[-1]

    yield start
    for client in clients:
        client.die()
