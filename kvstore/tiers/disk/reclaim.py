"""Making room: which segment leaves, what of it is carried over, and what has to be hidden first."""

from __future__ import annotations

import errno
from collections.abc import Sequence

from kvstore.segments.aligned import aligned_empty
from kvstore.segments.batching import leading_within, order_to_leave, plan_chunks
from kvstore.segments.index import Place
from kvstore.segments.log import write_cost
from kvstore.segments.record import ChunkSize
from kvstore.segments.segment import Entry, Segment
from kvstore.tiers.disk.page_log import PageLog
from kvstore.tiers.disk.reader import Outcome

_CARRY_SHARE = 4
"""At most this part of a segment is carried over: of what is written, at most a third is written again."""
_VICTIMS_SHARE = 32  # for so many of a log's segments, the order in which they leave is decided at once


class Reclaimer:
    """Lets segments leave. One thread at a time, the one that changes the log."""

    def __init__(self, logged: PageLog) -> None:
        self._logged = logged
        self._log = logged.log
        self._pages = logged.pages
        self._to_leave: list[int] = []

    def make(self, chunk: ChunkSize, *, carry: bool = True) -> None:
        """Let segments leave until a chunk of this size fits.

        Raises:
            OSError: the system refuses to delete one, or is late, or all that could leave has.
        """
        log = self._log
        # First with something to spare for carrying over, as long as there is an older segment to take it from.
        while carry and log.missing(chunk, log.reserve_bytes) > 0:
            candidates = [segment for segment in log.may_leave(chunk) if not log.is_active(segment)]
            if not candidates:
                break
            self._reclaim(self._victim(candidates), candidates[0], carry=True)
        while log.missing(chunk) > 0:
            candidates = log.may_leave(chunk)
            if not candidates:
                if log.try_to_grow():  # nothing is left that could make room in a full file system
                    continue
                raise OSError(errno.ENOSPC, "no segment can leave")
            self._reclaim(self._victim(candidates), candidates[0], carry=carry)

    def drop_empty(self, segments: set[int]) -> None:
        """Delete those of the segments in which no page is left."""
        for number in sorted(segments):
            segment = self._log.by_id.get(number)
            if segment is None or segment.stuck or self._log.is_active(segment):
                continue
            hidden = self._pages.to_be_hidden(segment, behind_unread=self._behind_unread(segment))
            if self._pages.are_in(number) or self._log.missing(ChunkSize(len(hidden), 0)) > 0:
                continue
            if self._logged.device.writing.resting:
                return
            try:
                self._reclaim(segment, segment, carry=False)
            except OSError as error:
                self._logged.write_failed(error)

    def renew(self, segment: Segment) -> None:
        """Write the pages of a segment again, as new ones, and delete it.

        A page that can't be read back, or for which no bytes are left of the day's, leaves.

        Raises:
            OSError: the system refuses, or is late; what was not written again stays where it is.
        """
        if self._log.is_active(segment):
            self._log.seal()
        if segment.id not in self._log.by_id:  # others made room with it
            return
        pages = self._pages.lie_in(segment.id)
        for chunk in plan_chunks([place.length for place, _ in pages], self._log.chunk_bytes):
            entries = self._read_back([pages[index] for index in chunk])
            size = self._log.chunk_size(entries)
            if entries and self._log.budget.take(write_cost(size)):
                self.make(size, carry=False)
                if segment.id not in self._log.by_id:  # it was the one to leave
                    return
                self._logged.append(entries, carried=True)
        self._reclaim(segment, segment, carry=False)

    def _victim(self, candidates: Sequence[Segment]) -> Segment:
        """The segment of which the least is wanted."""
        by_id = {segment.id: segment for segment in candidates}
        self._to_leave = [each for each in self._to_leave if each in by_id]
        if not self._to_leave:
            ids = [segment.id for segment in self._log.segments]
            live, wanted = self._pages.sizes(ids)
            sizes = {each: (a, w) for each, a, w in zip(ids, live, wanted, strict=True)}
            order = order_to_leave(
                [segment.footprint for segment in candidates],
                [sizes[segment.id][0] for segment in candidates],
                [sizes[segment.id][1] for segment in candidates],
            )
            self._to_leave = [candidates[at].id for at in order[: 1 + len(order) // _VICTIMS_SHARE]]
        return by_id[self._to_leave.pop(0)]

    def _behind_unread(self, segment: Segment) -> bool:
        """Whether the system refused to read an older segment: that may hold anything."""
        return any(each.unread and each.id < segment.id for each in self._log.segments)

    def _reclaim(self, victim: Segment, oldest: Segment, *, carry: bool) -> None:
        """Carry over what is wanted of a segment, forget the rest, delete it.

        Args:
            victim: what should leave.
            oldest: leaves instead where there is no room for the tombstones that the victim's going asks for; the
                oldest asks for none.
            carry: whether to carry anything over.

        Raises:
            OSError: the system refuses to delete it, or is late.
        """
        hidden = self._pages.to_be_hidden(victim, behind_unread=self._behind_unread(victim))
        if hidden and victim is not oldest and self._log.missing(ChunkSize(len(hidden), 0)) > 0:
            victim = oldest
        if carry:
            self._carry_over(victim)
        leaving, hidden = self._pages.leave(victim, behind_unread=self._behind_unread(victim))
        try:
            # Before the file goes: a crash in between must not bring back what was removed.
            self._logged.append_tombstones(hidden)
            self._log.drop(victim)
        except OSError:
            self._pages.did_not_go(victim.id, leaving)
            raise
        finally:
            self._pages.used_bytes = self._log.used_bytes
        self._pages.is_gone(victim.id)

    def _carry_over(self, victim: Segment) -> None:
        """Write the pages of a segment that are wanted most once more, as far as there is room for them."""
        wanted = self._pages.read_lately_in(victim.id)
        room = min(-self._log.missing(), self._log.reserve_bytes or victim.size, victim.size)
        budget = min(victim.size // _CARRY_SHARE, room)
        chosen = sorted(wanted[: leading_within([place.length for place, _ in wanted], budget)])
        for chunk in plan_chunks([place.length for place, _ in chosen], self._log.chunk_bytes):
            entries = self._read_back([chosen[index] for index in chunk])
            size = self._log.chunk_size(entries)
            if not entries or self._log.missing(size) > 0 or not self._log.budget.take(write_cost(size)):
                return
            try:
                self._logged.append(entries, carried=True)
            except OSError as error:
                self._logged.count_failure(error)
                return

    def _read_back(self, pages: Sequence[tuple[Place, bytes]]) -> list[Entry]:
        """Those of these pages that are sound, to be written again."""
        memory = [aligned_empty(self._logged.page_bytes(place)) for place, _ in pages]
        fetched = self._logged.fetch([key for _, key in pages], [place for place, _ in pages], memory)
        self._pages.failed(len(fetched.errors), fetched.late)
        # A reader may have found one damaged since it was chosen.
        there = self._pages.still_there(pages)
        return [
            Entry(key, checksum, array)
            for (_, key), array, outcome, checksum, still in zip(
                pages, memory, fetched.outcomes, fetched.checksums, there, strict=True
            )
            if outcome is Outcome.FOUND and still
        ]
