"""Which page is in which slot, who holds it, and what may happen to it next. No memory and no file is touched here.

A page is absent, or in a slot that went through these states::

              reserve              publish                 retire
    (free) ───────────► RESERVED ───────────► RESIDENT ───────────► RETIRED
       ▲                 │    │ lapse            │ retire,             │ last hold
       │           abort │    ▼                  │ no holds            │ ends
       ├─────────────────┘  LAPSED               │                     │
       │       writer let go  │                  │                     │
       └──────────────────────┴──────────────────┴─────────────────────┘

* RESERVED: somebody is writing the payload; nobody finds it. Several slots may be reserved for one key.
* LAPSED: the writer is past its deadline. The page can't be published any more, and the slot is nobody else's until
  the writer has let go or is dead: it may still be writing.
* RESIDENT: complete and findable. Holds keep it where it is while somebody copies from it.
* RETIRED: not findable any more, but somebody still copies from it.

``TRANSITIONS`` is that picture as a table; every change goes through it.

Besides, a resident page is *dirty* until the tiers below have it. A dirty page that is evicted is counted as overrun.

Eviction passes over pages that are held; pages that are *pinned*, and dirty ones of a *durable* namespace, are not in
its order at all. A namespace with a quota has an order of its own: it makes room for its pages with its pages.
"""

from __future__ import annotations

import enum
import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice

from kvstore.arena.format import frames_for
from kvstore.arena.slabs import Slabs
from kvstore.eviction import EvictionPolicy

_DURABLE_SHARE = 4
"""Durable pages that no tier below has yet take at most this part of the arena."""
_WINDOWS_TRIED = 8
"""Runs of cold slabs that are looked through for one that can be emptied, coldest first."""
_EVICTIONS_A_LOOK = 64
"""Evictions of one size, for each of its slabs, from a look that found no colder slab of another size to the next."""
_CLEAN_WINDOW = 32
"""How far behind the oldest page a clean one may be to leave in its place."""


class SlotState(enum.Enum):
    """Where a slot stands; see the picture above."""

    FREE = "free"
    RESERVED = "reserved"
    LAPSED = "lapsed"
    RESIDENT = "resident"
    RETIRED = "retired"


class Event(enum.Enum):
    """What can happen to a slot."""

    RESERVE = "reserve"
    PUBLISH = "publish"
    ABORT = "abort"
    LAPSE = "lapse"
    LET_GO = "let go"
    RETIRE_UNHELD = "retire, no holds"
    RETIRE_HELD = "retire, held"
    LAST_HOLD_ENDED = "last hold ended"


TRANSITIONS: dict[tuple[SlotState, Event], SlotState] = {
    (SlotState.FREE, Event.RESERVE): SlotState.RESERVED,
    (SlotState.RESERVED, Event.PUBLISH): SlotState.RESIDENT,
    (SlotState.RESERVED, Event.ABORT): SlotState.FREE,
    (SlotState.RESERVED, Event.LAPSE): SlotState.LAPSED,
    (SlotState.LAPSED, Event.LET_GO): SlotState.FREE,
    (SlotState.RESIDENT, Event.RETIRE_UNHELD): SlotState.FREE,
    (SlotState.RESIDENT, Event.RETIRE_HELD): SlotState.RETIRED,
    (SlotState.RETIRED, Event.LAST_HOLD_ENDED): SlotState.FREE,
}


@dataclass(slots=True, eq=False)
class Slot:
    """A slot in use and the page in it."""

    frame: int
    frames: int
    key: bytes
    """64 bytes: fingerprint and block hash."""
    namespace: int
    length: int
    owner: int = 0
    """The client that may write into it; 0: the node's own threads."""
    state: SlotState = SlotState.FREE
    holds: int = 0
    used: int = 0
    """When it was used last, on the catalog's clock."""
    dirty: bool = False
    checksum: int | None = None
    parent: bytes = b""
    """The key of the page before it in its chain; empty where nobody says."""
    pinned: bool = False
    durable: bool = False
    """Whether it must not leave before a tier below has it."""

    @property
    def may_leave(self) -> bool:
        """Whether eviction may propose it."""
        return self.state is SlotState.RESIDENT and not self.pinned and not (self.durable and self.dirty)

    def apply(self, event: Event) -> None:
        """Follow the table.

        Raises:
            AssertionError: the event can't happen in this state.
        """
        after = TRANSITIONS.get((self.state, event))
        assert after is not None, f"slot {self.frame}: {event.value!r} can't happen to a {self.state.value} slot"
        self.state = after


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
        self._new_policy = policy
        self._orders: dict[int, dict[int, EvictionPolicy]] = {}
        """Slot size → orders of eviction: only a slot of the same size makes room for a page. A namespace with a quota
        has an order of its own, by its number; 0 is that of all others."""
        self._clock = 0
        self._slots: dict[int, Slot] = {}
        self._resident: dict[bytes, Slot] = {}
        self._dirty: OrderedDict[int, Slot] = OrderedDict()
        self._namespaces: dict[int, int] = {}
        """Namespace → resident pages."""
        self._frames_of: dict[int, int] = {}
        """Namespace → frames of its slots in use."""
        self._quotas: dict[int, int] = {}
        self._durable: set[int] = set()
        self._durable_frames = 0
        """Frames of durable namespaces' slots that are being written or dirty."""
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
        self, key: bytes, namespace: int, length: int, owner: int, parent: bytes = b""
    ) -> tuple[Slot | None, Removal]:
        """Take a slot for a page, making room if need be: within the namespace's quota, and within the arena.

        Returns:
            The slot, or None when everything that could leave is held, being written or pinned, or when a durable
            namespace has too much that no tier below has yet; and what left for it.
        """
        frames = frames_for(length)
        removal = Removal()
        durable = namespace in self._durable
        if durable and self._durable_frames + frames > self._slabs.units * self._slabs.unit_frames // _DURABLE_SHARE:
            return None, removal
        if not self._make_quota(namespace, frames, removal):
            return None, removal
        frame = self._slabs.allocate(frames)
        while frame is None and self._make_room(frames, removal):
            frame = self._slabs.allocate(frames)
        if frame is None:
            return None, removal
        slot = Slot(frame, frames, key, namespace, length, owner, parent=parent, durable=durable)
        slot.apply(Event.RESERVE)
        self._count_durable(slot, 1)
        self._enter(slot)
        return slot, removal

    def publish(self, slot: Slot, *, dirty: bool) -> bool:
        """Make a reserved page findable. False: the page is here already, and this slot is free again."""
        if slot.key in self._resident:
            self.abort(slot)
            return False
        slot.apply(Event.PUBLISH)
        slot.owner = 0
        if not dirty:
            self._count_durable(slot, -1)
        self._add_resident(slot, dirty=dirty)
        return True

    def abort(self, slot: Slot) -> None:
        """The writer gave up and has stopped writing."""
        slot.apply(Event.ABORT)
        self._count_durable(slot, -1)
        self._forget(slot)

    def lapse(self, slot: Slot) -> None:
        """The writer is past its deadline; what it does now is unknown."""
        slot.apply(Event.LAPSE)

    def let_go(self, slot: Slot) -> None:
        """The writer of a lapsed slot is dead, or says that it has stopped."""
        slot.apply(Event.LET_GO)
        self._count_durable(slot, -1)
        self._forget(slot)

    def adopt(self, slot: Slot, *, dirty: bool) -> None:
        """Take a resident page over from an earlier node's arena. Its slab was restored before."""
        slot.state = SlotState.RESIDENT
        slot.durable = slot.namespace in self._durable
        self._enter(slot)
        if dirty:
            self._count_durable(slot, 1)
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
            self._order_of(slots[0]).touch([slot.frame for slot in slots if slot.may_leave])

    def use(self, slots: Sequence[Slot]) -> None:
        """A load read these pages of a prefix, head first. All are of one size."""
        if slots:
            self._heat_up(slots)
            self._order_of(slots[0]).use([slot.frame for slot in slots if slot.may_leave])

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
        self._count_durable(slot, -1)
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
        assert not self._frames_of.get(namespace), f"namespace {namespace} has pages already"
        self._quotas[namespace] = frames

    def set_durable(self, namespace: int) -> None:
        """From now on this namespace's new pages don't leave before a tier below has them."""
        self._durable.add(namespace)

    def defer(self, slot: Slot) -> None:
        """The tiers below would not take the page now: let the others go first."""
        if slot.frame in self._dirty:
            self._dirty.move_to_end(slot.frame)

    # -- leaving -----------------------------------------------------------------------------------------------------

    def retire(self, slot: Slot) -> Removal:
        """Take a resident page out, by somebody's wish; held bytes stay until the last hold ends."""
        removal = Removal()
        self._retire(slot, removal)
        return removal

    def _make_quota(self, namespace: int, frames: int, removal: Removal) -> bool:
        """Let pages of a namespace leave until one more fits into its quota. False: too few can."""
        quota = self._quotas.get(namespace)
        while quota is not None and self.frames_of(namespace) + frames > quota:
            order = self._orders.get(frames, {}).get(namespace)
            victim = self._first(order) if order is not None else None
            if victim is None:
                return False
            self._retire(victim, removal)
        return True

    def _make_room(self, frames: int, removal: Removal) -> bool:
        """Let one page of this slot size leave, or empty slabs of other sizes that are colder. False: nothing can."""
        victim = self._victim(frames)
        to_look = self._evictions_to_look.get(frames, 0)
        if victim is None or to_look <= 0:
            if self._take_slabs(frames, victim, removal):
                return True
            # Looking walks over all slabs: only now and then while this size's own pages are the coldest.
            to_look = _EVICTIONS_A_LOOK * self._slabs.slabs_of_size(frames)
        if victim is None:
            return False
        self._evictions_to_look[frames] = to_look - 1
        self._retire(victim, removal)
        return True

    def _victim(self, frames: int) -> Slot | None:
        """The page of this slot size that leaves next; of the orders' first ones, that which was used longest ago."""
        firsts = [self._first(order) for order in self._orders.get(frames, {}).values()]
        return min((slot for slot in firsts if slot is not None), key=lambda slot: slot.used, default=None)

    def _first(self, order: EvictionPolicy) -> Slot | None:
        """The page that leaves first in one order, or one nearly as old that a tier below has."""
        oldest: Slot | None = None
        dirty_seen = 0
        for frame in order.victims():
            slot = self._slots[frame]
            if slot.holds:
                continue
            if not slot.dirty:
                return slot
            oldest = oldest or slot
            dirty_seen += 1
            if dirty_seen >= _CLEAN_WINDOW:
                break
        return oldest

    def _take_slabs(self, frames: int, rival: Slot | None, removal: Removal) -> bool:
        """Empty the coldest run of other sizes' slabs, if all of it is colder than ``rival``."""
        before = rival.used if rival is not None else self._clock + 1
        windows = []
        for window in self._slabs.windows(frames):
            if window and all(slab.slot_frames != frames for slab in window):
                used = max(slab.used for slab in window)
                if used < before:
                    windows.append((used, window[0].first_unit, window))
        for _, _, window in heapq.nsmallest(_WINDOWS_TRIED, windows, key=lambda each: each[:2]):
            slots = [self._slots[frame] for slab in window for frame in slab.frames() if frame in self._slots]
            if all(slot.may_leave and not slot.holds for slot in slots):
                for slot in slots:
                    self._retire(slot, removal)
                for slab in window:
                    self._slabs.release(slab)
                return True
        return False

    def _retire(self, slot: Slot, removal: Removal) -> None:
        del self._resident[slot.key]
        self._namespaces[slot.namespace] -= 1
        if slot.may_leave:
            self._order_of(slot).remove(slot.frame)
        self.pinned_pages -= slot.pinned
        slot.pinned = False
        if slot.dirty:
            removal.overrun += 1
            self._count_durable(slot, -1)
            slot.dirty = False
            self._dirty.pop(slot.frame, None)
        removal.left.append(slot)
        if slot.holds:
            slot.apply(Event.RETIRE_HELD)
        else:
            slot.apply(Event.RETIRE_UNHELD)
            self._forget(slot)

    # -- books -------------------------------------------------------------------------------------------------------

    def _order_of(self, slot: Slot) -> EvictionPolicy:
        orders = self._orders.setdefault(slot.frames, {})
        number = slot.namespace if slot.namespace in self._quotas else 0
        if number not in orders:
            orders[number] = self._new_policy()
        return orders[number]

    def _order(self, slot: Slot, before: bool) -> None:
        """A slot that might leave before (or might not) has changed: put it into its order, or take it out."""
        if before and not slot.may_leave:
            self._order_of(slot).remove(slot.frame)
        elif slot.may_leave and not before:
            order, parent = self._order_of(slot), self._resident.get(slot.parent)
            ordered = parent is not None and parent.may_leave and self._order_of(parent) is order
            order.insert(slot.frame, slot.key, parent.frame if parent and ordered else None)

    def _count_durable(self, slot: Slot, sign: int) -> None:
        if slot.durable:
            self._durable_frames += sign * slot.frames

    def _enter(self, slot: Slot) -> None:
        """A slot is in use from now on."""
        self._slots[slot.frame] = slot
        self.used_frames += slot.frames
        self._frames_of[slot.namespace] = self._frames_of.get(slot.namespace, 0) + slot.frames

    def _add_resident(self, slot: Slot, *, dirty: bool) -> None:
        self._resident[slot.key] = slot
        self._namespaces[slot.namespace] = self._namespaces.get(slot.namespace, 0) + 1
        self._heat_up([slot])
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
        order = [frame for orders in self._orders.values() for each in orders.values() for frame in each.victims()]
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
        at_risk = (SlotState.RESERVED, SlotState.LAPSED)
        durable = sum(s.frames for s in self._slots.values() if s.durable and (s.dirty or s.state in at_risk))
        assert durable == self._durable_frames, "durable pages at risk are miscounted"
        frames: dict[int, int] = {}
        for slot in self._slots.values():
            frames[slot.namespace] = frames.get(slot.namespace, 0) + slot.frames
        assert frames == {number: used for number, used in self._frames_of.items() if used}, "frames by namespace"
        assert counted == {number: pages for number, pages in self._namespaces.items() if pages}, "pages by namespace"
