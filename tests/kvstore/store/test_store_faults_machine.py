"""A store over a real arena, a real disk tier and a real Redis, all of which fail, against a model.

Disk calls go through :mod:`faulty_files`, Redis is behind :mod:`faulty_proxy`. In any order: pages come, go, are held;
the process is killed and opens again, with the same sizes or others; the newest segment loses its tail, a bit rots;
the disk is full, refuses, tears, hangs; Redis is gone, full, emptied, slow, garbled. What holds all the time: never
wrong bytes, every page accounted for, every limit. And when the faults end, it works again without being opened anew.
"""

from __future__ import annotations

import errno
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import numpy as np
import pytest
from dice import examples
from fake_clock import FakeClock
from faulty_files import FaultyFiles
from faulty_proxy import Proxy
from faulty_store import ARENAS, DISKS, NUMBERS, REDIS, SIZES, TTL, FaultyStore, payload
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)
from redis_servers import RedisServer
from store_promises import Promises
from tiny_stores import page_hashes

from kvstore.errors import ResourceError
from kvstore.hashing import checksum_of
from kvstore.store.leases import NODE
from kvstore.tiers.redis import RedisTier
from kvstore.tiers.tier import PageWrite

pytestmark = pytest.mark.timeout(400)  # long on a busy machine

names = st.sampled_from(sorted(SIZES))
firsts = st.sampled_from(NUMBERS)
lengths = st.integers(1, 10)
any_of_them = st.integers(0, 999)
"""Which of some things there are: taken modulo their number, so that what is drawn depends on no clock."""
some_numbers = st.lists(st.sampled_from(NUMBERS), min_size=1, max_size=5, unique=True)


class FaultsMachine(Promises, RuleBasedStateMachine):
    """What may happen, in any order."""

    def __init__(self, clock: FakeClock, files: FaultyFiles, redis: RedisServer | None) -> None:
        RuleBasedStateMachine.__init__(self)
        FaultyStore.__init__(self, clock, files, redis)

    @initialize(arena=st.sampled_from(ARENAS), disk=st.sampled_from(DISKS), never_overrun=st.booleans())
    def start(self, arena: int, disk: int, never_overrun: bool) -> None:
        self.durability = {"middle": "disk"} if never_overrun else {}
        if self.server is not None:
            self.server.client.config_set("maxmemory", 0)
            self.server.client.flushall()
            self.proxy = Proxy(self.server.port)
            self.other = RedisTier(self.server.url, REDIS, timeout=20.0, lookup_timeout=20.0)
        self.arena_bytes, self.disk_bytes = arena, disk
        self.open()

    def teardown(self) -> None:
        with ExitStack() as ends:
            ends.callback(shutil.rmtree, self.root)
            for end in (self.proxy, self.other):
                if end is not None:
                    ends.callback(end.close)
            if self.store is not None:
                ends.callback(lambda: self.kill())  # of the store that is open then
                ends.callback(self.heal_disk)
                self.it_works_again_when_the_faults_end()

    # -- pages come and go -----------------------------------------------------------------------------------------

    @rule(name=names, first=firsts, pages=lengths, write_back=st.booleans())
    def store_a_prompt(self, name: str, first: int, pages: int, write_back: bool) -> None:
        for number in range(first, min(first + pages, len(NUMBERS))):
            made = self.reserve(name, [number])
            if made is not None:
                self.publish(made)
        if write_back:
            self.write_back()

    @rule(name=names, numbers=some_numbers)
    def begin_to_store(self, name: str, numbers: list[int]) -> None:
        made = self.reserve(name, numbers[: self.store.batch_pages(self.spaces[name])])
        if made is not None:
            self.writings.append(made)

    @rule(which=any_of_them, publish=st.booleans())
    def end_storing(self, which: int, publish: bool) -> None:
        if self.writings:
            self.publish(self.writings.pop(which % len(self.writings)), publish=publish)

    @rule(name=names, first=firsts, pages=lengths)
    def load_a_prompt(self, name: str, first: int, pages: int) -> None:
        for number in range(first, min(first + pages, len(NUMBERS))):
            if not self.load_one((name, number)):
                break

    @rule(name=names, first=firsts, pages=lengths)
    def hold(self, name: str, first: int, pages: int) -> None:
        known = self.spaces[name]
        numbers = list(NUMBERS[first : first + pages])[: self.store.batch_pages(known)]
        held = self.store.prepare_load(NODE, known.fingerprint, page_hashes(numbers), TTL)
        assert len(held.frames) == len(held.tiers) <= len(numbers)
        if held.lease:
            self.readings.append(self.opened(name, numbers[: len(held.frames)], held.lease, held.frames))
            self.check_bytes(self.readings[-1])

    @rule(which=any_of_them)
    def end_hold(self, which: int) -> None:
        if not self.readings:
            return
        reading = self.readings.pop(which % len(self.readings))
        before = [self.store.arena.view(frame, SIZES[reading.name]).tobytes() for frame in reading.frames]
        good = self.store.complete_load(NODE, reading.lease)
        assert good or reading.deadline < self.clock.now
        for number, content in zip(reading.numbers, before if good else [], strict=bool(good)):
            assert content in self.contents((reading.name, number), ever=True), "wrong bytes, said to be good"

    @rule(name=names, which=st.lists(any_of_them, min_size=1, max_size=5), touch=st.booleans())
    def evict(self, name: str, which: list[int], touch: bool) -> None:
        """Drop some of a prompt, or only use it."""
        here, numbers = self.here(), self.some_here(name, which)
        pages = {(name, number) for number in numbers}
        if touch:
            touched = self.store.touch(self.spaces[name].fingerprint, page_hashes(numbers))
            assert touched == len(pages & self.in_arena())
            return
        drop = self.removal_of(pages)
        try:
            dropped = self.store.evict(self.spaces[name].fingerprint, page_hashes(numbers))
            assert len(pages & here) <= dropped or self.disk_rests()
        except ResourceError:
            assert self.proxy is not None, "only what others share can't be reached"
        drop()

    @rule(name=names, which=st.lists(any_of_them, min_size=1, max_size=5), seconds=st.sampled_from([0, 8, 5000]))
    def pin(self, name: str, which: list[int], seconds: int) -> None:
        """Or unpin, for no seconds at all."""
        numbers = self.some_here(name, which)
        pages = [(name, number) for number in numbers]
        if not seconds:
            unpinned = self.store.unpin(self.spaces[name].fingerprint, page_hashes(numbers))
            assert unpinned >= sum(page in self.pinned for page in pages)
        else:
            pages = pages[: self.store.pin(self.spaces[name].fingerprint, page_hashes(numbers), seconds)]
        for page in pages:
            end = self.pinned.pop(page, 0.0)
            if seconds:
                self.pinned[page] = max(end, self.clock.now + seconds)

    @rule(name=names)
    def clear(self, name: str) -> None:
        drop = self.removal_of({(name, number) for number in NUMBERS})
        self.clears[name] += 1
        try:
            self.store.clear(self.spaces[name].fingerprint)
        except ResourceError:
            assert self.proxy is not None, "only what others share can't be reached"
        self.spaces[name] = self.open_space(name)
        drop()

    @rule()
    def write_back(self) -> None:
        dirty = self.store.statistics().dirty_pages
        assert self.store.write_back.write_back() == dirty - self.store.statistics().dirty_pages

    @rule()
    def flush(self) -> None:
        if self.try_to_flush():
            assert self.store.statistics().dirty_pages == 0

    @rule(seconds=st.sampled_from([1.0, 6.0, 11.0, 100.0]))
    def time_goes_by(self, seconds: float) -> None:
        self.go_on(seconds)

    # -- Redis -----------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.proxy)
    @rule(fault=st.sampled_from([None, None, "drop", "delay", "cut", "garble", "refuse"]), after=st.integers(1, 90_000))
    def share(self, fault: str | None, after: int) -> None:
        self.harm_redis(fault, after)
        self.store.write_back.share()
        self.heal_redis()

    @precondition(lambda self: self.proxy)
    @rule(
        fault=st.sampled_from(["drop", "delay", "cut", "garble", "refuse"]),
        after=st.integers(1, 90_000),
        name=names,
        first=firsts,
        pages=lengths,
    )
    def load_while_redis_fails(self, fault: str, after: int, name: str, first: int, pages: int) -> None:
        self.harm_redis(fault, after)
        self.hold(name, first, pages)
        self.heal_redis()

    @precondition(lambda self: self.other)
    @rule(name=names, first=firsts, pages=lengths)
    def another_node_stores(self, name: str, first: int, pages: int) -> None:
        batch = [(name, number) for number in NUMBERS[first : first + pages]]
        writes = []
        for page in batch:
            content = np.frombuffer(payload(*page, self.versions[page]), np.uint8)
            writes.append(PageWrite(self.key(page), checksum_of(content), content))
        for page, taken in zip(batch, self.other.write(writes), strict=True):
            if taken:
                self.others.add(page)

    @precondition(lambda self: self.server)
    @rule(what=st.sampled_from(["full", "room", "emptied"]))
    def redis_is(self, what: str) -> None:
        if what == "emptied":
            self.server.client.flushall()
            self.others = set()
        else:
            self.server.client.config_set("maxmemory", 1 if what == "full" else 0)

    # -- the disk --------------------------------------------------------------------------------------------------

    @rule(
        fault=st.sampled_from([errno.EIO, errno.ENOSPC, errno.EIO, errno.ENOSPC, "torn", "hang"]),
        calls=st.sets(st.sampled_from(FaultyFiles.CALLS), min_size=1),
        chance=st.sampled_from([0.3, 1.0]),
        seed=st.integers(0, 9),
    )
    def the_disk_fails(self, fault: int | str, calls: set[str], chance: float, seed: int) -> None:
        dice = random.Random(seed)

        def decide(call: str) -> int | str | None:
            if call not in calls or dice.random() >= chance:
                return None
            return errno.EIO if fault == "torn" and call != "write" else fault

        self.files.decide = decide
        self.disk_is_well = False

    @rule()
    def the_disk_is_well(self) -> None:
        self.heal_disk()

    @rule(which=any_of_them, where=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7), luck=st.integers(0, 2))
    def a_bit_rots(self, which: int, where: float, bit: int, luck: int) -> None:
        if luck:
            return
        paths = [path for path in self.segments() if path.stat().st_size]
        if not paths:
            return
        path = paths[which % len(paths)]
        content = path.read_bytes()
        at = int(where * len(content))
        with path.open("r+b") as file:
            file.seek(at)
            file.write(bytes([content[at] ^ 1 << bit]))
        # Whatever it hits: pages of this segment may be gone, now or at the next opening, its tombstones, too.
        self.rotten.add(int(path.stem, 16))
        self.durable -= self.on_rotten()
        for page in ((name, number) for name in SIZES for number in NUMBERS):
            self.old[page] |= set(range(self.versions[page]))
        self.drops_are_sure = False

    # -- the process dies ------------------------------------------------------------------------------------------

    @rule(arena=st.sampled_from([None, *ARENAS]), disk=st.sampled_from([None, *DISKS]))
    def crash(self, arena: int | None, disk: int | None) -> None:
        """SIGKILL: files stay as they are, in the middle of whatever hangs."""
        self.come_back(lambda: self.kill(), arena, disk, cut=0.0)

    @rule(arena=st.sampled_from([None, *ARENAS]), cut=st.floats(0, 1))
    def lose_a_tail(self, arena: int | None, cut: float) -> None:
        """Of the newest segment, a part of what was not flushed is gone."""
        self.come_back(lambda: self.kill(), arena, None, cut)

    @rule(arena=st.sampled_from([None, *ARENAS]), disk=st.sampled_from([None, *DISKS]))
    def stop(self, arena: int | None, disk: int | None) -> None:
        for writing in self.writings:
            self.store.complete_store(NODE, writing.lease, publish=False)
        self.writings = []

        def close() -> None:
            with suppress(ResourceError):
                self.store.close()
            self.remember_counters()

        self.come_back(close, arena, disk, cut=0.0)


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> FaultyFiles:
    return FaultyFiles(monkeypatch)


@pytest.fixture
def redis(short_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RedisServer]:
    monkeypatch.setattr("kvstore.tiers.redis.net.server.LONGEST_PAUSE", 0.02)
    server = RedisServer(short_folder / "redis")
    yield server
    server.close()


def run(machine: Callable[[], FaultsMachine], most: int, steps: int) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=most,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.hypothesis
def test_arena_and_disk_with_faults(clock: FakeClock, files: FaultyFiles) -> None:
    run(lambda: FaultsMachine(clock, files, None), most=examples(50), steps=50)


@pytest.mark.hypothesis
def test_arena_disk_and_redis_with_faults(clock: FakeClock, files: FaultyFiles, redis: RedisServer) -> None:
    run(lambda: FaultsMachine(clock, files, redis), most=examples(20), steps=40)
