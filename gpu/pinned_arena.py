"""Keeps the shared-memory arena that a client maps pinned, also when the node comes back with another arena."""

from __future__ import annotations

import atexit
import logging
import math
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvstore.gpu.pinned import REGISTERED, PinnedMapping
from kvstore.gpu.registered import Bytes
from kvstore.gpu.registering_limits import limits
from kvstore.gpu.registering_turns import PAUSE, Turns

_log = logging.getLogger(__name__)

CHUNK_BYTES = 256 << 20
"""What is registered at once, about: some 30 ms, at the 10 GB/s that others report.

Other calls of the process to CUDA wait meanwhile, a decode step's among them, and so does an end. The first chunks are
the ones that a node fills first, and copies from and to them are fast at once. A driver has a limit, too: 512 GiB for
one call (NVIDIA r580), where vLLM keeps to 64 GiB."""
CLOSE_WAIT = 10.0
"""Seconds for which an end waits for the chunk that is just being registered."""


class PinnedArena:
    """Follows a client from one mapping to the next: a node that comes back may have another arena, and its client then
    maps that one.

    A mapping is registered chunk by chunk, on a thread of its own, and nobody waits for that: copies of what is not
    registered yet take a detour, as they all do where the machine refuses. What it refuses it refuses as a whole: the
    chunks before are unregistered, or they would hold what the limit leaves to the other ranks and to the engine, for
    copies of which some are fast and nobody can say which. Processes that map one arena take turns.

    The engine may capture CUDA graphs meanwhile: :class:`kvstore.gpu.cudart.CudaRuntime` says why they survive.

    A mapping that is no longer the client's is unregistered behind the last use that may still copy from or to it. It
    stays mapped until then: this object holds it. At the interpreter's end nothing is registered any more, if it was
    closed or not.

    Args:
        mapping: gives the client's mapping now, None where it has none. It must be quick. One-dimensional, or rows
            between which it may be cut (``Client.arena_units``).
        pin: registers a chunk.
    """

    def __init__(
        self, mapping: Callable[[], Bytes | None], pin: Callable[[Bytes], PinnedMapping] = PinnedMapping
    ) -> None:
        self._mapping = mapping
        self._pin: Callable[[Bytes], PinnedMapping] = pin
        self._lock = threading.Lock()
        self._registrations: list[_Registration] = []  # the last one is in use, unless this object is closed
        self._closed = False
        self._process = os.getpid()
        atexit.register(self.close)
        self._follow()

    @contextmanager
    def use(self) -> Iterator[None]:
        """Around asking for pages and copying them. What the client lends meanwhile is not unregistered meanwhile."""
        with REGISTERED.use():
            self._follow()
            yield

    @property
    def size(self) -> int:
        """Bytes that the client maps now, 0 where it maps none."""
        memory = self._mapping()
        return 0 if memory is None else memory.size

    def close(self) -> None:
        """Unregister, behind the last use under way; where there is none, before this returns. It waits for the chunk
        that is just being registered, for :data:`CLOSE_WAIT` at most. A second call does nothing."""
        if os.getpid() != self._process:
            return  # a forked child: CUDA is its parent's
        with self._lock:
            self._closed = True
            registrations = list(self._registrations)
        for registration in registrations:
            registration.stop()
        end = time.monotonic() + CLOSE_WAIT
        for registration in registrations:
            registration.wait(max(0.0, end - time.monotonic()))
        atexit.unregister(self.close)

    def _follow(self) -> None:
        """Register what the client maps now, if it is something new."""
        with self._lock:
            memory = None if self._closed else self._mapping()
            if memory is None:
                return
            last = self._registrations[-1] if self._registrations else None
            if last is not None and last.is_of(memory):
                return
            self._registrations = [each for each in self._registrations if each is last or each.running]
            self._registrations.append(_Registration(memory, self._pin, last))


class _Registration:
    """One mapping, being registered, registered, or over."""

    def __init__(self, memory: Bytes, pin: Callable[[Bytes], PinnedMapping], before: _Registration | None) -> None:
        self._memory = memory.reshape(-1)
        self._address = memory.ctypes.data
        self._pin = pin
        self._before = before
        self._chunks = _chunks(self._memory.nbytes, memory.shape[1] if memory.ndim == 2 else 1)
        self._cuts = [self._address + each.start for each in self._chunks[1:]]
        self._lock = threading.Lock()
        self._pinned: list[PinnedMapping] = []
        self._stop = threading.Event()
        REGISTERED.plan(self._cuts)
        self._thread = threading.Thread(target=self._run, name="kvstore-pin", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:  # no more threads, or the interpreter is ending
            self._refused(str(error))
            self._release()
            if before is not None:
                before.stop()

    @property
    def running(self) -> bool:
        """Whether its thread is still there."""
        return self._thread.is_alive()

    def is_of(self, memory: Bytes) -> bool:
        """Whether it is this mapping's."""
        return self._address == memory.ctypes.data and self._memory.nbytes == memory.nbytes

    def stop(self) -> None:
        """Unregister what is registered, and register nothing more but the chunk under way, which goes then."""
        self._stop.set()
        self._release()

    def wait(self, seconds: float) -> None:
        """For the chunk under way."""
        if self._thread.is_alive():
            self._thread.join(seconds)

    def _run(self) -> None:
        if self._before is not None:
            self._before.stop()  # here: it takes time, and whoever has seen the new mapping is about to copy
            self._before = None
        try:
            self._register()
        except Exception as error:  # noqa: BLE001 - nobody else would tell
            self._refused(f"{type(error).__name__}: {error}")
        if self._stop.is_set():
            self._release()

    def _register(self) -> None:
        size, chunks = self._memory.nbytes, len(self._chunks)
        started = time.monotonic()
        if chunks > 1:
            _log.info("pinning the arena, %.1f GiB in %d chunks: copies take a detour until then", _gib(size), chunks)
        turns = Turns(self._memory)
        for chunk in self._chunks:
            with turns.turn(self._stop):
                if self._stop.is_set():
                    return
                pinned = self._pin(self._memory[chunk])
            if not pinned.pinned:
                behind = f", behind {_gib(chunk.start):.1f} of {_gib(size):.1f} GiB" if chunk.start else ""
                self._refused(f"{pinned.reason}{behind}" + (f"; {limits(size)}" if pinned.status else ""))
                return
            with self._lock:
                self._pinned.append(pinned)
            if chunk.stop < size:
                self._stop.wait(PAUSE)
        _log.info("the arena is pinned: %.1f GiB in %.1f s", _gib(size), time.monotonic() - started)

    def _refused(self, reason: str) -> None:
        _log.warning("the arena is not pinned, copies take a detour: %s", reason)
        self._stop.set()

    def _release(self) -> None:
        with self._lock:
            pinned, self._pinned = self._pinned, []
            cuts, self._cuts = self._cuts, []
        for each in pinned:
            each.release()
        REGISTERED.unplan(cuts)


def _chunks(size: int, unit: int) -> list[slice]:
    """What is registered at once: whole units, and whole pages of the machine's, which CUDA rounds to.

    In units, since no slot of less than a sixteenth of a unit lies across two, nor do most larger ones (a slab has the
    units that leave little unused); copies of a page that does are cut there (:meth:`Registered.cut`).
    """
    step = math.lcm(unit, mmap.PAGESIZE)
    chunk = max(CHUNK_BYTES // step, 1) * step
    return [slice(start, min(start + chunk, size)) for start in range(0, size, chunk)]


def _gib(size: int) -> float:
    return size / (1 << 30)
