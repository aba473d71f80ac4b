"""What this node reads of other writers' packs, until it is told; which namespaces anybody uses. No I/O."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from kvstore.segments.record import BLOCK, FINGERPRINT_BYTES
from kvstore.tiers.objects.names import PackName
from kvstore.tiers.objects.uses import Uses

_MOST_PACKS = 1 << 16
_NAMESPACE_SECONDS = 600.0
"""For so long others are told that a namespace is used."""

_Blocks = dict[PackName, set[int]]
"""Where pages lie that were read, in blocks, by pack."""


class UseLog:
    """Safe for threads; :meth:`take` is called by one at a time.

    Each use is told by two use objects, one behind the other: the second is written in the place of the first, which
    others may not have read yet.

    Args:
        clock: seconds that only grow.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._lock = threading.Lock()
        self._clock = clock
        self._opened = clock()
        self._new: _Blocks = {}
        self._telling: _Blocks = {}
        """Of these, what the use object says that is being written."""
        self._told: _Blocks = {}
        """What the one before said that was new."""
        self._namespaces: dict[bytes, float] = {}

    def note_reads(self, reads: Iterable[tuple[PackName, int]]) -> None:
        """Pages of others' packs were used, which lie there."""
        with self._lock:
            for name, offset in reads:
                if name in self._new or len(self._new) < _MOST_PACKS:
                    self._new.setdefault(name, set()).add(offset // BLOCK)

    def note_namespaces(self, keys: Iterable[bytes]) -> None:
        """Pages of these namespaces were used: keys of pages, or fingerprints alone."""
        now = self._clock()
        with self._lock:
            self._namespaces.update({key[:FINGERPRINT_BYTES]: now for key in keys})

    def take(self) -> Uses:
        """What a use object is to say. :meth:`told` or :meth:`untold` comes next."""
        since = self._clock() - _NAMESPACE_SECONDS
        with self._lock:
            self._telling, self._new = self._new, {}
            packs = {name: set(blocks) for name, blocks in self._telling.items()}
            _merge(self._told, packs)
            return Uses(frozenset(key for key, when in self._namespaces.items() if when > since), packs)

    def told(self) -> None:
        """It was written."""
        with self._lock:
            self._told, self._telling = self._telling, {}

    def untold(self) -> None:
        """It could not be written: the next one says the same."""
        with self._lock:
            _merge(self._telling, self._new)
            self._telling = {}

    def idle_seconds(self, fingerprint: bytes) -> float:
        """How long nobody has used a namespace, as far as this node knows: since it was opened at most."""
        with self._lock:
            return self._clock() - self._namespaces.get(fingerprint, self._opened)


def _merge(blocks: _Blocks, into: _Blocks) -> None:
    for name, some in blocks.items():
        into.setdefault(name, set()).update(some)
