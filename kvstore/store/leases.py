"""Leases: slots reserved for a writer or held for a reader, until it is done or its time is over. Pure bookkeeping.

The store's lock guards it.
"""

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
"""The owner of leases that the node's own threads write and read under, for clients that don't share the arena."""


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
    """The thread of this process that writes the payloads and alone may end the lease; None: whoever asks."""


@dataclass(slots=True, eq=False)
class LoadLease:
    """Slots held for one reader, head of the prefix first."""

    number: int
    owner: int
    slots: list[Slot]
    deadline: float


class Leases:
    """The open leases by number.

    Numbers are random, and a restarted node doesn't know the earlier one's: a number from before a restart is unknown,
    never that of another lease.
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
        lease = StoreLease(self._next(), owner, slots, deadline, direct, batch, ahead)
        self.stores[lease.number] = lease
        return lease

    def open_load(self, owner: int, slots: list[Slot], deadline: float) -> LoadLease:
        """A new hold."""
        lease = LoadLease(self._next(), owner, slots, deadline)
        self.loads[lease.number] = lease
        return lease

    def take_store(self, number: int, owner: int, part: Part | None = None) -> StoreLease | None:
        """End a reservation, or a part of it; None when this owner has none of this number, or another thread is
        writing it.

        Raises:
            InvalidRequestError: it has no such part. All of it stays as it was.
        """
        lease = self.stores.get(number)
        if lease is None or lease.owner != owner or lease.writer not in (None, threading.get_ident()):
            return None
        if part is not None and part.at != lease.parted:
            raise InvalidRequestError(f"a part from slot {part.at} on of a reservation that goes on at {lease.parted}")
        if part is None or not part.slots:
            return self.stores.pop(number)
        if part.slots >= len(lease.slots):
            raise InvalidRequestError(f"a part of {part.slots} slots leaves none of the {len(lease.slots)} there are")
        taken = replace(lease, slots=lease.slots[: part.slots])
        del lease.slots[: part.slots]
        lease.parted += part.slots
        return taken

    def take_load(self, number: int, owner: int) -> LoadLease | None:
        """End a hold; None when this owner has none of this number."""
        lease = self.loads.get(number)
        return self.loads.pop(number) if lease is not None and lease.owner == owner else None

    def slots_of(self, owner: int) -> Iterator[Slot]:
        """The slots that one owner has reserved or holds: one twice that it holds twice."""
        leases: Iterator[StoreLease | LoadLease] = chain(self.stores.values(), self.loads.values())
        return chain.from_iterable(lease.slots for lease in leases if lease.owner == owner)

    def written_here(self) -> bool:
        """Whether a thread of this process may be writing into a reserved slot."""
        return any(lease.direct and lease.owner == NODE for lease in self.stores.values())

    def overdue(self, now: float) -> tuple[list[StoreLease], list[LoadLease]]:
        """Leases past their deadline, lapsed reservations left out."""
        stores = [lease for lease in self.stores.values() if lease.deadline < now and not lease.lapsed]
        loads = [lease for lease in self.loads.values() if lease.deadline < now]
        return stores, loads

    def _next(self) -> int:
        """A number that tells nothing of the next one: clients from afar are one owner, and the number is the key."""
        while True:
            number = secrets.randbits(63)
            if number and number not in self.stores and number not in self.loads:
                return number
