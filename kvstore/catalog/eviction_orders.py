"""Eviction orders: which page leaves next, by slot size; one for each namespace with a quota, one for all others.

The pages of a namespace that gets its first quota move from the one to the other
(:mod:`kvstore.catalog.order_migration`).

An order holds the pages that may leave. A policy knows nothing of holds and dirty pages; here, held ones are passed
over, and a clean page nearly as old goes before a dirty one. A walk over a policy's order proposes a few pages for the
next evictions at once: pages that are held for long at its front must not cost each eviction a walk over all of them.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from kvstore.catalog.policies import EvictionPolicy, Prospect
from kvstore.catalog.policies.deferred import Deferred
from kvstore.catalog.slot_state import Slot
from kvstore.catalog.slot_table import SlotTable

_CLEAN_WINDOW = 32
"""How far behind the oldest page a clean one may be to leave in its place."""
_MOST_PROPOSED = 64
_PAGES_A_PROPOSAL = 256
"""One page for so many in the order is proposed by one walk."""


@dataclass(slots=True)
class _Order:
    """Numbers its pages for itself, so that tables of a policy are as long as it has pages."""

    policy: Deferred
    slots: array[int] = field(default_factory=lambda: array("I"))
    """By number: the slot."""
    free: array[int] = field(default_factory=lambda: array("I"))
    """Numbers that are no page's."""
    proposed: deque[tuple[Slot, int]] = field(default_factory=deque)
    """Pages that leave next, each with its last use when it was proposed."""

    @property
    def pages(self) -> int:
        return len(self.slots) - len(self.free)


class EvictionOrders:
    """All orders of one arena. The columns ``rank`` and ``apart`` of the slot table are changed here only."""

    def __init__(self, new_policy: Callable[[], EvictionPolicy], slots: SlotTable) -> None:
        self._new_policy = new_policy
        self._slots = slots
        self._orders: dict[int, dict[int, _Order]] = {}
        """Slot size in frames → number → order."""
        self._own: set[int] = set()
        self._moving: set[int] = set()
        """Of these: namespaces with pages in the common order, too."""

    def give_own(self, namespace: int, *, moving: bool) -> None:
        """From now on this namespace's pages come into an order of their own. ``moving``: it has pages in the common
        one, which ``move`` brings there."""
        self._own.add(namespace)
        if moving:
            self._moving.add(namespace)

    def end_move(self, namespace: int) -> None:
        """None of its pages is in the common order any more."""
        self._moving.discard(namespace)

    def is_moving(self, namespace: int) -> bool:
        """Whether some of its pages may be in the common order, though it has an order of its own."""
        return namespace in self._moving

    def has_own(self, namespace: int) -> bool:
        """Whether this namespace's pages are in an order of their own."""
        return namespace in self._own

    def drop(self, namespace: int) -> None:
        """The namespace has no pages any more, and never will."""
        self._own.discard(namespace)
        self._moving.discard(namespace)
        for orders in self._orders.values():
            if namespace in orders and not orders[namespace].pages:
                del orders[namespace]

    def enter(self, pages: Sequence[tuple[Slot, Slot | None]]) -> None:
        """Pages of one namespace and size may leave from now on.

        Args:
            pages: slot of each, head of the prefix first; and of the same namespace, the page before it, if that is
                here.
        """
        slots, (first, _) = self._slots, pages[0]
        namespace, frames = slots.namespace[first], slots.frames[first]
        frames_of, apart_of, rank, may_leave = slots.frames, slots.apart, slots.rank, slots.may_leave
        apart = namespace in self._own
        order = self._order(frames, namespace if apart else 0)
        numbers, free = order.slots, order.free
        entered: list[tuple[int, bytes, int | None]] = []
        coming = [slot for slot, _ in pages]
        unnumbered = set(coming)
        for (slot, parent), key in zip(pages, slots.keys(coming), strict=True):
            unnumbered.discard(slot)
            apart_of[slot] = apart
            if free:
                number = free.pop()
                numbers[number] = slot
            else:
                number = len(numbers)
                numbers.append(slot)
            rank[slot] = number
            before = None
            if (
                parent is not None
                and parent not in unnumbered  # whoever names his own tail contradicts himself
                and frames_of[parent] == frames
                and apart_of[parent] == apart
                and may_leave(parent)
            ):
                before = rank[parent]
            entered.append((number, key, before))
        order.policy.insert_all(entered)

    def leave(self, slot: Slot, *, lost: bool) -> None:
        """It may not leave any more. ``lost``: it has left, to make room."""
        self.leave_all((slot,), lost=lost)

    def leave_all(self, leaving: Sequence[Slot], *, lost: bool) -> None:
        """:meth:`leave` for many slots, in this order."""
        frames, namespace, apart, rank = self._slots.frames, self._slots.namespace, self._slots.apart, self._slots.rank
        for (size, number), some in groupby(
            leaving, lambda slot: (frames[slot], namespace[slot] if apart[slot] else 0)
        ):
            order = self._order(size, number)
            numbers = [rank[slot] for slot in some]
            order.policy.remove_all(numbers, lost=lost)
            order.free.extend(numbers)

    def move(self, slot: Slot, parent: Slot | None) -> None:
        """From the common order into its namespace's own; the rest as in ``enter``. Both are told at once: what is put
        off is worked out in larger pieces."""
        common, number = self._of(slot), self._slots.rank[slot]
        self.enter([(slot, parent)])
        self._of(slot).policy.catch_up()
        common.policy.remove(number, lost=False)
        common.free.append(number)
        common.policy.catch_up()

    def remembers(self, key: bytes, namespace: int, frames: int) -> bool:
        """Whether a page with slots of this size is known to have left to make room."""
        order = self._orders.get(frames, {}).get(namespace if namespace in self._own else 0)
        return order is not None and order.policy.remembers(key)

    def prospect(self, slot: Slot) -> Prospect | None:
        """What is expected of a resident page; None: nothing is known of it, as of one that may not leave now."""
        return self._of(slot).policy.prospect(self._slots.rank[slot]) if self._slots.may_leave(slot) else None

    def touch(self, slots: Sequence[Slot]) -> None:
        """Pages of a prefix were stored or are wanted, head first."""
        for policy, ranks in self._ranks(slots):
            policy.touch(ranks)

    def use(self, slots: Sequence[Slot]) -> None:
        """A load read these pages of a prefix, head first."""
        for policy, ranks in self._ranks(slots):
            policy.use(ranks)

    def catch_up(self) -> None:
        """Work out what was left for later."""
        for orders in self._orders.values():
            for order in orders.values():
                order.policy.catch_up()

    def first_of(self, namespace: int, frames: int) -> Slot | None:
        """The page that leaves next for another one of a namespace with an order of its own."""
        order = self._orders.get(frames, {}).get(namespace)
        return self._first(order) if order is not None else None

    def first_of_any(self, namespaces: Iterable[int]) -> Slot | None:
        """Of the pages that leave next from namespaces with orders of their own, whatever their size, that which was
        used longest ago."""
        wanted, used = set(namespaces), self._slots.used
        orders = [order for sizes in self._orders.values() for number, order in sizes.items() if number in wanted]
        firsts = [slot for order in orders if order.pages and (slot := self._first(order)) is not None]
        return min(firsts, key=used.__getitem__, default=None)

    def first(self, frames: int, most: int) -> list[Slot]:
        """Pages of this slot size that leave next, at most so many, and none if there is none; of several orders the
        one whose first page was used longest ago."""
        orders = [order for order in self._orders.get(frames, {}).values() if order.pages]
        if len(orders) == 1:
            return self._some(orders[0], most)
        firsts = [some[0] for order in orders if (some := self._some(order, 1))]
        return [min(firsts, key=self._slots.used.__getitem__)] if firsts else []

    def slots(self) -> Iterator[Slot]:
        """Each slot that may leave."""
        for orders in self._orders.values():
            for order in orders.values():
                yield from map(order.slots.__getitem__, order.policy.victims())

    def _of(self, slot: Slot) -> _Order:
        """The order of a slot that is in one, or enters one."""
        slots = self._slots
        return self._order(slots.frames[slot], slots.namespace[slot] if slots.apart[slot] else 0)

    def _order(self, frames: int, number: int) -> _Order:
        try:
            return self._orders[frames][number]
        except KeyError:
            order = self._orders.setdefault(frames, {})[number] = _Order(Deferred(self._new_policy()))
            return order

    def _ranks(self, slots: Sequence[Slot]) -> list[tuple[EvictionPolicy, list[int]]]:
        """Pages of one size and namespace, but for those that are in no order: their numbers in their order, or two."""
        rank, may_leave, apart = self._slots.rank, self._slots.may_leave, self._slots.apart
        frames, namespace = self._slots.frames[slots[0]], self._slots.namespace[slots[0]]
        if namespace not in self._moving:
            number = namespace if namespace in self._own else 0
            return [(self._order(frames, number).policy, [rank[slot] for slot in slots if may_leave(slot)])]
        ranks: dict[int, list[int]] = {0: [], namespace: []}
        for slot in filter(may_leave, slots):
            ranks[namespace if apart[slot] else 0].append(rank[slot])
        return [(self._order(frames, number).policy, some) for number, some in ranks.items() if some]

    def _first(self, order: _Order) -> Slot | None:
        some = self._some(order, 1)
        return some[0] if some else None

    def _some(self, order: _Order, most: int) -> list[Slot]:
        """Pages of an order that leave next: one or more of those that are proposed, none if there is none."""
        slots, proposed = self._slots, order.proposed
        used_last, may_leave, holds = slots.used, slots.may_leave, slots.holds
        some: list[Slot] = []
        for again in (True, False):
            while proposed:
                slot, used = proposed.popleft()
                if used_last[slot] == used and may_leave(slot) and not holds[slot]:
                    some.append(slot)
                    if len(some) == most:
                        break
            if some or not again:
                break
            self._propose(order)
        proposed.extendleft([(slot, used_last[slot]) for slot in reversed(some)])  # it is not said that they leave
        return some

    def _propose(self, order: _Order) -> None:
        most = max(1, min(order.pages // _PAGES_A_PROPOSAL, _MOST_PROPOSED))
        clean: list[tuple[Slot, int]] = []
        dirty: list[tuple[Slot, int]] = []
        slots = self._slots
        for number in order.policy.victims():
            slot = order.slots[number]
            if not slots.holds[slot]:
                (dirty if slots.dirty[slot] else clean).append((slot, slots.used[slot]))
                if len(clean) >= most or len(dirty) >= _CLEAN_WINDOW:
                    break
        order.proposed.extend(clean or dirty)
