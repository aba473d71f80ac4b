"""Which page is in which slot, who holds it, and what may happen to it next. No memory and no file is touched here.

What may happen to a slot is said in :mod:`kvstore.slot`. A resident page is *dirty* until the tiers below have it. A
dirty page that is evicted is counted as overrun.

Eviction (:mod:`kvstore.orders`) passes over pages that are held; pages that are *pinned*, and dirty ones of a *durable*
namespace, are in no order at all. A namespace with a quota makes room for its pages with its pages.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice

from kvstore.arena.format import frames_for
from kvstore.arena.slabs import Slab, Slabs
from kvstore.eviction import EvictionPolicy
from kvstore.orders import Orders
from kvstore.slot import Event, Slot, SlotState

_DURABLE_SHARE = 4
"""Durable pages that no tier below has yet take at most this part of the arena."""
_SLOTS_TRIED = 1 << 14
"""Slots looked at, in the coldest runs of slabs first, for a run that can be emptied."""
_EVICTIONS_A_LOOK = 64
"""Evictions of one size, for each of its slabs, from a look that found no colder slab of another size to the next."""


@dataclass(slots=True)
class Removal:
    """Pages that left the arena, and slots that became free with them."""

    left: list[Slot] = field(default_factory=list)
    """Not findable any more; their headers must say so before anything else is written."""
    overrun: int = 0
    """Of these: dirty ones, which no tier below has."""


class Catalog:
    """The state of every slot. One lock outside of it (the store's) guards all calls."""

    def __init__(self, slabs: Slabs, policy: Callable[[], EvictionPolicy]) -> None:
        self._slabs = slabs
        self._clock = 0
        self._slots: dict[int, Slot] = {}
        self._orders = Orders(policy, self._slots.__getitem__)
        self._resident: dict[bytes, Slot] = {}
        self._dirty: OrderedDict[int, Slot] = OrderedDict()
        self._namespaces: dict[int, int] = {}
        """Namespace → resident pages."""
        self._frames_of: dict[int, int] = {}
        """Namespace → frames of its slots in use."""
        self._quotas: dict[int, int] = {}
        self._durable: set[int] = set()
        self._durable_frames = 0
        """Frames of slots that are ``at_risk``."""
        self.pinned_pages = 0
        self._evictions_to_look: dict[int, int] = {}
        self.used_frames = 0
        """Frames in slots that are in use, padding included."""

    # -- what is here ------------------------------------------------------------------------------------------------

    def find(self, key: bytes) -> Slot | None:
        """The resident slot of a page."""
        return self._resident.get(key)

    def __len__(self) -> int:
        return len(self._resident)

    def pages_of(self, namespace: int) -> int:
        """Resident pages of one namespace."""
        return self._namespaces.get(namespace, 0)

    def frames_of(self, namespace: int) -> int:
        """Frames of one namespace's slots in use, padding included."""
        return self._frames_of.get(namespace, 0)

    def resident(self) -> list[Slot]:
        """Every resident slot, in no order that matters."""
        return list(self._resident.values())

    @property
    def dirty_pages(self) -> int:
        """Resident pages that no tier below has."""
        return len(self._dirty)

    def dirty(self, most: int) -> list[Slot]:
        """Up to ``most`` dirty slots, the one that has waited longest first."""
        return list(islice(self._dirty.values(), most))

    # -- coming ------------------------------------------------------------------------------------------------------

    def reserve(
        self, key: bytes, namespace: int, length: int, owner: int, parent: bytes = b"", *, below: bool = False
    ) -> tuple[Slot | None, Removal]:
        """Take a slot for a page, making room if need be: within the namespace's quota, and within the arena.

        Args:
            key: of the page.
            namespace: its number.
            length: bytes of its payload.
            owner: who writes it.
            parent: key of the page before it in its chain.
            below: whether a tier below has it: it comes up.

        Returns:
            The slot, or None when everything that could leave is held, being written or pinned, or when a durable
            namespace has too much that no tier below has yet; and what left for it.
        """
        frames = frames_for(length)
        removal = Removal()
        at_risk = namespace in self._durable and not below
        if at_risk and self._durable_frames + frames > self._slabs.units * self._slabs.unit_frames // _DURABLE_SHARE:
            return None, removal
        if not self._make_quota(namespace, frames, removal):
            return None, removal
        frame = self._slabs.allocate(frames)
        while frame is None and self._make_room(frames, removal):
            frame = self._slabs.allocate(frames)
        if frame is None:
            return None, removal
        slot = Slot(frame, frames, key, namespace, length, owner, parent=parent)
        slot.apply(Event.RESERVE)
        self._set_risk(slot, at_risk)
        self._enter(slot)
        return slot, removal

    def publish(self, slot: Slot, *, dirty: bool) -> bool:
        """Make a reserved page findable. False: the page is here already, and this slot is free again."""
        if slot.key in self._resident:
            self.abort(slot)
            return False
        slot.apply(Event.PUBLISH)
        slot.owner = 0
        self._add_resident(slot, dirty=dirty)
        return True

    def abort(self, slot: Slot) -> None:
        """The writer gave up and has stopped writing."""
        slot.apply(Event.ABORT)
        self._set_risk(slot, False)
        self._forget(slot)

    def lapse(self, slot: Slot) -> None:
        """The writer is past its deadline; what it does now is unknown."""
        slot.apply(Event.LAPSE)

    def let_go(self, slot: Slot) -> None:
        """The writer of a lapsed slot is dead, or says that it has stopped."""
        slot.apply(Event.LET_GO)
        self._set_risk(slot, False)
        self._forget(slot)

    def adopt(self, slot: Slot, *, dirty: bool) -> None:
        """Take a resident page over from an earlier node's arena. Its slab was restored before."""
        slot.state = SlotState.RESIDENT
        self._enter(slot)
        self._add_resident(slot, dirty=dirty)

    def quarantine(self, slot: Slot) -> None:
        """Take over a slot into which a client of an earlier node may still write."""
        slot.state = SlotState.LAPSED
        self._enter(slot)

    # -- staying -----------------------------------------------------------------------------------------------------

    def touch(self, slots: Sequence[Slot]) -> None:
        """Pages of a prefix were stored or are wanted, head first. All are of one size."""
        if slots:
            self._heat_up(slots)
            self._orders.touch(slots)

    def use(self, slots: Sequence[Slot]) -> None:
        """A load read these pages of a prefix, head first. All are of one size."""
        if slots:
            self._heat_up(slots)
            self._orders.use(slots)

    def _heat_up(self, slots: Sequence[Slot]) -> None:
        for slot in reversed(slots):
            self._clock += 1
            slot.used = self._slabs.slab_of(slot.frame).used = self._clock

    def hold(self, slot: Slot) -> None:
        """Keep a resident page where it is."""
        assert slot.state is SlotState.RESIDENT, f"slot {slot.frame} is {slot.state.value}: it can't be held"
        slot.holds += 1

    def release(self, slot: Slot) -> None:
        """End one hold."""
        assert slot.holds > 0, f"slot {slot.frame} is not held"
        slot.holds -= 1
        if slot.state is SlotState.RETIRED and not slot.holds:
            slot.apply(Event.LAST_HOLD_ENDED)
            self._forget(slot)

    def mark_clean(self, slot: Slot) -> None:
        """The tiers below have the page."""
        if not slot.dirty:
            return
        before = slot.may_leave
        self._set_risk(slot, False)
        slot.dirty = False
        self._dirty.pop(slot.frame, None)
        self._order(slot, before)

    def pin(self, slot: Slot) -> None:
        """Let eviction pass a resident page over until ``unpin``."""
        before = slot.may_leave
        self.pinned_pages += not slot.pinned
        slot.pinned = True
        self._order(slot, before)

    def unpin(self, slot: Slot) -> None:
        """End that."""
        before = slot.may_leave
        self.pinned_pages -= slot.pinned
        slot.pinned = False
        self._order(slot, before)

    # -- what namespaces are granted ---------------------------------------------------------------------------------

    def set_quota(self, namespace: int, frames: int) -> None:
        """Most frames that a namespace's slots take from now on. Before it has any slot."""
        if namespace not in self._quotas:
            assert not self._frames_of.get(namespace), f"namespace {namespace} has pages already"
            self._orders.give_own(namespace)
        self._quotas[namespace] = frames

    def set_durable(self, namespace: int) -> None:
        """From now on this namespace's pages don't leave before a tier below has them."""
        if namespace in self._durable:
            return
        self._durable.add(namespace)
        for slot in [slot for slot in self._dirty.values() if slot.namespace == namespace]:
            before = slot.may_leave
            self._set_risk(slot, True)
            self._order(slot, before)

    def forget_namespace(self, namespace: int) -> None:
        """It was dropped with its pages, and its number is never used again."""
        self._quotas.pop(namespace, None)
        self._durable.discard(namespace)
        self._orders.drop(namespace)

    def defer(self, slot: Slot) -> None:
        """The tiers below would not take the page now: let the others go first."""
        if slot.frame in self._dirty:
            self._dirty.move_to_end(slot.frame)

    # -- leaving -----------------------------------------------------------------------------------------------------

    def retire(self, slot: Slot) -> Removal:
        """Take a resident page out, by somebody's wish; held bytes stay until the last hold ends."""
        removal = Removal()
        self._retire(slot, removal, lost=False)
        return removal

    def _make_quota(self, namespace: int, frames: int, removal: Removal) -> bool:
        """Let pages of a namespace leave until one more fits into its quota. False: too few can."""
        quota = self._quotas.get(namespace)
        while quota is not None and self.frames_of(namespace) + frames > quota:
            victim = self._orders.first_of(namespace, frames)
            if victim is None:
                return False
            self._retire(victim, removal, lost=True)
        return True

    def _make_room(self, frames: int, removal: Removal) -> bool:
        """Let one page of this slot size leave, or empty slabs of other sizes that are colder. False: nothing can."""
        victim = self._orders.first(frames)
        to_look = self._evictions_to_look.get(frames, 0)
        if victim is None or to_look <= 0:
            if self._take_slabs(frames, victim, removal):
                return True
            # Looking walks over all slabs: only now and then while this size's own pages are the coldest.
            to_look = _EVICTIONS_A_LOOK * self._slabs.slabs_of_size(frames)
        if victim is None:
            return False
        self._evictions_to_look[frames] = to_look - 1
        self._retire(victim, removal, lost=True)
        return True

    def _take_slabs(self, frames: int, rival: Slot | None, removal: Removal) -> bool:
        """Empty the coldest run of other sizes' slabs, if all of it is colder than ``rival``."""
        before = rival.used if rival is not None else self._clock + 1
        windows: list[tuple[int, int, list[Slab]]] = []
        for window in self._slabs.windows(frames):
            if window and all(slab.slot_frames != frames for slab in window):
                used = max(slab.used for slab in window)
                if used < before:
                    windows.append((used, len(windows), window))
        heapq.heapify(windows)
        to_try = _SLOTS_TRIED
        while windows and to_try > 0:
            window = heapq.heappop(windows)[2]
            slots = [self._slots[frame] for slab in window for frame in slab.frames() if frame in self._slots]
            to_try -= len(slots)
            if all(slot.may_leave and not slot.holds for slot in slots):
                for slot in slots:
                    self._retire(slot, removal, lost=True)
                for slab in window:
                    self._slabs.release(slab)
                return True
        return False

    def _retire(self, slot: Slot, removal: Removal, *, lost: bool) -> None:
        del self._resident[slot.key]
        self._namespaces[slot.namespace] -= 1
        if slot.may_leave:
            self._orders.leave(slot, lost=lost)
        self.pinned_pages -= slot.pinned
        slot.pinned = False
        if slot.dirty:
            removal.overrun += 1
            self._set_risk(slot, False)
            slot.dirty = False
            self._dirty.pop(slot.frame, None)
        removal.left.append(slot)
        if slot.holds:
            slot.apply(Event.RETIRE_HELD)
        else:
            slot.apply(Event.RETIRE_UNHELD)
            self._forget(slot)

    # -- books -------------------------------------------------------------------------------------------------------

    def _order(self, slot: Slot, before: bool) -> None:
        """A slot that might leave before (or might not) has changed: put it into its order, or take it out."""
        if before and not slot.may_leave:
            self._orders.leave(slot, lost=False)
        elif slot.may_leave and not before:
            self._orders.enter(slot, self._resident.get(slot.parent))

    def _set_risk(self, slot: Slot, at_risk: bool) -> None:
        self._durable_frames += slot.frames * (at_risk - slot.at_risk)
        slot.at_risk = at_risk

    def _enter(self, slot: Slot) -> None:
        """A slot is in use from now on."""
        self._slots[slot.frame] = slot
        self.used_frames += slot.frames
        self._frames_of[slot.namespace] = self._frames_of.get(slot.namespace, 0) + slot.frames

    def _add_resident(self, slot: Slot, *, dirty: bool) -> None:
        self._resident[slot.key] = slot
        self._namespaces[slot.namespace] = self._namespaces.get(slot.namespace, 0) + 1
        self._heat_up([slot])
        self._set_risk(slot, dirty and slot.namespace in self._durable)
        slot.dirty = dirty
        if dirty:
            self._dirty[slot.frame] = slot
        self._order(slot, before=False)

    def _forget(self, slot: Slot) -> None:
        del self._slots[slot.frame]
        self.used_frames -= slot.frames
        self._frames_of[slot.namespace] -= slot.frames
        self._slabs.free(slot.frame)

    # -- checking ----------------------------------------------------------------------------------------------------

    def check_integrity(self, holders: Iterable[Slot] = (), writers: Iterable[Slot] = ()) -> None:
        """Recount everything. ``holders`` names a slot once for each hold, ``writers`` each slot being written.

        Raises:
            AssertionError: something does not add up.
        """
        self._slabs.check_integrity({slot.frame: slot.frames for slot in self._slots.values()})
        assert self.used_frames == sum(slot.frames for slot in self._slots.values()), "used frames are miscounted"
        holds: dict[int, int] = {}
        for slot in holders:
            holds[slot.frame] = holds.get(slot.frame, 0) + 1
        writing = {slot.frame for slot in writers}
        order = list(self._orders.frames())
        assert len(order) == len(set(order)), "a slot is twice in the order of eviction"
        counted: dict[int, int] = {}
        for frame, slot in self._slots.items():
            assert slot.frame == frame and slot.state is not SlotState.FREE, f"slot {frame} is free and in use"
            resident = slot.state is SlotState.RESIDENT
            assert (self._resident.get(slot.key) is slot) == resident, f"slot {frame}: findable and not resident"
            assert slot.holds == holds.get(frame, 0), f"slot {frame} has {slot.holds} holds, not {holds.get(frame, 0)}"
            assert not slot.holds or slot.state in (SlotState.RESIDENT, SlotState.RETIRED), f"slot {frame} is held"
            assert (slot.state is SlotState.RETIRED) <= bool(slot.holds), f"slot {frame} is retired and not held"
            assert (slot.state in (SlotState.RESERVED, SlotState.LAPSED)) == (frame in writing), f"slot {frame}: writer"
            assert (frame in self._dirty) == slot.dirty and slot.dirty <= resident, f"slot {frame}: dirty"
            if resident:
                counted[slot.namespace] = counted.get(slot.namespace, 0) + 1
        may_leave = {slot.frame for slot in self._resident.values() if slot.may_leave}
        assert set(order) == may_leave, "the order of eviction is not complete"
        assert self.pinned_pages == sum(slot.pinned for slot in self._slots.values()), "pinned pages are miscounted"
        durable = sum(slot.frames for slot in self._slots.values() if slot.at_risk)
        assert durable == self._durable_frames, "durable pages at risk are miscounted"
        for slot in self._resident.values():
            assert slot.at_risk == (slot.dirty and slot.namespace in self._durable), f"slot {slot.frame}: at risk"
        frames: dict[int, int] = {}
        for slot in self._slots.values():
            frames[slot.namespace] = frames.get(slot.namespace, 0) + slot.frames
        assert frames == {number: used for number, used in self._frames_of.items() if used}, "frames by namespace"
        assert counted == {number: pages for number, pages in self._namespaces.items() if pages}, "pages by namespace"
