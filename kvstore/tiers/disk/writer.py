"""Pages and tombstones on their way to disk: room is made, failures are counted, nothing is raised."""

from __future__ import annotations

import errno
from collections.abc import Sequence

from kvstore.errors import ResourceError
from kvstore.segments.batching import plan_chunks
from kvstore.segments.log import write_cost
from kvstore.segments.record import ChunkSize
from kvstore.segments.segment import Entry
from kvstore.tiers.disk.device_trust import RESTING
from kvstore.tiers.disk.page_log import PageLog
from kvstore.tiers.disk.reclaim import Reclaimer


class DiskWriter:
    """Stores what was chosen. One thread at a time, the one that changes the log."""

    def __init__(self, logged: PageLog, room: Reclaimer) -> None:
        self._logged = logged
        self._log = logged.log
        self._pages = logged.pages
        self._device = logged.device
        self._room = room
        self._left_in_vain = False  # a segment left for a full file system, and there was no room all the same

    def store(self, entries: Sequence[Entry]) -> None:
        """Write pages, in order, in chunks; what can't be is counted."""
        for chunk in plan_chunks(self._log.stored_lengths(entries), self._log.chunk_bytes):
            self._store(entries[chunk.start : chunk.stop])

    def _store(self, entries: Sequence[Entry]) -> None:
        """Make room for one chunk, and write it."""
        size = self._log.chunk_size(entries)
        if not self._device.writing.may_try() or not self._log.budget.take(write_cost(size)):
            self._pages.refused(len(entries))
            return
        try:
            try:
                self._room.make(size)
                self._logged.append(entries)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT) or self._left_in_vain:
                    raise
                # The file system is smaller than the limit. A segment leaves for these pages; if that brings no room,
                # others take it, and no further one leaves for them.
                self._logged.count_failure(error)
                self._log.file_system_is_full()
                self._left_in_vain = True
                self._room.make(size)
                self._logged.append(entries)
        except OSError as error:
            self._logged.write_failed(error)
            self._device.warn("%d pages not written: %s", len(entries), error)
            self._pages.refused(len(entries))
            self._pages.used_bytes = self._log.used_bytes
        else:
            self._left_in_vain = False
            self._device.writing.succeeded()

    def store_tombstones(self) -> None:
        """Bring to disk which pages are forgotten. Those that can't be written now are tried again next time."""
        forgotten = self._pages.forgotten()
        if not forgotten or not self._device.writing.may_try():
            return
        try:
            for chunk in plan_chunks([0] * len(forgotten)):
                self._room.make(ChunkSize(len(chunk), 0))
                # Making room may have made some of them needless.
                still = self._pages.still_forgotten(forgotten[chunk.start : chunk.stop])
                if still:
                    self._log.budget.take(write_cost(ChunkSize(len(still), 0)), must=True)
                    self._logged.append([Entry(key, 0, None) for key in still])
        except OSError as error:
            self._logged.write_failed(error)
            self._device.warn("%d removals not written: %s", len(forgotten), error)
            self._pages.used_bytes = self._log.used_bytes
        else:
            self._device.writing.succeeded()

    def sync(self) -> None:
        """Return when everything written so far would be found after the machine loses power.

        What a sync before this one was refused for is written anew first, elsewhere.

        Raises:
            ResourceError: the system refuses, or is late, or is not asked for now.
        """
        if self._device.writing.resting:
            raise ResourceError(f"what was written may not survive a loss of power: {RESTING}")
        doubtful = [segment for segment in self._log.segments if segment.doubtful]
        try:
            for segment in doubtful:
                self._room.renew(segment)
            self._log.flush()
            if doubtful:
                self._device.writing.succeeded()
        except OSError as error:
            self._logged.write_failed(error)
            raise ResourceError(f"what was written may not survive a loss of power: {error}") from error
        finally:
            self._pages.used_bytes = self._log.used_bytes
