"""Compression of KV pages of 16-bit floats: lz4 over bit-shuffled bytes, for namespaces where that pays. No I/O.

Of a 16-bit float the low byte is noise, and goes as it is. The high byte has sign and exponent, whose upper bits hardly
change from one value to the next: with equal bits side by side, lz4 finds long runs.

::

    length of what follows, compressed u32 · lz4 of the high bytes, shuffled · the low bytes

A page is sent once and received at least once. Compressing pays when both together, with packing and unpacking, are
faster than with the page as it is. So a fast network and a slow processor say no, whatever the ratio.
"""

from __future__ import annotations

import struct
import threading
from collections import OrderedDict
from dataclasses import dataclass

import lz4.block
import numpy as np
import numpy.typing as npt

from kvstore.tiers.tier import PageBytes

RAW = 0
BIT_SHUFFLED = 1
"""The codec's number in a chunk's header. A page that it does not make smaller is stored as it is there, too."""

FIRST_SAMPLES = 4
"""Chunks of a namespace of which a page is tried at first, each."""
SAMPLE_EVERY = 256
"""Afterwards one page is tried in so many chunks: pages change, and so does the network."""
MOST_NAMESPACES = 1024
_WEIGHT = 0.25
"""Of a new measurement, in the running mean."""
_HASTE = 1.2
"""Compressing must be faster by this factor: it takes processor time from others."""

_LENGTH = struct.Struct(">I")
_GRAIN = 16
"""A page's length must be a multiple: eight values of two bytes."""
_MOST_KEPT = 0.95
"""A page that stays longer than this part of it is stored as it is: unpacking would cost more than it saves."""
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
    if _LENGTH.size + len(packed) + len(high) > _MOST_KEPT * len(page):
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


@dataclass(slots=True)
class _Measured:
    chunks: int = 0
    samples: int = 0
    kept: float = 1.0
    """Compressed length for each byte."""
    seconds: float = 0.0
    """To pack and unpack one byte."""


class CodecChoice:
    """Whether compressing pays, by what was measured of namespaces and of the network. Safe for threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: OrderedDict[bytes, _Measured] = OrderedDict()
        self._wire_seconds: float | None = None

    def sent(self, size: int, seconds: float) -> None:
        """So many bytes went over the network in so many seconds."""
        with self._lock:
            self._wire_seconds = _mean(self._wire_seconds, seconds / size)

    def wants_sample(self, namespace: bytes) -> bool:
        """Whether to try a page of the chunk at hand."""
        with self._lock:
            known = self._of(namespace)
            known.chunks += 1
            return known.samples < FIRST_SAMPLES or known.chunks % SAMPLE_EVERY == 0

    def sampled(self, namespace: bytes, size: int, compressed: int, seconds: float) -> None:
        """A page of ``size`` bytes had ``compressed`` ones, and took so long to be packed and unpacked."""
        with self._lock:
            known = self._of(namespace)
            first = not known.samples
            known.kept = _mean(None if first else known.kept, compressed / size)
            known.seconds = _mean(None if first else known.seconds, seconds / size)
            known.samples += 1

    def pays(self, namespace: bytes) -> bool:
        """Whether to compress this namespace's pages."""
        with self._lock:
            known = self._of(namespace)
            if known.samples < FIRST_SAMPLES or self._wire_seconds is None:
                return False
            return known.seconds * _HASTE < 2 * self._wire_seconds * (1 - known.kept)

    def _of(self, namespace: bytes) -> _Measured:
        known = self._known.setdefault(namespace, _Measured())
        self._known.move_to_end(namespace)
        if len(self._known) > MOST_NAMESPACES:
            self._known.popitem(last=False)
        return known


def _mean(old: float | None, new: float) -> float:
    return new if old is None else (1 - _WEIGHT) * old + _WEIGHT * new
