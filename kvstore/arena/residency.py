"""Catalog and headers kept in step: every change to what is in the arena that must also be written down in it.

The order of the writes is what makes the arena readable after a kill at any instruction: what leaves is counted first
and its header turned odd before its slot is written by anyone; what comes has its header turned even last.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence

from kvstore.arena.arena import Arena
from kvstore.arena.clients import Clients
from kvstore.arena.format import FRAME_BYTES
from kvstore.arena.slabs import Slabs
from kvstore.catalog import Catalog, Removal
from kvstore.eviction import ExpectedReuse
from kvstore.hashing import HASH_BYTES
from kvstore.namespaces import KnownNamespace, Namespaces
from kvstore.slot import Slot, SlotState


class Residency:
    """Changes to the pages of one arena. The store's lock guards every call, and the catalog."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._slabs = Slabs(arena.units, arena.unit_bytes // FRAME_BYTES)
        self.catalog = Catalog(self._slabs, ExpectedReuse)
        self.pins: Container[bytes] = ()
        """Keys of the pages that are pinned as soon as they are here."""
        self.quarantined: list[Slot] = []
        """Slots into which clients of an earlier node may still write."""

    def reserve(
        self, key: bytes, known: KnownNamespace, owner: int, parent: bytes = b"", *, below: bool = False
    ) -> Slot | None:
        """A slot for a page that ``owner`` is going to write; None when nothing can leave for it."""
        slot, removal = self.catalog.reserve(key, known.number, known.layout.page_bytes, owner, parent, below=below)
        self._write_down(removal)
        if slot is not None:
            self._arena.begin_change(slot.frame, owner)
            if self._slabs.changed:
                self._arena.set_units(self._slabs.unit_table())
        return slot

    def publish(self, slots: Sequence[Slot], checksums: Sequence[int | None], *, dirty: bool) -> int:
        """Make written pages findable, head of the prefix first.

        Returns:
            How many: of those that are here already, the other copy is kept.
        """
        published = 0
        for slot, checksum, sequence in zip(slots, checksums, self._arena.sequences(len(slots)), strict=True):
            if not self.catalog.publish(slot, dirty=dirty):
                self._arena.begin_change(slot.frame, 0)
                continue
            published += 1
            slot.checksum = checksum
            if slot.key in self.pins:
                self.catalog.pin(slot)
            block_hash = slot.key[-HASH_BYTES:]
            self._arena.publish(slot.frame, block_hash, slot.namespace, slot.length, checksum, sequence)
        return published

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
        slots, self.quarantined = self.quarantined, []
        for slot in slots:
            if slot.owner in clients:
                self.quarantined.append(slot)
            else:
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
        pages: dict[bytes, Slot] = {}
        for each in found:
            known = namespaces.in_headers.get(each.namespace)
            key = known.fingerprint + each.hash if known is not None else b""
            if not each.complete and each.owner in clients:
                self.quarantined.append(Slot(each.frame, each.frames, b"", 0, 0, each.owner))
            elif each.complete and known and known.layout.page_bytes == each.length and key not in pages:
                pages[key] = Slot(each.frame, each.frames, key, known.number, each.length, checksum=each.checksum)
                self._arena.index_found(each)
            else:
                self._arena.begin_change(each.frame, 0)
        unit_frames = self._arena.unit_bytes // FRAME_BYTES
        used: dict[int, set[int]] = {unit: set() for unit in range(self._arena.units)}
        for slot in (*pages.values(), *self.quarantined):
            used[slot.frame // unit_frames].add(slot.frame)
        for slab in slabs:
            units = range(slab.first_unit, slab.first_unit + slab.units)
            self._slabs.restore(
                slab.first_unit, slab.units, slab.slot_frames, set().union(*(used[unit] for unit in units))
            )
        for slot in self.quarantined:
            self.catalog.quarantine(slot)
        for slot, under in zip(pages.values(), is_below(list(pages)), strict=True):
            self.catalog.adopt(slot, dirty=tiers and not under)
            if slot.key in self.pins:
                self.catalog.pin(slot)
        return len(self.catalog)

    def _write_down(self, removal: Removal) -> None:
        self._arena.count("overrun", removal.overrun)
        self._arena.count("evicted", len(removal.left) - removal.overrun)
        for slot in removal.left:
            self._arena.begin_change(slot.frame, 0)
