"""Keeps the shared-memory arena that a client maps pinned, also when the node comes back with another arena."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvstore.gpu.pinned import Bytes, PinnedMapping

_log = logging.getLogger(__name__)


class PinnedArena:
    """Follows a client from one mapping to the next: a node that comes back may have another arena, and its client then
    maps that one.

    Registering takes about as long as reading the memory once. What the client maps when this object is made is
    registered by the time it has been made: an engine may go on to capture CUDA graphs, and while a capture is under
    way CUDA refuses to register memory, in any thread, and gives the capture up. Later mappings are registered on a
    thread of their own; until that is over, and where it fails, copies go without. A mapping that is no longer the
    client's is unregistered behind the last use that may still copy from or to it. It stays mapped until then: this
    object holds it.

    Args:
        mapping: gives the client's mapping now, None where it has none. It must be quick.
        pin: registers a mapping.
    """

    def __init__(
        self, mapping: Callable[[], Bytes | None], pin: Callable[[Bytes], PinnedMapping] = PinnedMapping
    ) -> None:
        self._mapping = mapping
        self._pin: Callable[[Bytes], PinnedMapping] = pin
        self._lock = threading.Lock()
        self._registrations: list[_Registration] = []  # the last one is in use, unless this object is closed
        self._number = 0
        self._uses: Counter[int] = Counter()  # by the number of the registration that was the last one at their start
        self._closed = False
        with self.use():
            for registration in self._registrations:
                registration.wait()

    @contextmanager
    def use(self) -> Iterator[None]:
        """Around asking for pages and copying them. What the client lends meanwhile is not unregistered meanwhile."""
        with self._lock:
            self._follow()
            number = self._number
            self._uses[number] += 1
        try:
            yield
        finally:
            with self._lock:
                self._uses[number] -= 1
                self._uses += Counter()  # drops those at zero
            self._release_unused()

    @property
    def size(self) -> int:
        """Bytes that the client maps now, 0 where it maps none."""
        memory = self._mapping()
        return 0 if memory is None else memory.size

    def close(self) -> None:
        """Unregister behind the last use under way. A second call does nothing."""
        with self._lock:
            self._closed = True
        self._release_unused()

    def _follow(self) -> None:
        """Register what the client maps now, if it is something new."""
        memory = None if self._closed else self._mapping()
        if memory is None:
            return
        last = self._registrations[-1] if self._registrations else None
        if last is not None and last.memory.ctypes.data == memory.ctypes.data and last.memory.size == memory.size:
            return
        self._number += 1
        self._registrations.append(_Registration(self._number, memory, self._pin))

    def _release_unused(self) -> None:
        with self._lock:
            # Whoever began when a later mapping was the client's can't have been lent anything of an earlier one.
            oldest = min(self._uses, default=self._number + 1)
            last = self._number if not self._closed else self._number + 1
            unused = [each for each in self._registrations if each.number < min(oldest, last)]
            self._registrations = [each for each in self._registrations if each not in unused]
        for registration in unused:
            registration.release()


class _Registration:
    """One mapping, being registered, registered, or over."""

    def __init__(self, number: int, memory: Bytes, pin: Callable[[Bytes], PinnedMapping]) -> None:
        self.number = number
        self.memory = memory
        self._lock = threading.Lock()
        self._pinned: PinnedMapping | None = None
        self._over = False
        self._thread = threading.Thread(target=self._register, args=(pin,), name="kvstore-pin", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Until it is registered, or refused."""
        self._thread.join()

    def release(self) -> None:
        with self._lock:
            self._over = True
            pinned, self._pinned = self._pinned, None
        if pinned is not None:
            pinned.release()

    def _register(self, pin: Callable[[Bytes], PinnedMapping]) -> None:
        pinned = pin(self.memory)
        if not pinned.pinned:
            _log.warning("the arena is not pinned, copies take a detour: %s", pinned.reason)
        with self._lock:
            over = self._over
            if not over:
                self._pinned = pinned
        if over:
            pinned.release()
