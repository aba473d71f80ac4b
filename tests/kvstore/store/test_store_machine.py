"""A store against a model: whatever happens in whatever order, never wrong bytes, and every page is accounted for."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dice import examples
from fake_clock import FakeClock
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from local_clients import LocalClient
from memory_tier import MemoryTier
from tiny_stores import found_pages, kill_store, layout_of, page_hash, page_hashes, payload_of

from kvstore.arena.arena import Arena
from kvstore.namespaces.registry import KnownNamespace
from kvstore.page_codes import PageTier, StoreOutcome
from kvstore.store.leases import NODE
from kvstore.store.store import Store

pytestmark = pytest.mark.timeout(400)  # long on a busy machine

FRAMES = 16
FRAME = 4096
SIZES = {"one": 4000, "three": 3 * FRAME}
NUMBERS = range(18)
TTL = 10.0

names = st.sampled_from(sorted(SIZES))
batches = st.lists(st.sampled_from(NUMBERS), min_size=1, max_size=5)
Page = tuple[str, int]


@dataclass(eq=False)
class Writing:
    """A reservation, open as far as its writer knows."""

    owner: int
    name: str
    numbers: list[int]
    """Of the pages reserved."""
    lease: int
    frames: list[int]
    deadline: float
    direct: bool
    epoch: int
    """How often the namespace had been cleared when it was made."""
    over: bool = False
    """It lapsed, or its node is gone: it can't be published any more."""


@dataclass(eq=False)
class Reading:
    """A hold."""

    owner: int
    name: str
    contents: list[bytes]
    lease: int
    frames: list[int]


class StoreMachine(RuleBasedStateMachine):
    def __init__(self, clock: FakeClock) -> None:
        super().__init__()
        self.clock = clock
        self.folder = Path(tempfile.mkdtemp(prefix="kvstore-test-", dir="/dev/shm"))
        self.tier = MemoryTier()
        self.versions: dict[Page, int] = {}
        """Raised when a page is dropped: what comes back from before has other bytes."""
        self.stored: set[Page] = set()
        """Pages that may be found: published, and not dropped since."""
        self.lost_below = 0
        self.dropped_here = 0
        self.epochs = dict.fromkeys(SIZES, 0)
        self.writings: list[Writing] = []
        self.readings: list[Reading] = []
        self.client: Any = None
        self.client_name = 0

    @initialize(tier=st.booleans())
    def start(self, tier: bool) -> None:
        self.has_tier = tier
        self.open()

    def teardown(self) -> None:
        try:
            if hasattr(self, "store"):
                self.every_page_has_its_bytes()
                kill_store(self.store)
            if self.client is not None:
                self.client.die()
        finally:
            shutil.rmtree(self.folder)

    # -- what happens ----------------------------------------------------------------------------------------------

    @rule(name=names, numbers=batches, who=st.sampled_from(["client", "embedded", "remote"]))
    def prepare_store(self, name: str, numbers: list[int], who: str) -> None:
        known = self.spaces[name]
        numbers = numbers[: self.store.batch_pages(known)]
        owner = self.owner() if who == "client" else NODE
        here = self.found(name)
        reserved = self.store.prepare_store(owner, known.fingerprint, page_hashes(numbers), TTL, direct=who != "remote")
        outcomes = list(reserved.outcomes)
        assert len(outcomes) == len(numbers)
        assert [outcome == StoreOutcome.PRESENT for outcome in outcomes] == [number in here for number in numbers]
        wanted = [number for number, outcome in zip(numbers, outcomes, strict=True) if outcome == StoreOutcome.RESERVED]
        assert len(wanted) == len(reserved.frames)
        assert bool(wanted) == bool(reserved.lease)
        assert {number for number in numbers if number in here} <= set(self.found(name)), "it pushed out its own"
        self.check_frames_are_nobodys(known, reserved.frames)
        if wanted:
            self.writings.append(
                Writing(
                    owner,
                    name,
                    wanted,
                    reserved.lease,
                    reserved.frames,
                    self.clock.now + TTL,
                    who != "remote",
                    self.epochs[name],
                )
            )

    @rule(name=names, first=st.sampled_from(NUMBERS), pages=st.integers(4, 12))
    def store_a_prompt(self, name: str, first: int, pages: int) -> None:
        """All at once, page after page: what makes an arena full."""
        known = self.spaces[name]
        for number in range(first, min(first + pages, len(NUMBERS))):
            hashes = [page_hash(number)]
            reserved = self.store.prepare_store(NODE, known.fingerprint, hashes, TTL, direct=True)
            if reserved.lease:
                content = np.frombuffer(self.payload((name, number)), np.uint8)
                self.store.arena.view(reserved.frames[0], len(content))[:] = content
                assert self.store.complete_store(NODE, reserved.lease, publish=True) == (1, 0, 0)
                self.stored.add((name, number))

    @rule(name=names, first=st.sampled_from(NUMBERS), pages=st.integers(4, 12))
    def load_a_prompt(self, name: str, first: int, pages: int) -> None:
        for number in range(first, min(first + pages, len(NUMBERS))):
            if not self.load_one(name, number):
                break

    @precondition(lambda self: self.writings)
    @rule(data=st.data(), publish=st.booleans())
    def complete_store(self, data: st.DataObject, publish: bool) -> None:
        writing = data.draw(st.sampled_from(self.writings))
        self.writings.remove(writing)
        known, pages = self.spaces[writing.name], [(writing.name, number) for number in writing.numbers]
        if writing.direct or not writing.over:
            for page, frame in zip(pages, writing.frames, strict=True):
                self.store.arena.view(frame, known.layout.page_bytes)[:] = np.frombuffer(self.payload(page), np.uint8)
        here = set(self.arena_pages())
        done = self.store.complete_store(writing.owner, writing.lease, publish=publish)
        if writing.over:
            assert done.stored == done.present == 0
        elif not publish or writing.epoch != self.epochs[writing.name]:
            assert done == (0, 0, len(pages))
        else:
            assert done == (len(set(pages) - here), len(pages) - len(set(pages) - here), 0)
            self.stored |= set(pages)
            assert set(pages) <= set(self.arena_pages()), "acknowledged, and not resident"

    @precondition(lambda self: any(writing.over and writing.direct for writing in self.writings))
    @rule()
    def write_too_late(self) -> None:
        """A writer that was stopped wakes up, and goes on writing where it may no longer."""
        for writing in self.writings:
            if writing.over and writing.direct:
                for frame in writing.frames:
                    self.store.arena.view(frame, SIZES[writing.name])[:] = 0xEE

    @rule(name=names, numbers=batches, mine=st.booleans())
    def prepare_load(self, name: str, numbers: list[int], mine: bool) -> None:
        known = self.spaces[name]
        numbers = numbers[: self.store.batch_pages(known)]
        owner = self.owner() if mine else NODE
        held = self.store.prepare_load(owner, known.fingerprint, page_hashes(numbers), TTL)
        assert len(held.frames) == len(held.tiers) <= len(numbers)
        assert bool(held.lease) == bool(held.frames)
        contents = [self.payload((name, number)) for number in numbers[: len(held.frames)]]
        assert all((name, number) in self.stored for number in numbers[: len(held.frames)])
        if held.lease:
            self.readings.append(Reading(owner, name, contents, held.lease, held.frames))
            self.check_contents(self.readings[-1])

    @precondition(lambda self: self.readings)
    @rule(data=st.data())
    def complete_load(self, data: st.DataObject) -> None:
        reading = data.draw(st.sampled_from(self.readings))
        self.readings.remove(reading)
        copies = [self.store.arena.view(frame, SIZES[reading.name]).tobytes() for frame in reading.frames]
        if self.store.complete_load(reading.owner, reading.lease):
            assert copies == reading.contents, "wrong bytes, and said to be good"

    @precondition(lambda self: self.readings)
    @rule(data=st.data())
    def make_checksums(self, data: st.DataObject) -> None:
        reading = data.draw(st.sampled_from(self.readings))
        self.store.checksums(reading.owner, reading.lease)

    @rule(seconds=st.sampled_from([1.0, 6.0, 11.0]))
    def time_goes_by(self, seconds: float) -> None:
        self.clock.now += seconds
        self.sweep()

    @rule()
    def sweep(self) -> None:
        self.store.sweep()
        for writing in self.writings:
            writing.over = writing.over or writing.deadline < self.clock.now

    @precondition(lambda self: self.client is not None)
    @rule()
    def client_dies(self) -> None:
        self.client.die()
        self.client = None
        self.writings = [writing for writing in self.writings if writing.owner == NODE]
        self.readings = [reading for reading in self.readings if reading.owner == NODE]
        self.sweep()

    @rule(name=names, numbers=batches)
    def evict(self, name: str, numbers: list[int]) -> None:
        pages = {(name, number) for number in numbers}
        here = pages & {(name, number) for number in self.found(name)}
        self.drops(pages)
        assert self.store.evict(self.spaces[name].fingerprint, page_hashes(numbers)) == len(here)

    @rule(name=names)
    def clear(self, name: str) -> None:
        here = self.found(name)
        self.drops({(name, number) for number in NUMBERS})
        self.epochs[name] += 1
        assert self.store.clear(self.spaces[name].fingerprint) == len(here)
        self.spaces[name] = self.store.open_namespace(layout_of(name, SIZES[name]))

    @rule(name=names, numbers=batches)
    def touch(self, name: str, numbers: list[int]) -> None:
        here = {number for each, number in self.arena_pages() if each == name}
        touched = self.store.touch(self.spaces[name].fingerprint, page_hashes(numbers))
        assert touched == sum(number in here for number in numbers)

    @precondition(lambda self: self.has_tier)
    @rule(refuse=st.booleans())
    def write_back(self, refuse: bool) -> None:
        dirty = self.store.statistics().dirty_pages
        self.tier.refuse = (lambda key: key[-1] % 2 == 0) if refuse else (lambda key: False)
        assert self.store.write_back.write_back() == dirty - self.store.statistics().dirty_pages
        self.tier.refuse = lambda key: False

    @precondition(lambda self: self.has_tier)
    @rule()
    def flush(self) -> None:
        dirty = self.store.statistics().dirty_pages
        assert self.store.flush() == dirty
        assert self.store.statistics().dirty_pages == 0

    @precondition(lambda self: self.tier.pages)
    @rule(data=st.data(), how=st.sampled_from(["damage", "lose"]))
    def the_tier_loses_a_page(self, data: st.DataObject, how: str) -> None:
        key = data.draw(st.sampled_from(sorted(self.tier.pages)))
        self.lost_below += 1
        if how == "damage":
            self.tier.damage(key)
        else:
            del self.tier.pages[key]

    @rule(graceful=st.booleans())
    def restart(self, graceful: bool) -> None:
        """The embedded writers and the handlers die with the node; the client lives on, and may be writing."""
        if graceful:
            for writing in [writing for writing in self.writings if writing.owner == NODE]:
                self.store.complete_store(NODE, writing.lease, publish=False)
                self.writings.remove(writing)
            self.store.close()
        else:
            kill_store(self.store)
        self.writings = [writing for writing in self.writings if writing.owner != NODE]
        for writing in self.writings:
            writing.over = True
        for reading in self.readings:
            assert not graceful or not self.store.complete_load(reading.owner, reading.lease)
        self.readings = []
        resident = self.arena_pages()
        self.open()
        assert self.arena_pages() == resident, "a takeover finds every page, and no other"
        if self.client is not None:
            assert self.store.owner_of(self.client_name)

    # -- what holds ------------------------------------------------------------------------------------------------

    @invariant()
    def everything_adds_up(self) -> None:
        if not hasattr(self, "store"):
            return
        self.store.check_integrity()
        statistics = self.store.statistics()
        counters = statistics.counters
        assert statistics.arena_used_bytes <= statistics.arena_limit_bytes == FRAMES * FRAME
        came = counters["stored"] + self.tier.hits
        left = counters["evicted"] + counters["overrun"] + self.dropped_here
        assert statistics.arena_pages == came - left
        assert counters["asked"] == counters["hit"] + counters["missed"]
        assert sum(usage.arena_pages for usage in statistics.namespaces) == statistics.arena_pages
        assert self.has_tier or not counters["overrun"]

    @invariant()
    def pages_are_found_or_counted(self) -> None:
        if not hasattr(self, "store"):
            return
        found = {(name, number) for name in SIZES for number in self.found(name)}
        assert found <= self.stored, "found, and never stored, or dropped"
        counters = self.store.statistics().counters
        gone = counters["overrun"] + self.lost_below + (0 if self.has_tier else counters["evicted"])
        assert len(self.stored - found) <= gone, "acknowledged, not found, and not counted"

    def every_page_has_its_bytes(self) -> None:
        for name in SIZES:
            for number in self.found(name):
                self.load_one(name, number)

    # -- inside ----------------------------------------------------------------------------------------------------

    def open(self) -> None:
        tiers = [self.tier] if self.has_tier else []
        self.store = Store(Arena(self.folder, FRAMES * FRAME), tiers, [self.folder])
        self.spaces = {name: self.store.open_namespace(layout_of(name, size)) for name, size in SIZES.items()}

    def load_one(self, name: str, number: int) -> bool:
        held = self.store.prepare_load(77, self.spaces[name].fingerprint, [page_hash(number)], TTL)
        for frame in held.frames:
            content = self.store.arena.view(frame, SIZES[name]).tobytes()
            assert content == self.payload((name, number)), "wrong bytes"
        assert self.store.complete_load(77, held.lease) == bool(held.lease)
        return bool(held.lease)

    def owner(self) -> int:
        if self.client is None:
            self.client = LocalClient(self.folder)
            self.client_name = self.store.attach(self.client.name)
        return self.store.owner_of(self.client_name)

    def payload(self, page: Page) -> bytes:
        name, number = page
        return bytes(payload_of(self.spaces[name], page_hash(number), self.versions.get(page, 0) % 256))

    def drops(self, pages: set[Page]) -> None:
        self.dropped_here += len(pages & set(self.arena_pages()))
        self.stored -= pages
        for page in pages:
            self.versions[page] = self.versions.get(page, 0) + 1

    def found(self, name: str) -> list[int]:
        return list(found_pages(self.store, self.spaces[name], list(NUMBERS)))

    def arena_pages(self) -> list[Page]:
        pages = []
        for name, known in self.spaces.items():
            [tiers] = self.store.lookup([(known.fingerprint, page_hashes(NUMBERS))])
            pages += [(name, number) for number, tier in zip(NUMBERS, tiers, strict=True) if tier == PageTier.ARENA]
        return pages

    def check_contents(self, reading: Reading) -> None:
        for frame, content in zip(reading.frames, reading.contents, strict=True):
            assert self.store.arena.view(frame, SIZES[reading.name]).tobytes() == content, "wrong bytes"

    def check_frames_are_nobodys(self, known: KnownNamespace, frames: list[int]) -> None:
        """What was reserved lies over nothing that another writer may still write, and not over itself."""
        width = -(-known.layout.page_bytes // FRAME)
        mine = [each for frame in frames for each in range(frame, frame + width)]
        assert len(mine) == len(set(mine))
        assert all(0 <= each < FRAMES for each in mine)
        for writing in self.writings:
            if writing.direct or not writing.over:
                others = -(-SIZES[writing.name] // FRAME)
                for frame in writing.frames:
                    assert not set(mine) & set(range(frame, frame + others)), "another writer's slot"


@pytest.mark.hypothesis
def test_a_store_against_a_model(clock: FakeClock) -> None:
    run_state_machine_as_test(
        lambda: StoreMachine(clock),
        settings=settings(
            max_examples=examples(150),
            stateful_step_count=50,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
        ),
    )
