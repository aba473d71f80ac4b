"""glibc's allocator, set for a node: few arenas, memory kept for messages, and free memory given back."""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import threading
import time
from contextlib import suppress
from pathlib import Path

_M_ARENA_MAX = -8
"""glibc's number of this parameter of ``mallopt``."""
_ARENAS = 2
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEPT_BYTES = 16 << 20
"""What an arena keeps at its end when it is freed: what a few messages of 2 MiB take on their way."""
_LARGE_BYTES = 8 << 20
"""Blocks from here on are mapped by themselves; no message is as large."""

_PLENTY_BYTES = 8 << 20
"""Free memory that is given back: more than calls leave and take again all the time."""
_GIVE_BACK_SECONDS = 5.0


class _Mallinfo(ctypes.Structure):
    """What glibc's ``mallinfo2`` says."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks"),
            "keepcost",
        )
    ]


def limit_malloc_arenas() -> None:
    """Let all threads share two arenas of the C library from now on, unless ``MALLOC_ARENA_MAX`` says another number.

    By default there are eight for each core, and each keeps what its threads took at their peaks, cut into pieces: a
    node whose clients come and go grows for a long time, though it holds nothing more. Another C library is left alone.
    """
    _set(_M_ARENA_MAX, _ARENAS, "MALLOC_ARENA_MAX")


def keep_memory_for_messages() -> None:
    """Keep what one message leaves for the next one, instead of giving it back to the system and taking it again.

    By default glibc gives back about twice the largest block that it ever freed: a node that receives messages of 2 MiB
    over gRPC took a page fault for each 4 KiB of them, a third of its processor time. Another C library is left alone.

    For a node's process alone, which has few arenas: each of them keeps so much. In an engine's, with an arena for each
    of many threads, that would be hundreds of MiB.
    """
    _set(_M_MMAP_THRESHOLD, _LARGE_BYTES, "MALLOC_MMAP_THRESHOLD_")
    _set(_M_TRIM_THRESHOLD, _KEPT_BYTES, "MALLOC_TRIM_THRESHOLD_")


class Excess:
    """Gives free memory back to the system when there is plenty of it.

    By itself glibc gives back what lies at an arena's end alone, and what many calls took at once lies between what
    stays. Another C library is left alone.
    """

    def __init__(self) -> None:
        self._given = 0
        """Free bytes that the system has: glibc counts them as free all the same."""
        self._resident = _resident_bytes()
        """Bytes that the process had for itself when it gave back last."""

    def give_back(self) -> bool:
        """Do so, if there is: whether there was.

        It takes half a second where memory is in many pieces, so it is not done for nothing: only if what is free has
        grown since the last time, or the process has, whose threads may have taken and freed it meanwhile.
        """
        library = ctypes.CDLL(None)
        try:
            library.mallinfo2.restype = _Mallinfo
            free = int(library.mallinfo2().fordblks)
        except AttributeError:
            return False
        self._given = min(self._given, free)
        grown = _resident_bytes() - self._resident
        if max(free - self._given, grown) < _PLENTY_BYTES:
            return False
        gc.collect()  # Python's free lists are in pieces all over what it could give back
        library.malloc_trim(ctypes.c_size_t(0))
        self._given = int(library.mallinfo2().fordblks)
        self._resident = _resident_bytes()
        return True


def keep_giving_back() -> None:
    """Do so every few seconds, as long as this process runs. For a node's process alone."""

    def run() -> None:
        excess = Excess()
        while True:
            time.sleep(_GIVE_BACK_SECONDS)
            excess.give_back()

    threading.Thread(target=run, name="kvstore-give-back", daemon=True).start()


def _resident_bytes() -> int:
    """What this process has for itself: shared memory and files left out."""
    _, resident, shared, *_ = map(int, Path("/proc/self/statm").read_text().split())
    return (resident - shared) * resource.getpagesize()


def _set(parameter: int, value: int, variable: str) -> None:
    """Unless the environment says otherwise."""
    if variable not in os.environ:
        with suppress(AttributeError, OSError):
            ctypes.CDLL(None).mallopt(parameter, value)
