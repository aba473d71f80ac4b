"""What a client stores or loads: pages of one prefix, where their bytes are, and by when."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore.hashing import HASH_BYTES

Bytes = npt.NDArray[np.uint8]


class Transfer(NamedTuple):
    """Pages of one namespace that follow each other in their chain, head of the prefix first.

    :class:`kvstore.Namespace` makes one for each of its calls; large ones go to a path in parts. The namespace is not
    in it: it may be opened again while the transfer goes on.
    """

    hashes: bytes
    """Block hashes of the pages, 32 bytes each, joined."""
    pages: Sequence[Bytes]
    """For each page an array of ``page_bytes`` uint8: its payload, or where that goes. Empty where the path lends the
    memory."""
    deadline: float
    """When it is given up, on the clock of ``time.monotonic``."""
    parent: bytes = b""
    """Block hash of the page before the first one; empty: the first one is the head, or nobody knows."""

    @property
    def page_count(self) -> int:
        """How many pages these are."""
        return len(self.hashes) // HASH_BYTES

    def part(self, start: int, end: int) -> Transfer:
        """The pages from ``start`` to ``end``; their parent is the page before them."""
        hashes, first = self.hashes, start * HASH_BYTES
        parent = hashes[first - HASH_BYTES : first] if start else self.parent
        return Transfer(hashes[first : end * HASH_BYTES], self.pages[start:end], self.deadline, parent)
