"""lz4 over bit-shuffled bytes: for KV pages of 16-bit floats, which plain lz4 can do nothing with.

Of a 16-bit float the low byte is noise, and goes as it is. The high byte has sign and exponent, whose upper bits hardly
change from one value to the next: with equal bits side by side, lz4 finds long runs.

::

    length of what follows, compressed u32 · lz4 of the high bytes, shuffled · the low bytes
"""

from __future__ import annotations

import struct

import lz4.block
import numpy as np
import numpy.typing as npt

from kvstore.tiers.tier import PageBytes

RAW = 0
BIT_SHUFFLED = 1
"""The codec's number in a chunk's header. A page that it does not make smaller is stored as it is there, too."""

_LENGTH = struct.Struct(">I")
_GRAIN = 16
"""A page's length must be a multiple: eight values of two bytes."""
_WORTH = 0.95
"""A page that stays longer than this part of it is not worth being unpacked."""
_BLOCK_BYTES = 32 << 10
"""Bytes that are shuffled together: little enough to stay in the processor's cache from pass to pass, and for lz4 not
to lose patience in a long stretch of noise before it comes to the next run."""
_STEPS = tuple(
    (np.uint64(shift), np.uint64(mask))
    for shift, mask in ((7, 0x00AA00AA00AA00AA), (14, 0x0000CCCC0000CCCC), (28, 0x00000000F0F0F0F0))
)


def compress(page: PageBytes) -> bytes | None:
    """The page's compressed form; None if that is hardly shorter."""
    if len(page) % _GRAIN or not len(page):
        return None
    high = np.ascontiguousarray(page[1::2])
    _shuffle(high)
    packed = lz4.block.compress(high.data, store_size=False)
    if _LENGTH.size + len(packed) + len(high) > _WORTH * len(page):
        return None
    return b"".join((_LENGTH.pack(len(packed)), packed, np.ascontiguousarray(page[0::2]).data))


def decompress(stored: PageBytes, into: PageBytes) -> bool:
    """Fill ``into`` with the page. False: this is no compressed page of that length."""
    half = len(into) // 2
    if len(into) % _GRAIN or len(stored) < _LENGTH.size + half:
        return False
    (length,) = _LENGTH.unpack_from(stored.data)
    if length != len(stored) - _LENGTH.size - half:
        return False
    try:
        unpacked = lz4.block.decompress(stored[_LENGTH.size : _LENGTH.size + length].data, uncompressed_size=half)
    except lz4.block.LZ4BlockError:
        return False
    if len(unpacked) != half:
        return False
    high = np.frombuffer(unpacked, np.uint8).copy()
    _unshuffle(high)
    into[1::2] = high
    into[0::2] = stored[_LENGTH.size + length :]
    return True


def _shuffle(data: PageBytes) -> None:
    """In each block, put the bits of one weight of all bytes side by side."""
    for at in range(0, len(data), _BLOCK_BYTES):
        block = data[at : at + _BLOCK_BYTES]
        _transpose_bits(block.view(np.uint64))
        block[:] = block.reshape(-1, 8).T.reshape(-1)


def _unshuffle(data: PageBytes) -> None:
    for at in range(0, len(data), _BLOCK_BYTES):
        block = data[at : at + _BLOCK_BYTES]
        block[:] = block.reshape(8, -1).T.reshape(-1)
        _transpose_bits(block.view(np.uint64))


def _transpose_bits(words: npt.NDArray[np.uint64]) -> None:
    """Turn each word, as eight bytes of eight bits, over its diagonal. Done twice it changes nothing."""
    swap = np.empty_like(words)
    for shift, mask in _STEPS:
        np.right_shift(words, shift, out=swap)
        swap ^= words
        swap &= mask
        words ^= swap
        np.left_shift(swap, shift, out=swap)
        words ^= swap
