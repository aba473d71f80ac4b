"""Events in vLLM's form: what happened to pages, as msgpack of its ``KVEventBatch``.

A batch is an array (time, events, data parallel rank), an event a map with its class in ``type``; fields that vLLM has
a default for are left out where they have it. The node knows blocks by hash alone: ``token_ids`` is empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgpack

from kvstore.events.ring import Change, PageEvent
from kvstore.layout import Layout

_RANK = 0
_OWNERSHIP = "kvstore"
_PLACES = {
    "arena": ("CPU", "LOCAL"),
    "disk": ("STORAGE", "LOCAL"),
    "redis": ("STORAGE", "REMOTE"),
    "objects": ("STORAGE", "REMOTE"),
}
"""Tier → vLLM's medium and locality."""

CLEARED = {"type": "AllBlocksCleared"}
"""Whatever was told of this topic before is void."""


def block_event(event: PageEvent, layout: Layout) -> dict[str, Any]:
    """``BlockStored`` or ``BlockRemoved`` of an event, in the namespace of a layout."""
    medium, locality = _PLACES[event.tier]
    where = {"medium": medium, "group_idx": layout.group, "locality": locality, "ownership": _OWNERSHIP}
    if event.change is Change.REMOVED:
        return {"type": "BlockRemoved", "block_hashes": event.hashes, **where}
    return {
        "type": "BlockStored",
        "block_hashes": event.hashes,
        "parent_block_hash": event.parent or None,
        "token_ids": (),
        "block_size": layout.block_size,
        "lora_id": None,
        "lora_name": None,
        **where,
    }


def encode(time: float, events: Sequence[dict[str, Any]]) -> bytes:
    """A batch as it is sent. ``time``: seconds since 1970."""
    packed: bytes = msgpack.packb([time, events, _RANK])
    return packed
