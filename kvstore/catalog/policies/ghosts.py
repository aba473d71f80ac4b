"""Ghosts: a table of fixed size of pages that left, by the hash of their key; newer ones replace older."""

from __future__ import annotations

from array import array
from typing import NamedTuple

import numpy as np


class Ghost(NamedTuple):
    """What is remembered of a page."""

    page_class: int
    uses: int
    used: int
    """When it was used last."""


class Ghosts:
    """18 bytes a place.

    Args:
        places: a power of two, or 0: nothing is remembered, and nothing may be added.
    """

    def __init__(self, places: int) -> None:
        self.keys = array("Q", bytes(8 * places))
        self.used = array("q", bytes(8 * places))
        self.classes = array("B", bytes(places))
        self.uses = array("B", bytes(places))

    def __len__(self) -> int:
        return len(self.keys)

    def add(self, key: int, ghost: Ghost) -> None:
        """A page left."""
        place = key & (len(self.keys) - 1)
        self.keys[place] = key or 1
        self.classes[place], self.uses[place], self.used[place] = ghost

    def __contains__(self, key: int) -> bool:
        return bool(self.keys) and self.keys[key & (len(self.keys) - 1)] == (key or 1)

    def take(self, key: int) -> tuple[int, Ghost] | None:
        """A page is back: its place here, and what was remembered of it, once."""
        if not self.keys:
            return None
        place = key & (len(self.keys) - 1)
        if self.keys[place] != (key or 1):
            return None
        self.keys[place] = 0
        return place, Ghost(self.classes[place], self.uses[place], self.used[place])

    def grown(self) -> Ghosts:
        """The same in twice the places."""
        larger = Ghosts(2 * len(self.keys))
        keys = np.frombuffer(self.keys, np.uint64)
        old = np.flatnonzero(keys)
        new = (keys[old] & np.uint64(len(larger.keys) - 1)).astype(np.int64)
        for name in ("keys", "used", "classes", "uses"):
            source, target = getattr(self, name), getattr(larger, name)
            np.frombuffer(target, source.typecode)[new] = np.frombuffer(source, source.typecode)[old]
        return larger
