"""Reading pages of a segment log: in large pieces, several at a time, each verified, none waited for too long."""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import chain

import xxhash

from kvstore.segments.aligned import take_scratch
from kvstore.segments.batching import plan_reads
from kvstore.segments.blockfile import Patience
from kvstore.segments.index import Place
from kvstore.segments.io_threads import Job, LateError
from kvstore.segments.record import padded
from kvstore.segments.segment import Segment
from kvstore.tiers.tier import READER, PageBytes


class Outcome(enum.Enum):
    """What became of one page's read."""

    FOUND = enum.auto()
    GONE = enum.auto()  # its segment was deleted
    CORRUPT = enum.auto()
    FAILED = enum.auto()  # the system refused
    LATE = enum.auto()


_MANY_PAGES = 8
"""Reads of so many pages are verified and copied one after the other: side by side, threads would lose more by handing
the interpreter's lock to and fro, twice a page, than they gain."""
_Read = tuple[Outcome, int]
"""What became of a page, and its checksum if it was found."""


@dataclass(slots=True)
class Fetched:
    """What became of one call's reads."""

    outcomes: list[Outcome]
    """Of each page."""
    checksums: list[int] = field(default_factory=list)
    """xxh3_64 of each page that was found."""
    errors: list[OSError] = field(default_factory=list)
    """One for each read that the system refused, or that was late."""

    @property
    def late(self) -> int:
        """How many pages did not come in time."""
        return self.outcomes.count(Outcome.LATE)


class DiskReader:
    """Reads pages on threads that may hang, into memory of those threads, and copies from there what is right.

    ``patience`` has the threads, and says how long a call waits for the next of its reads to be done.
    """

    def __init__(self, patience: Patience, *, verify: bool = True) -> None:
        self._patience = patience
        self._verify = verify
        self._turn = threading.Lock()

    def fetch(
        self,
        keys: Sequence[bytes],
        places: Sequence[Place],
        into: Sequence[PageBytes],
        segment_of: Callable[[int], Segment | None],
    ) -> Fetched:
        """Read pages into arrays of their lengths: as on disk, but for the tag of those that are encrypted.

        When this returns, nothing writes into the arrays any more, whatever still hangs.
        """
        fetched = Fetched([Outcome.GONE] * len(places), [0] * len(places))
        order = sorted(range(len(places)), key=lambda index: places[index][:2])
        delivery = _Delivery()
        groups: list[list[int]] = []
        reads: list[_Run] = []
        start = 0
        for end in range(1, len(order) + 1):
            if end < len(order) and places[order[end]].segment == places[order[start]].segment:
                continue
            segment = segment_of(places[order[start]].segment)
            if segment is not None:
                group = order[start:end]
                for run in plan_reads([(places[index].offset, places[index].length) for index in group]):
                    indices = group[run.start : run.stop]
                    pages = [(keys[i], places[i], into[i]) for i in indices]
                    in_turn = len(pages) >= _MANY_PAGES and segment.cipher is None  # decrypting takes longer
                    read = _Run(segment, pages, delivery, self._turn if in_turn else nullcontext(), self._verify)
                    groups.append(indices)
                    reads.append(read)
            start = end
        try:
            jobs = self._patience.threads.submit_all(reads, READER.get())
        except OSError as error:
            fetched.errors.append(error)
            for index in chain.from_iterable(groups):
                fetched.outcomes[index] = Outcome.FAILED
        else:
            self._gather(list(zip(groups, jobs, strict=True)), fetched)
        delivery.end()
        return fetched

    def _gather(self, jobs: list[tuple[list[int], Job[list[_Read]]]], fetched: Fetched) -> None:
        late = False
        for indices, job in jobs:
            try:
                # Each one begins when one before it ends: as long as reads get done, the call goes on.
                outcomes = job.wait(0.0 if late else self._patience.seconds)
            except LateError as error:
                if not late:
                    fetched.errors.append(error)
                late = True
                self._patience.threads.give_up(job)
                outcomes = [(Outcome.LATE, 0)] * len(indices)
            except OSError as error:
                fetched.errors.append(error)
                outcomes = [(Outcome.FAILED, 0)] * len(indices)
            for index, (outcome, checksum) in zip(indices, outcomes, strict=True):
                fetched.outcomes[index] = outcome
                fetched.checksums[index] = checksum


@dataclass(slots=True)
class _Run:
    """One read of pages that lie side by side."""

    segment: Segment
    pages: list[tuple[bytes, Place, PageBytes]]
    """Key, place and array of each."""
    delivery: _Delivery
    turn: AbstractContextManager[object]
    """Held while pages are verified and copied."""
    verify: bool

    def __call__(self) -> list[_Read]:
        """Read, verify, copy. Returns what became of each page."""
        first, last = self.pages[0][1].offset, self.pages[-1][1]
        memory = take_scratch(last.offset + padded(last.length) - first)
        # Held for one read at a time, so that deleting the segment waits for no more than that.
        with self.segment.reading() as file:
            if file is None:
                return [(Outcome.GONE, 0)] * len(self.pages)
            read = file.read([memory], first)
        if not self.delivery.begin():
            return [(Outcome.LATE, 0)] * len(self.pages)
        try:
            with self.turn:
                return [self._take(memory[: min(read, len(memory))], first, *page) for page in self.pages]
        finally:
            self.delivery.done()

    def _take(self, memory: PageBytes, first: int, key: bytes, place: Place, into: PageBytes) -> _Read:
        at = place.offset - first
        stored = memory[at : at + place.length]
        # xxhash releases the GIL for any but small buffers: threads verify side by side.
        if len(stored) < place.length or (self.verify and xxhash.xxh3_64_intdigest(stored.data) != place.checksum):
            return Outcome.CORRUPT, 0
        if len(stored) == len(into):
            into[:] = stored
            return Outcome.FOUND, place.checksum
        cipher = self.segment.cipher
        if cipher is None or not cipher.decrypt(place.offset, key, stored, into):
            return Outcome.CORRUPT, 0
        return Outcome.FOUND, xxhash.xxh3_64_intdigest(into.data)


class _Delivery:
    """Lets threads write into a caller's arrays until the caller goes."""

    def __init__(self) -> None:
        self._state = threading.Condition()
        self._writing = 0
        self._ended = False

    def begin(self) -> bool:
        """Whether the caller is still there, and waits for :meth:`done`."""
        with self._state:
            if not self._ended:
                self._writing += 1
            return not self._ended

    def done(self) -> None:
        """This thread writes no more."""
        with self._state:
            self._writing -= 1
            self._state.notify_all()

    def end(self) -> None:
        """The caller goes: nobody begins any more, and those who write are waited for."""
        with self._state:
            self._ended = True
            self._state.wait_for(lambda: not self._writing)
