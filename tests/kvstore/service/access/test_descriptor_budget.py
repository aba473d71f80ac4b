"""Descriptors of the process: as many as it may have, and a word when none is left."""

from __future__ import annotations

import resource
import socket
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import numpy as np
import pytest
from ports import free_port

import kvstore
from kvstore.service.access.descriptor_budget import DescriptorBudget, connections_within, raise_limit

SECONDS = 50.0
HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""With what a connection begins; then it may be silent."""


@pytest.fixture
def limits() -> Iterator[tuple[int, int]]:
    """Soft and hard limit; as before behind the test."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield before
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_that_none_is_left_is_counted_and_said_once(limits, caplog):
    descriptors = DescriptorBudget()
    try:
        descriptors.look()
        assert "are in use" not in caplog.text
        resource.setrlimit(resource.RLIMIT_NOFILE, (1, limits[1]))
        descriptors.look()
        descriptors.look()
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        [family] = descriptors.collect()
        assert family.samples[0].value >= 2
        assert caplog.text.count("are in use") == 1
    finally:
        descriptors.stop()


def test_a_low_soft_limit_is_raised(limits):
    wanted = min(limits[1], 1 << 16) if limits[1] != resource.RLIM_INFINITY else 1 << 16
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, wanted), limits[1]))
    raise_limit()
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (wanted, limits[1])


def ended(connection: socket.socket) -> bool:
    """Whether the other end closed it."""
    connection.setblocking(False)
    try:
        while connection.recv(1 << 12):
            pass
    except BlockingIOError:
        return False
    except ConnectionError:
        pass
    return True


def test_connections_leave_descriptors_for_the_nodes_own_work(node_process, limits, eventually):
    if limits[1] < 2048:
        pytest.skip("this process may not have descriptors enough to use up a node's")
    raise_limit()
    node = node_process(ready=False, metrics=str(free_port()))
    node.command = ["sh", "-c", 'ulimit -n 800; exec "$@"', "sh", *node.command]
    node.start()
    assert "800 descriptors, too few for 512 connections" in node.errors.read_text()
    metrics = int(node.options["metrics"])
    with ExitStack() as stack:

        def opened(port: int, count: int) -> list[socket.socket]:
            where = ("127.0.0.1", port)
            return [stack.enter_context(socket.create_connection(where, timeout=SECONDS)) for _ in range(count)]

        flood = opened(node.port, 900)  # this node asks for no tokens, so whoever is connected stays
        for each in flood:
            with suppress(ConnectionError):  # it has none
                each.sendall(HTTP2)
        opened(node.bulk_port, 64)
        opened(metrics, 80)
        eventually(lambda: sum(map(ended, flood)) > 100, "those beyond the limit are closed")
        layout = kvstore.Layout(model="tiny", block_size=16, page_bytes=1 << 20)
        with kvstore.connect(node.url, timeout=SECONDS) as client:
            pages = client.namespace(layout)
            for number in range(40):  # several segments of the disk, each with a file of its own
                pages.store([bytes([number]) * 32], np.full(1 << 20, number, np.uint8))
                client.flush()
            assert client.status().tier("disk").pages == 40
        with urllib.request.urlopen(f"http://127.0.0.1:{metrics}/metrics", timeout=SECONDS) as answer:
            assert b"kvstore_descriptors_exhausted_total 0.0" in answer.read()


def test_as_many_connections_as_are_wanted_where_descriptors_suffice(limits, caplog):
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, limits[1]), limits[1]))
    assert connections_within(16, 0) == 16
    assert not caplog.text
    assert 16 <= connections_within(512, 0) < 512
    assert connections_within(512, 1024) == 16, "fewer are of no use"
