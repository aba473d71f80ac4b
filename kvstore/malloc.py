"""The process's own memory: glibc gives it out from arenas, of which a node needs few."""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress

_M_ARENA_MAX = -8
"""glibc's number of this parameter of ``mallopt``."""
_ARENAS = 2


def limit_malloc_arenas() -> None:
    """Let all threads share two arenas of the C library from now on, unless ``MALLOC_ARENA_MAX`` says another number.

    By default there are eight for each core, and each keeps what its threads took at their peaks, cut into pieces: a
    node whose clients come and go grows for a long time, though it holds nothing more. Another C library is left alone.
    """
    if "MALLOC_ARENA_MAX" not in os.environ:
        with suppress(AttributeError, OSError):
            ctypes.CDLL(None).mallopt(_M_ARENA_MAX, _ARENAS)
