"""This process's open file descriptors, found by what they are: libraries open some and tell nobody their numbers."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path


def open_descriptors(which: Callable[[int], bool]) -> list[int]:
    """The descriptors for which ``which`` says yes; its OSError is a no. Empty where ``/proc`` is missing."""
    found = []
    with suppress(OSError):
        for entry in Path("/proc/self/fd").iterdir():
            with suppress(OSError):  # the listing's own, at least
                if which(int(entry.name)):
                    found.append(int(entry.name))
    return found


def redirect_to_null(which: Callable[[int], bool]) -> None:
    """Let go of files that a library has open: their descriptors refer to ``/dev/null`` from now on.

    They are not closed: the library may close them once more, and by then their numbers could be other files'.
    """
    with suppress(OSError):
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        try:
            for fd in open_descriptors(which):
                os.dup2(null, fd, inheritable=False)
        finally:
            os.close(null)
