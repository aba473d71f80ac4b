"""A queue of slots that any of them can leave, at 8 bytes for each slot that there is."""

from __future__ import annotations

from array import array
from collections.abc import Iterator

from kvstore.slot import Slot

_END = 0
"""The place before the first slot and behind the last one; a slot's own is its number + 1."""
_OUT = 0xFFFFFFFF


class SlotQueue:
    """Slots in the order in which they came: a ring that is linked by numbers."""

    def __init__(self) -> None:
        self._next = array("I", [_END])
        self._previous = array("I", [_END])
        self._count = 0

    def copy(self) -> SlotQueue:
        """The same slots in the same order."""
        other = SlotQueue()
        other._next, other._previous, other._count = self._next[:], self._previous[:], self._count
        return other

    def __len__(self) -> int:
        return self._count

    def __contains__(self, slot: object) -> bool:
        return isinstance(slot, int) and slot + 1 < len(self._next) and self._next[slot + 1] != _OUT

    def __iter__(self) -> Iterator[Slot]:
        place = self._next[_END]
        while place != _END:
            yield place - 1
            place = self._next[place]

    def append(self, slot: Slot) -> None:
        """Put a slot at the end, that is not here."""
        assert slot not in self, f"slot {slot} is queued twice"
        place = slot + 1
        more = place + 1 - len(self._next)
        if more > 0:
            self._next.extend([_OUT] * more)
            self._previous.extend([_OUT] * more)
        last = self._previous[_END]
        self._next[last], self._previous[place] = place, last
        self._next[place], self._previous[_END] = _END, place
        self._count += 1

    def remove(self, slot: Slot) -> None:
        """Take a slot out, that is here."""
        assert slot in self, f"slot {slot} is not queued"
        place = slot + 1
        before, behind = self._previous[place], self._next[place]
        self._next[before], self._previous[behind] = behind, before
        self._next[place] = _OUT
        self._count -= 1
