"""Reservations and holds that clients have open. Pure bookkeeping; the store's lock guards it."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import NamedTuple

from kvstore.catalog.slot_state import Slot
from kvstore.errors import InvalidRequestError

NODE = 0
"""The owner of tickets that the node's own threads carry out."""


class Part(NamedTuple):
    """The slots of a reservation that are ended before the others."""

    at: int
    """How many were ended before them."""
    slots: int
    """How many these are; 0: all that are left."""


@dataclass(slots=True, eq=False)
class StoreLease:
    """Slots reserved for one writer."""

    number: int
    owner: int
    slots: list[Slot]
    deadline: float
    """On the clock of ``time.monotonic``."""
    direct: bool
    """Whether the writer has the slots' memory before it: then only its own word, or its death, frees them."""
    batch: list[bytes] = field(default_factory=list)
    """The keys that the writer named, head of the prefix first; those of the slots are among them."""
    ahead: bool = False
    """Whether nobody has named its pages yet."""
    parted: int = 0
    """Slots that it had before these, and that were ended as parts of it."""
    lapsed: bool = False
    writer: int | None = None
    """The thread of this process that writes the payloads and alone may end the ticket; None: whoever asks."""


@dataclass(slots=True, eq=False)
class LoadLease:
    """Slots held for one reader, head of the prefix first."""

    number: int
    owner: int
    slots: list[Slot]
    deadline: float


class Leases:
    """The open tickets by number.

    Numbers are random, and a restarted node doesn't know the earlier one's: a ticket from before a restart is an
    unknown ticket, never another one's.
    """

    def __init__(self) -> None:
        self.stores: dict[int, StoreLease] = {}
        self.loads: dict[int, LoadLease] = {}

    def open_store(
        self,
        owner: int,
        slots: list[Slot],
        batch: list[bytes],
        deadline: float,
        *,
        direct: bool,
        ahead: bool = False,
    ) -> StoreLease:
        """A new reservation."""
        ticket = StoreLease(self._next(), owner, slots, deadline, direct, batch, ahead)
        self.stores[ticket.number] = ticket
        return ticket

    def open_load(self, owner: int, slots: list[Slot], deadline: float) -> LoadLease:
        """A new hold."""
        ticket = LoadLease(self._next(), owner, slots, deadline)
        self.loads[ticket.number] = ticket
        return ticket

    def take_store(self, number: int, owner: int, part: Part | None = None) -> StoreLease | None:
        """End a reservation, or a part of it; None when this owner has none of this number, or another thread is
        writing it.

        Raises:
            InvalidRequestError: it has no such part. All of it stays as it was.
        """
        ticket = self.stores.get(number)
        if ticket is None or ticket.owner != owner or ticket.writer not in (None, threading.get_ident()):
            return None
        if part is not None and part.at != ticket.parted:
            raise InvalidRequestError(f"a part from slot {part.at} on of a reservation that goes on at {ticket.parted}")
        if part is None or not part.slots:
            return self.stores.pop(number)
        if part.slots >= len(ticket.slots):
            raise InvalidRequestError(f"a part of {part.slots} slots leaves none of the {len(ticket.slots)} there are")
        taken = replace(ticket, slots=ticket.slots[: part.slots])
        del ticket.slots[: part.slots]
        ticket.parted += part.slots
        return taken

    def take_load(self, number: int, owner: int) -> LoadLease | None:
        """End a hold; None when this owner has none of this number."""
        ticket = self.loads.get(number)
        return self.loads.pop(number) if ticket is not None and ticket.owner == owner else None

    def slots_of(self, owner: int) -> Iterator[Slot]:
        """The slots that one owner has reserved or holds: one twice that it holds twice."""
        leases: Iterator[StoreLease | LoadLease] = chain(self.stores.values(), self.loads.values())
        return chain.from_iterable(ticket.slots for ticket in leases if ticket.owner == owner)

    def written_here(self) -> bool:
        """Whether a thread of this process may be writing into a reserved slot."""
        return any(ticket.direct and ticket.owner == NODE for ticket in self.stores.values())

    def overdue(self, now: float) -> tuple[list[StoreLease], list[LoadLease]]:
        """Tickets past their deadline, lapsed reservations left out."""
        stores = [ticket for ticket in self.stores.values() if ticket.deadline < now and not ticket.lapsed]
        loads = [ticket for ticket in self.loads.values() if ticket.deadline < now]
        return stores, loads

    def _next(self) -> int:
        """A number that tells nothing of the next one: clients from afar are one owner, and the number is the key."""
        while True:
            number = secrets.randbits(63)
            if number and number not in self.stores and number not in self.loads:
                return number
