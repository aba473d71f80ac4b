"""Memory that O_DIRECT takes: pages go to the system from where they are, where they lie on whole blocks.

A page whose address is aligned is written and read in place, but for the part of its last block that it does not fill;
that part, and any page that lies at an odd address, goes through aligned memory of the thread's own.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Sequence

import numpy as np

from kvstore.segments.record import BLOCK, ByteArray, padded

_KEPT_BYTES = 16 << 20  # a larger need is rare (a single page above it) and gets memory of its own


def aligned_empty(size: int) -> ByteArray:
    """``size`` bytes at a page-aligned address, zeroed."""
    return np.frombuffer(mmap.mmap(-1, padded(size) or BLOCK), dtype=np.uint8)[:size]


def is_aligned(array: ByteArray) -> bool:
    """Whether the array's memory starts on a whole block."""
    address: int = array.__array_interface__["data"][0]
    return address % BLOCK == 0


class BounceBuffer(threading.local):
    """Aligned memory, one piece a thread, kept from call to call (fresh memory costs about 1 s/GiB)."""

    def __init__(self) -> None:
        self._memory = aligned_empty(0)

    def take(self, size: int) -> ByteArray:
        """``size`` bytes, holding anything, the thread's own until its next call."""
        if size > _KEPT_BYTES:
            return aligned_empty(size)
        if size > len(self._memory):
            self._memory = aligned_empty(size)
        return self._memory[:size]


_bounce = BounceBuffer()


def stage_write(payloads: Sequence[ByteArray]) -> list[ByteArray]:
    """Aligned buffers that hold, one after the other, every payload padded with zeros to whole blocks.

    They are valid until the thread's next staging, and as long as the payloads are.
    """
    split = [_in_place(payload) for payload in payloads]
    memory = _bounce.take(sum(padded(len(payload) - here) for payload, here in zip(payloads, split, strict=True)))
    buffers = []
    at = 0
    for payload, here in zip(payloads, split, strict=True):
        if here:
            buffers.append(payload[:here])
        if rest := len(payload) - here:
            staged = memory[at : at + padded(rest)]
            staged[:rest] = payload[here:]
            staged[rest:] = 0
            buffers.append(staged)
            at += len(staged)
    return buffers


class ReadStaging:
    """Aligned buffers to read neighbouring payloads into, each padded to whole blocks, in the order of the arrays.

    Valid until the thread's next staging.
    """

    def __init__(self, into: Sequence[ByteArray]) -> None:
        split = [_in_place(array) for array in into]
        memory = _bounce.take(sum(padded(len(array) - here) for array, here in zip(into, split, strict=True)))
        self.buffers: list[ByteArray] = []
        self._copies: list[tuple[ByteArray, ByteArray]] = []
        at = 0
        for array, here in zip(into, split, strict=True):
            if here:
                self.buffers.append(array[:here])
            if rest := len(array) - here:
                staged = memory[at : at + padded(rest)]
                self.buffers.append(staged)
                self._copies.append((array[here:], staged[:rest]))
                at += len(staged)

    def finish(self) -> None:
        """Copy to the arrays what did not go straight into them."""
        for array, staged in self._copies:
            array[:] = staged


def _in_place(array: ByteArray) -> int:
    """How many leading bytes of the array O_DIRECT takes where they are."""
    return len(array) // BLOCK * BLOCK if is_aligned(array) else 0
