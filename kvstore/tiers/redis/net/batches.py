"""Long calls are cut into pieces: by bytes where pages go along, else by their number."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

BATCH_BYTES = 32 << 20
"""Bytes that are sent, or asked for, under one deadline."""
BATCH_PAGES = 1024
"""Pages whose entries are asked for at once: some milliseconds of a server, which serves nobody else meanwhile."""
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


def runs(items: Sequence[_Item]) -> list[Sequence[_Item]]:
    """Runs of items of up to ``BATCH_PAGES``."""
    return [items[at : at + BATCH_PAGES] for at in range(0, len(items), BATCH_PAGES)]
