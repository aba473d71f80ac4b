"""Reclaiming space: which segment is deleted, what of it is carried over first, and which tombstones that needs."""

from __future__ import annotations

import errno
from collections.abc import Sequence

from kvstore.segments.aligned import aligned_empty
from kvstore.segments.batching import leading_within, order_of_eviction, plan_chunks
from kvstore.segments.index import Place
from kvstore.segments.log import write_cost
from kvstore.segments.record import ChunkSize
from kvstore.segments.segment import Entry, Segment
from kvstore.tiers.disk.page_log import PageLog
from kvstore.tiers.disk.reader import Outcome

_CARRY_SHARE = 4
"""At most this part of a segment is carried over: of what is written, at most a third is written again."""
_VICTIMS_SHARE = 32  # this part of a log's segments is chosen at once, and then deleted one by one


class Reclaimer:
    """Deletes segments. For the holder of the log lock."""

    def __init__(self, page_log: PageLog) -> None:
        self._page_log = page_log
        self._log = page_log.log
        self._catalog = page_log.catalog
        self._device = page_log.device
        self._victims: list[int] = []  # ids of segments to delete next

    def make_space(self, chunk: ChunkSize, *, carry: bool = True) -> None:
        """Delete segments until a chunk of this size fits.

        Raises:
            OSError: the system refuses to delete one, or is late, or none is left that could be deleted.
        """
        log = self._log
        # First with headroom for carrying over, as long as there is an older segment to take it from.
        while carry and log.missing(chunk, log.headroom_bytes) > 0:
            candidates = [segment for segment in log.evictable(chunk) if not log.is_active(segment)]
            if not candidates:
                break
            self._reclaim(self._victim(candidates), candidates[0], carry=True)
        while log.missing(chunk) > 0:
            candidates = log.evictable(chunk)
            if not candidates:
                if log.try_to_grow():  # the file system was full below the limit: it may have space by now
                    continue
                raise OSError(errno.ENOSPC, "no segment can leave")
            self._reclaim(self._victim(candidates), candidates[0], carry=carry)

    def delete_empty(self, segments: set[int]) -> None:
        """Delete those of the segments in which no page is left."""
        for number in sorted(segments):
            segment = self._log.by_id.get(number)
            if segment is None or segment.stuck or self._log.is_active(segment):
                continue
            needed = self._catalog.tombstones_needed(segment, behind_unread=self._behind_unread(segment))
            if self._catalog.has_pages_in(number) or self._log.missing(ChunkSize(len(needed), 0)) > 0:
                continue
            if self._device.writing.resting:
                return
            try:
                self._reclaim(segment, segment, carry=False)
            except OSError as error:
                self._page_log.write_failed(error)

    def rewrite(self, segment: Segment) -> None:
        """Append the pages of a segment once more, and delete it.

        A page that can't be read back, or for which today's write budget has no bytes left, leaves.

        Raises:
            OSError: the system refuses, or is late; what was not written again stays where it is.
        """
        if self._log.is_active(segment):
            self._log.seal()
        if segment.id not in self._log.by_id:  # deleted for the one rewritten before it
            return
        pages = self._catalog.pages_in(segment.id)
        for chunk in plan_chunks([place.length for place, _ in pages], self._log.chunk_bytes):
            entries = self._read_back([pages[index] for index in chunk])
            size = self._log.chunk_size(entries)
            if entries and self._log.budget.take(write_cost(size)):
                self.make_space(size, carry=False)
                if segment.id not in self._log.by_id:  # it was the one to leave
                    return
                self._page_log.append(entries, carried=True)
        self._reclaim(segment, segment, carry=False)

    def _victim(self, candidates: Sequence[Segment]) -> Segment:
        """The segment of which the smallest part is in recent use."""
        by_id = {segment.id: segment for segment in candidates}
        self._victims = [each for each in self._victims if each in by_id]
        if not self._victims:
            ids = [segment.id for segment in self._log.segments]
            live, recent = (dict(zip(ids, sizes, strict=True)) for sizes in self._catalog.bytes_by_segment(ids))
            order = order_of_eviction(
                [segment.footprint for segment in candidates],
                [live[segment.id] for segment in candidates],
                [recent[segment.id] for segment in candidates],
            )
            self._victims = [candidates[at].id for at in order[: 1 + len(order) // _VICTIMS_SHARE]]
        return by_id[self._victims.pop(0)]

    def _behind_unread(self, segment: Segment) -> bool:
        """Whether the system refused to read a segment older than this: that may hold anything."""
        return any(each.unread and each.id < segment.id for each in self._log.segments)

    def _reclaim(self, victim: Segment, oldest: Segment, *, carry: bool) -> None:
        """Carry over what was read recently in a segment, forget the rest, delete it.

        Args:
            victim: what should be deleted.
            oldest: is deleted instead where there is no space for the tombstones that the victim needs; the oldest
                needs none.
            carry: whether to carry anything over.

        Raises:
            OSError: the system refuses to delete it, or is late.
        """
        needed = self._catalog.tombstones_needed(victim, behind_unread=self._behind_unread(victim))
        if needed and victim is not oldest and self._log.missing(ChunkSize(len(needed), 0)) > 0:
            victim = oldest
        if carry:
            self._carry_over(victim)
        leaving, needed = self._catalog.evict_segment(victim, behind_unread=self._behind_unread(victim))
        try:
            # Before the file goes: a crash in between must not bring back what was removed.
            self._page_log.append_tombstones(needed)
            self._log.delete(victim)
        except OSError:
            self._catalog.segment_not_deleted(victim.id, leaving)
            raise
        finally:
            self._catalog.used_bytes = self._log.used_bytes
        self._catalog.segment_deleted(victim.id)

    def _carry_over(self, victim: Segment) -> None:
        """Append those pages of a segment once more that were read there last, as far as there is space for them."""
        recent = self._catalog.recently_read_in(victim.id)
        free = min(-self._log.missing(), self._log.headroom_bytes or victim.size, victim.size)
        most_bytes = min(victim.size // _CARRY_SHARE, free)
        chosen = sorted(recent[: leading_within([place.length for place, _ in recent], most_bytes)])
        for chunk in plan_chunks([place.length for place, _ in chosen], self._log.chunk_bytes):
            entries = self._read_back([chosen[index] for index in chunk])
            size = self._log.chunk_size(entries)
            if not entries or self._log.missing(size) > 0 or not self._log.budget.take(write_cost(size)):
                return
            try:
                self._page_log.append(entries, carried=True)
            except OSError as error:
                self._page_log.count_failure(error)
                return

    def _read_back(self, pages: Sequence[tuple[Place, bytes]]) -> list[Entry]:
        """Those of these pages whose bytes are right, to be appended again."""
        memory = [aligned_empty(self._page_log.page_bytes(place)) for place, _ in pages]
        fetched = self._page_log.fetch([key for _, key in pages], [place for place, _ in pages], memory)
        self._catalog.count_failed(len(fetched.errors), fetched.late)
        # A reader may have found one damaged, and removed it, since it was chosen.
        there = self._catalog.still_at(pages)
        return [
            Entry(key, checksum, array)
            for (_, key), array, outcome, checksum, still in zip(
                pages, memory, fetched.outcomes, fetched.checksums, there, strict=True
            )
            if outcome is Outcome.FOUND and still
        ]
