"""The bytes of the headers file: other processes map them, and later versions read them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.arena import format as fmt


def test_a_header_is_64_bytes_in_a_fixed_order() -> None:
    assert fmt.HEADER.itemsize == fmt.HEADER_BYTES == 64
    offsets = {name: fmt.HEADER.fields[name][1] for name in fmt.HEADER.names}
    assert offsets == {
        "generation": 0,
        "hash": 8,
        "checksum": 40,
        "sequence": 48,
        "length": 56,
        "namespace": 60,
        "owner": 62,
    }
    assert fmt.HEADER_BODY.size == fmt.HEADER_BYTES - fmt.BODY_OFFSET


def test_nothing_lies_over_anything_else() -> None:
    assert fmt.COUNTERS_OFFSET + 8 * len(fmt.COUNTERS) <= fmt.UNITS_OFFSET
    assert fmt.UNITS_OFFSET + fmt.MAX_UNITS * fmt.UNIT.itemsize <= fmt.SLOTS_OFFSET
    assert fmt.SLOTS_OFFSET % 64 == 0, "generations must be aligned"


def test_superblock() -> None:
    block = fmt.Superblock(1 << 30, 1 << 24, bytes(range(16)))
    packed = block.pack()
    assert len(packed) <= fmt.COUNTERS_OFFSET
    assert fmt.Superblock.unpack(packed + b"more") == block
    retired = packed[: fmt.RETIRED_OFFSET] + fmt.RETIRED + packed[fmt.RETIRED_OFFSET + len(fmt.RETIRED) :]
    assert fmt.Superblock.unpack(retired) == block._replace(retired=1)


@pytest.mark.parametrize("place", range(16))
def test_a_superblock_of_another_format_is_none(place: int) -> None:
    packed = bytearray(fmt.Superblock(1 << 30, 1 << 24, bytes(16)).pack())
    packed[place] ^= 1
    assert fmt.Superblock.unpack(packed) is None


def test_a_superblock_that_is_cut_off_is_none() -> None:
    packed = fmt.Superblock(1 << 30, 1 << 24, bytes(16)).pack()
    assert fmt.Superblock.unpack(packed[:-1]) is None
    assert fmt.Superblock.unpack(b"") is None


@given(st.integers(1 << 16, 1 << 42))
def test_any_arena_is_cut_into_units(size: int) -> None:
    unit = fmt.unit_bytes_for(size)
    assert unit % fmt.FRAME_BYTES == 0
    assert 1 <= size // unit <= fmt.MAX_UNITS
    assert size - size // unit * unit <= size / 16, "too much is rounded away"


@pytest.mark.parametrize(("length", "frames"), [(1, 1), (4096, 1), (4097, 2), (2 << 20, 512)])
def test_frames(length: int, frames: int) -> None:
    assert fmt.frames_for(length) == frames
