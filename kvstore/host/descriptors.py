"""This process's descriptors, found by what they are: those of others' code, which tells nobody their numbers."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path


def open_descriptors(which: Callable[[int], bool]) -> list[int]:
    """Those for which ``which`` says yes; its OSError is a no. None where the system does not tell."""
    found = []
    with suppress(OSError):
        for entry in Path("/proc/self/fd").iterdir():
            with suppress(OSError):  # the listing's own, at least
                if which(int(entry.name)):
                    found.append(int(entry.name))
    return found


def let_go(which: Callable[[int], bool]) -> None:
    """Close what others' code has open and may close once more: its number must not become another file's."""
    with suppress(OSError):
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        try:
            for fd in open_descriptors(which):
                os.dup2(null, fd, inheritable=False)
        finally:
            os.close(null)
