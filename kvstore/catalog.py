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
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice

from kvstore.arena.format import frames_for
from kvstore.arena.slabs import Slab, Slabs
from kvstore.eviction import EvictionPolicy

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
        self._policies: dict[int, EvictionPolicy] = {}
        """One order for each slot size: only a slot of the same size makes room for a page."""
        self._clock = 0
        self._slots: dict[int, Slot] = {}
        self._resident: dict[bytes, Slot] = {}
        self._dirty: OrderedDict[int, Slot] = OrderedDict()
        self._namespaces: dict[int, int] = {}
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

    def reserve(self, key: bytes, namespace: int, length: int, owner: int) -> tuple[Slot | None, Removal]:
        """Take a slot for a page, making room if need be.

        Returns:
            The slot, or None when everything that could leave is held or being written; and what left for it.
        """
        frames = frames_for(length)
        removal = Removal()
        frame = self._slabs.allocate(frames)
        while frame is None and self._make_room(frames, removal):
            frame = self._slabs.allocate(frames)
        if frame is None:
            return None, removal
        slot = Slot(frame, frames, key, namespace, length, owner)
        slot.apply(Event.RESERVE)
        self._slots[frame] = slot
        self.used_frames += frames
        return slot, removal

    def publish(self, slot: Slot, *, dirty: bool) -> bool:
        """Make a reserved page findable. False: the page is here already, and this slot is free again."""
        if slot.key in self._resident:
            slot.apply(Event.ABORT)
            self._forget(slot)
            return False
        slot.apply(Event.PUBLISH)
        slot.owner = 0
        self._add_resident(slot, dirty=dirty)
        return True

    def abort(self, slot: Slot) -> None:
        """The writer gave up and has stopped writing."""
        slot.apply(Event.ABORT)
        self._forget(slot)

    def lapse(self, slot: Slot) -> None:
        """The writer is past its deadline; what it does now is unknown."""
        slot.apply(Event.LAPSE)

    def let_go(self, slot: Slot) -> None:
        """The writer of a lapsed slot is dead, or says that it has stopped."""
        slot.apply(Event.LET_GO)
        self._forget(slot)

    def adopt(self, slot: Slot, *, dirty: bool) -> None:
        """Take a resident page over from an earlier node's arena. Its slab was restored before."""
        slot.state = SlotState.RESIDENT
        self._slots[slot.frame] = slot
        self.used_frames += slot.frames
        self._add_resident(slot, dirty=dirty)

    def quarantine(self, slot: Slot) -> None:
        """Take over a slot into which a client of an earlier node may still write."""
        slot.state = SlotState.LAPSED
        self._slots[slot.frame] = slot
        self.used_frames += slot.frames

    # -- staying -----------------------------------------------------------------------------------------------------

    def touch(self, slots: Sequence[Slot]) -> None:
        """Pages of a prefix were stored or are wanted, head first. All are of one size."""
        if slots:
            self._heat_up(slots)
            self._policies[slots[0].frames].touch([slot.frame for slot in slots])

    def use(self, slots: Sequence[Slot]) -> None:
        """A load read these pages of a prefix, head first. All are of one size."""
        if slots:
            self._heat_up(slots)
            self._policies[slots[0].frames].use([slot.frame for slot in slots])

    def _heat_up(self, slots: Sequence[Slot]) -> None:
        for slot in reversed(slots):
            self._clock += 1
            slot.used = self._clock

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
        if slot.dirty:
            slot.dirty = False
            self._dirty.pop(slot.frame, None)

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
        """The page of this slot size that leaves next: the oldest, or one nearly as old that a tier below has."""
        policy = self._policies.get(frames)
        oldest: Slot | None = None
        dirty_seen = 0
        for frame in policy.victims() if policy else ():
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
        heat = {slab.first_unit: self._heat(slab) for slab in self._slabs.slabs() if slab.slot_frames != frames}
        if not heat:
            return False
        best: list[Slab] | None = None
        best_heat = rival.used if rival is not None else self._clock + 1
        for window in self._slabs.windows(frames):
            heats = [heat.get(slab.first_unit) for slab in window]
            known = [each for each in heats if each is not None]
            if len(known) == len(heats) and max(known, default=0) < best_heat:
                best, best_heat = window, max(known, default=0)
        if best is None:
            return False
        for slab in best:
            for frame in slab.frames():
                if frame in self._slots:
                    self._retire(self._slots[frame], removal)
            self._slabs.release(slab)
        return True

    def _heat(self, slab: Slab) -> int | None:
        """When any page of a slab was used last; None when the slab can't be emptied now."""
        heat = 0
        for frame in slab.frames():
            slot = self._slots.get(frame)
            if slot is None:
                continue
            if slot.state is not SlotState.RESIDENT or slot.holds:
                return None
            heat = max(heat, slot.used)
        return heat

    def _retire(self, slot: Slot, removal: Removal) -> None:
        del self._resident[slot.key]
        self._namespaces[slot.namespace] -= 1
        self._policies[slot.frames].remove(slot.frame)
        if slot.dirty:
            removal.overrun += 1
        self.mark_clean(slot)
        removal.left.append(slot)
        if slot.holds:
            slot.apply(Event.RETIRE_HELD)
        else:
            slot.apply(Event.RETIRE_UNHELD)
            self._forget(slot)

    def _add_resident(self, slot: Slot, *, dirty: bool) -> None:
        self._resident[slot.key] = slot
        self._namespaces[slot.namespace] = self._namespaces.get(slot.namespace, 0) + 1
        if slot.frames not in self._policies:
            self._policies[slot.frames] = self._new_policy()
        parent = self._resident.get(slot.parent)
        same_size = parent is not None and parent.frames == slot.frames
        self._policies[slot.frames].insert(slot.frame, slot.key, parent.frame if parent and same_size else None)
        self._clock += 1
        slot.used = self._clock
        slot.dirty = dirty
        if dirty:
            self._dirty[slot.frame] = slot

    def _forget(self, slot: Slot) -> None:
        del self._slots[slot.frame]
        self.used_frames -= slot.frames
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
        order = [frame for policy in self._policies.values() for frame in policy.victims()]
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
        assert set(order) == {slot.frame for slot in self._resident.values()}, "the order of eviction is not complete"
        assert counted == {number: pages for number, pages in self._namespaces.items() if pages}, "pages by namespace"
