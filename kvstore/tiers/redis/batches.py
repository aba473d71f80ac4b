"""Long calls are cut: each piece has a deadline of its own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

BATCH_BYTES = 32 << 20
"""Bytes that are sent, or asked for, under one deadline."""
_Item = TypeVar("_Item")


def batches(items: Sequence[_Item], sizes: Sequence[int]) -> Iterable[list[_Item]]:
    """Runs of items of up to ``BATCH_BYTES``, or of one item."""
    batch: list[_Item] = []
    total = 0
    for item, size in zip(items, sizes, strict=True):
        if batch and total + size > BATCH_BYTES:
            yield batch
            batch, total = [], 0
        batch.append(item)
        total += size
    if batch:
        yield batch
