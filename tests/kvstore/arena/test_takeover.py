"""A node that was killed at any moment: the next one finds every page that was published, and nothing else."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_clock import FakeClock
from local_clients import ChildClient, LocalClient
from memory_tier import MemoryTier
from tiny_stores import (
    fill_reserved,
    found_pages,
    hold_pages,
    kill_store,
    layout_of,
    load_pages,
    page_hash,
    page_hashes,
    payload_of,
    put_pages,
)

from kvstore.arena import format as fmt
from kvstore.arena.arena import Arena
from kvstore.core import choice
from kvstore.errors import NotAttachedError
from kvstore.page_codes import PageTier
from kvstore.store.leases import NODE
from kvstore.store.residency import QUARANTINE_SECONDS
from kvstore.store.store import Store

FRAME = 4096
OpenStore = Callable[..., Store]
FIXTURES = Path(__file__).parents[2] / "fixtures"


def header(store: Store, frame: int) -> Any:
    return store.arena._headers[frame]


def frame_of(store: Store, known: Any, number: int) -> int:
    held = hold_pages(store, known, [number])
    assert store.complete_load(NODE, held.lease)
    return int(held.frames[0])


def test_every_published_page_is_found_again(open_store: OpenStore) -> None:
    store = open_store(256)
    spaces = [store.open_namespace(layout_of(f"m{size}", size)) for size in (100, FRAME, 3 * FRAME - 1, 20 * FRAME)]
    for known in spaces:
        for number in range(3):
            assert put_pages(store, known, [number]) == (1, 0, 0)
    held = hold_pages(store, spaces[0], [0, 1])
    sums = store.checksums(NODE, held.lease)
    before = store.statistics()
    kill_store(store)

    again = open_store(256)
    again.check_integrity()
    assert again.kept_pages == 12
    after = again.statistics()
    assert after.counters == before.counters
    assert (after.arena_pages, after.arena_used_bytes) == (12, before.arena_used_bytes)
    assert after.namespaces == before.namespaces
    for known in spaces:
        assert again.open_namespace(known.layout) == known
        assert load_pages(again, known, [0, 1, 2]) == 3
    held = hold_pages(again, spaces[0], [0, 1])
    assert again.checksums(NODE, held.lease) == sums


def test_tickets_of_the_earlier_node_are_unknown(open_store: OpenStore) -> None:
    store = open_store()
    known = store.open_namespace(layout_of("a", FRAME))
    put_pages(store, known, [1])
    held = hold_pages(store, known, [1])
    reserved = store.prepare_store(NODE, known.fingerprint, page_hashes([2]), 9.0, direct=True)
    kill_store(store)
    again = open_store()
    assert not again.complete_load(NODE, held.lease)
    assert again.complete_store(NODE, reserved.lease, publish=True) == (0, 0, 0)
    assert found_pages(again, known, [1, 2]) == [1]
    assert again.statistics().arena_used_bytes == FRAME, "nobody holds, and nobody writes"


def test_the_order_of_leaving_is_kept(open_store: OpenStore) -> None:
    """The oldest batch first, and its tail before its head."""
    store = open_store(16)
    known = store.open_namespace(layout_of("a", FRAME))
    for batch in ([3, 1, 2], [6, 5, 4], [9, 8, 7]):
        put_pages(store, known, batch)
    kill_store(store)
    again = open_store(16)
    left: list[int] = []
    for number in range(100, 116):
        put_pages(again, known, [number])
        left += [each for each in range(1, 10) if each not in [*found_pages(again, known, list(range(1, 10))), *left]]
    assert left == [2, 1, 3, 4, 5, 6, 7, 8, 9]


def test_pages_that_no_tier_has_are_dirty_again(open_store: OpenStore, tier: MemoryTier) -> None:
    store = open_store(16, [tier])
    known = store.open_namespace(layout_of("a", FRAME))
    put_pages(store, known, [1, 2])
    assert store.write_back.write_back() == 2
    put_pages(store, known, [3, 4])
    kill_store(store)
    again = open_store(16, [tier])
    assert again.statistics().dirty_pages == 2
    assert again.flush() == 2
    assert len(tier.pages) == 4
    kill_store(again)
    assert open_store(16).statistics().dirty_pages == 0, "without a lower tier no page waits for one"


def test_a_slot_that_a_living_client_may_write_stays_in_quarantine(
    open_store: OpenStore, shm: Path, child_client: Callable[[Path], ChildClient], clock: FakeClock
) -> None:
    store = open_store(16)
    known = store.open_namespace(layout_of("a", FRAME))
    client, other = child_client(shm / "arena"), child_client(shm / "arena")
    name, dying = store.attach(client.name), store.attach(other.name)
    reserved = store.prepare_store(store.owner_of(name), known.fingerprint, page_hashes([1, 2]), 9.0, direct=True)
    gone = store.prepare_store(store.owner_of(dying), known.fingerprint, page_hashes([3]), 9.0, direct=True)
    own = store.prepare_store(NODE, known.fingerprint, page_hashes([4]), 9.0, direct=True)
    put_pages(store, known, [5])
    other.die()
    kill_store(store)

    again = open_store(16)
    again.check_integrity()
    assert again.owner_of(name) == 1
    with pytest.raises(NotAttachedError):
        again.owner_of(dying)
    assert again.statistics().arena_used_bytes == 4 * FRAME, "three in quarantine, one page"

    def fill(writing: list[int], pages: int) -> None:
        for number in range(100, 130):
            put_pages(again, known, [number])
            for frame in writing:
                again.arena.view(frame, FRAME)[:] = 0xFF
            again.sweep()
        found = found_pages(again, known, list(range(130)))
        assert len(found) == pages
        assert all(load_pages(again, known, [number]) == 1 for number in found)
        again.check_integrity()

    clock.now += QUARANTINE_SECONDS - 0.1
    fill([*reserved.frames, *gone.frames], 13)  # one was stopped, and wakes up; a device copies for the other
    clock.now += 0.2
    fill(reserved.frames, 14)

    # A third node, over the quarantine of the second one.
    kill_store(again)
    third = open_store(16)
    assert third.statistics().arena_used_bytes == 16 * FRAME
    third.check_integrity()
    client.die()
    third.sweep()
    assert third.statistics().arena_used_bytes == 16 * FRAME, "a device may still be copying"
    clock.now += QUARANTINE_SECONDS
    third.sweep()
    third.check_integrity()
    assert third.statistics().arena_used_bytes == 14 * FRAME
    put_pages(third, known, [200, 201])
    assert third.statistics().arena_pages == 16
    assert {*gone.frames, *own.frames}.isdisjoint(reserved.frames)


def test_a_lapsed_slot_is_in_quarantine_too(open_store: OpenStore, shm: Path, clock: FakeClock) -> None:
    store = open_store(16)
    known = store.open_namespace(layout_of("a", FRAME))
    client = LocalClient(shm / "arena")
    owner = store.owner_of(store.attach(client.name))
    store.prepare_store(owner, known.fingerprint, page_hashes([1]), 9.0, direct=True)
    clock.now += 9.1
    store.sweep()
    kill_store(store)
    again = open_store(16)
    assert again.statistics().arena_used_bytes == FRAME
    client.leave()
    again.sweep()
    assert again.statistics().arena_used_bytes == 0, "it has said that it had stopped"


def test_the_quarantine_of_a_dead_clients_slots_outlives_the_node(
    open_store: OpenStore, shm: Path, clock: FakeClock
) -> None:
    """The node is killed in the middle of it, when it has forgotten the client already."""
    store = open_store(16)
    known = store.open_namespace(layout_of("a", FRAME))
    client = LocalClient(shm / "arena")
    owner = store.owner_of(store.attach(client.name))
    store.prepare_store(owner, known.fingerprint, page_hashes([1]), 9.0, direct=True)
    client.die()
    store.sweep()
    assert store.statistics().clients == 0
    clock.now += 1.0
    kill_store(store)
    again = open_store(16)
    again.sweep()
    assert again.statistics().arena_used_bytes == FRAME, "a device may still be copying"
    clock.now += QUARANTINE_SECONDS
    again.sweep()
    assert again.statistics().arena_used_bytes == 0
    again.check_integrity()


def test_slots_of_a_client_that_left_while_no_node_was_there_are_free_at_once(open_store: OpenStore, shm: Path) -> None:
    store = open_store(16)
    known = store.open_namespace(layout_of("a", FRAME))
    client = LocalClient(shm / "arena")
    owner = store.owner_of(store.attach(client.name))
    store.prepare_store(owner, known.fingerprint, page_hashes([1]), 9.0, direct=True)
    kill_store(store)
    client.leave()
    again = open_store(16)
    assert again.statistics().arena_used_bytes == 0, "it has said that it had stopped"
    assert not list((shm / "arena" / "clients").iterdir())
    again.check_integrity()


def test_a_sweep_that_ends_behind_the_store_frees_no_slot(open_store: OpenStore, shm: Path) -> None:
    """The headers are another node's to write by then."""
    store = open_store(16)
    known = store.open_namespace(layout_of("a", FRAME))
    client = LocalClient(shm / "arena")
    owner = store.owner_of(store.attach(client.name))
    [frame] = store.prepare_store(owner, known.fingerprint, page_hashes([1]), 9.0, direct=True).frames
    kill_store(store)
    again = open_store(16)
    again._state.clients.remove_abandoned = again.close  # type: ignore[method-assign]
    again.sweep()
    assert header(again, frame)["owner"] == owner
    client.die()


def test_a_page_that_was_dropped_does_not_come_back(open_store: OpenStore) -> None:
    store = open_store(16)
    known, other = (store.open_namespace(layout_of(model, FRAME)) for model in "ab")
    put_pages(store, known, [1, 2])
    put_pages(store, other, [1, 2])
    held = hold_pages(store, known, [1])
    store.evict(known.fingerprint, page_hashes([1]))
    store.clear(other.fingerprint)
    assert held.lease
    kill_store(store)
    again = open_store(16)
    assert found_pages(again, known, [1, 2]) == [2]
    assert found_pages(again, again.open_namespace(layout_of("b", FRAME)), [1, 2]) == []
    assert again.statistics().arena_used_bytes == FRAME


def test_units_that_went_from_size_to_size_have_no_ghosts(open_store: OpenStore) -> None:
    """Headers of slots that were there before, when their frames belonged to other slots, say nothing any more."""
    store = open_store(256)
    small, large = store.open_namespace(layout_of("s", FRAME)), store.open_namespace(layout_of("l", 3 * FRAME))
    for number in range(256):
        put_pages(store, small, [number])
    for number in range(300):
        put_pages(store, large, [number])
    assert store.evict(large.fingerprint, page_hashes(range(300))) > 60
    put_pages(store, small, [1000, 1001])
    here = found_pages(store, small, list(range(1002)))
    kill_store(store)
    again = open_store(256)
    assert found_pages(again, small, list(range(1002))) == here
    assert all(load_pages(again, small, [number]) == 1 for number in here)


def test_pages_of_a_namespace_that_is_not_known_are_dropped(open_store: OpenStore, shm: Path) -> None:
    store = open_store(16)
    known, other = (store.open_namespace(layout_of(model, FRAME)) for model in "ab")
    put_pages(store, known, [1])
    put_pages(store, other, [1])
    kill_store(store)
    register = shm / "arena" / "namespaces.json"
    entries = json.loads(register.read_text())
    del entries["namespaces"][0]
    register.write_text(json.dumps(entries))
    again = open_store(16)
    again.check_integrity()
    assert load_pages(again, other, [1]) == 1
    assert again.kept_pages == 1
    # Whoever gets that number next must not find them, in this node or in the next one.
    fresh = again.open_namespace(layout_of("c", FRAME))
    assert found_pages(again, fresh, [1]) == []
    kill_store(again)
    assert open_store(16).kept_pages == 1


def test_a_lost_register_never_gives_a_namespace_the_pages_of_another(
    open_store: OpenStore, shm: Path, tier: MemoryTier
) -> None:
    """The disk's register is there still, but it counts the namespaces anew."""
    (shm / "disk").mkdir()
    store = open_store(16, [tier], also=[shm / "disk"])
    cleared, known, other = (store.open_namespace(layout_of(model, FRAME)) for model in "abc")
    put_pages(store, known, [1])
    put_pages(store, other, [2])
    store.clear(cleared.fingerprint)
    kill_store(store)
    (shm / "arena" / "namespaces.json").unlink()
    again = open_store(16, [tier], also=[shm / "disk"])
    for space in (known, other):
        for number in (1, 2):
            assert load_pages(again, again.open_namespace(space.layout), [number]) == 0
    again.check_integrity()


def test_pages_stored_in_a_namespace_that_came_from_the_disk_are_found(
    open_store: OpenStore, shm: Path, tier: MemoryTier
) -> None:
    """A new arena beside an old disk: the namespace is known before anybody opens it."""
    (shm / "disk").mkdir()
    store = open_store(16, [tier], also=[shm / "disk"])
    known = store.open_namespace(layout_of("a", FRAME))
    kill_store(store)
    resized = open_store(32, [tier], also=[shm / "disk"])
    put_pages(resized, known, [1])
    kill_store(resized)
    again = open_store(32, [tier], also=[shm / "disk"])
    assert again.kept_pages == 1
    assert load_pages(again, known, [1]) == 1


def test_headers_that_make_no_sense_are_no_pages(open_store: OpenStore) -> None:
    store = open_store(64)
    known = store.open_namespace(layout_of("a", 2 * FRAME))
    put_pages(store, known, [1, 2, 3, 4])
    frames = [frame_of(store, known, number) for number in (1, 2, 3, 4)]
    header(store, frames[0])["length"] = 2 * FRAME - 1
    header(store, frames[1])["namespace"] = 77
    header(store, frames[2])["hash"] = header(store, frames[3])["hash"]
    store.arena.view(frames[2], 2 * FRAME)[:] = store.arena.view(frames[3], 2 * FRAME)
    kill_store(store)
    again = open_store(64)
    again.check_integrity()
    assert again.kept_pages == 1, "of two copies of one page, one"
    assert found_pages(again, known, [1, 2, 3, 4]) == [4]
    assert load_pages(again, known, [4]) == 1
    assert again.evict(known.fingerprint, page_hashes([4])) == 1
    again.check_integrity()
    kill_store(again)
    assert open_store(64).kept_pages == 0


@pytest.mark.parametrize("frames", [32, 8])
def test_another_size_starts_anew_and_keeps_what_lower_tiers_have(
    open_store: OpenStore, shm: Path, tier: MemoryTier, frames: int
) -> None:
    (shm / "disk").mkdir()
    store = open_store(16, [tier], also=[shm / "disk"])
    known = store.open_namespace(layout_of("a", FRAME))
    client = LocalClient(shm / "arena")
    name = store.attach(client.name)
    put_pages(store, known, [1])
    store.flush()
    store.close()
    tier.closed = False
    with (shm / "arena" / "headers").open("rb") as old:
        again = open_store(frames, [tier], also=[shm / "disk"])
        block = fmt.Superblock.unpack(old.read(FRAME))
    assert block is not None
    assert block.retired == 1
    with pytest.raises(NotAttachedError):
        again.owner_of(name)
    [tiers] = again.lookup([(known.fingerprint, page_hashes([1]))])
    assert list(tiers) == [PageTier.DISK]
    assert load_pages(again, known, [1]) == 1
    client.die()


# -- killed at every step ------------------------------------------------------------------------------------------


class Killed(BaseException):
    """In place of SIGKILL: at exactly one step."""


class Steps:
    """Counts writes to shared memory, and ends the node at one of them."""

    def __init__(self, last: int) -> None:
        self.left = last
        self.taken = 0

    def step(self) -> None:
        if self.left == self.taken:
            raise Killed
        self.taken += 1


class SteppingWords:
    """Words of the mapping; there is a step before and after each change."""

    def __init__(self, words: memoryview, steps: Steps) -> None:
        self._words, self._steps = words, steps

    def __getitem__(self, place: int) -> int:
        return int(self._words[place])

    def __setitem__(self, place: int, value: int) -> None:
        self._steps.step()
        self._words[place] = value
        self._steps.step()

    def tolist(self) -> list[int]:
        return list(self._words.tolist())


class SteppingBody:
    """The rest of a header."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps

    def pack_into(self, buffer: Any, offset: int, *values: Any) -> None:
        self._steps.step()
        BODY.pack_into(buffer, offset, *values)

    def unpack_from(self, buffer: Any, offset: int) -> tuple[Any, ...]:
        return BODY.unpack_from(buffer, offset)


class SteppingUnits:
    """The unit table; it may be written in part."""

    def __init__(self, units: Any, steps: Steps) -> None:
        self._units, self._steps = units, steps

    def __setitem__(self, where: slice, table: list[tuple[int, int]]) -> None:
        middle = len(table) // 2
        self._units[:middle] = table[:middle]
        self._steps.step()
        self._units[middle : len(table)] = table[middle:]


BODY = fmt.HEADER_BODY


class Life:
    """One node's life: stores and drops of two page sizes in an arena that is far too small."""

    def __init__(self) -> None:
        self.acknowledged: set[tuple[str, int]] = set()
        self.dropped: set[tuple[str, int]] = set()

    def run(self, store: Store) -> None:
        small, large = self.open(store)
        self.put(store, small, [1, 2, 3])
        store.write_back.write_back()
        self.put(store, small, [4, 5, 6])
        self.put(store, large, [1])
        self.put(store, large, [2])
        store.write_back.write_back()
        self.drop(store, small, [2, 5])
        self.put(store, large, [3])
        reserved = store.prepare_store(NODE, small.fingerprint, page_hashes([7]), 9.0, direct=True)
        self.put(store, small, [8, 9])
        store.complete_store(NODE, reserved.lease, publish=False)
        load_pages(store, small, [1, 3])
        self.put(store, large, [4])
        self.put(store, large, [5])
        for number in range(10, 16):
            self.put(store, small, [number])
        self.drop(store, large, [4, 5])
        store.write_back.write_back()
        for number in range(6, 10):
            self.put(store, large, [number])
            self.put(store, small, [number + 10])
        load_pages(store, large, [6])

    def open(self, store: Store) -> tuple[Any, Any]:
        return tuple(store.open_namespace(layout_of(name, size)) for name, size in (("s", 4000), ("l", 12_000)))  # type: ignore[return-value]

    def put(self, store: Store, known: Any, numbers: list[int]) -> None:
        hashes = page_hashes(numbers)
        reserved = store.prepare_store(NODE, known.fingerprint, hashes, 9.0, direct=True)
        fill_reserved(store, known, hashes, reserved)
        done = store.complete_store(NODE, reserved.lease, publish=True)
        if not done.refused and 2 not in reserved.outcomes:
            self.acknowledged |= {(known.layout.model, number) for number in numbers}

    def drop(self, store: Store, known: Any, numbers: list[int]) -> None:
        self.dropped |= {(known.layout.model, number) for number in numbers}
        store.evict(known.fingerprint, page_hashes(numbers))

    def check(self, store: Store) -> None:
        """What the next node must find."""
        store.check_integrity()
        here = set()
        for known in self.open(store):
            for number in found_pages(store, known, list(range(20))):
                here.add((known.layout.model, number))
        missing = self.acknowledged - self.dropped - here
        counters = store.statistics().counters
        assert len(missing) <= counters["overrun"], f"{missing} are not found, and not counted"
        for known in self.open(store):
            for number in range(20):
                if (known.layout.model, number) in here:
                    load_pages(store, known, [number])  # exact bytes, or it pushed itself out


class SteppingCore:
    """The native core's writing calls; there is a step before and after each. What is between two stores of one call is
    what readers may see at any time: tests/kvstore/core."""

    def __init__(self, core: Any, steps: Steps) -> None:
        self._core, self._steps = core, steps

    def __getattr__(self, name: str) -> Any:
        return getattr(self._core, name)

    def begin_changes(self, *arguments: Any) -> Any:
        return self._stepping(self._core.begin_changes, arguments)

    def publish(self, *arguments: Any) -> Any:
        return self._stepping(self._core.publish, arguments)

    def _stepping(self, call: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        self._steps.step()
        done = call(*arguments)
        self._steps.step()
        return done


def killed_at(step: int, shm: Path, monkeypatch: pytest.MonkeyPatch, core: Any) -> bool:
    """Live, be killed at this step, be taken over. False: life ended before."""
    folder = shm / str(step)
    tier, life, steps = MemoryTier(), Life(), Steps(step)
    chosen = choice.Choice(core and SteppingCore(core, steps), "")
    store = Store(Arena(folder, 16 * FRAME), [tier], [folder])
    arena: Any = store.arena
    arena._words = SteppingWords(arena._words, steps)
    arena._counters = SteppingWords(arena._counters, steps)
    arena._epoch = SteppingWords(arena._epoch, steps)
    arena._index._words = SteppingWords(arena._index._words, steps)
    arena._units = SteppingUnits(arena._units, steps)
    with monkeypatch.context() as patch:
        patch.setattr(fmt, "HEADER_BODY", SteppingBody(steps))
        patch.setattr(choice, "CHOSEN", chosen)
        try:
            life.run(store)
            ended = True
        except Killed:
            ended = False
    kill_store(store)
    again = Store(Arena(folder, 16 * FRAME), [tier], [folder])
    life.check(again)
    Life().run(again)  # it works on
    again.check_integrity()
    kill_store(again)
    return not ended


@pytest.mark.parametrize("core", [None, choice.native()], ids=["python", "native"])
def test_killed_at_any_step_of_any_change(core: object, shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = 0
    while killed_at(step, shm, monkeypatch, core):
        step += 1
    assert step > 200, "the node was not killed in the middle of much"


# -- killed for good -----------------------------------------------------------------------------------------------

_STORE_UNTIL_KILLED = """
import os, random, sys
from pathlib import Path
sys.path.append(sys.argv[1])
from tiny_stores import layout_of, put_pages
from kvstore.arena.arena import Arena
from kvstore.store.store import Store
folder, seed = Path(sys.argv[2]), int(sys.argv[3])
store = Store(Arena(folder, 256 * 4096), [], [folder])
spaces = [store.open_namespace(layout_of(name, size)) for name, size in (("s", 4000), ("l", 50_000))]
draw = random.Random(seed)
while True:
    known = draw.choice(spaces)
    first = draw.randrange(1000)
    numbers = range(first, first + draw.randint(1, 4))
    if put_pages(store, known, numbers).refused == 0:
        line = known.layout.model + " " + " ".join(map(str, numbers))
        os.write(1, line.encode() + b"\\n")
"""


def test_a_killed_process_loses_nothing_that_it_acknowledged(shm: Path) -> None:
    folder = shm / "arena"
    draw = random.Random(7)
    acknowledged: set[tuple[str, int]] = set()
    for life in range(4):
        child = subprocess.Popen(
            [sys.executable, "-c", _STORE_UNTIL_KILLED, str(FIXTURES), str(folder), str(life)], stdout=subprocess.PIPE
        )
        assert child.stdout is not None
        with child:
            for _ in range(draw.randrange(1, 400)):
                line = child.stdout.readline().split()
                acknowledged |= {(line[0].decode(), int(number)) for number in line[1:]}
            child.kill()
            for last in child.stdout.read().splitlines(keepends=True):
                if last.endswith(b"\n"):
                    line = last.split()
                    acknowledged |= {(line[0].decode(), int(number)) for number in line[1:]}
        store = Store(Arena(folder, 256 * FRAME), [], [folder])
        store.check_integrity()
        assert store.kept_pages > 0
        counters = store.statistics().counters
        found = set()
        for name, size in (("s", 4000), ("l", 50_000)):
            known = store.open_namespace(layout_of(name, size))
            here = found_pages(store, known, list(range(1004)))
            found |= {(name, number) for number in here}
            assert all(load_pages(store, known, [number]) == 1 for number in here)
        assert len(found) == store.kept_pages
        assert len(acknowledged - found) <= counters["evicted"]
        assert counters["stored"] <= len(found) + counters["evicted"], "more is counted than was there"
        kill_store(store)


def test_a_flipped_byte_in_an_arena_taken_over_is_found(open_store: OpenStore) -> None:
    """Any byte of any page that had its checksum."""
    store = open_store(64)
    known = store.open_namespace(layout_of("a", 9000))
    put_pages(store, known, [1, 2, 3, 4, 5])
    held = hold_pages(store, known, [1, 2, 3, 4])
    store.checksums(NODE, held.lease)
    for frame, byte in zip(held.frames[:3], (0, 4500, 8999), strict=True):
        store.arena.view(frame, 9000)[byte] ^= 0x10
    kill_store(store)
    again = open_store(64)
    assert again.verify(threading.Event()) == 3
    assert found_pages(again, known, [1, 2, 3, 4, 5]) == [4, 5]
    assert again.statistics().counters["corrupt"] == 3
    again.check_integrity()
    assert np.array_equal(again.arena.view(frame_of(again, known, 4), 9000), payload_of(known, page_hash(4)))


def test_the_first_checksum_of_a_page_counts(open_store: OpenStore) -> None:
    """Bytes that have changed since would have another one, which must not hide that."""
    store = open_store(64)
    known = store.open_namespace(layout_of("a", 9000))
    put_pages(store, known, [1])
    residency = store._state.residency
    [slot] = residency.catalog.resident()
    residency.note_checksums([slot], [5])
    residency.note_checksums([slot], [6])
    assert residency.checksum(slot) == 5
