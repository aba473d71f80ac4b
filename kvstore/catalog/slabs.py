"""The slab allocator: where slots lie in the arena. A slab is a run of units, cut into slots of one page size.

Pure bookkeeping: no memory is touched here. A slab whose slots are all free goes back to the free units when another
page size needs them; giving away a slab that is in use is the catalog's decision (its pages must leave first).
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

_MOST_UNITS_TRIED = 8
"""A slab takes one to eight times the units that one slot needs, whichever leaves the least unused."""


@dataclass(slots=True)
class Slab:
    """A run of units cut into slots of one size."""

    first_unit: int
    units: int
    slot_frames: int
    first_frame: int
    slots: int
    free: deque[int] = field(default_factory=deque)
    """Free slots (their first frames). The one that has been free for longest goes first: its readers are gone."""
    used: int = 0
    """When any page of it was used last, on the catalog's clock: pages that have left count, too."""
    _numbers: array[int] = field(init=False)
    """By place in the slab: the number by which the catalog knows the slot that is in use there; -1: none."""

    def __post_init__(self) -> None:
        self._numbers = array("i", [-1]) * self.slots
        self.free.extend(self.frames())

    @property
    def empty(self) -> bool:
        """Whether no slot is in use."""
        return len(self.free) == self.slots

    def frames(self) -> range:
        """The first frame of each slot."""
        return range(self.first_frame, self.first_frame + self.slots * self.slot_frames, self.slot_frames)

    def note(self, frame: int, number: int) -> None:
        """The slot at ``frame`` is in use under this number; -1: it is free."""
        self._numbers[(frame - self.first_frame) // self.slot_frames] = number

    def in_use(self) -> list[int]:
        """The numbers of its slots in use."""
        return [number for number in self._numbers if number >= 0]


class Slabs:
    """The allocator over ``units`` units of ``unit_frames`` frames each."""

    def __init__(self, units: int, unit_frames: int) -> None:
        self.units = units
        self.unit_frames = unit_frames
        self._owner: list[Slab | None] = [None] * units
        self._by_size: dict[int, dict[int, Slab]] = {}
        """Slot size in frames → first unit → slab."""
        self._with_free_slots: dict[int, dict[int, Slab]] = {}
        """The same, slabs with a free slot only."""
        self._empty: dict[int, Slab] = {}
        self._free_units = units
        self.changed = False
        """Whether a slab was made or given back since ``unit_table`` was called last."""

    def allocate(self, slot_frames: int) -> int | None:
        """A free slot of this size (its first frame), or None: then something has to leave first."""
        frames = self.allocate_some(slot_frames, 1)
        return frames[0] if frames else None

    def allocate_some(self, slot_frames: int, most: int) -> list[int]:
        """Up to ``most`` of them; fewer, or none: then something has to leave first."""
        with_free_slots = self._with_free_slots.setdefault(slot_frames, {})
        frames: list[int] = []
        while len(frames) < most and (with_free_slots or self._grow(slot_frames)):
            slab = next(iter(with_free_slots.values()))
            self._empty.pop(slab.first_unit, None)
            free = slab.free
            while free and len(frames) < most:
                frames.append(free.popleft())
            if not free:
                del with_free_slots[slab.first_unit]
        return frames

    def free_all(self, frames: Sequence[int]) -> None:
        """Take slots back."""
        owner, unit_frames = self._owner, self.unit_frames
        for frame in frames:
            slab = owner[frame // unit_frames]
            assert slab is not None, f"frame {frame} lies in no slab"
            if not slab.free:
                self._with_free_slots[slab.slot_frames][slab.first_unit] = slab
            slab.free.append(frame)
            slab.note(frame, -1)
            if len(slab.free) == slab.slots:
                self._empty[slab.first_unit] = slab

    def slab_of(self, frame: int) -> Slab:
        """The slab that a slot in use lies in."""
        slab = self._owner[frame // self.unit_frames]
        if slab is None:
            raise AssertionError(f"frame {frame} lies in no slab")
        return slab

    def slabs(self) -> Iterator[Slab]:
        """Every slab, in no order that matters."""
        for by_unit in self._by_size.values():
            yield from by_unit.values()

    def slabs_of_size(self, slot_frames: int) -> int:
        """How many slabs this page size has."""
        return len(self._by_size.get(slot_frames, ()))

    def shape(self, slot_frames: int) -> int:
        """Units of a slab for slots of this size."""
        least = -(-slot_frames // self.unit_frames)
        best, best_waste = least, 1.0
        for units in range(least, min(least * _MOST_UNITS_TRIED, max(self.units // 2, least)) + 1):
            frames = units * self.unit_frames
            waste = frames % slot_frames / frames
            if waste < best_waste - 1e-9:
                best, best_waste = units, waste
            if waste <= 1 / 16:
                break
        return best

    def windows(self, slot_frames: int) -> Iterator[list[Slab]]:
        """Ways to have one more slab of this size: each a set of slabs that would have to be emptied."""
        need = self.shape(slot_frames)
        for start in range(self.units - need + 1):
            yield list({id(slab): slab for slab in self._owner[start : start + need] if slab is not None}.values())

    def release(self, slab: Slab) -> None:
        """Give an empty slab's units back."""
        if not slab.empty:
            raise AssertionError("a slab in use can't be released")
        del self._by_size[slab.slot_frames][slab.first_unit]
        self._with_free_slots[slab.slot_frames].pop(slab.first_unit, None)
        del self._empty[slab.first_unit]
        self.changed = True
        self._free_units += slab.units
        for unit in range(slab.first_unit, slab.first_unit + slab.units):
            self._owner[unit] = None

    def restore(self, first_unit: int, units: int, slot_frames: int, used: set[int]) -> None:
        """Put back a slab that a takeover found, with the slots in ``used`` (first frames) in use."""
        slab = self._make(first_unit, units, slot_frames)
        slab.free = deque(frame for frame in slab.free if frame not in used)
        if not slab.empty:
            del self._empty[first_unit]
        if not slab.free:
            del self._with_free_slots[slot_frames][first_unit]

    def unit_table(self) -> list[tuple[int, int]]:
        """For each unit its slab's first unit and slot size in frames; ``(0, 0)`` for a free one."""
        self.changed = False
        return [(slab.first_unit, slab.slot_frames) if slab else (0, 0) for slab in self._owner]

    def check_integrity(self, used: dict[int, int]) -> None:
        """Recount everything against ``used`` (first frame → frames of each slot in use).

        Raises:
            AssertionError: something does not add up.
        """
        seen: set[int] = set()
        for slab in self.slabs():
            assert all(self._owner[unit] is slab for unit in range(slab.first_unit, slab.first_unit + slab.units)), (
                "a slab's units name another owner"
            )
            free = set(slab.free)
            assert len(free) == len(slab.free), "a slot is free twice"
            for frame in slab.frames():
                assert (frame in free) != (used.get(frame) == slab.slot_frames), f"slot {frame} is free and in use"
                seen.add(frame)
            assert slab.empty == (slab.first_unit in self._empty), "an empty slab is not known"
            is_listed = slab.first_unit in self._with_free_slots.get(slab.slot_frames, {})
            assert is_listed == bool(slab.free), "a slab's free slots are not known"
        assert self._free_units == sum(slab is None for slab in self._owner), "free units are miscounted"
        assert set(used) <= seen, "a slot in use lies in no slab"

    def _grow(self, slot_frames: int) -> bool:
        """Make one more slab of this size from free units, or from slabs of other sizes that are empty."""
        least = -(-slot_frames // self.unit_frames)
        for slab in [slab for slab in self._empty.values() if slab.slot_frames != slot_frames]:
            if self._free_units >= least and self._free_run(least) is not None:
                break
            self.release(slab)
        if self._free_units < least:
            return False
        for units in range(self.shape(slot_frames), least - 1, -1):
            start = self._free_run(units)
            if start is not None:
                self._make(start, units, slot_frames)
                return True
        return False

    def _make(self, first_unit: int, units: int, slot_frames: int) -> Slab:
        first_frame = first_unit * self.unit_frames
        slots = units * self.unit_frames // slot_frames
        slab = Slab(first_unit, units, slot_frames, first_frame, slots)
        self._by_size.setdefault(slot_frames, {})[first_unit] = slab
        self._with_free_slots.setdefault(slot_frames, {})[first_unit] = slab
        self._empty[first_unit] = slab
        self._free_units -= units
        self.changed = True
        for unit in range(first_unit, first_unit + units):
            self._owner[unit] = slab
        return slab

    def _free_run(self, need: int) -> int | None:
        run = 0
        for unit, slab in enumerate(self._owner):
            run = 0 if slab is not None else run + 1
            if run == need:
                return unit - need + 1
        return None
