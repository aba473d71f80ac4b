"""Residency: which pages are in the arena, changed in the catalog and in the arena's headers at once.

The order of the writes is what makes the arena readable after a kill at any instruction: what leaves is counted first
and its header turned odd before its slot is written by anyone; what comes has its header turned even last.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import compress

import numpy as np
import numpy.typing as npt

from kvstore.arena.arena import Arena, FoundSlot
from kvstore.arena.clients import Clients
from kvstore.arena.format import FRAME_BYTES
from kvstore.catalog.catalog import Catalog
from kvstore.catalog.evictor import Evicted
from kvstore.catalog.policies import ExpectedReuse
from kvstore.catalog.slabs import Slabs
from kvstore.catalog.slot_state import Slot, SlotState
from kvstore.events.ring import EventRing
from kvstore.namespaces.registry import KnownNamespace, NamespaceRegistry

QUARANTINE_SECONDS = 3.0
"""For which nobody else gets a slot whose writer has died: a device may have been copying into it."""


class Residency:
    """Changes to the pages of one arena, which are told. The store's lock guards every call, and the catalog."""

    def __init__(self, arena: Arena, events: EventRing) -> None:
        self._arena = arena
        self._events = events
        self._slabs = Slabs(arena.units, arena.unit_bytes // FRAME_BYTES)
        self.catalog = Catalog(self._slabs, ExpectedReuse)
        self.slots = self.catalog.slots
        self.pins: Collection[bytes] = ()
        """Keys of the pages that are pinned as soon as they are here."""
        self.quarantined: dict[Slot, float | None] = {}
        """Slots of no reservation into which somebody may still write, and when nobody does any more, on the clock of
        ``time.monotonic``; None: their client, of an earlier node, was alive."""

    def reserve(
        self,
        key: bytes,
        known: KnownNamespace,
        owner: int,
        parent: bytes = b"",
        *,
        clean: bool = False,
        evict: bool = True,
    ) -> Slot | None:
        """A slot for a page that ``owner`` is going to write; None when nothing can, or may, leave for it."""
        slots = self.reserve_all([key], known, owner, [parent], clean=clean, evict=evict)
        return slots[0] if slots else None

    def reserve_all(
        self,
        keys: Sequence[bytes],
        known: KnownNamespace,
        owner: int,
        parents: Sequence[bytes],
        *,
        clean: bool = False,
        evict: bool = True,
    ) -> list[Slot]:
        """:meth:`reserve` for many pages: the slots of the leading ones, until there is none for one."""
        slots: list[Slot] = []
        removal = Evicted()
        number, page_bytes = known.number, known.layout.page_bytes
        try:
            try:
                self.catalog.reserve_all(
                    keys, number, page_bytes, owner, parents, slots, removal, clean=clean, evict=evict
                )
            finally:
                self._write_down(removal)
            self._arena.begin_changes([self.slots.frame[slot] for slot in slots], owner)
        except BaseException:
            for slot in slots:
                self.free_written(slot)
            raise
        if self._slabs.changed:
            self._arena.set_units(self._slabs.unit_table())
        return slots

    def publish(self, slots: Sequence[Slot], checksums: Sequence[int | None], dirty: Sequence[bool]) -> int:
        """Make written pages of one namespace findable, head of the prefix first.

        Args:
            slots: reserved ones.
            checksums: of each, where it was made.
            dirty: of each, whether a lower tier is to have it and has not.

        Returns:
            How many: of those that are here already, the other copy is kept.
        """
        if not slots:
            return 0
        assert len(checksums) == len(slots), f"{len(checksums)} checksums of {len(slots)} pages"
        table = self.slots
        namespace, length = table.namespace[slots[0]], table.length[slots[0]]
        frames = [table.frame[slot] for slot in slots]
        new = self.catalog.publish(slots, dirty)
        if not all(new):
            self._arena.begin_changes([frame for frame, here in zip(frames, new, strict=True) if not here], 0)
        told, sums = list(compress(slots, new)), list(compress(checksums, new))
        if self.pins:
            for slot in told:
                if table.key(slot) in self.pins:
                    self.catalog.pin(slot)
        self._arena.publish(list(compress(frames, new)), table.hashes_of(told), namespace, length, sums)
        if self._events.wanted:
            self._events.stored("arena", [(table.key(slot), table.parent(slot)) for slot in told])
        return len(told)

    def checksum(self, slot: Slot) -> int | None:
        """The checksum of a resident or held page; None if nobody made it yet."""
        return self._arena.checksum(self.slots.frame[slot])

    def view(self, slot: Slot) -> npt.NDArray[np.uint8]:
        """The payload of a page, or the place for it: a writable view, without a copy."""
        return self._arena.view(self.slots.frame[slot], self.slots.length[slot])

    def free_written(self, slot: Slot) -> None:
        """Free a reserved or lapsed slot: nobody writes into it any more."""
        self._arena.begin_change(self.slots.frame[slot], 0)
        if self.slots.state[slot] == SlotState.LAPSED:
            self.catalog.let_go(slot)
        else:
            self.catalog.abort(slot)

    def drop(self, slot: Slot) -> None:
        """Take a resident page out by somebody's wish: it counts neither as evicted nor as overrun."""
        self._arena.begin_change(self.slots.frame[slot], 0)
        self._events.removed("arena", self.catalog.retire(slot).keys)

    def note_checksums(self, slots: Sequence[Slot], sums: Sequence[int | None]) -> None:
        """Write checksums down that were made of held pages."""
        frame, is_resident, known = self.slots.frame, self.slots.is_resident, self._arena.checksum
        for slot, checksum in zip(slots, sums, strict=True):
            # The first one counts: bytes that have changed since would have another one.
            if checksum is not None and is_resident(slot) and known(frame[slot]) is None:
                self._arena.set_checksum(frame[slot], checksum)

    def quarantine(self, slots: Sequence[Slot], now: float) -> None:
        """Reserved or lapsed slots whose client was found dead ``now``: a device may still copy into them."""
        for slot in slots:
            if self.slots.state[slot] != SlotState.LAPSED:
                self.catalog.lapse(slot)
            self.quarantined[slot] = now + QUARANTINE_SECONDS

    def release_quarantine(self, clients: Clients, left: Collection[int], now: float) -> None:
        """Free the quarantined slots that nobody writes any more.

        Args:
            clients: the attached ones.
            left: clients that were attached until now, and said before they left that they had stopped writing.
            now: on the clock of ``time.monotonic``.
        """
        for slot, over in list(self.quarantined.items()):
            if over is None:
                owner = self.slots.owner[slot]
                if owner in clients:
                    continue
                over = self.quarantined[slot] = now if owner in left else now + QUARANTINE_SECONDS
            if over <= now:
                del self.quarantined[slot]
                self.free_written(slot)

    def take_over(
        self,
        namespaces: NamespaceRegistry,
        clients: Clients,
        find_lower: Callable[[Sequence[bytes]], bytes],
        now: float,
        *,
        tiers: bool,
    ) -> int:
        """Make the catalog again from the headers that an earlier node left.

        Args:
            namespaces: what the numbers in the headers stand for; pages of others are dropped.
            clients: those of the earlier node that still live, or have left.
            find_lower: for each key not 0 where a lower tier has the page.
            now: on the clock of ``time.monotonic``.
            tiers: whether there are lower tiers at all.

        Returns:
            How many pages were kept.
        """
        slabs, found = self._arena.found()
        pages: dict[bytes, FoundSlot] = {}
        quarantined: list[FoundSlot] = []
        for each in found:
            known = namespaces.in_headers.get(each.namespace)
            key = known.fingerprint + each.hash if known is not None else b""
            if not each.complete and not clients.has_left(each.owner):
                quarantined.append(each)
            elif each.complete and known and known.layout.page_bytes == each.length and key not in pages:
                pages[key] = each
                self._arena.index(each.namespace, [(each.frame, each.hash)])
            else:
                self._arena.begin_change(each.frame, 0)
        unit_frames = self._arena.unit_bytes // FRAME_BYTES
        used: dict[int, set[int]] = {unit: set() for unit in range(self._arena.units)}
        for each in (*pages.values(), *quarantined):
            used[each.frame // unit_frames].add(each.frame)
        for slab in slabs:
            units = range(slab.first_unit, slab.first_unit + slab.units)
            self._slabs.restore(
                slab.first_unit, slab.units, slab.slot_frames, set().union(*(used[unit] for unit in units))
            )
        # Nobody knows when a client died that lives no more: its slots stay as if it had died now.
        self.quarantined = {
            self.catalog.quarantine(each.frame, each.frames, each.owner): (
                None if each.owner in clients else now + QUARANTINE_SECONDS
            )
            for each in quarantined
        }
        for (key, each), tier in zip(pages.items(), find_lower(list(pages)), strict=True):
            slot = self.catalog.adopt(each.frame, key, each.namespace, each.length, dirty=tiers and not tier)
            if key in self.pins:
                self.catalog.pin(slot)
        return len(self.catalog)

    def _write_down(self, removal: Evicted) -> None:
        if not removal.left:
            return
        self._arena.count("overrun", removal.overrun)
        self._arena.count("evicted", len(removal.left) - removal.overrun)
        self._arena.begin_changes(removal.left, 0)
        self._events.removed("arena", removal.keys)
