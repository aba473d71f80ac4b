"""What a killed node did not come to drop, and what no register knows, leaves with the next node."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore import leftovers
from kvstore.arena.arena import Arena
from kvstore.errors import ResourceError
from kvstore.store import Store
from kvstore.tiers.disk import DiskTier

FRAME = 4096
LIMIT = 8 << 20
OpenStore = Callable[..., Store]

CHILD = """
import signal, sys
from pathlib import Path
import numpy as np
from kvstore.arena.arena import Arena
from kvstore.layout import Layout
from kvstore.store import Store
from kvstore.tickets import NODE
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
    assert store.complete_store(NODE, reserved.ticket, publish=True).stored == 3
assert store.flush() == 6

def killed_over_it(keys):
    print("removing", flush=True)
    signal.pause()

tier.remove = killed_over_it
store.clear(Layout(model="cleared", block_size=16, page_bytes=4096).fingerprint)
"""


@pytest.mark.parametrize("arena_survives", [True, False])
def test_a_node_killed_while_it_clears_does_not_bring_the_pages_back(
    shm: Path, tmp_path: Path, kv: SimpleNamespace, arena_survives: bool
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
        cleared, kept = (store.open_namespace(kv.layout(model, FRAME)) for model in ("cleared", "kept"))
        assert kv.found(store, cleared, [1, 2, 3]) == []
        assert kv.found(store, kept, [1, 2, 3]) == [1, 2, 3]
        assert tier.fingerprints() == [kept.fingerprint]
        store.leftovers.drop()
        assert store.namespaces.leaving() == []
        kv.put(store, cleared, [1])
        store.flush()
    with Store(Arena(arena, 64 * FRAME), [DiskTier(disk, LIMIT)], [arena, disk]) as store:
        assert kv.found(store, cleared, [1, 2]) == [1], "it came to its end, and does not go on for ever"


def test_what_the_shared_tier_has_leaves_once_that_answers(
    shm: Path, kv: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    shared = kv.MemoryTier(name="redis")

    def opened() -> Store:
        return Store(Arena(shm / "arena", 64 * FRAME), [], [shm / "arena"], shared)

    class Killed(BaseException):
        pass

    def die(*arguments: Any) -> Any:
        raise Killed

    def away(*arguments: Any) -> Any:
        raise ResourceError("redis is away")

    store = opened()
    known = store.open_namespace(kv.layout("a", FRAME))
    kv.put(store, known, [1, 2])
    store.write_behind.share()
    remove, shared.remove = shared.remove, die
    with pytest.raises(Killed):
        store.clear(known.fingerprint)
    kv.kill(store)

    with opened() as store:
        shared.remove = away
        with caplog.at_level(logging.WARNING):
            store.leftovers.drop()
        assert "was being dropped when the node ended: redis is away" in caplog.text
        assert len(shared.pages) == 2
        shared.remove = remove
        again = store.open_namespace(kv.layout("a", FRAME))
        assert kv.get(store, again, [1]) == 1
        store.leftovers.drop()
        assert kv.found(store, again, [1, 2]) == []
        assert not shared.pages
        assert store.namespaces.leaving() == []


def test_pages_that_no_register_knows_leave_unless_somebody_opens_their_namespace(
    open_store: OpenStore,
    kv: SimpleNamespace,
    tier: Any,
    shm: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = open_store(64, [tier])
    gone, wanted = (store.open_namespace(kv.layout(model, FRAME)) for model in ("gone", "wanted"))
    kv.put(store, gone, [1, 2])
    kv.put(store, wanted, [1])
    store.close()
    (shm / "arena" / "namespaces.json").write_text("{damaged")
    clock = kv.FakeClock()
    monkeypatch.setattr(leftovers, "time", clock)
    with caplog.at_level(logging.WARNING):
        store = open_store(64, [tier])
    assert f"8 KiB on disk belong to namespace {gone.fingerprint.hex()[:12]}" in caplog.text
    again = store.open_namespace(kv.layout("wanted", FRAME))
    clock.now += leftovers.UNCLAIMED_SECONDS
    store.leftovers.drop()
    assert len(tier.pages) == 3
    clock.now += 1
    store.leftovers.drop()
    assert tier.fingerprints() == [wanted.fingerprint]
    assert kv.found(store, again, [1]) == [1]
    assert f"nobody opened namespace {gone.fingerprint.hex()[:12]}: dropped, with 2 pages" in caplog.text
