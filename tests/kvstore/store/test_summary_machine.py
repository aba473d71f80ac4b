"""A store over a real arena and a real disk, and a client's mapping of it: nothing that is there is ever a "no"."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from tiny_stores import kill_store, layout_of, page_hash, page_hashes

from kvstore.arena.epochs import CAN_READ
from kvstore.client.paths.path import OpenedNamespace
from kvstore.client.paths.shm.mapped_arena import MappedArena
from kvstore.config.node import NodeConfig
from kvstore.page_codes import UNTOLD, PageTier
from kvstore.store.leases import NODE
from kvstore.store.open import open_store

pytestmark = [
    pytest.mark.timeout(400),  # long on a busy machine
    pytest.mark.skipif(not CAN_READ, reason="on this processor nothing is read without a call"),
]

PAGE = 16 << 10
NAMES = ("one", "other")
NUMBERS = range(120)
"""More than arena (16 pages) and disk (at most 100) have room for."""
TTL = 60.0
names = st.sampled_from(NAMES)
firsts, lengths = st.sampled_from(NUMBERS), st.integers(1, 12)


class StopsAfter:
    """An event that is set behind so many looks."""

    def __init__(self, looks: int) -> None:
        self.left = looks

    def is_set(self) -> bool:
        self.left -= 1
        return self.left < 0


class SummaryMachine(RuleBasedStateMachine):
    @initialize()
    def start(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="kvstore-test-"))
        self.shm = Path(tempfile.mkdtemp(prefix="kvstore-test-", dir="/dev/shm"))
        self.limit = 2 << 20
        self.mapped: MappedArena | None = None
        self.open()
        self.store.summary.keep(StopsAfter(100))

    def open(self) -> None:
        self.store = open_store(
            NodeConfig(
                arena=18 * PAGE,
                arena_dir=self.shm / "arena",
                disk=self.folder / "disk",
                disk_limit=self.limit,
                disk_deadline=300.0,
            )
        )
        # A client keeps its mapping over restarts: the arena is the same.
        self.mapped = self.mapped or MappedArena(self.store.arena.directory)

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
            shutil.rmtree(self.folder)
            shutil.rmtree(self.shm)

    def known(self, name: str):
        return self.store.open_namespace(layout_of(name, PAGE))

    @rule(name=names, first=firsts, pages=lengths)
    def put(self, name: str, first: int, pages: int) -> None:
        known = self.known(name)
        for number in range(first, min(first + pages, len(NUMBERS))):
            reserved = self.store.prepare_store(NODE, known.fingerprint, [page_hash(number)], TTL, direct=True)
            if reserved.lease:
                self.store.arena.view(reserved.frames[0], PAGE)[:] = number
                self.store.complete_store(NODE, reserved.lease, publish=True)

    @rule(name=names, first=firsts)
    def store_and_write_back(self, name: str, first: int) -> None:
        """What fills the disk, so that segments leave it."""
        self.put(name, first, 12)
        self.store.flush()

    @rule()
    def write_back(self) -> None:
        self.store.write_back.write_back()

    @rule(name=names, first=firsts, pages=lengths)
    def promote(self, name: str, first: int, pages: int) -> None:
        known = self.known(name)
        for number in range(first, min(first + pages, len(NUMBERS))):
            held = self.store.prepare_load(NODE, known.fingerprint, [page_hash(number)], TTL)
            if held.lease:
                assert (self.store.arena.view(held.frames[0], PAGE) == number).all()
                self.store.complete_load(NODE, held.lease)

    @rule(name=names, first=firsts, pages=lengths)
    def evict(self, name: str, first: int, pages: int) -> None:
        self.store.evict(self.known(name).fingerprint, page_hashes(range(first, first + pages)))

    @rule(name=names)
    def clear(self, name: str) -> None:
        self.store.clear(self.known(name).fingerprint)

    @rule(name=names, pages=st.sampled_from([0, 5, 30]))
    def set_quota(self, name: str, pages: int) -> None:
        self.store.lower_tiers.own[0].set_quota(self.known(name).fingerprint, pages * (PAGE + 4096))

    @rule(limit=st.sampled_from([1 << 20, 2 << 20]))
    def set_limit(self, limit: int) -> None:
        self.limit = limit
        self.store.lower_tiers.own[0].set_limit(limit)

    @rule(byte=st.integers(0, 255))
    def damage(self, byte: int) -> None:
        """Somewhere in each segment; who reads it finds that out."""
        for path in (self.folder / "disk").glob("*.segment"):
            data = bytearray(path.read_bytes())
            data[len(data) // 2 : len(data) // 2 + 64] = bytes([byte]) * 64
            with path.open("r+b") as file:
                file.write(data)

    @rule()
    def sweep(self) -> None:
        self.store.sweep()

    @rule(looks=st.sampled_from([0, 1, 100]))
    def make_another(self, looks: int) -> None:
        """As if it were crowded; it may be stopped on the way."""
        summary = self.store.summary
        summary._make(256 if looks else 128, self.limit, StopsAfter(looks))

    @rule()
    def keep(self) -> None:
        summary = self.store.summary
        summary._not_before = 0.0
        summary.keep(StopsAfter(100))

    @rule(graceful=st.booleans())
    def restart(self, graceful: bool) -> None:
        if graceful:
            self.store.close()
        else:
            self.store.lower_tiers.own[0].close()  # its folder must be free for the next one
            kill_store(self.store)
        self.open()

    @invariant()
    def no_is_no(self) -> None:
        if not hasattr(self, "store"):
            return
        assert self.mapped is not None
        complete = bool(self.store.arena.summaries._word[0])
        for name in NAMES:
            known = self.known(name)
            opened = OpenedNamespace(known.layout, known.fingerprint, 1, "", known.number, self.store.arena.edition)
            hashes = page_hashes(NUMBERS)
            [truth] = self.store.lookup([(known.fingerprint, hashes)])
            told = self.mapped.find(opened, b"".join(hashes))
            for number, (says, is_in) in enumerate(zip(told, truth, strict=True)):
                assert says != PageTier.ABSENT or is_in == PageTier.ABSENT, f"page {number} of {name} is there"
                assert (says == PageTier.ARENA) == (is_in == PageTier.ARENA)
                assert not complete or says != UNTOLD or is_in == PageTier.DISK, f"page {number} of {name} is a maybe"


def test_nothing_that_is_there_is_a_no() -> None:
    run_state_machine_as_test(
        SummaryMachine,
        settings=settings(
            max_examples=15, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )


def test_the_machine_sees_a_page_that_was_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """It could not fail otherwise."""
    monkeypatch.setattr("kvstore.store.own_summary._Told.came", lambda told, keys: None)
    machine = SummaryMachine()
    machine.start()
    try:
        machine.store_and_write_back("one", 0)
        machine.store_and_write_back("other", 0)
        with pytest.raises(AssertionError, match="is there"):
            machine.no_is_no()
    finally:
        machine.teardown()
