"""Which page leaves next: orders of eviction by slot size, one for each namespace with a quota and one for all others.

An order holds the pages that may leave. A policy knows nothing of holds and dirty pages; here, held ones are passed
over, and a clean page nearly as old goes before a dirty one. A walk over a policy's order proposes a few pages for the
next evictions at once: pages that are held for long at its front must not cost each eviction a walk over all of them.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from kvstore.eviction import EvictionPolicy
from kvstore.slot import Slot
from kvstore.slot_table import SlotTable

_CLEAN_WINDOW = 32
"""How far behind the oldest page a clean one may be to leave in its place."""
_MOST_PROPOSED = 64
_PAGES_A_PROPOSAL = 256
"""One page for so many in the order is proposed by one walk."""


@dataclass(slots=True)
class _Order:
    """Numbers its pages for itself, so that tables of a policy are as long as it has pages."""

    policy: EvictionPolicy
    slots: array[int] = field(default_factory=lambda: array("I"))
    """By number: the slot."""
    free: array[int] = field(default_factory=lambda: array("I"))
    """Numbers that are no page's."""
    proposed: deque[tuple[Slot, int]] = field(default_factory=deque)
    """Pages that leave next, each with its last use when it was proposed."""

    @property
    def pages(self) -> int:
        return len(self.slots) - len(self.free)


class Orders:
    """All orders of one arena.

    Args:
        new_policy: makes a policy.
        slots: what is known of each slot; the column ``rank`` is changed here only.
    """

    def __init__(self, new_policy: Callable[[], EvictionPolicy], slots: SlotTable) -> None:
        self._new_policy = new_policy
        self._slots = slots
        self._orders: dict[int, dict[int, _Order]] = {}
        """Slot size in frames → number → order."""
        self._own: set[int] = set()

    def give_own(self, namespace: int) -> None:
        """From now on, while none of its pages is in an order, this namespace's are in one of their own."""
        self._own.add(namespace)

    def has_own(self, namespace: int) -> bool:
        """Whether this namespace's pages are in an order of their own."""
        return namespace in self._own

    def drop(self, namespace: int) -> None:
        """The namespace has no pages any more, and never will."""
        self._own.discard(namespace)
        for orders in self._orders.values():
            if namespace in orders and not orders[namespace].pages:
                del orders[namespace]

    def enter(self, slot: Slot, parent: Slot | None) -> None:
        """A page may leave from now on. ``parent``: of the same namespace, the page before it, if that is here."""
        order = self._of(slot)
        slots = self._slots
        if order.free:
            number = order.free.pop()
            order.slots[number] = slot
        else:
            number = len(order.slots)
            order.slots.append(slot)
        slots.rank[slot] = number
        if parent is not None and not (slots.frames[parent] == slots.frames[slot] and slots.may_leave(parent)):
            parent = None
        order.policy.insert(number, slots.key(slot), slots.rank[parent] if parent is not None else None)

    def leave(self, slot: Slot, *, lost: bool) -> None:
        """It may not leave any more. ``lost``: it has left, to make room."""
        order = self._of(slot)
        number = self._slots.rank[slot]
        order.policy.remove(number, lost=lost)
        order.free.append(number)

    def remembers(self, key: bytes, namespace: int, frames: int) -> bool:
        """Whether a page with slots of this size is known to have left to make room."""
        order = self._orders.get(frames, {}).get(namespace if namespace in self._own else 0)
        return order is not None and order.policy.remembers(key)

    def touch(self, slots: Sequence[Slot]) -> None:
        """Pages of a prefix were stored or are wanted, head first."""
        self._of(slots[0]).policy.touch(self._ranks(slots))

    def use(self, slots: Sequence[Slot]) -> None:
        """A load read these pages of a prefix, head first."""
        self._of(slots[0]).policy.use(self._ranks(slots))

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

    def first(self, frames: int) -> Slot | None:
        """The page of this slot size that leaves next; of the orders' first ones, that which was used longest ago."""
        used = self._slots.used
        first: Slot | None = None
        for order in self._orders.get(frames, {}).values():
            slot = self._first(order) if order.pages else None
            if slot is not None and (first is None or used[slot] < used[first]):
                first = slot
        return first

    def slots(self) -> Iterator[Slot]:
        """Each slot that may leave."""
        for orders in self._orders.values():
            for order in orders.values():
                yield from map(order.slots.__getitem__, order.policy.victims())

    def _of(self, slot: Slot) -> _Order:
        frames, namespace = self._slots.frames[slot], self._slots.namespace[slot]
        number = namespace if namespace in self._own else 0
        try:
            return self._orders[frames][number]
        except KeyError:
            order = self._orders.setdefault(frames, {})[number] = _Order(self._new_policy())
            return order

    def _ranks(self, slots: Sequence[Slot]) -> list[int]:
        """Their numbers in their order, but for those that are in none."""
        rank, may_leave = self._slots.rank, self._slots.may_leave
        return [rank[slot] for slot in slots if may_leave(slot)]

    def _first(self, order: _Order) -> Slot | None:
        slots = self._slots
        for again in (True, False):
            while order.proposed:
                slot, used = order.proposed[0]
                if slots.used[slot] == used and slots.may_leave(slot) and not slots.holds[slot]:
                    return slot
                order.proposed.popleft()
            if again:
                self._propose(order)
        return None

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
