"""The checksum that a page carries out of the arena."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import xxhash

RunningChecksum = xxhash.xxh3_64
"""The same of a payload that comes in pieces."""


def checksum_of(payload: npt.NDArray[np.uint8]) -> int:
    """xxh3_64 of a payload, unsigned."""
    return xxhash.xxh3_64_intdigest(payload.data)
