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
        known = [(slots.key(slot), residency.checksum(slot), residency.view(slot), slots.parent(slot)) for slot in held]
    pages = [
        PageWrite(key, checksum if checksum is not None else checksum_of(view), view, parent)
        for key, checksum, view, parent in known
    ]
    return pages, [page.checksum for page in pages]
