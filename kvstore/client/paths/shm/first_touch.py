"""The first touch of a mapping, made ahead: its page table entries, in the background behind the attachment.

The arena's memory is all there (the node allocates it), but a process that maps it pays for each 4 KiB once, at the
first copy to or from it: a first pass runs at a fraction of the speed of the second.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from contextlib import suppress
from typing import Protocol

import numpy as np
import numpy.typing as npt

STEP_BYTES = 8 << 20
"""At a time: whoever maps or unmaps memory meanwhile waits for about a millisecond."""
_MADV_POPULATE_READ = 22
"""Linux 5.14; older ones refuse it. Shared memory is mapped writable by it, too, and it costs a third of
``MADV_POPULATE_WRITE``, which looks at each page by itself."""
_libc = ctypes.CDLL(None)  # mmap.madvise keeps the interpreter's lock; a call by ctypes lets it go
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class Mapped(Protocol):
    """Who has a mapping, for as long as it needs it."""

    @property
    def is_over(self) -> bool:
        """Whether nobody will use the mapping any more."""
        ...

    @property
    def memory(self) -> npt.NDArray[np.uint8]:
        """All of it."""
        ...


def touch_ahead(owner: Mapped) -> None:
    """Begin to make the entries, in a thread that ends with the last one or when ``owner`` is over or gone."""
    target = weakref.ref(owner)
    thread = threading.Thread(target=_run, args=(target,), name="kvstore-first-touch", daemon=True)
    with suppress(RuntimeError):  # no thread to be had: the first pass pays
        thread.start()


def _run(target: weakref.ref[Mapped]) -> None:
    start = 0
    while _touch(target(), start):
        start += STEP_BYTES


def _touch(owner: Mapped | None, start: int) -> bool:
    """One step. Returns whether there is another one: its owner is held meanwhile, and no longer."""
    if owner is None or owner.is_over:
        return False
    size = owner.memory.size
    length = min(STEP_BYTES, size - start)
    if length <= 0:
        return False
    refused: int = _libc.madvise(owner.memory.ctypes.data + start, length, _MADV_POPULATE_READ)
    return not refused
