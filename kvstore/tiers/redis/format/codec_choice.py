"""Whether compressing a namespace's pages pays: decided by what was measured, without I/O.

A page is sent once and received at least once. Compressing pays when both together, with packing and unpacking, are
faster than with the page as it is. So a fast network and a slow processor say no, whatever the ratio.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass

FIRST_SAMPLES = 4
"""Chunks of a namespace of which a page is tried at first, each."""
SAMPLE_EVERY = 256
"""Afterwards one page is tried in so many chunks: pages change, and so does the network."""
MOST_NAMESPACES = 1024
_WEIGHT = 0.25
"""Of a new measurement, in the running mean."""
_HASTE = 1.2
"""Compressing must be faster by this factor: it takes processor time from others."""


@dataclass(slots=True)
class _Measured:
    chunks: int = 0
    samples: int = 0
    kept: float = 1.0
    """Compressed length for each byte."""
    seconds: float = 0.0
    """To pack and unpack one byte."""


class CodecChoice:
    """What is known of namespaces and of the network. Safe for threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: OrderedDict[bytes, _Measured] = OrderedDict()
        self._wire_seconds: float | None = None

    def sent(self, size: int, seconds: float) -> None:
        """So many bytes went over the network in so many seconds."""
        with self._lock:
            self._wire_seconds = _mean(self._wire_seconds, seconds / size)

    def wants_sample(self, namespace: bytes) -> bool:
        """Whether to try a page of the chunk at hand."""
        with self._lock:
            known = self._of(namespace)
            known.chunks += 1
            return known.samples < FIRST_SAMPLES or known.chunks % SAMPLE_EVERY == 0

    def sampled(self, namespace: bytes, size: int, compressed: int, seconds: float) -> None:
        """A page of ``size`` bytes had ``compressed`` ones, and took so long to be packed and unpacked."""
        with self._lock:
            known = self._of(namespace)
            first = not known.samples
            known.kept = _mean(None if first else known.kept, compressed / size)
            known.seconds = _mean(None if first else known.seconds, seconds / size)
            known.samples += 1

    def pays(self, namespace: bytes) -> bool:
        """Whether to compress this namespace's pages."""
        with self._lock:
            known = self._of(namespace)
            if known.samples < FIRST_SAMPLES or self._wire_seconds is None:
                return False
            return known.seconds * _HASTE < 2 * self._wire_seconds * (1 - known.kept)

    def _of(self, namespace: bytes) -> _Measured:
        known = self._known.setdefault(namespace, _Measured())
        self._known.move_to_end(namespace)
        if len(self._known) > MOST_NAMESPACES:
            self._known.popitem(last=False)
        return known


def _mean(old: float | None, new: float) -> float:
    return new if old is None else (1 - _WEIGHT) * old + _WEIGHT * new
