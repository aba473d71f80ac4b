"""Which page leaves next: orders of eviction by slot size, one for each namespace with a quota and one for all others.

An order holds the pages that may leave. A policy knows nothing of holds and dirty pages; here, held ones are passed
over, and a clean page nearly as old goes before a dirty one. A walk over a policy's order proposes a few pages for the
next evictions at once: pages that are held for long at its front must not cost each eviction a walk over all of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from kvstore.eviction import EvictionPolicy
from kvstore.slot import Slot

_CLEAN_WINDOW = 32
"""How far behind the oldest page a clean one may be to leave in its place."""
_MOST_PROPOSED = 64
_PAGES_A_PROPOSAL = 256
"""One page for so many in the order is proposed by one walk."""


@dataclass(slots=True)
class _Order:
    policy: EvictionPolicy
    pages: int = 0
    proposed: deque[tuple[Slot, int]] = field(default_factory=deque)
    """Pages that leave next, each with its last use when it was proposed."""


class Orders:
    """All orders of one arena.

    Args:
        new_policy: makes a policy.
        slot_of: the slot in use at a frame.
    """

    def __init__(self, new_policy: Callable[[], EvictionPolicy], slot_of: Callable[[int], Slot]) -> None:
        self._new_policy = new_policy
        self._slot_of = slot_of
        self._orders: dict[int, dict[int, _Order]] = {}
        """Slot size in frames → number → order."""
        self._own: set[int] = set()

    def give_own(self, namespace: int) -> None:
        """From now on, before it has pages, this namespace's pages are in an order of their own."""
        self._own.add(namespace)

    def drop(self, namespace: int) -> None:
        """The namespace has no pages any more, and never will."""
        self._own.discard(namespace)
        for orders in self._orders.values():
            if namespace in orders and not orders[namespace].pages:
                del orders[namespace]

    def enter(self, slot: Slot, parent: Slot | None) -> None:
        """A page may leave from now on. ``parent``: the page before it in its chain, if it is here."""
        order = self._of(slot)
        behind = parent is not None and parent.may_leave and self._of(parent) is order
        order.policy.insert(slot.frame, slot.key, parent.frame if parent is not None and behind else None)
        order.pages += 1

    def leave(self, slot: Slot, *, lost: bool) -> None:
        """It may not leave any more. ``lost``: it has left, to make room."""
        order = self._of(slot)
        order.policy.remove(slot.frame, lost=lost)
        order.pages -= 1

    def touch(self, slots: Sequence[Slot]) -> None:
        """Pages of a prefix were stored or are wanted, head first."""
        self._of(slots[0]).policy.touch([slot.frame for slot in slots if slot.may_leave])

    def use(self, slots: Sequence[Slot]) -> None:
        """A load read these pages of a prefix, head first."""
        self._of(slots[0]).policy.use([slot.frame for slot in slots if slot.may_leave])

    def first_of(self, namespace: int, frames: int) -> Slot | None:
        """The page that leaves next for another one of a namespace with an order of its own."""
        order = self._orders.get(frames, {}).get(namespace)
        return self._first(order) if order is not None else None

    def first(self, frames: int) -> Slot | None:
        """The page of this slot size that leaves next; of the orders' first ones, that which was used longest ago."""
        firsts = [self._first(order) for order in self._orders.get(frames, {}).values() if order.pages]
        return min((slot for slot in firsts if slot is not None), key=lambda slot: slot.used, default=None)

    def frames(self) -> Iterator[int]:
        """The first frame of each slot that may leave."""
        for orders in self._orders.values():
            for order in orders.values():
                yield from order.policy.victims()

    def _of(self, slot: Slot) -> _Order:
        orders = self._orders.setdefault(slot.frames, {})
        number = slot.namespace if slot.namespace in self._own else 0
        if number not in orders:
            orders[number] = _Order(self._new_policy())
        return orders[number]

    def _first(self, order: _Order) -> Slot | None:
        for again in (True, False):
            while order.proposed:
                slot, used = order.proposed[0]
                if slot.used == used and slot.may_leave and not slot.holds:
                    return slot
                order.proposed.popleft()
            if again:
                self._propose(order)
        return None

    def _propose(self, order: _Order) -> None:
        most = max(1, min(order.pages // _PAGES_A_PROPOSAL, _MOST_PROPOSED))
        clean: list[tuple[Slot, int]] = []
        dirty: list[tuple[Slot, int]] = []
        for frame in order.policy.victims():
            slot = self._slot_of(frame)
            if not slot.holds:
                (dirty if slot.dirty else clean).append((slot, slot.used))
                if len(clean) >= most or len(dirty) >= _CLEAN_WINDOW:
                    break
        order.proposed.extend(clean or dirty)
