"""A node that is killed at each step of a store and of a load from another host, over bulk and over gRPC."""

from __future__ import annotations

import contextlib
import threading

import numpy as np
import pytest
from faulty_proxy import Proxy
from ports import free_port

import kvstore
from kvstore.client.paths.bulk.pool import BulkPool
from kvstore.errors import DeadlineError, UnavailableError

PAGE_BYTES = 96 << 10
STEPS = {
    "at once": [("store", "up", 50), ("store", "up", 3 * PAGE_BYTES + 1000), ("store", "down", 10)],
    "reserved before": [("store", "up", 3 * PAGE_BYTES + 1000), ("store", "down", 10)],
    "load": [("load", "up", 50), ("load", "down", 5 * PAGE_BYTES)],
}
"""What is done, and behind how many bytes to or from the node this one dies: of the request, of pages, of an answer."""


@pytest.fixture
def proxies(monkeypatch):
    """Before a node's two ports; clients that connect to the first one are sent to the second one."""
    opened: list[Proxy] = []

    def make(node) -> list[Proxy]:
        opened.extend([Proxy(node.port), Proxy(node.bulk_port)])
        connect = BulkPool._connect
        monkeypatch.setattr(BulkPool, "_connect", lambda self, port, *rest: connect(self, opened[1].port, *rest))
        return opened

    yield make
    for proxy in opened:
        proxy.close()


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("path", ["bulk", "grpc"])
def test_killed_at_each_step(node_process, proxies, layout, hashes, payload, monkeypatch, path, steps):
    """What was said to be stored is there, what is there is whole, and the next call goes on."""
    if steps == "reserved before":
        for module in ("bulk.path", "grpc"):
            monkeypatch.setattr(f"kvstore.client.paths.{module}.AT_ONCE_BYTES", 0)
    node = node_process(disk_limit="0", bulk_port=str(free_port()))  # the same one when it comes back
    layout = kvstore.Layout(model="large", block_size=16, page_bytes=PAGE_BYTES)
    grpc_proxy, bulk_proxy = proxies(node)
    for turn, (work, direction, cut) in enumerate(STEPS[steps]):
        names, data, into = hashes(8, name=turn), payload(8, turn, PAGE_BYTES), np.zeros((8, PAGE_BYTES), np.uint8)
        dead, once = threading.Event(), threading.Semaphore()

        def die(dead: threading.Event = dead, once: threading.Semaphore = once) -> None:
            if once.acquire(blocking=False):  # several connections may end at once
                node.kill()
                dead.set()

        for proxy in (grpc_proxy, bulk_proxy):
            proxy.heal()
            proxy.on_cut = die
        bulk_proxy.refuse = path == "grpc"
        told = kvstore.StoreResult()
        loaded = 0
        with kvstore.connect(f"kv://127.0.0.1:{grpc_proxy.port}", timeout=20.0) as client:
            pages = client.namespace(layout)
            pages.store(hashes(1, name=1000 + turn), payload(1, 99, PAGE_BYTES))  # it is connected
            if work == "load":
                assert pages.store(names, data).stored == 8
            proxy = bulk_proxy if path == "bulk" else grpc_proxy
            setattr(proxy, "cut_up_after" if direction == "up" else "cut_after", cut)
            with contextlib.suppress(UnavailableError, DeadlineError):
                if work == "store":
                    told = pages.store(names, data)
                else:
                    loaded = pages.load(names, into)
        assert np.array_equal(into[:loaded], data[:loaded])
        assert dead.wait(30), "it was not killed"
        node.start()
        for proxy in (grpc_proxy, bulk_proxy):
            proxy.heal()
        with kvstore.connect(node.kv_url, timeout=20.0) as client:
            pages = client.namespace(layout)
            here = pages.lookup(names).prefix
            assert here >= told.stored + told.present
            assert pages.load(names, into) == here
            assert np.array_equal(into[:here], data[:here])
            assert pages.store(names, data) == kvstore.StoreResult(stored=8 - here, present=here)
            assert pages.load(names, into) == 8
            assert np.array_equal(into, data)
