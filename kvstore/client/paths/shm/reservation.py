"""A store's slots: written by this client, and published while later ones are still being written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.client.paths.path import OpenedNamespace
from kvstore.client.paths.results import StoreResult
from kvstore.client.paths.shm.attachment import Attachment
from kvstore.client.paths.shm.connection import LocalConnection, Packed
from kvstore.client.paths.shm.copies import copy_runs, slot_bytes
from kvstore.errors import KVStoreError
from kvstore.hashing import HASH_BYTES
from kvstore.limits import PRESENT, REFUSED, RESERVED
from kvstore.v1 import cache_pb2 as pb

Bytes = npt.NDArray[np.uint8]
Used = Callable[[], pb.UseReport | None]
"""What was read without a call, for the next one to take along."""
LEAST_PART_BYTES = 1 << 20
"""Least that is published before the rest, unless it is one page."""


class Reservation:
    """Slots for the pages of one batch that are not here. Not safe for threads.

    Args:
        attachment: to the arena; an operation of it was begun for this.
        namespace: of the pages.
        hashes: of all pages of the batch, joined.
        parent: hash of the page before them; empty where nobody knows.
        ticket: the node's; 0: nothing is reserved.
        outcomes: one byte a page.
        offsets: where each reserved page goes.
        ahead: whether the node does not know yet which pages these are.
    """

    def __init__(
        self,
        attachment: Attachment,
        namespace: OpenedNamespace,
        hashes: bytes,
        parent: bytes,
        ticket: int,
        outcomes: bytes,
        offsets: list[int],
        *,
        ahead: bool,
    ) -> None:
        self.attachment = attachment
        self.namespace = namespace
        self.outcomes = outcomes
        self.ticket = ticket
        self._hashes = hashes
        self._parent = parent
        self._offsets = offsets
        self._ahead = ahead
        self._answers: list[Any] = []
        if ticket:
            attachment.begun(self)

    @property
    def pages(self) -> int:
        """How many are to be written."""
        return self.outcomes.count(RESERVED)

    @property
    def before(self) -> StoreResult:
        """What became of the other pages."""
        return StoreResult(present=self.outcomes.count(PRESENT), refused=self.outcomes.count(REFUSED))

    def views(self) -> list[Bytes | None]:
        """For each page of the batch where it goes, or None."""
        offsets = iter(self._offsets)
        length = self.namespace.layout.page_bytes
        return [
            self.attachment.view(next(offsets), length) if outcome == RESERVED else None for outcome in self.outcomes
        ]

    def write(
        self,
        line: LocalConnection,
        pages: Sequence[Bytes],
        used: Used,
        before: Callable[[], None],
        deadline: float,
    ) -> None:
        """Copy pages in, part by part, and post each part as soon as it is copied.

        Args:
            line: to the node.
            pages: of the batch.
            used: see above.
            before: called before anything is published.
            deadline: of all of it.

        Raises:
            UnavailableError: the node is lost.
            DeadlineError: it did not take a part in time.
        """
        places = [place for place, outcome in enumerate(self.outcomes) if outcome == RESERVED]
        length = self.namespace.layout.page_bytes
        starts = [0, *(part_ends(len(places), length) if line.ahead else [len(places)])]
        bounds = [0, *(places[end] for end in starts[1:-1]), len(self.outcomes)]
        parts = [
            (start, end, self._part(line, first, behind, start, end - start, used))
            for start, end, first, behind in zip(starts, starts[1:], bounds, bounds[1:], strict=False)
        ]
        wanted = pages if len(places) == len(pages) else [pages[place] for place in places]
        arena, stride = self.attachment.arena.pages, slot_bytes(length)
        for start, end, packed in parts:
            copy_runs(arena, self._offsets[start:end], stride, wanted[start:end], np.copyto, out=False)
            if not start:
                before()
            line.post([packed], deadline)

    def publish(self, line: LocalConnection, used: Used, deadline: float) -> None:
        """Post everything at once: it was written already."""
        line.post([self._part(line, 0, len(self.outcomes), 0, self.pages, used)], deadline)

    def give_up(self, line: LocalConnection, deadline: float) -> None:
        """Post that nothing is written any more."""
        request = pb.CompleteStoreRequest(ticket=self.ticket, publish=False, client=self.attachment.client)
        line.post([line.pack(request, self._answers.append)], deadline)

    def result(self) -> tuple[StoreResult, bool]:
        """What became of the written pages, behind all answers, and whether the node knew of all of them.

        Raises:
            KVStoreError: what the node answered instead.
        """
        stored = present = refused = 0
        for answer in self._answers:
            if isinstance(answer, KVStoreError):
                raise answer
            stored += answer.stored
            present += answer.present
            refused += answer.refused
        written = self.pages
        return StoreResult(stored, present, written - stored - present), stored + present + refused >= written

    def _part(self, line: LocalConnection, first: int, behind: int, at: int, slots: int, used: Used) -> Packed:
        """What publishes the slots from ``at`` on, which are those of the pages from ``first`` to ``behind``."""
        last = behind == len(self.outcomes)
        request = pb.CompleteStoreRequest(
            ticket=self.ticket,
            publish=True,
            client=self.attachment.client,
            part_at=at,
            part_slots=0 if last else slots,
        )
        if self._ahead:
            request.pages.fingerprint = self.namespace.fingerprint
            request.pages.hashes = self._hashes[first * HASH_BYTES : behind * HASH_BYTES]
            request.outcomes = self.outcomes[first:behind]
            request.parent = self._hashes[(first - 1) * HASH_BYTES : first * HASH_BYTES] if first else self._parent
            if last and (report := used()) is not None:
                request.used.CopyFrom(report)
        return line.pack(request, self._answers.append)


def part_ends(pages: int, page_bytes: int) -> list[int]:
    """Where the parts of so many pages end: before the last quarter, so that little is left behind the last copy, and
    at the end. Sending one costs as much as copying half a MiB, so there are no more."""
    last = pages - max(LEAST_PART_BYTES // page_bytes, pages // 4, 1)
    return [last, pages] if last > 0 else [pages]
