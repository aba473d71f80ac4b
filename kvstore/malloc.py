"""The process's own memory: glibc gives it out from arenas, of which a node needs few, and gives back what is free."""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress

_M_ARENA_MAX = -8
"""glibc's number of this parameter of ``mallopt``."""
_ARENAS = 2
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEPT_BYTES = 16 << 20
"""What an arena keeps at its end when it is freed: what a few messages of 2 MiB take on their way."""
_LARGE_BYTES = 8 << 20
"""Blocks from here on are mapped by themselves; no message is as large."""


def limit_malloc_arenas() -> None:
    """Let all threads share two arenas of the C library from now on, unless ``MALLOC_ARENA_MAX`` says another number.

    By default there are eight for each core, and each keeps what its threads took at their peaks, cut into pieces: a
    node whose clients come and go grows for a long time, though it holds nothing more. Another C library is left alone.
    """
    _set(_M_ARENA_MAX, _ARENAS, "MALLOC_ARENA_MAX")


def keep_room_for_messages() -> None:
    """Keep what one message leaves for the next one, instead of giving it back to the system and taking it again.

    By default glibc gives back about twice the largest block that it ever freed: a node that receives messages of 2 MiB
    over gRPC took a page fault for each 4 KiB of them, a third of its processor time. Another C library is left alone.

    For a node's process alone, which has few arenas: each of them keeps so much. In an engine's, with an arena for each
    of many threads, that would be hundreds of MiB.
    """
    _set(_M_MMAP_THRESHOLD, _LARGE_BYTES, "MALLOC_MMAP_THRESHOLD_")
    _set(_M_TRIM_THRESHOLD, _KEPT_BYTES, "MALLOC_TRIM_THRESHOLD_")


def _set(parameter: int, value: int, variable: str) -> None:
    """Unless the environment says otherwise."""
    if variable not in os.environ:
        with suppress(AttributeError, OSError):
            ctypes.CDLL(None).mallopt(parameter, value)
