"""Pages of one store on their way in."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from tiny_stores import layout_of, page_hashes, put_pages

from kvstore.service.incoming import incoming
from kvstore.service.receipts import Receipts
from kvstore.store.store import Store
from kvstore.v1 import cache_pb2 as pb

FRAME = 4096


def test_what_was_reserved_is_given_back_where_memory_for_the_others_is_missing(
    open_store: Callable[..., Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page that is present is received in vain, into memory of its own."""
    store = open_store(16)
    known = store.open_namespace(layout_of("a", FRAME))
    put_pages(store, known, [1])
    pages = pb.PageList(fingerprint=known.fingerprint, hashes=b"".join(page_hashes([1, 2])))
    request = pb.StorePages(ticket=7, request=pb.PrepareStoreRequest(pages=pages, ttl_ms=60_000))

    def full(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(np, "empty", full)
    with (
        pytest.raises(MemoryError),
        incoming(store, Receipts(), request, lambda: None),
    ):
        pass
    monkeypatch.undo()

    assert store.statistics().arena_used_bytes == FRAME
    assert not store._state.leases.stores
    store.check_integrity()
