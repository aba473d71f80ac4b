"""A store's reservation: slots that this client fills, and publishes part by part while later ones are being filled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.client.paths.path import OpenedNamespace
from kvstore.client.paths.results import StoreResult
from kvstore.client.paths.shm.attachment import Attachment
from kvstore.client.paths.shm.connection import LocalConnection, Packed
from kvstore.client.paths.shm.copies import copy_slots, slot_bytes
from kvstore.client.paths.transfer import Transfer
from kvstore.errors import KVStoreError
from kvstore.page_codes import StoreOutcome
from kvstore.v1 import cache_pb2 as pb

Bytes = npt.NDArray[np.uint8]
Used = Callable[[], pb.UseReport | None]
"""What was read without a call, for the next one to take along."""
LEAST_PART_BYTES = 1 << 20
"""Least that is published before the rest, unless it is one page."""


class Reservation:
    """Slots for the pages of one batch that are not here. Not safe for threads.

    An operation of the attachment was begun for it. ``ticket`` is the node's number of it, 0 where nothing is reserved;
    ``outcomes`` has one byte a page, ``offsets`` where each reserved page goes. Where the slots were ``preallocated``,
    the node does not know yet which pages these are.
    """

    def __init__(
        self,
        attachment: Attachment,
        namespace: OpenedNamespace,
        transfer: Transfer,
        ticket: int,
        outcomes: bytes,
        offsets: list[int],
        *,
        preallocated: bool,
    ) -> None:
        self.attachment = attachment
        self.namespace = namespace
        self.transfer = transfer
        self.outcomes = outcomes
        self.ticket = ticket
        self._offsets = offsets
        self._preallocated = preallocated
        self._answers: list[Any] = []
        if ticket:
            attachment.begun(self)

    @property
    def pages(self) -> int:
        """How many are to be written."""
        return self.outcomes.count(StoreOutcome.RESERVED)

    @property
    def before(self) -> StoreResult:
        """What became of the other pages."""
        return StoreResult(
            present=self.outcomes.count(StoreOutcome.PRESENT), refused=self.outcomes.count(StoreOutcome.REFUSED)
        )

    def views(self) -> list[Bytes | None]:
        """For each page of the batch where it goes, or None."""
        offsets, reserved = iter(self._offsets), StoreOutcome.RESERVED
        length = self.namespace.layout.page_bytes
        return [
            self.attachment.view(next(offsets), length) if outcome == reserved else None for outcome in self.outcomes
        ]

    def write(self, connection: LocalConnection, used: Used, before: Callable[[], None]) -> None:
        """Copy the transfer's pages in, part by part, and post each part as soon as it is copied. ``before`` is called
        before anything is published.

        Raises:
            UnavailableError: the node is lost.
            DeadlineError: it did not take a part in time.
        """
        pages, deadline = self.transfer.pages, self.transfer.deadline
        reserved = StoreOutcome.RESERVED
        places = [place for place, outcome in enumerate(self.outcomes) if outcome == reserved]
        length = self.namespace.layout.page_bytes
        starts = [0, *(part_ends(len(places), length) if connection.pipelined else [len(places)])]
        bounds = [0, *(places[end] for end in starts[1:-1]), len(self.outcomes)]
        parts = [
            (start, end, self._part(connection, first, behind, start, end - start, used))
            for start, end, first, behind in zip(starts, starts[1:], bounds, bounds[1:], strict=False)
        ]
        wanted = pages if len(places) == len(pages) else [pages[place] for place in places]
        arena, stride = self.attachment.arena.pages, slot_bytes(length)
        for start, end, packed in parts:
            copy_slots(arena, self._offsets[start:end], stride, wanted[start:end], np.copyto, out=False)
            if not start:
                before()
            connection.post([packed], deadline)

    def publish(self, connection: LocalConnection, used: Used, deadline: float) -> None:
        """Post everything at once: it was written already."""
        connection.post([self._part(connection, 0, len(self.outcomes), 0, self.pages, used)], deadline)

    def give_up(self, connection: LocalConnection, deadline: float) -> None:
        """Post that nothing is written any more."""
        request = pb.CompleteStoreRequest(ticket=self.ticket, publish=False, client=self.attachment.client)
        connection.post([connection.pack(request, self._answers.append)], deadline)

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

    def _part(self, connection: LocalConnection, first: int, behind: int, at: int, slots: int, used: Used) -> Packed:
        """What publishes the slots from ``at`` on, which are those of the pages from ``first`` to ``behind``."""
        last = behind == len(self.outcomes)
        request = pb.CompleteStoreRequest(
            ticket=self.ticket,
            publish=True,
            client=self.attachment.client,
            part_at=at,
            part_slots=0 if last else slots,
        )
        if self._preallocated:
            request.pages.fingerprint = self.namespace.fingerprint
            part = self.transfer.part(first, behind)
            request.pages.hashes = part.hashes
            request.outcomes = self.outcomes[first:behind]
            request.parent = part.parent
            if last and (report := used()) is not None:
                request.used.CopyFrom(report)
        return connection.pack(request, self._answers.append)


def part_ends(pages: int, page_bytes: int) -> list[int]:
    """Where the parts of so many pages end: before the last quarter, so that little is left behind the last copy, and
    at the end. Sending one costs as much as copying half a MiB, so there are no more."""
    last = pages - max(LEAST_PART_BYTES // page_bytes, pages // 4, 1)
    return [last, pages] if last > 0 else [pages]
