"""Today's client and a node of an older version, which ignores what it does not know in a message."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import kvstore
from kvstore.service.grpc import pages
from kvstore.service.incoming import incoming
from kvstore.service.sockets import bulk

LAYOUT = kvstore.Layout(model="old", block_size=16, page_bytes=8192)


@pytest.fixture
def forgets_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """The node does not know ``StorePages.request``."""

    @contextlib.contextmanager
    def older(store: Any, receipts: Any, request: Any, *rest: Any) -> Iterator[Any]:
        request.ClearField("request")
        with incoming(store, receipts, request, *rest) as arrival:
            yield arrival

    monkeypatch.setattr(bulk, "incoming", older)
    monkeypatch.setattr(pages, "incoming", older)


@pytest.mark.parametrize("way", ["bulk", "gRPC"])
def test_small_stores_are_stored_by_two_requests(
    way: str, forgets_requests: None, start_node: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if way == "gRPC":
        monkeypatch.setattr(
            "kvstore.client.paths.bulk.pool.BulkPool.lent", lambda self, deadline: contextlib.nullcontext()
        )
    node = start_node()
    with kvstore.connect(f"kv://127.0.0.1:{node.port}", timeout=30.0) as client:
        namespace = client.namespace(LAYOUT)
        for first in (0, 100):
            hashes = kvstore.hash_blocks(list(range(first, first + 64)), block_size=16)
            stored = [np.full(8192, each[0], np.uint8) for each in hashes]
            assert namespace.store(hashes, stored) == kvstore.StoreResult(stored=4)
            assert namespace.store(hashes, stored) == kvstore.StoreResult(present=4)
            into = [np.zeros(8192, np.uint8) for _ in hashes]
            assert namespace.load(hashes, into) == 4
            assert all(map(np.array_equal, into, stored))
    assert node.store.statistics().counters["stored"] == 8
