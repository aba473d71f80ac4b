"""Catalog and headers kept in step: every change to what is in the arena that must also be written down in it.

The order of the writes is what makes the arena readable after a kill at any instruction: what leaves is counted first
and its header turned odd before its slot is written by anyone; what comes has its header turned even last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvstore.arena.arena import Arena
from kvstore.arena.clients import Clients
from kvstore.arena.format import FRAME_BYTES
from kvstore.arena.slabs import Slabs
from kvstore.catalog import Catalog, Removal, Slot, SlotState
from kvstore.eviction import LeastRecentlyUsed
from kvstore.hashing import HASH_BYTES
from kvstore.namespaces import KnownNamespace, Namespaces


class Residency:
    """Changes to the pages of one arena. The store's lock guards every call, and the catalog."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._slabs = Slabs(arena.units, arena.unit_bytes // FRAME_BYTES)
        self.catalog = Catalog(self._slabs, LeastRecentlyUsed)
        self.quarantined: list[Slot] = []
        """Slots into which clients of an earlier node may still write."""

    def reserve(self, key: bytes, known: KnownNamespace, owner: int) -> Slot | None:
        """A slot for a page that ``owner`` is going to write; None when nothing can leave for it."""
        slot, removal = self.catalog.reserve(key, known.number, known.layout.page_bytes, owner)
        self._write_down(removal)
        if slot is not None:
            self._arena.begin_change(slot.frame, owner)
            if self._slabs.changed:
                self._arena.set_units(self._slabs.unit_table())
        return slot

    def publish(self, slot: Slot, checksum: int | None, *, dirty: bool) -> bool:
        """Make a written page findable. False: it is here already, the other copy is kept."""
        if not self.catalog.publish(slot, dirty=dirty):
            self._arena.begin_change(slot.frame, 0)
            return False
        slot.checksum = checksum
        self._arena.publish(slot.frame, slot.key[-HASH_BYTES:], slot.namespace, slot.length, checksum)
        return True

    def free_written(self, slot: Slot) -> None:
        """Free a reserved or lapsed slot: nobody writes into it any more."""
        self._arena.begin_change(slot.frame, 0)
        if slot.state is SlotState.LAPSED:
            self.catalog.let_go(slot)
        else:
            self.catalog.abort(slot)

    def drop(self, slot: Slot) -> None:
        """Take a resident page out by somebody's wish: it counts neither as evicted nor as overrun."""
        self._arena.begin_change(slot.frame, 0)
        self.catalog.retire(slot)

    def note_checksums(self, slots: Sequence[Slot], sums: Sequence[int | None]) -> None:
        """Write checksums down that were made of held pages."""
        for slot, checksum in zip(slots, sums, strict=True):
            if checksum is not None and slot.checksum is None and slot.state is SlotState.RESIDENT:
                slot.checksum = checksum
                self._arena.set_checksum(slot.frame, checksum)

    def release_quarantine(self, clients: Clients) -> None:
        """Free the quarantined slots whose clients are gone."""
        for slot in [slot for slot in self.quarantined if slot.owner not in clients]:
            self.quarantined.remove(slot)
            self.free_written(slot)

    def take_over(
        self, namespaces: Namespaces, clients: Clients, is_below: Callable[[Sequence[bytes]], bytes], *, tiers: bool
    ) -> int:
        """Make the catalog again from the headers that an earlier node left.

        Args:
            namespaces: what the numbers in the headers stand for; pages of others are dropped.
            clients: those of the earlier node that still live.
            is_below: for each key whether a tier below has the page.
            tiers: whether there are tiers below at all.

        Returns:
            How many pages were kept.
        """
        slabs, found = self._arena.found()
        slots: dict[int, Slot] = {}
        for each in found:
            known = namespaces.by_number.get(each.namespace)
            slot = Slot(each.frame, each.frames, b"", each.namespace, each.length, each.owner, checksum=each.checksum)
            if each.complete and known is not None and known.layout.page_bytes == each.length:
                slot.key = known.fingerprint + each.hash
            elif each.complete or each.owner not in clients:
                self._arena.begin_change(each.frame, 0)
                continue
            slots[each.frame] = slot
        unit_frames = self._arena.unit_bytes // FRAME_BYTES
        for slab in slabs:
            first, last = slab.first_unit * unit_frames, (slab.first_unit + slab.units) * unit_frames
            used = {frame for frame in slots if first <= frame < last}
            self._slabs.restore(slab.first_unit, slab.units, slab.slot_frames, used)
        below = is_below([slot.key for slot in slots.values()])
        for slot, under in zip(slots.values(), below, strict=True):
            if not slot.key:
                self.catalog.quarantine(slot)
                self.quarantined.append(slot)
            else:
                self.catalog.adopt(slot, dirty=tiers and not under)
        return len(self.catalog)

    def _write_down(self, removal: Removal) -> None:
        self._arena.count("overrun", removal.overrun)
        self._arena.count("evicted", len(removal.left) - removal.overrun)
        for slot in removal.left:
            self._arena.begin_change(slot.frame, 0)
