"""A store over a real arena, a real disk tier and a real Redis, all of which fail, against a model.

Disk calls go through :mod:`faulty_files`, Redis is behind :mod:`faulty_proxy`. In any order: pages come, go, are held;
the process is killed and opens again, with the same sizes or others; the newest segment loses its tail, a bit rots;
the disk is full, refuses, tears, hangs; Redis is gone, full, emptied, slow, garbled. What holds all the time: never
wrong bytes, every page accounted for, every limit. And when the faults end, it works again without being opened anew.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import random
import shutil
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from faulty_files import FaultyFiles
from faulty_proxy import Proxy
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
from redis_servers import RedisServer

from kvstore.answers import PRESENT, RESERVED
from kvstore.arena.arena import Arena
from kvstore.checksum import checksum_of
from kvstore.errors import ResourceError
from kvstore.store import Store
from kvstore.tickets import NODE
from kvstore.tiers.disk import DiskTier
from kvstore.tiers.redis import RedisTier
from kvstore.tiers.tier import PageWrite

pytestmark = pytest.mark.timeout(400)  # long on a busy machine

KIB, MIB = 1 << 10, 1 << 20
SIZES = {"small": 5000, "middle": 60_000, "large": 200_000}
NUMBERS = range(16)
ARENAS = [512 * KIB, MIB]
DISKS = [3 * MIB, 4 * MIB]
SEGMENT = 512 * KIB
REDIS = 8 * MIB
TTL = 10.0
DISK_DEADLINE = 0.08
"""Seconds of real time that a call which hangs costs; a call that is late for other reasons is a miss like any."""
Page = tuple[str, int]

names = st.sampled_from(sorted(SIZES))
firsts = st.sampled_from(NUMBERS)
lengths = st.integers(1, 10)
any_of_them = st.integers(0, 999)
"""Which of some things there are: taken modulo their number, so that what is drawn depends on no clock."""
some_numbers = st.lists(st.sampled_from(NUMBERS), min_size=1, max_size=5, unique=True)


@dataclass(eq=False)
class Open:
    """A reservation or a hold."""

    name: str
    numbers: list[int]
    ticket: int
    frames: list[int]
    deadline: float
    clears: int
    """How often its namespace had been cleared when it was made."""


@cache
def payload(name: str, number: int, version: int) -> bytes:
    """Bytes that no other page, and no other version of this one, has."""
    return hashlib.shake_128(f"{name}/{number}/{version}".encode()).digest(SIZES[name])


class FaultsMachine(RuleBasedStateMachine):
    def __init__(self, kv: SimpleNamespace, clock: Any, files: FaultyFiles, redis: RedisServer | None) -> None:
        super().__init__()
        self.kv, self.clock, self.files, self.server = kv, clock, files, redis
        self.root = Path(tempfile.mkdtemp(prefix="kvstore-test-", dir="/dev/shm"))
        self.proxy: Proxy | None = None
        self.other: RedisTier | None = None
        self.store: Any = None
        self.lives = 0
        self.disk = self.root / "disk0"
        self.versions: Counter[Page] = Counter()
        """Raised when a page is dropped: what comes back from before has other bytes."""
        self.old: defaultdict[Page, set[int]] = defaultdict(set)
        """Versions whose dropping is not known to have reached every tier."""
        self.unflushed_drops: defaultdict[Page, set[int]] = defaultdict(set)
        self.acknowledged: set[Page] = set()
        """Published by this node, and not dropped since."""
        self.others: set[Page] = set()
        """Stored in Redis by another node, and not dropped since."""
        self.durable: set[Page] = set()
        """On disk when it was flushed last, and not evicted or dropped since."""
        self.flushed_sizes: dict[str, int] = {}
        self.rotten: set[int] = set()
        """Segments of which not everything is as it was written."""
        self.gone: set[Page] = set()
        """Acknowledged once; they left, and were counted. A segment that can't be deleted may bring them back."""
        self.left_disk: set[Page] = set()
        """In the arena; the disk had them, let them go, and counted that."""
        self.on_disk_before: set[Page] = set()
        self.below_before = self.overrun_before = 0
        self.pinned: dict[Page, float] = {}
        """Until when pages must stay in the arena."""
        self.past: Counter[str] = Counter()
        """Counters of the disk and Redis tiers of earlier lives."""
        self.base: Counter[str] = Counter()
        """What was counted below, and dropped, before the arena was made anew."""
        self.dropped_here = 0
        self.unshared_at_death = 0
        self.clears: Counter[str] = Counter()
        self.writings: list[Open] = []
        self.readings: list[Open] = []
        self.drops_are_sure = True
        """False from the first fault on that may let a dropped page live on somewhere unseen."""
        self.disk_is_well = True

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
        held = self.store.prepare_load(NODE, known.fingerprint, self.kv.hashes_of(numbers), TTL)
        assert len(held.frames) == len(held.tiers) <= len(numbers)
        if held.ticket:
            self.readings.append(self.opened(name, numbers[: len(held.frames)], held.ticket, held.frames))
            self.check_bytes(self.readings[-1])

    @rule(which=any_of_them)
    def end_hold(self, which: int) -> None:
        if not self.readings:
            return
        reading = self.readings.pop(which % len(self.readings))
        before = [self.store.arena.view(frame, SIZES[reading.name]).tobytes() for frame in reading.frames]
        good = self.store.complete_load(NODE, reading.ticket)
        assert good or reading.deadline < self.clock.now
        for number, content in zip(reading.numbers, before if good else [], strict=bool(good)):
            assert content in self.contents((reading.name, number), ever=True), "wrong bytes, said to be good"

    @rule(name=names, which=st.lists(any_of_them, min_size=1, max_size=5), touch=st.booleans())
    def evict(self, name: str, which: list[int], touch: bool) -> None:
        """Drop some of a prompt, or only use it."""
        here, numbers = self.here(), self.some_here(name, which)
        pages = {(name, number) for number in numbers}
        if touch:
            touched = self.store.touch(self.spaces[name].fingerprint, self.kv.hashes_of(numbers))
            assert touched == len(pages & self.in_arena())
            return
        drop = self.dropping(pages)
        try:
            dropped = self.store.evict(self.spaces[name].fingerprint, self.kv.hashes_of(numbers))
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
            unpinned = self.store.unpin(self.spaces[name].fingerprint, self.kv.hashes_of(numbers))
            assert unpinned >= sum(page in self.pinned for page in pages)
        else:
            pages = pages[: self.store.pin(self.spaces[name].fingerprint, self.kv.hashes_of(numbers), seconds)]
        for page in pages:
            end = self.pinned.pop(page, 0.0)
            if seconds:
                self.pinned[page] = max(end, self.clock.now + seconds)

    @rule(name=names)
    def clear(self, name: str) -> None:
        drop = self.dropping({(name, number) for number in NUMBERS})
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
        assert self.store.write_behind.write_back() == dirty - self.store.statistics().dirty_pages

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
        self.store.write_behind.share()
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
            self.store.complete_store(NODE, writing.ticket, publish=False)
        self.writings = []

        def close() -> None:
            with suppress(ResourceError):
                self.store.close()
            self.remember_counters()

        self.come_back(close, arena, disk, cut=0.0)

    # -- what holds ------------------------------------------------------------------------------------------------

    @invariant()
    def everything_adds_up(self) -> None:
        if self.store is None:
            return
        self.store.check_integrity()
        statistics = self.store.statistics()
        counters = statistics.counters
        assert statistics.arena_used_bytes <= statistics.arena_limit_bytes <= self.arena_bytes
        assert counters["asked"] == counters["hit"] + counters["missed"]
        assert sum(usage.arena_pages for usage in statistics.namespaces) == statistics.arena_pages
        came = counters["stored"] + self.below("hit")
        left = counters["evicted"] + counters["overrun"] + self.dropped_here
        assert statistics.arena_pages == came - left, (counters, self.below("hit"), self.dropped_here)
        for tier in statistics.below.values():
            assert tier.asked == tier.hit + tier.missed
        if self.server is not None:
            waiting = self.waiting_to_be_shared() + self.unshared_at_death
            assert counters["stored"] == counters["shared"] + counters["unshared"] + waiting

    @invariant()
    def the_disk_keeps_its_limit(self) -> None:
        if self.store is not None:
            counts = self.tier.statistics()
            held = sum(path.stat().st_size for path in self.disk.iterdir())
            assert held <= counts.used_bytes <= counts.limit_bytes == self.disk_bytes

    @invariant()
    def pages_are_here_or_counted(self) -> None:
        if self.store is None:
            return
        here, on_disk = self.here(), self.on_disk()
        known = self.acknowledged | self.gone | self.others | {page for page, old in self.old.items() if old}
        assert here <= known, f"found, and never stored, or dropped: {here - known}"
        self.left_disk |= self.on_disk_before - on_disk
        self.left_disk &= self.in_arena() - on_disk | self.acknowledged - here
        clean = {self.page_of(slot.key) for slot in self.store._catalog.resident() if not slot.dirty}
        missing = self.acknowledged - here
        below = self.counted_below() - self.below_before
        overrun = self.counted_overrun() - self.overrun_before
        # Some may have come to the disk and left it since this was asked last.
        never = clean - on_disk - self.left_disk
        assert len(never) <= below, f"clean, and the disk never had it: {never}"
        self.left_disk |= never
        unexplained = missing - self.left_disk
        assert len(unexplained) <= below + overrun, f"not here, and not counted: {missing}"
        durable = {page for page in unexplained if page[0] in self.durability}
        assert len(durable) <= below, f"they left the arena before they were on disk: {durable}"
        self.acknowledged -= missing
        self.gone |= missing
        self.note_counts()

    @invariant()
    def what_is_pinned_stays(self) -> None:
        if self.store is not None:
            assert self.pinned.keys() <= self.in_arena()

    @invariant()
    def what_was_flushed_stays(self) -> None:
        if self.store is not None:
            self.durable &= self.on_disk()  # what left was counted: `pages_are_here_or_counted`

    def it_works_again_when_the_faults_end(self) -> None:
        """Without being opened again; then it is killed, and what it flushed is there."""
        self.heal_disk()
        self.heal_redis()
        if self.server is not None:
            self.server.client.config_set("maxmemory", 0)
        self.go_on(10_000)
        for writing in self.writings:
            self.publish(writing)
        for reading in self.readings:
            assert not self.store.complete_load(NODE, reading.ticket)
        self.writings, self.readings = [], []
        self.patiently(self.try_to_flush, "it does not flush")
        fresh = ("middle", 99)
        made = self.reserve(*fresh[:1], [99])
        assert made is not None, "no room in an arena that nobody uses"
        self.publish(made)
        self.patiently(self.try_to_flush, "it does not flush")
        assert self.store.statistics().dirty_pages == 0
        assert fresh in self.on_disk()
        for page in sorted(self.here()):
            self.load_one(page)
        self.durable &= self.on_disk()
        if self.other is not None:
            self.share_again()
        self.come_back(lambda: self.kill(), next(size for size in ARENAS if size != self.arena_bytes), None, cut=0.0)
        self.patiently(lambda: self.load_one(fresh), "what was flushed is not loaded")
        self.everything_adds_up()
        self.pages_are_here_or_counted()

    def share_again(self) -> None:
        """A page that is stored now is found by the other node."""
        page = ("small", 98)

        def shared() -> bool:
            with contextlib.suppress(ResourceError):
                self.store.evict(self.spaces["small"].fingerprint, [self.kv.hash_of(98)])
            self.dropped_here += page in self.acknowledged
            self.acknowledged.discard(page)
            made = self.reserve("small", [98])
            if made is None:
                return False
            self.publish(made)
            while self.waiting_to_be_shared():
                self.store.write_behind.share()
            return self.other.contains([self.key(page)]) == [True]

        self.patiently(shared, "Redis is back, and nothing is shared")

    # -- inside ----------------------------------------------------------------------------------------------------

    def open(self) -> None:
        self.tier = DiskTier(
            self.disk,
            self.disk_bytes,
            segment_bytes=SEGMENT,
            deadline=DISK_DEADLINE,
            clock=lambda: float(self.clock.now),
        )
        arena = Arena(self.root / "arena", self.arena_bytes)
        self.shared = None
        if self.proxy is not None:
            self.shared = RedisTier(self.proxy.url, REDIS, timeout=0.3, lookup_timeout=0.3, pause=0.001)
        self.store = Store(arena, [self.tier], [arena.directory, self.disk], self.shared)
        self.spaces = {name: self.open_space(name) for name in SIZES}
        self.names = {known.fingerprint: name for name, known in self.spaces.items()}

    def open_space(self, name: str) -> Any:
        return self.store.open_namespace(self.kv.layout(name, SIZES[name]), self.durability.get(name, ""))

    def kill(self) -> None:
        """What SIGKILL leaves: files as they are. The rest is this process's to tidy up."""
        self.remember_counters()
        self.lives += 1
        left = self.root / f"disk{self.lives}"
        shutil.copytree(self.disk, left)
        self.heal_disk()
        self.kv.kill(self.store)
        self.store._bringups.close()
        self.tier.close()
        if self.shared is not None:
            self.shared.close()
        shutil.rmtree(self.disk)
        self.disk = left

    def remember_counters(self) -> None:
        self.unshared_at_death += self.waiting_to_be_shared()
        for tier in (self.tier, self.shared):
            statistics = tier.statistics() if tier is not None else None
            for counter in ("hit", "evicted", "corrupt") if tier is not None else ():
                self.past[f"{tier.name} {counter}"] += getattr(statistics, counter)

    def come_back(self, end: Callable[[], None], arena: int | None, disk: int | None, cut: float) -> None:
        before, in_arena, well = self.here(), self.in_arena(), self.disk_is_well
        decide = self.files.decide
        evicted = -self.below("evicted", "disk", ever=True)
        end()
        self.heal_disk()
        self.writings, self.readings = [], []
        anew = arena is not None and arena != self.arena_bytes
        less = disk is not None and disk < self.disk_bytes
        self.arena_bytes, self.disk_bytes = arena or self.arena_bytes, disk or self.disk_bytes
        if cut and self.segments():
            newest = max(self.segments())
            size = newest.stat().st_size
            flushed = self.flushed_sizes.get(newest.name, 0)
            with newest.open("r+b") as file:
                file.truncate(max(min(flushed, size), int(size * (1 - cut))))
            for page, versions in self.unflushed_drops.items():
                self.old[page] |= versions
        self.store = None
        self.open()
        self.files.decide, self.disk_is_well = decide, well
        if anew:
            self.base = Counter(self.past)
            self.dropped_here = self.unshared_at_death = 0
            self.pinned = {}
            assert not self.in_arena()
        else:
            assert self.in_arena() == in_arena, "a takeover finds every page, and no other"
            assert self.store.verify(SimpleNamespace(is_set=lambda: False)) == 0
        after = self.here()
        evicted += self.below("evicted", "disk", ever=True)
        assert len(self.durable - self.on_disk()) <= evicted, "flushed, and not here after a crash"
        self.durable &= self.on_disk()
        missing = self.acknowledged - after
        if not (cut or anew or less or self.rotten):
            assert len(missing & before - self.left_disk) <= evicted, "the process died, and pages are gone"
        self.acknowledged -= missing
        self.gone |= missing
        # A page that is clean is so since the disk has it: found out anew.
        self.left_disk = set()
        self.note_counts()

    def harm_redis(self, fault: str | None, after: int) -> None:
        assert self.proxy is not None
        dice = random.Random(after)
        match fault:
            case "drop":
                self.proxy.drop = True
            case "delay":
                self.proxy.delay = 0.35
            case "cut":
                self.proxy.cut_after = after
            case "garble":
                self.proxy.garble = lambda data: _flip(data, dice)
            case "refuse":
                self.proxy.refuse, self.proxy.cut_after = True, 1
        # What is under way may arrive after a later drop.
        self.drops_are_sure = self.drops_are_sure and fault is None

    def heal_disk(self) -> None:
        """End its faults, and wait for the calls that hung: a process does not end before them, either."""
        self.files.let_go()
        self.disk_is_well = True
        while self.files.hanging.acquire(blocking=False):
            assert self.files.came_back.acquire(timeout=30)

    def heal_redis(self) -> None:
        if self.proxy is not None:
            self.proxy.heal()

    def reserve(self, name: str, numbers: list[int]) -> Open | None:
        known = self.spaces[name]
        here = self.in_arena() | (set() if self.disk_rests() else self.on_disk())
        reserved = self.store.prepare_store(NODE, known.fingerprint, self.kv.hashes_of(numbers), TTL, direct=True)
        outcomes = list(reserved.outcomes)
        assert len(outcomes) == len(numbers)
        if not self.disk_rests():
            assert [outcome == PRESENT for outcome in outcomes] == [(name, number) in here for number in numbers]
        wanted = [number for number, outcome in zip(numbers, outcomes, strict=True) if outcome == RESERVED]
        assert len(wanted) == len(reserved.frames) and bool(wanted) == bool(reserved.ticket)
        return self.opened(name, wanted, reserved.ticket, reserved.frames) if wanted else None

    def publish(self, writing: Open, *, publish: bool = True) -> None:
        pages = [(writing.name, number) for number in writing.numbers]
        here = self.in_arena()
        for page, frame in zip(pages, writing.frames, strict=True):
            content = np.frombuffer(payload(*page, self.versions[page]), np.uint8)
            self.store.arena.view(frame, len(content))[:] = content
        done = self.store.complete_store(NODE, writing.ticket, publish=publish)
        if not publish or writing.deadline < self.clock.now or writing.clears != self.clears[writing.name]:
            assert done.stored == done.present == 0
        else:
            new = set(pages) - here
            assert done == (len(new), len(pages) - len(new), 0)
            assert set(pages) <= self.in_arena(), "acknowledged, and not resident"
            self.acknowledged |= set(pages)

    def try_to_flush(self) -> bool:
        """Whether everything is durable now."""
        try:
            assert self.store.flush() >= 0
        except ResourceError:
            return False
        self.durable = self.on_disk() - self.on_rotten()
        self.flushed_sizes = {path.name: path.stat().st_size for path in self.segments()}
        if not self.removals_wait():
            self.unflushed_drops.clear()
        return True

    def load_one(self, page: Page) -> bool:
        known = self.spaces[page[0]]
        here, before = page in self.here(), self.tier.statistics()
        held = self.store.prepare_load(NODE, known.fingerprint, [self.kv.hash_of(page[1])], TTL)
        made = self.opened(page[0], [page[1]][: len(held.frames)], held.ticket, held.frames)
        self.check_bytes(made)
        assert self.store.complete_load(NODE, held.ticket) == bool(held.ticket)
        after = self.tier.statistics()
        if here and not (self.writings or self.readings or self.disk_rests()):
            failed = after.errors - before.errors or after.corrupt - before.corrupt
            assert held.ticket or failed, f"{page} is here, nothing failed, and it is a miss"
        return bool(held.ticket)

    def check_bytes(self, reading: Open) -> None:
        for number, frame in zip(reading.numbers, reading.frames, strict=True):
            content = self.store.arena.view(frame, SIZES[reading.name]).tobytes()
            assert content in self.contents((reading.name, number)), "wrong bytes"

    def contents(self, page: Page, *, ever: bool = False) -> list[bytes]:
        """What may be read of a page."""
        now = self.versions[page]
        some = set(range(now)) if ever else self.old[page]
        if page not in self.acknowledged | self.gone | self.others and not ever:
            return [payload(*page, version) for version in some]
        return [payload(*page, version) for version in some | {now}]

    def dropping(self, pages: set[Page]) -> Callable[[], None]:
        """To be called before pages are dropped; what it returns, behind it."""
        here = pages & self.in_arena()
        self.dropped_here += len(here)

        def dropped() -> None:
            entries = [b"kvstore:page:" + self.key(page) for page in pages]
            lives_on = self.server is not None and self.server.client.exists(*entries)
            sure = self.drops_are_sure and self.disk_is_well and not self.removals_wait() and not lives_on
            for page in pages:
                version = self.versions[page]
                self.versions[page] += 1
                self.unflushed_drops[page].add(version)
                if sure:
                    self.old[page].clear()
                else:
                    self.old[page] |= {version}
                self.pinned.pop(page, None)
            for some in (self.acknowledged, self.gone, self.others, self.durable, self.on_disk_before):
                some -= pages

        return dropped

    def opened(self, name: str, numbers: list[int], ticket: int, frames: list[int]) -> Open:
        return Open(name, numbers, ticket, frames, self.clock.now + TTL, self.clears[name])

    def below(self, counter: str, *tiers: str, ever: bool = False) -> int:
        """What tiers below counted since the arena was made, or ever."""
        now = self.store.statistics().below
        base = Counter() if ever else self.base
        some = [f"{tier} {counter}" for tier in tiers or now]
        return sum(self.past[each] - base[each] for each in some) + sum(
            getattr(statistics, counter) for tier, statistics in now.items() if tier in (tiers or now)
        )

    def counted_below(self) -> int:
        """Pages that left the disk without anybody's wish."""
        return self.below("evicted", "disk", ever=True) + self.below("corrupt", "disk", ever=True)

    def counted_overrun(self) -> int:
        return int(self.store.statistics().counters["overrun"])

    def note_counts(self) -> None:
        self.on_disk_before = self.on_disk()
        self.below_before, self.overrun_before = self.counted_below(), self.counted_overrun()

    def disk_rests(self) -> bool:
        return bool(self.tier._device.reading.resting)

    def removals_wait(self) -> bool:
        """Whether pages are forgotten, and no tombstone says so yet."""
        return bool(self.tier._pages.forgotten())

    def waiting_to_be_shared(self) -> int:
        return len(self.store.write_behind._to_share)

    def key(self, page: Page) -> bytes:
        return bytes(self.spaces[page[0]].fingerprint + self.kv.hash_of(page[1]))

    def page_of(self, key: bytes) -> Page:
        return self.names[key[:32]], int.from_bytes(key[32:], "big")

    def in_arena(self) -> set[Page]:
        return {self.page_of(slot.key) for slot in self.store._catalog.resident()}

    def on_disk(self) -> set[Page]:
        return set(map(self.page_of, self.tier.keys(b"")))

    def on_rotten(self) -> set[Page]:
        return {self.page_of(key) for place, key in self.tier._pages.all() if place.segment in self.rotten}

    def here(self) -> set[Page]:
        """In the arena or on disk; asked beside `lookup`, which finds nothing on a disk that rests."""
        return self.in_arena() | self.on_disk()

    def some_here(self, name: str, which: list[int]) -> list[int]:
        """Numbers of pages that are here, if any are."""
        numbers = sorted(number for each, number in self.here() if each == name) or list(NUMBERS)
        return list({numbers[each % len(numbers)]: 0 for each in which})

    def segments(self) -> list[Path]:
        return sorted(self.disk.glob("*.segment"))

    def patiently(self, succeeds: Callable[[], bool], otherwise: str) -> None:
        """Again and again: a machine that is busy makes calls late, too."""
        end = time.monotonic() + 20
        while not succeeds():
            assert time.monotonic() < end, otherwise
            self.go_on(100)
            time.sleep(0.005)

    def go_on(self, seconds: float) -> None:
        self.clock.now += seconds
        self.store.sweep()
        self.pinned = {page: end for page, end in self.pinned.items() if end > self.clock.now}


def _flip(data: bytearray, dice: random.Random) -> None:
    for _ in range(dice.randint(0, 2)):
        data[dice.randrange(min(len(data), dice.choice([4, 100, 70_000])))] ^= 1 << dice.randrange(8)


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> FaultyFiles:
    return FaultyFiles(monkeypatch)


@pytest.fixture
def redis(short_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RedisServer]:
    monkeypatch.setattr("kvstore.tiers.redis.breaker.LONGEST_PAUSE", 0.02)
    server = RedisServer(short_folder / "redis")
    yield server
    server.close()


def run(machine: Callable[[], FaultsMachine], examples: int, steps: int) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_arena_and_disk_with_faults(kv: SimpleNamespace, clock: Any, files: FaultyFiles) -> None:
    run(lambda: FaultsMachine(kv, clock, files, None), examples=50, steps=50)


def test_arena_disk_and_redis_with_faults(
    kv: SimpleNamespace, clock: Any, files: FaultyFiles, redis: RedisServer
) -> None:
    run(lambda: FaultsMachine(kv, clock, files, redis), examples=20, steps=40)
