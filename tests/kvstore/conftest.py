"""Stores over tiny arenas in shared memory, each with what a test does to it."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from fake_clock import FakeClock
from local_clients import ChildClient
from memory_tier import MemoryTier
from tiny_stores import OpenStore, kill_store

from kvstore.arena.arena import Arena
from kvstore.arena.format import FRAME_BYTES
from kvstore.config.rules import NamespaceRule, TenantRule
from kvstore.store.store import Store
from kvstore.tiers.tier import OwnTier


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
def open_store(shm: Path) -> Iterator[OpenStore]:
    """Opens stores over one folder; those still open in the end give it up."""
    stores: list[Store] = []

    def open_it(
        frames: int = 64,
        tiers: Sequence[OwnTier] = (),
        also: Sequence[Path] = (),
        rules: Sequence[NamespaceRule] = (),
        life: float = 0.0,
        tenants: Sequence[TenantRule] = (),
    ) -> Store:
        arena = Arena(shm / "arena", frames * FRAME_BYTES)
        stores.append(Store(arena, tiers, [shm / "arena", *also], rules=rules, life=life, tenants=tenants))
        return stores[-1]

    yield open_it
    for store in stores:
        kill_store(store)


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
