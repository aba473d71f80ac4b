"""Batches of pages and tombstones on their way to disk: space is reclaimed, failures are counted."""

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
    """Writes what the catalog chose. For the holder of the log lock."""

    def __init__(self, page_log: PageLog, reclaimer: Reclaimer) -> None:
        self._page_log = page_log
        self._log = page_log.log
        self._catalog = page_log.catalog
        self._device = page_log.device
        self._reclaimer = reclaimer
        self._left_in_vain = False  # a segment was deleted for a full file system, and there was no space all the same

    def write(self, entries: Sequence[Entry]) -> None:
        """Write pages, in order, in chunks. What can't be written is counted as refused."""
        for chunk in plan_chunks(self._log.stored_lengths(entries), self._log.chunk_bytes):
            self._write(entries[chunk.start : chunk.stop])

    def _write(self, entries: Sequence[Entry]) -> None:
        """Reclaim space for one chunk, and append it."""
        size = self._log.chunk_size(entries)
        if not self._device.writing.may_try() or not self._log.budget.take(write_cost(size)):
            self._catalog.count_refused(len(entries))
            return
        try:
            try:
                self._reclaimer.make_space(size)
                self._page_log.append(entries)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT) or self._left_in_vain:
                    raise
                # The file system is full below the limit. One segment is deleted for these pages; if that brings no
                # space, another program takes it, and no further segment is deleted for them.
                self._page_log.count_failure(error)
                self._log.file_system_is_full()
                self._left_in_vain = True
                self._reclaimer.make_space(size)
                self._page_log.append(entries)
        except OSError as error:
            self._page_log.write_failed(error)
            self._device.warn("%d pages not written: %s", len(entries), error)
            self._catalog.count_refused(len(entries))
        else:
            self._left_in_vain = False
            self._device.writing.succeeded()

    def write_tombstones(self) -> None:
        """Write the pending tombstones. Those that can't be written now are tried again next time."""
        pending = self._catalog.pending_tombstones()
        if not pending or not self._device.writing.may_try():
            return
        try:
            for chunk in plan_chunks([0] * len(pending)):
                self._reclaimer.make_space(ChunkSize(len(chunk), 0))
                # A segment deleted for them may have made some of them needless.
                still = self._catalog.still_pending(pending[chunk.start : chunk.stop])
                if still:
                    self._log.budget.take(write_cost(ChunkSize(len(still), 0)), must=True)
                    self._page_log.append([Entry(key, 0, None) for key in still])
        except OSError as error:
            self._page_log.write_failed(error)
            self._device.warn("%d removals not written: %s", len(pending), error)
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
                self._reclaimer.rewrite(segment)
            self._log.flush()
            if doubtful:
                self._device.writing.succeeded()
        except OSError as error:
            self._page_log.write_failed(error)
            raise ResourceError(f"what was written may not survive a loss of power: {error}") from error
