"""Namespaces' fingerprints as small numbers, with the pages and bytes that each namespace has."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvstore.segments.record import FINGERPRINT_BYTES

Numbers = npt.NDArray[np.int32]
"""Numbers of namespaces; -1 for one that has no page."""


class Fingerprints:
    """A number for each namespace that has a page, given to another one when the last page is gone."""

    def __init__(self) -> None:
        self._numbers: dict[bytes, int] = {}
        self._names: list[bytes] = []
        self._free: list[int] = []
        self._pages = np.zeros(0, np.int64)
        self._bytes = np.zeros(0, np.int64)

    def find(self, fingerprint: bytes) -> int:
        """The number of a namespace; -1 if it has no page."""
        return self._numbers.get(fingerprint, -1)

    def all(self) -> list[bytes]:
        """The namespaces that have a page."""
        return list(self._numbers)

    def of(self, keys: Sequence[bytes]) -> Numbers:
        """The number of each key's namespace."""
        return self._of([key[:FINGERPRINT_BYTES] for key in keys])

    def _of(self, names: Sequence[bytes]) -> Numbers:
        if names and names.count(names[0]) == len(names):  # mostly they are all of one
            return np.full(len(names), self.find(names[0]), np.int32)
        return np.array([self.find(name) for name in names], np.int32)

    def beginning_with(self, prefix: bytes) -> Numbers:
        """The numbers of the namespaces whose fingerprints begin with ``prefix``."""
        return np.array([n for name, n in self._numbers.items() if name.startswith(prefix)], np.int32)

    def names(self, numbers: Numbers) -> list[bytes]:
        """The fingerprints behind numbers."""
        names = self._names
        return [names[number] for number in numbers.tolist()]

    def pages_of(self, fingerprint: bytes) -> int:
        """How many pages a namespace has."""
        number = self.find(fingerprint)
        return int(self._pages[number]) if number >= 0 else 0

    def bytes_of(self, fingerprint: bytes) -> int:
        """How many bytes the pages of a namespace have."""
        number = self.find(fingerprint)
        return int(self._bytes[number]) if number >= 0 else 0

    def add(self, keys: Sequence[bytes], sizes: npt.NDArray[np.int64]) -> Numbers:
        """Pages come, of these sizes. Returns the number of each one's namespace."""
        names = [key[:FINGERPRINT_BYTES] for key in keys]
        for fingerprint in set(names).difference(self._numbers):
            self._number(fingerprint)
        numbers = self._of(names)
        np.add.at(self._pages, numbers, 1)
        np.add.at(self._bytes, numbers, sizes)
        return numbers

    def change(self, numbers: Numbers, growth: npt.NDArray[np.int64]) -> None:
        """Pages of these namespaces grow by so many bytes, or shrink."""
        np.add.at(self._bytes, numbers, growth)

    def remove(self, numbers: Numbers, sizes: npt.NDArray[np.int64]) -> None:
        """Pages of these namespaces go, of these sizes."""
        np.subtract.at(self._pages, numbers, 1)
        np.subtract.at(self._bytes, numbers, sizes)
        for number in np.unique(numbers).tolist():
            if not self._pages[number]:
                del self._numbers[self._names[number]]
                self._free.append(number)

    def _number(self, fingerprint: bytes) -> None:
        if not self._free:
            count = len(self._names)
            more = max(8, count)
            self._names += [b""] * more
            self._free += range(count + more - 1, count - 1, -1)
            self._pages = np.append(self._pages, np.zeros(more, np.int64))
            self._bytes = np.append(self._bytes, np.zeros(more, np.int64))
        number = self._free.pop()
        self._names[number] = fingerprint
        self._numbers[fingerprint] = number
