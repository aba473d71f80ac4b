"""Held pages as lower tiers take them."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from kvstore.catalog.slot_state import Slot
from kvstore.hashing import checksum_of
from kvstore.store.residency import Residency
from kvstore.tiers.tier import PageWrite


def writes_of(
    held: Sequence[Slot], residency: Residency, lock: threading.Lock
) -> tuple[list[PageWrite], list[int | None]]:
    """Pages of slots that are held, with checksums made where there are none yet.

    Args:
        held: the slots.
        residency: of these.
        lock: the store's; taken for a moment.
    """
    slots = residency.slots
    with lock:
        keys, parents = slots.keys(held), slots.parents(held)
        known = list(map(residency.checksum, held))
        views = list(map(residency.view, held))
    sums = [checksum_of(view) if made is None else made for made, view in zip(known, views, strict=True)]
    return list(map(PageWrite, keys, sums, views, parents)), list(sums)
