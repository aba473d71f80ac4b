"""The catalog: which page is in which slot, who holds it, and what may happen to it next. Pure bookkeeping.

The states of a slot are in :mod:`kvstore.catalog.slot_state`, what is known of each in
:mod:`kvstore.catalog.slot_table`. A resident page is *dirty* until the lower tiers have it. A dirty page that is
evicted is counted as overrun.

Eviction (:mod:`kvstore.catalog.evictor`, :mod:`kvstore.catalog.eviction_orders`) passes over pages that are held; pages
that are *pinned*, and dirty ones of a *durable* namespace, are in no order at all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import compress, groupby, islice

from kvstore.arena.format import FRAME_BYTES, frames_for
from kvstore.catalog.dirty_queue import DirtyQueue
from kvstore.catalog.eviction_orders import EvictionOrders
from kvstore.catalog.evictor import Evicted, Evictor
from kvstore.catalog.key_table import Found, KeyTable
from kvstore.catalog.order_migration import OrderMigration
from kvstore.catalog.policies import EvictionPolicy, Prospect
from kvstore.catalog.slabs import Slabs
from kvstore.catalog.slot_state import Event, Slot, SlotState
from kvstore.catalog.slot_table import SlotTable

_RESIDENT, _RETIRED = int(SlotState.RESIDENT), int(SlotState.RETIRED)
_WRITTEN = {int(SlotState.RESERVED), int(SlotState.LAPSED)}
_DURABLE_SHARE = 4
"""Durable pages that no lower tier has yet take at most this part of the arena."""


class Catalog:
    """The state of every slot. One lock outside of it (the store's) guards all calls."""

    def __init__(self, slabs: Slabs, policy: Callable[[], EvictionPolicy]) -> None:
        self._slabs = slabs
        self._clock = 0
        self.slots = SlotTable()
        """What is known of each slot; changed here only."""
        self._orders = EvictionOrders(policy, self.slots)
        self._evicting = Evictor(slabs, self.slots, self._orders, self.frames_of, self._evict)
        self._resident = KeyTable(self.slots)
        self._dirty = DirtyQueue()
        self._dirty_frames = 0
        """Frames of the slots in it."""
        self._to_touch: list[Sequence[bytes]] = []
        """Keys of prefixes that were stored, and are to be touched before the order is asked for anything."""
        self._entered: Slot = 0
        """The slot that entered an order last; it may be free by now."""
        self._namespaces: dict[int, int] = {}
        """Namespace → resident pages."""
        self._frames_of: dict[int, int] = {}
        """Namespace → frames of its slots in use."""
        self._to_migrate: list[int] = []
        """Namespaces with a first quota whose pages are in the common order yet."""
        self._durable: set[int] = set()
        self._unprotected: set[int] = set()
        """Of these: namespaces with dirty pages from before, which may leave yet."""
        self._durable_frames = 0
        """Frames of slots that are ``at_risk``."""
        self.pinned_pages = 0
        self.used_frames = 0
        """Frames in slots that are in use, padding included."""

    # -- what is here ------------------------------------------------------------------------------------------------

    def find(self, key: bytes) -> Slot | None:
        """The resident slot of a page."""
        return self._resident.find(key)

    def find_all(self, keys: Sequence[bytes]) -> Found:
        """The resident slot of each page, -1 where it has none."""
        return self._resident.find_all(keys)

    def find_here(self, keys: Sequence[bytes]) -> list[Slot]:
        """The resident slots of those pages that have one."""
        return [slot for slot in self._resident.find_all(keys).tolist() if slot >= 0]

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
        return self._resident.all()

    def remembers(self, key: bytes, namespace: int, length: int) -> bool:
        """Whether a page of ``length`` bytes that is not here is known to have left to make room."""
        return self._orders.remembers(key, namespace, frames_for(length))

    def prospects(self, slots: Sequence[Slot]) -> list[Prospect | None]:
        """What is expected of resident pages; None: nothing is known of one."""
        if self._to_touch:
            self._touch_now()
        return list(map(self._orders.prospect, slots))

    @property
    def dirty_pages(self) -> int:
        """Resident pages that no lower tier has."""
        return len(self._dirty)

    @property
    def dirty_bytes(self) -> int:
        """What the slots of these take."""
        return self._dirty_frames * FRAME_BYTES

    def dirty(self, most: int) -> list[Slot]:
        """Up to ``most`` dirty slots: of the namespace whose turn it is first; of each, the one that has waited longest
        first."""
        return list(islice(self._dirty, most))

    @property
    def dirty_namespaces(self) -> int:
        """How many namespaces have such pages."""
        return self._dirty.namespaces

    def end_turns(self, slots: Iterable[Slot]) -> int:
        """The namespaces of these slots had their turns: ``dirty`` names all others first. Returns how many had."""
        namespaces = dict.fromkeys(map(self.slots.namespace.__getitem__, slots))
        for namespace in namespaces:
            self._dirty.end_turn(namespace)
        return len(namespaces)

    def dirty_stamps(self) -> Iterator[int]:
        """The stamps of all slots that are dirty now, namespace by namespace. They may be read without the lock."""
        queue, serials = self._dirty.copy(), self.slots.serials()
        return (serials[slot] << 32 | slot for slot in queue)

    # -- coming ------------------------------------------------------------------------------------------------------

    def reserve(
        self,
        key: bytes,
        namespace: int,
        length: int,
        owner: int,
        parent: bytes = b"",
        *,
        clean: bool = False,
        evict: bool = True,
    ) -> tuple[Slot | None, Evicted]:
        """Take a slot for a page, making room if need be: within the namespace's quota, and within the arena.

        Args:
            key: of the page.
            namespace: its number.
            length: bytes of its payload.
            owner: who writes it.
            parent: key of the page before it in its chain.
            clean: whether a lower tier of this node has it.
            evict: whether pages may leave for it.

        Returns:
            The slot, or None when everything that could leave is held, being written or pinned, or when a durable
            namespace has too much that no lower tier has yet; and what left for it.
        """
        slots: list[Slot] = []
        removal = Evicted()
        self.reserve_all([key], namespace, length, owner, [parent], slots, removal, clean=clean, evict=evict)
        return slots[0] if slots else None, removal

    def reserve_all(
        self,
        keys: Sequence[bytes],
        namespace: int,
        length: int,
        owner: int,
        parents: Sequence[bytes],
        slots: list[Slot],
        removal: Evicted,
        *,
        clean: bool = False,
        evict: bool = True,
    ) -> None:
        """:meth:`reserve` for many pages of one namespace, until there is no slot for one.

        Args:
            keys: of the pages.
            namespace: as in ``reserve``; so are the next two, and the last two.
            length: of each.
            owner: of all.
            parents: of each.
            slots: those of the leading pages are added here,
            removal: and here what left for them: both count also if this raises.
            clean: of all.
            evict: for all.
        """
        if self._to_touch:
            self._touch_now()
        frames, wanted = frames_for(length), len(keys)
        at_risk = namespace in self._durable and not clean
        if at_risk:
            room = self._slabs.units * self._slabs.unit_frames // _DURABLE_SHARE - self._durable_frames
            wanted = min(wanted, max(0, room // frames))
        one_by_one = self._evicting.has_quota(namespace)  # what enters counts for the next one
        allocate, make_room = self._slabs.allocate_some, self._evicting.make_room
        first = 0
        while first < wanted:
            most = 1 if one_by_one else wanted - first
            if one_by_one and not self._evicting.make_quota(namespace, frames, removal, evict=evict):
                return
            found = allocate(frames, most)
            while not found and evict and make_room(frames, removal, most):
                found = allocate(frames, most)
            if not found:
                return
            end = first + len(found)
            entered = self._enter_all(
                found, keys[first:end], namespace, length, owner, SlotState.RESERVED, parents[first:end]
            )
            slots += entered
            if at_risk:
                for slot in entered:
                    self._set_risk(slot, True)
            first = end

    def name(self, slots: Sequence[Slot], keys: Sequence[bytes], parents: Sequence[bytes]) -> None:
        """Say which pages are in slots that were reserved without them: their keys, and those of the pages before."""
        state = self.slots.state
        assert {state[slot] for slot in slots} <= _WRITTEN, f"one of the slots {slots} is not reserved"
        self.slots.name(slots, keys, parents)

    def publish(self, slots: Sequence[Slot], dirty: Sequence[bool]) -> list[bool]:
        """Make reserved pages of one namespace and size findable, head of the prefix first.

        Args:
            slots: theirs.
            dirty: of each, whether a lower tier is to have it and has not.

        Returns:
            For each whether it is. Not: the page is here already, and this slot is free again.
        """
        assert len(slots) == len(dirty), f"{len(slots)} slots, and of {len(dirty)} it is said whether they are dirty"
        table = self.slots
        namespace = table.namespace[slots[0]]
        self._resident.make_room(len(slots))
        table.apply_all(slots, Event.PUBLISH)
        published = self._resident.add_all(slots)
        came = list(compress(slots, published))
        if len(came) < len(slots):
            for slot, new in zip(slots, published, strict=True):
                if not new:
                    table.state[slot] = SlotState.RESERVED
                    self.abort(slot)
        unwritten = [slot for slot, wanted, new in zip(slots, dirty, published, strict=True) if wanted and new]
        self._set_dirty(unwritten, namespace, True)
        for slot in came:
            table.owner[slot] = 0
            if table.at_risk[slot] and not table.dirty[slot]:
                self._set_risk(slot, False)
        if came:
            self._namespaces[namespace] = self._namespaces.get(namespace, 0) + len(came)
            self._heat_up(came)
        entering = [(slot, self._find_parent(slot)) for slot in came if table.may_leave(slot)]
        if entering:
            self._orders.enter(entering)
        return published

    def abort(self, slot: Slot) -> None:
        """The writer gave up and has stopped writing."""
        self.slots.apply(slot, Event.ABORT)
        self._set_risk(slot, False)
        self._forget((slot,))

    def lapse(self, slot: Slot) -> None:
        """The writer is past its deadline; what it does now is unknown."""
        self.slots.apply(slot, Event.LAPSE)

    def let_go(self, slot: Slot) -> None:
        """The writer of a lapsed slot is dead, or says that it has stopped."""
        self.slots.apply(slot, Event.LET_GO)
        self._set_risk(slot, False)
        self._forget((slot,))

    def adopt(self, frame: int, key: bytes, namespace: int, length: int, *, dirty: bool) -> Slot:
        """Take a resident page over from an earlier node's arena. Its slab was restored before, and its key is new."""
        slot = self._enter(frame, key, namespace, length, 0, SlotState.RESIDENT)
        self._resident.add(slot)
        self._namespaces[namespace] = self._namespaces.get(namespace, 0) + 1
        self._heat_up((slot,))
        if dirty:
            self._set_dirty((slot,), namespace, True)
        self._order(slot, before=False)
        return slot

    def quarantine(self, frame: int, frames: int, owner: int) -> Slot:
        """Take over a slot into which ``owner``, a client of an earlier node, may still write."""
        return self._enter(frame, b"", 0, frames * FRAME_BYTES, owner, SlotState.LAPSED)

    # -- staying -----------------------------------------------------------------------------------------------------

    def touch_later(self, keys: Sequence[bytes]) -> None:
        """As ``touch`` of those of these pages that are here, by ``catch_up`` or with the next change of the order."""
        self._to_touch.append(keys)

    def catch_up(self) -> None:
        """Work out what was left for later: in which order pages leave."""
        self._touch_now()
        self._orders.catch_up()

    def _touch_now(self) -> None:
        waiting, self._to_touch = self._to_touch, []
        for keys in waiting:
            self.touch(self.find_here(keys))

    def touch(self, slots: Sequence[Slot]) -> None:
        """Pages of a prefix were stored or are wanted, head first. All are of one size."""
        if self._to_touch:
            self._touch_now()
        if slots:
            self._heat_up(slots)
            self._orders.touch(slots)

    def use(self, slots: Sequence[Slot]) -> None:
        """A load read these pages of a prefix, head first. All are of one size."""
        if self._to_touch:
            self._touch_now()
        if slots:
            self._heat_up(slots)
            self._orders.use(slots)

    def _heat_up(self, slots: Sequence[Slot]) -> None:
        used, frame, slab_of = self.slots.used, self.slots.frame, self._slabs.slab_of
        clock = self._clock
        for slot in reversed(slots):
            clock += 1
            used[slot] = slab_of(frame[slot]).used = clock
        self._clock = clock

    def hold(self, slots: Iterable[Slot]) -> None:
        """Keep resident pages where they are."""
        state, holds = self.slots.state, self.slots.holds
        for slot in slots:
            assert state[slot] == _RESIDENT, f"slot {slot} is not resident: it can't be held"
            holds[slot] += 1

    def release(self, slots: Iterable[Slot]) -> None:
        """End one hold of each."""
        state, holds = self.slots.state, self.slots.holds
        for slot in slots:
            held = holds[slot] - 1
            assert held >= 0, f"slot {slot} is not held"
            holds[slot] = held
            if not held and state[slot] == _RETIRED:
                self.slots.apply(slot, Event.LAST_HOLD_ENDED)
                self._forget((slot,))

    def mark_clean(self, slots: Iterable[Slot]) -> None:
        """The lower tiers have these pages."""
        table = self.slots
        written: dict[int, list[Slot]] = {}
        for slot in dict.fromkeys(slots):
            if table.dirty[slot]:
                written.setdefault(table.namespace[slot], []).append(slot)
        for namespace, some in written.items():
            stayed = [slot for slot in some if not table.may_leave(slot)]
            self._set_dirty(some, namespace, False)
            for slot in stayed:
                self._order(slot, before=False)

    def pin(self, slot: Slot) -> None:
        """Let eviction pass a resident page over until ``unpin``."""
        self._set_pinned(slot, True)

    def unpin(self, slot: Slot) -> None:
        """End that."""
        self._set_pinned(slot, False)

    # -- quotas and durability of namespaces -------------------------------------------------------------------------

    def set_quota(self, namespace: int, frames: int | None) -> None:
        """Most frames that a namespace's slots take from now on; None: as many as there are.

        The first quota of a namespace that has pages counts once these are in an order of their own: see
        ``take_migration``.
        """
        if frames is not None:
            self._give_own_order(namespace)
        self._evicting.set_quota(namespace, frames)

    def set_tenant_quota(self, namespace: int, tenant: str, frames: int | None) -> None:
        """Most frames that the slots of all of a tenant's namespaces take from now on, this one's among them; None: as
        many as there are."""
        if frames is not None:
            self._give_own_order(namespace)
        self._evicting.set_tenant_quota(namespace, tenant, frames)

    def _give_own_order(self, namespace: int) -> None:
        if not self._orders.has_own(namespace):
            moving = bool(self.pages_of(namespace))
            self._orders.give_own(namespace, moving=moving)
            if moving:
                self._to_migrate.append(namespace)

    def take_migration(self) -> OrderMigration | None:
        """A namespace whose pages are still to move into their own order. Each is given out once, and again after
        ``migrate_again``. Until all of its pages are there its quotas wait."""
        if not self._to_migrate:
            return None
        return OrderMigration(self._to_migrate.pop(), self.slots, self._orders, self._find_parent)

    def migrate_again(self, namespace: int) -> None:
        """Not all of its pages were moved."""
        if self._orders.is_moving(namespace):  # else it was dropped
            self._to_migrate.append(namespace)

    def quota_of(self, namespace: int) -> int | None:
        """Most frames that a namespace's slots may take, where that is said for it or its tenant."""
        return self._evicting.quota_of(namespace)

    def set_durable(self, namespace: int) -> None:
        """From now on this namespace's pages don't leave before a lower tier has them: those that come, and those that
        are dirty now as soon as they are told to ``protect``."""
        if namespace not in self._durable and self.pages_of(namespace):
            self._unprotected.add(namespace)
        self._durable.add(namespace)

    def is_unprotected(self, namespace: int) -> bool:
        """Whether some of a durable namespace's dirty pages may leave yet."""
        return namespace in self._unprotected

    def protect(self, slots: Iterable[Slot]) -> None:
        """Resident pages of a durable namespace don't leave before they are clean."""
        for slot in slots:
            if self.slots.dirty[slot]:
                before = self.slots.may_leave(slot)
                self._set_risk(slot, True)
                self._order(slot, before)

    def end_protecting(self, namespace: int) -> None:
        """All of its dirty pages are protected."""
        self._unprotected.discard(namespace)

    def forget_namespace(self, namespace: int) -> None:
        """It was dropped with its pages, and its number is never used again."""
        self._evicting.forget_namespace(namespace)
        self._durable.discard(namespace)
        self._unprotected.discard(namespace)
        self._orders.drop(namespace)

    def defer(self, slot: Slot) -> None:
        """The lower tiers would not take the page now: let the others of its namespace go first."""
        if slot in self._dirty:
            namespace = self.slots.namespace[slot]
            self._dirty.remove(slot, namespace)
            self._dirty.append(slot, namespace)

    # -- leaving -----------------------------------------------------------------------------------------------------

    def retire(self, slot: Slot) -> Evicted:
        """Take a resident page out, by somebody's wish; held bytes stay until the last hold ends."""
        removal = Evicted()
        self._retire((slot,), removal, lost=False)
        return removal

    def _evict(self, slots: Sequence[Slot], removal: Evicted) -> None:
        self._retire(slots, removal, lost=True)

    def _retire(self, retired: Sequence[Slot], removal: Evicted, *, lost: bool) -> None:
        slots, holds, dirty = self.slots, self.slots.holds, self.slots.dirty
        removal.left += [slots.frame[slot] for slot in retired]
        removal.keys += slots.keys(retired)
        self._resident.remove_all(retired)
        self._orders.leave_all([slot for slot in retired if slots.may_leave(slot)], lost=lost)
        for namespace, some in groupby(retired, slots.namespace.__getitem__):
            left = list(some)
            self._namespaces[namespace] -= len(left)
            if not self._namespaces[namespace]:
                del self._namespaces[namespace]
            unwritten = [slot for slot in left if dirty[slot]]
            removal.overrun += len(unwritten)
            self._set_dirty(unwritten, namespace, False)
        held: list[Slot] = []
        unheld: list[Slot] = []
        for slot in retired:
            self.pinned_pages -= slots.pinned[slot]
            slots.pinned[slot] = 0
            (held if holds[slot] else unheld).append(slot)
        slots.apply_all(held, Event.RETIRE_HELD)
        slots.apply_all(unheld, Event.RETIRE_UNHELD)
        self._forget(unheld)

    # -- bookkeeping -------------------------------------------------------------------------------------------------

    def _order(self, slot: Slot, before: bool) -> None:
        """A slot that might leave before (or might not) has changed: put it into its order, or take it out."""
        after = self.slots.may_leave(slot)
        if before and not after:
            self._orders.leave(slot, lost=False)
        elif after and not before:
            self._orders.enter([(slot, self._find_parent(slot))])

    def _find_parent(self, slot: Slot) -> Slot | None:
        """The resident slot of the page before this one in its chain."""
        slots, last = self.slots, self._entered
        self._entered = slot
        # Mostly it is the page that came just before.
        if slots.namespace[last] == slots.namespace[slot] and slots.is_resident(last) and slots.is_behind(slot, last):
            return last
        parent = slots.parent(slot)
        return self._resident.find(parent) if parent else None

    def _set_pinned(self, slot: Slot, pinned: bool) -> None:
        before = self.slots.may_leave(slot)
        self.pinned_pages += pinned - self.slots.pinned[slot]
        self.slots.pinned[slot] = pinned
        self._order(slot, before)

    def _set_dirty(self, slots: Sequence[Slot], namespace: int, dirty: bool) -> None:
        """Resident pages of a namespace become dirty, or dirty ones are so no longer."""
        frames, is_dirty, at_risk = self.slots.frames, self.slots.dirty, self.slots.at_risk
        (self._dirty.append_all if dirty else self._dirty.remove_all)(slots, namespace)
        will_be = dirty and namespace in self._durable
        changed = 0
        for slot in slots:
            is_dirty[slot] = dirty
            changed += frames[slot]
            if at_risk[slot] != will_be:
                self._set_risk(slot, will_be)
        self._dirty_frames += changed if dirty else -changed

    def _set_risk(self, slot: Slot, at_risk: bool) -> None:
        if at_risk != self.slots.at_risk[slot]:
            self._durable_frames += self.slots.frames[slot] * (1 if at_risk else -1)
            self.slots.at_risk[slot] = at_risk

    def _enter(
        self, frame: int, key: bytes, namespace: int, length: int, owner: int, state: SlotState, parent: bytes = b""
    ) -> Slot:
        """A slot is in use from now on."""
        return self._enter_all([frame], [key], namespace, length, owner, state, [parent])[0]

    def _enter_all(
        self,
        places: Sequence[int],
        keys: Sequence[bytes],
        namespace: int,
        length: int,
        owner: int,
        state: SlotState,
        parents: Sequence[bytes],
    ) -> list[Slot]:
        """Slots at these first frames are in use from now on."""
        slots = self.slots.add_all(places, keys, namespace, length, owner, state, parents)
        slab_of = self._slabs.slab_of
        for frame, slot in zip(places, slots, strict=True):
            slab_of(frame).note(frame, slot)
        frames = frames_for(length) * len(slots)
        self.used_frames += frames
        self._frames_of[namespace] = self._frames_of.get(namespace, 0) + frames
        return slots

    def _forget(self, slots: Sequence[Slot]) -> None:
        """These slots are free."""
        frames_of, namespace_of = self.slots.frames, self.slots.namespace
        for namespace, some in groupby(slots, namespace_of.__getitem__):
            frames = sum(map(frames_of.__getitem__, some))
            self.used_frames -= frames
            self._frames_of[namespace] -= frames
            if not self._frames_of[namespace]:
                del self._frames_of[namespace]
                self.slots.forget_namespace(namespace)
        self._slabs.free_all(list(map(self.slots.frame.__getitem__, slots)))
        self.slots.remove_all(slots)

    # -- checking ----------------------------------------------------------------------------------------------------

    def check_integrity(self, holders: Iterable[Slot] = (), writers: Iterable[Slot] = ()) -> None:
        """Recount everything. ``holders`` names a slot once for each hold, ``writers`` each slot being written.

        Raises:
            AssertionError: something does not add up.
        """
        slots = self.slots
        in_use = [slot for slot in range(len(slots)) if slots.state[slot] != SlotState.FREE]
        slots.check_integrity()
        self._slabs.check_integrity({slots.frame[slot]: slots.frames[slot] for slot in in_use})
        named = [slot for slab in self._slabs.slabs() for slot in slab.in_use()]
        assert sorted(named) == in_use, "slabs name other slots than those in use"
        assert self.used_frames == sum(slots.frames[slot] for slot in in_use), "used frames are miscounted"
        holds = Counter(holders)
        writing = set(writers)
        order = list(self._orders.slots())
        assert len(order) == len(set(order)), "a slot is twice in the order of eviction"
        dirty = list(self._dirty)
        assert len(dirty) == len(self._dirty) == len(set(dirty)), "a slot is queued twice as dirty"
        pages: Counter[int] = Counter()
        frames: Counter[int] = Counter()
        for slot in in_use:
            state, held = slots.state[slot], slots.holds[slot]
            resident = state == SlotState.RESIDENT
            namespace = slots.namespace[slot]
            pages[namespace] += resident
            frames[namespace] += slots.frames[slot]
            assert (self._resident.find(slots.key(slot)) == slot) == resident, f"slot {slot}: findable and not resident"
            assert held == holds[slot], f"slot {slot} has {held} holds, not {holds[slot]}"
            assert not held or state in (SlotState.RESIDENT, SlotState.RETIRED), f"slot {slot} is held"
            assert (state == SlotState.RETIRED) <= bool(held), f"slot {slot} is retired and not held"
            assert (state in (SlotState.RESERVED, SlotState.LAPSED)) == (slot in writing), f"slot {slot}: writer"
            assert (slot in self._dirty) == slots.dirty[slot] and slots.dirty[slot] <= resident, f"slot {slot}: dirty"
            if resident:
                at_risk = slots.dirty[slot] and namespace in self._durable
                may_be = namespace in self._unprotected and not slots.at_risk[slot]
                assert slots.at_risk[slot] == at_risk or may_be, f"slot {slot}: at risk"
        assert len(dirty) == sum(slots.dirty[slot] for slot in in_use), "dirty slots are miscounted"
        assert self._dirty_frames == sum(slots.frames[slot] for slot in dirty), "dirty frames are miscounted"
        resident_slots = self._resident.all()
        assert len(resident_slots) == len(self._resident) == sum(pages.values()), "resident pages are miscounted"
        assert set(order) == {slot for slot in in_use if slots.may_leave(slot)}, "the order of eviction is not complete"
        assert self.pinned_pages == sum(slots.pinned[slot] for slot in in_use), "pinned pages are miscounted"
        durable = sum(slots.frames[slot] for slot in in_use if slots.at_risk[slot])
        assert durable == self._durable_frames, "durable pages at risk are miscounted"
        assert +frames == {number: used for number, used in self._frames_of.items() if used}, "frames by namespace"
        assert +pages == {number: count for number, count in self._namespaces.items() if count}, "pages by namespace"
