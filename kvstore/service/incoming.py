"""One store's payloads as they arrive, by frames or by a gRPC stream: reserve slots, receive, publish all or none."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from kvstore.errors import InvalidRequestError, LimitExceededError
from kvstore.hashing import HASH_BYTES
from kvstore.page_codes import StoreOutcome
from kvstore.service.page_calls import reserve
from kvstore.service.receipts import Receipts
from kvstore.store.leases import NODE
from kvstore.store.results import Published
from kvstore.store.store import Store
from kvstore.tiers.tier import PageBytes
from kvstore.v1 import cache_pb2 as pb
from kvstore.wire.messages import AT_ONCE_BYTES


@dataclass(slots=True)
class Incoming:
    """What is to be received, and then what became of it."""

    pages: Sequence[PageBytes] | None
    """Where the payload of each page goes, as they come; None: the reservation lapsed, was given up, or an earlier node
    gave it."""
    checksums: Sequence[int] | None = None
    """xxh3_64 of each, set by the receiver when all came and are right; None: nothing is published."""
    published: Published = Published(0, 0, 0)  # noqa: RUF009 - it can't be changed
    """What became of them, behind the context."""


@contextmanager
def incoming(store: Store, receipts: Receipts, request: pb.StorePages, cut: Callable[[], object]) -> Iterator[Incoming]:
    """Receive the payloads of a reservation, or reserve and receive at once. They are published, all or none, when the
    context ends.

    Args:
        store: where they go.
        receipts: told what became of them.
        request: which pages.
        cut: ends the connection that they come by, from any thread.

    Raises:
        KVStoreError: nothing can be received: what ``prepare_store`` raises, or the store is known already.
        LimitExceededError: more than ``AT_ONCE_BYTES`` without a reservation.
    """
    at_once = request.HasField("request")
    with receipts.receiving(request.ticket, cut, new=at_once) as receipt:
        lease, outcomes, to_write = request.ticket, b"", StoreOutcome.RESERVED
        if at_once:
            page_bytes = _page_bytes(store, request.request.pages)
            reserved = reserve(store, NODE, request.request)
            lease, outcomes = reserved.ticket, reserved.outcomes
        views = store.take_over_writing(NODE, lease) if lease else None
        arrival = Incoming(views)
        try:
            if at_once:
                slots = iter(views or ())
                wanted = [next(slots, None) if outcome == to_write else None for outcome in outcomes]
                arrival.pages = [np.empty(page_bytes, np.uint8) if slot is None else slot for slot in wanted]
            yield arrival
        finally:
            sums = arrival.checksums
            done = Published(0, 0, 0)
            if views is not None:
                if at_once and sums is not None:
                    sums = [each for each, outcome in zip(sums, outcomes, strict=True) if outcome == to_write]
                done = store.complete_store(NODE, lease, publish=sums is not None, checksums=sums)
            if at_once:
                present = outcomes.count(StoreOutcome.PRESENT) if sums is not None else 0
                stored, present = done.stored, done.present + present
                done = Published(stored, present, len(outcomes) - stored - present)
            if arrival.pages is not None:
                receipt.published = arrival.published = done


def _page_bytes(store: Store, pages: pb.PageList) -> int:
    """The size of pages that come at once, so few that they may come in vain; 0 where nobody knows it."""
    known = store.namespaces.get(pages.fingerprint)
    page_bytes = known.layout.page_bytes if known is not None else 0
    size = len(pages.hashes) // HASH_BYTES * page_bytes
    if size > AT_ONCE_BYTES:
        raise LimitExceededError(f"{size} bytes of pages without a reservation, the limit is {AT_ONCE_BYTES}")
    if not pages.hashes:
        raise InvalidRequestError("a store of no pages")
    return page_bytes
