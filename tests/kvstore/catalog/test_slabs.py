"""Slots of any sizes never overlap, and units go from one size to another."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.catalog.slabs import Slabs

UNIT_FRAMES = 4
UNITS = 16
SIZES = [1, 2, 3, 4, 5, 7, 9, 16, 40, 64]


def grown(slabs: Slabs, size: int, slots: int) -> list[int]:
    frames = [slabs.allocate(size) for _ in range(slots)]
    assert None not in frames
    return [frame for frame in frames if frame is not None]


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_sequence_of_sizes_allocates_without_overlap(data: st.DataObject) -> None:
    slabs = Slabs(UNITS, UNIT_FRAMES)
    used: dict[int, int] = {}
    for _ in range(data.draw(st.integers(1, 60))):
        if used and data.draw(st.booleans()):
            frame = data.draw(st.sampled_from(sorted(used)))
            slabs.free_all([frame])
            del used[frame]
        else:
            size = data.draw(st.sampled_from(SIZES))
            frame = slabs.allocate(size)
            if frame is None:
                continue
            assert 0 <= frame <= UNITS * UNIT_FRAMES - size, "outside of the arena"
            taken = {each for first, frames in used.items() for each in range(first, first + frames)}
            assert taken.isdisjoint(range(frame, frame + size)), "over another slot"
            used[frame] = size
            assert slabs.slab_of(frame).slot_frames == size
        slabs.check_integrity(used)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.sampled_from(SIZES), min_size=1, max_size=30), st.data())
def test_what_was_written_down_is_put_back(sizes: list[int], data: st.DataObject) -> None:
    slabs = Slabs(UNITS, UNIT_FRAMES)
    used = {frame: size for size in sizes if (frame := slabs.allocate(size)) is not None}
    for frame in data.draw(st.lists(st.sampled_from(sorted(used)), unique=True)):
        slabs.free_all([frame])
        del used[frame]
    table = slabs.unit_table()
    again = Slabs(UNITS, UNIT_FRAMES)
    for unit in sorted({first for first, frames in table if frames}):
        size = table[unit][1]
        units = table.count((unit, size))
        again.restore(unit, units, size, {frame for frame in used if unit <= frame // UNIT_FRAMES < unit + units})
    again.check_integrity(used)
    assert again.unit_table() == table


@pytest.mark.parametrize("size", SIZES)
def test_one_size_fills_the_arena(size: int) -> None:
    slabs = Slabs(UNITS, UNIT_FRAMES)
    used: dict[int, int] = {}
    while (frame := slabs.allocate(size)) is not None:
        used[frame] = size
        slabs.check_integrity(used)
    assert sum(used.values()) > UNITS * UNIT_FRAMES * 0.6, "most of the arena stays empty"


def test_empty_slabs_go_to_another_size() -> None:
    slabs = Slabs(UNITS, UNIT_FRAMES)
    small = grown(slabs, 1, UNITS * UNIT_FRAMES)
    assert slabs.allocate(8) is None
    for frame in small:
        slabs.free_all([frame])
    large = grown(slabs, 8, UNITS * UNIT_FRAMES // 8)
    slabs.check_integrity(dict.fromkeys(large, 8))
    assert slabs.slabs_of_size(1) == 0


def test_slabs_in_use_stay() -> None:
    """One slot in use keeps its slab, whatever the others ask for."""
    slabs = Slabs(UNITS, UNIT_FRAMES)
    small = grown(slabs, 1, UNITS * UNIT_FRAMES)
    for frame in small[1:]:
        slabs.free_all([frame])
    used = {small[0]: 1}
    while (frame := slabs.allocate(4)) is not None:
        used[frame] = 4
        slabs.check_integrity(used)
    assert len(used) == UNITS


def test_a_slab_in_use_cannot_be_released() -> None:
    slabs = Slabs(UNITS, UNIT_FRAMES)
    frame = slabs.allocate(3)
    assert frame is not None
    with pytest.raises(AssertionError):
        slabs.release(slabs.slab_of(frame))


def test_a_slot_larger_than_the_arena_is_none() -> None:
    slabs = Slabs(UNITS, UNIT_FRAMES)
    assert slabs.allocate(UNITS * UNIT_FRAMES + 1) is None
    assert slabs.allocate(UNITS * UNIT_FRAMES) == 0


def test_integrity_finds_what_does_not_add_up() -> None:
    slabs = Slabs(UNITS, UNIT_FRAMES)
    frame = slabs.allocate(2)
    assert frame is not None
    slabs.check_integrity({frame: 2})
    for wrong in ({}, {frame: 1}, {frame: 2, frame + 1: 2}, {frame: 2, frame + 2: 2}, {frame: 2, 60: 1}):
        with pytest.raises(AssertionError):
            slabs.check_integrity(wrong)
    slabs.free_all([frame])
    slabs.free_all([frame])
    with pytest.raises(AssertionError):
        slabs.check_integrity({})


@pytest.mark.parametrize("unit_frames", [16, 100, 16384])
def test_a_slot_of_a_sixteenth_of_a_unit_or_less_never_lies_across_two(unit_frames: int) -> None:
    # A device registers the arena in parts that are whole units, and a page across two of them is copied more slowly.
    for frames in range(1, unit_frames // 16 + 1):
        assert Slabs(1024, unit_frames).shape(frames) == 1
