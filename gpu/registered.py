"""Which host memory of this process is registered with CUDA, and which copies may rely on that.

CUDA counts nothing: memory is registered once, by whoever comes first, and a copy that is under way when it is
unregistered is lost. So one object knows of all of it, whoever registered it, and unregisters what nobody has any more
only behind the last use that may have seen it (an epoch-based reclamation).
"""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from kvstore.gpu.cudart import Runtime

Bytes = npt.NDArray[np.uint8]
_Range = tuple[int, int]
"""First address, and the one behind the last."""


@dataclass
class _Entry:
    """Memory that is registered, or is just being registered or unregistered."""

    memory: Bytes
    """Keeps it mapped."""
    runtime: Runtime
    holders: int = 0
    busy: bool = True
    """A call to CUDA is under way for it."""
    epoch: int = 0
    """Without holders: uses that began in an earlier epoch may rely on it."""


class Registered:
    """What is registered, by address. Safe for threads; nobody waits for CUDA but who registers or unregisters."""

    def __init__(self) -> None:
        self._changed = threading.Condition()  # not held during calls to CUDA, which may take seconds
        self._entries: dict[_Range, _Entry] = {}
        self._leaving: dict[_Range, _Entry] = {}  # of these, the ones without holders
        self._epoch = 0
        self._uses: Counter[int] = Counter()  # by the epoch in which they began
        self._cut_by: Counter[int] = Counter()  # how often each address in _cuts was named
        # Read without the lock, for each page of each batch: replaced, never changed.
        self._pinned: tuple[list[int], list[int]] = [], []  # first addresses, and those behind the last, in order
        self._cuts: list[int] = []

    def take(self, memory: Bytes, runtime: Runtime, flags: int) -> int:
        """Register memory, or have a part in it where it is registered already. CUDA's status: 0 for success."""
        key = _range(memory)
        with self._changed:
            while (entry := self._entries.get(key)) is not None and entry.busy:
                self._changed.wait()
            if entry is not None:
                entry.holders += 1
                if self._leaving.pop(key, None) is not None:
                    self._show(key)
                return 0
            entry = self._entries[key] = _Entry(memory, runtime)
            self._name(key)  # before CUDA has it
        status = -1
        try:
            status = runtime.cudaHostRegister(memory.ctypes.data, memory.nbytes, flags)
        finally:
            with self._changed:
                entry.busy = False
                if status == 0:
                    entry.holders = 1
                    self._show(key)
                else:
                    self._forget(key)
                self._changed.notify_all()
        return status

    def leave(self, memory: Bytes) -> None:
        """Give up a part in registered memory: no copy that begins from now on relies on it. The last one to leave
        unregisters it, or the last use does that may still rely on it."""
        key = _range(memory)
        with self._changed:
            entry = self._entries[key]
            entry.holders -= 1
            if entry.holders:
                return
            starts, ends = (list(each) for each in self._pinned)
            place = bisect_left(starts, key[0])
            del starts[place], ends[place]
            self._pinned = starts, ends
            self._epoch += 1
            entry.epoch = self._epoch
            self._leaving[key] = entry
        self._unregister()

    @contextmanager
    def use(self) -> Iterator[None]:
        """Around asking whether pages are pinned and the copies that rely on the answer."""
        with self._changed:
            epoch = self._epoch
            self._uses[epoch] += 1
        try:
            yield
        finally:
            with self._changed:
                self._uses[epoch] -= 1
                if not self._uses[epoch]:
                    del self._uses[epoch]
                some = bool(self._leaving)
            if some:
                self._unregister()

    def is_pinned(self, page: Bytes) -> bool:
        """Whether all of these bytes lie in one piece of memory that is registered now."""
        starts, ends = self._pinned
        start = page.ctypes.data
        place = bisect_right(starts, start)
        return place > 0 and start + page.nbytes <= ends[place - 1]

    def pinned_bytes(self, memory: Bytes) -> int:
        """How many bytes of it are registered now."""
        start, end = _range(memory)
        return sum(max(0, min(last, end) - max(first, start)) for first, last in zip(*self._pinned, strict=True))

    def cut(self, page: Bytes) -> list[Bytes]:
        """The page in parts, each of which CUDA takes as one copy: registered as a whole and at once, or not at all.

        CUDA refuses a copy of memory that is registered in part ("memory regions spanning over allocations that are
        both registered and not registered with CUDA are not supported and will return CUDA_ERROR_INVALID_VALUE",
        cuMemcpyAsync), and promises nothing for one across two registrations, even where these touch.
        """
        cuts = self._cuts
        start = page.ctypes.data
        first, last = bisect_right(cuts, start), bisect_left(cuts, start + page.nbytes)
        if first >= last:
            return [page]
        edges = [0, *(each - start for each in cuts[first:last]), page.nbytes]
        return [page[from_:to] for from_, to in pairwise(edges)]

    def plan(self, addresses: Iterable[int]) -> None:
        """Say where memory that will be registered later ends, and other begins: copies are cut there from now on.

        A copy that was cut before CUDA has the memory may reach CUDA when it has it.
        """
        with self._changed:
            self._name(addresses)

    def unplan(self, addresses: Iterable[int]) -> None:
        """Take that back. What is registered is cut at its ends without it."""
        with self._changed:
            self._unname(addresses)

    def _unregister(self) -> None:
        """What nobody has any more and no use relies on."""
        while True:
            with self._changed:
                oldest = min(self._uses, default=self._epoch)
                key = next((key for key, each in self._leaving.items() if each.epoch <= oldest), None)
                if key is None:
                    return
                entry = self._leaving.pop(key)
                entry.busy = True
            try:
                entry.runtime.cudaHostUnregister(key[0])  # what it refuses leaves at the process's end
            finally:
                with self._changed:
                    self._forget(key)
                    self._changed.notify_all()

    def _show(self, key: _Range) -> None:
        starts, ends = (list(each) for each in self._pinned)
        place = bisect_left(starts, key[0])
        starts.insert(place, key[0])
        ends.insert(place, key[1])
        self._pinned = starts, ends

    def _forget(self, key: _Range) -> None:
        del self._entries[key]
        self._unname(key)

    def _name(self, addresses: Iterable[int]) -> None:
        cuts = list(self._cuts)
        for address in addresses:
            self._cut_by[address] += 1
            if self._cut_by[address] == 1:
                insort(cuts, address)
        self._cuts = cuts

    def _unname(self, addresses: Iterable[int]) -> None:
        cuts = list(self._cuts)
        for address in addresses:
            self._cut_by[address] -= 1
            if not self._cut_by[address]:
                del self._cut_by[address]
                del cuts[bisect_left(cuts, address)]
        self._cuts = cuts


def _range(memory: Bytes) -> _Range:
    start = memory.ctypes.data
    return start, start + memory.nbytes
