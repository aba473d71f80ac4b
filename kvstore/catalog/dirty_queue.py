"""The queue of dirty slots: namespaces take turns, and any slot can leave it at once.

Linked lists in two columns, at 8 bytes for each slot that there is.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

from kvstore.catalog.slot_state import Slot

_END = 0xFFFFFFFF
_OUT = 0xFFFFFFFE


class DirtyQueue:
    """Dirty slots by namespace, in the order in which they came; the namespaces take turns."""

    def __init__(self) -> None:
        self._next = array("I")
        self._previous = array("I")
        self._ends: dict[int, list[int]] = {}
        """By namespace, the one whose turn is next first: the first and the last of its slots."""
        self._count = 0

    def copy(self) -> DirtyQueue:
        """The same slots in the same order."""
        other = DirtyQueue()
        other._next, other._previous, other._count = self._next[:], self._previous[:], self._count
        other._ends = {namespace: ends[:] for namespace, ends in self._ends.items()}
        return other

    def __len__(self) -> int:
        return self._count

    def __contains__(self, slot: object) -> bool:
        return isinstance(slot, int) and slot < len(self._next) and self._next[slot] != _OUT

    def __iter__(self) -> Iterator[Slot]:
        """All slots of each namespace, the one whose turn is next first."""
        for slot, _ in self._ends.values():
            while slot != _END:
                yield slot
                slot = self._next[slot]

    @property
    def namespaces(self) -> int:
        """How many have dirty slots."""
        return len(self._ends)

    def append(self, slot: Slot, namespace: int) -> None:
        """Put a slot that is not here behind the others of its namespace."""
        self.append_all((slot,), namespace)

    def append_all(self, slots: Sequence[Slot], namespace: int) -> None:
        """:meth:`append` for many slots, in this order."""
        more = max(slots, default=-1) + 1 - len(self._next)
        if more > 0:
            self._next.extend([_OUT] * more)
            self._previous.extend([_OUT] * more)
        following, previous = self._next, self._previous
        first, last = self._ends.get(namespace, (_END, _END))
        for slot in slots:
            assert following[slot] == _OUT, f"slot {slot} is queued twice"
            previous[slot], following[slot] = last, _END
            if last == _END:
                first = slot
            else:
                following[last] = slot
            last = slot
            self._count += 1
            self._ends[namespace] = [first, last]

    def remove(self, slot: Slot, namespace: int) -> None:
        """Take a slot out that is here."""
        self.remove_all((slot,), namespace)

    def remove_all(self, slots: Sequence[Slot], namespace: int) -> None:
        """:meth:`remove` for many slots."""
        following, previous = self._next, self._previous
        for slot in slots:
            assert slot in self, f"slot {slot} is not queued"
            before, behind = previous[slot], following[slot]
            ends = self._ends[namespace]
            if before != _END:
                following[before] = behind
            else:
                ends[0] = behind
            if behind != _END:
                previous[behind] = before
            else:
                ends[1] = before
            if ends[0] == _END:
                del self._ends[namespace]
            following[slot] = _OUT
            self._count -= 1

    def end_turn(self, namespace: int) -> None:
        """All other namespaces come before this one."""
        ends = self._ends.pop(namespace, None)
        if ends is not None:
            self._ends[namespace] = ends
