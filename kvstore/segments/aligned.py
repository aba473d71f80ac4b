"""Aligned memory for O_DIRECT: pages go to the system from where they are, where they lie on whole blocks.

A page whose address is aligned is written in place, but for the part of its last block that it does not fill; that
part, and any page that lies at an odd address, goes through aligned memory of the thread's own. Reads always do: one
that is late must not write into memory that has got another use meanwhile.

That memory is asked for in huge pages. A read into 512 scattered small ones is more pieces than a request to the device
may have: it is cut in several, and took up to twice as long, by where the pages happened to lie.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Sequence
from contextlib import suppress

import numpy as np

from kvstore.segments.record import BLOCK, ByteArray, padded

_HUGE_PAGE = 2 << 20
_KEPT_BYTES = 20 << 20  # a larger need is rare (a single page above it) and gets memory of its own


def aligned_empty(size: int) -> ByteArray:
    """``size`` bytes at a page-aligned address, zeroed."""
    return np.frombuffer(mmap.mmap(-1, padded(size) or BLOCK), dtype=np.uint8)[:size]


def _in_huge_pages(size: int) -> ByteArray:
    """At least ``size`` bytes, zeroed, in huge pages where the system gives them."""
    whole = -(-size // _HUGE_PAGE) * _HUGE_PAGE
    memory = mmap.mmap(-1, whole + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    array = np.frombuffer(memory, np.uint8)
    first = -array.__array_interface__["data"][0] % _HUGE_PAGE
    return array[first : first + whole]


def is_aligned(array: ByteArray) -> bool:
    """Whether the array's memory starts on a whole block."""
    try:
        address = ctypes.addressof(
            ctypes.c_char.from_buffer(array.data)
        )  # takes a third of the time of NumPy's own answer
    except (TypeError, ValueError):  # read-only, or empty
        address = array.__array_interface__["data"][0]
    return address % BLOCK == 0


class BounceBuffer(threading.local):
    """Aligned memory, one piece a thread, kept from call to call (fresh memory costs about 1 s/GiB)."""

    def __init__(self) -> None:
        self._memory = aligned_empty(0)

    def take(self, size: int) -> ByteArray:
        """``size`` bytes, holding anything, the thread's own until its next call."""
        if size > _KEPT_BYTES:
            return _in_huge_pages(size)[:size]
        if size > len(self._memory):
            self._memory = _in_huge_pages(size)
        return self._memory[:size]

    def give_away(self) -> None:
        """Leave the memory to whoever still uses it; the next call takes other memory."""
        self._memory = aligned_empty(0)


_bounce = BounceBuffer()
_encrypted = BounceBuffer()


def give_staging_away() -> None:
    """A write of what this thread staged last was late, and may still be reading it."""
    _bounce.give_away()
    _encrypted.give_away()


def take_for_encryption(size: int) -> ByteArray:
    """``size`` aligned bytes, holding anything, valid until the thread's next call of this function."""
    return _encrypted.take(size)


def take_scratch(size: int) -> ByteArray:
    """``size`` aligned bytes, holding anything, valid until the thread's next staging."""
    return _bounce.take(size)


def stage_write(payloads: Sequence[ByteArray]) -> list[ByteArray]:
    """Aligned buffers that hold, one after the other, every payload padded with zeros to whole blocks.

    They are valid until the thread's next staging, and as long as the payloads are.
    """
    buffers: list[ByteArray] = []
    odd: list[tuple[int, ByteArray]] = []
    for payload in payloads:
        if len(payload) % BLOCK or not is_aligned(payload):
            odd.append((len(buffers), payload))
        buffers.append(payload)
    if odd:
        _stage(buffers, odd)
    return buffers


def _stage(buffers: list[ByteArray], odd: list[tuple[int, ByteArray]]) -> None:
    """Replace those of the buffers that can't be written as they are, the last one first."""
    split = [_in_place(payload) for _, payload in odd]
    memory = _bounce.take(sum(padded(len(payload) - here) for (_, payload), here in zip(odd, split, strict=True)))
    end = len(memory)
    for (place, payload), here in zip(reversed(odd), reversed(split), strict=True):
        rest = len(payload) - here
        staged = memory[end - padded(rest) : end]
        end -= len(staged)
        staged[:rest] = payload[here:]
        staged[rest:] = 0
        buffers[place : place + 1] = [payload[:here], staged] if here else [staged]


def _in_place(array: ByteArray) -> int:
    """How many leading bytes of the array O_DIRECT takes where they are."""
    return len(array) // BLOCK * BLOCK if is_aligned(array) else 0
