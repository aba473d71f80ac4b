"""Unauthenticated connections that are late or too many are closed, and never at the cost of others."""

from __future__ import annotations

import errno
import os
import resource
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NoReturn

import grpc
import numpy as np
import pytest

import kvstore
from kvstore.config.node import NodeConfig
from kvstore.errors import ConfigError
from kvstore.node.node import Node
from kvstore.security.grants import EVERYTHING, Grant
from kvstore.service.access import connection_guard
from kvstore.service.access.connection_guard import (
    Address,
    TcpConnection,
    address_of,
    most_unauthenticated,
    surplus,
)

TOKEN, OTHER = "a-token-of-some-length", "another-token-of-some-length"
HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
SECONDS = 60.0


def connections(*since: float) -> list[TcpConnection]:
    """By port 0, 1, …; seen first at these times."""
    return [TcpConnection(100 + port, ("10.0.0.1", port), seen) for port, seen in enumerate(since)]


def granted(grants: Mapping[int, Grant | None]) -> dict[Address, Grant | None]:
    return {("10.0.0.1", port): grant for port, grant in grants.items()}


def ports(closed: list[TcpConnection]) -> list[int]:
    return [each.peer[1] for each in closed]


class TestWhoGoes:
    def test_unauthenticated_ones_that_are_late(self):
        open_ones = connections(0.0, 5.0, 0.0)
        assert ports(surplus(open_ones, granted({2: EVERYTHING}), 512, 10.0)) == []
        assert ports(surplus(open_ones, granted({2: EVERYTHING}), 512, 10.1)) == [0]
        assert ports(surplus(open_ones, granted({2: EVERYTHING}), 512, 15.1)) == [0, 1]

    def test_the_oldest_unauthenticated_ones_where_there_are_too_many(self):
        open_ones = connections(3.0, 1.0, 2.0, 0.0, 4.0)
        assert most_unauthenticated(12) == 3
        assert ports(surplus(open_ones, granted({}), 12, 5.0)) == [3, 1]
        assert ports(surplus(open_ones, granted({1: EVERYTHING}), 12, 5.0)) == [3], "those that are known don't count"

    def test_who_may_do_nothing_any_more_ends_what_it_does_unless_there_are_too_many(self):
        assert surplus(connections(0.0), granted({0: None}), 12, 100.0) == []
        assert ports(surplus(connections(0.0, 95.0, 96.0, 97.0), granted({0: None}), 12, 100.0)) == [0]

    def test_the_youngest_of_a_tenant_beyond_its_half(self):
        open_ones = connections(*range(8))
        a, b = Grant(tenant="a"), Grant(tenant="b")
        known = dict.fromkeys(range(6), a) | {6: b, 7: EVERYTHING}
        assert ports(surplus(open_ones, granted(known), 8, 100.0)) == [4, 5]
        assert surplus(open_ones, granted(dict.fromkeys(range(8), EVERYTHING)), 8, 100.0) == []

    def test_no_more_that_watch_the_health_than_there_may_be_unauthenticated_ones(self):
        open_ones = connections(*range(5))
        watching = {("10.0.0.1", port) for port in range(4)}
        assert ports(surplus(open_ones, granted({}), 12, 100.0, watching)) == [3, 4], "three may stay"
        assert surplus(open_ones[:3], granted({}), 12, 100.0, watching) == []


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("ipv4:10.0.0.1:5000", ("10.0.0.1", 5000)),
        ("ipv6:%5B::1%5D:5000", ("::1", 5000)),
        ("ipv6:[fe80::1%25eth0]:5000", ("fe80::1", 5000)),
        ("ipv6:%5B::ffff:10.0.0.1%5D:5000", ("10.0.0.1", 5000)),
        ("unix:/run/kvstore.sock", None),
        ("ipv4:nonsense:5000", None),
        ("", None),
    ],
)
def test_what_grpc_calls_a_peer(peer, address):
    assert address_of(peer) == address


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    tokens = tmp_path / "tokens"
    tokens.write_text(f"{TOKEN}\nb:{OTHER} tenant=b\n")
    tokens.chmod(0o600)
    mine = tmp_path / "mine"
    mine.write_text(TOKEN)
    mine.chmod(0o600)
    return tokens


def opened(stack: ExitStack, node: Node) -> socket.socket:
    """A connection that speaks HTTP/2, and asks for nothing."""
    connection = stack.enter_context(socket.create_connection(("127.0.0.1", node.port), SECONDS))
    with suppress(OSError):  # it may be closed already
        connection.sendall(HELLO)
    return connection


def ended(connection: socket.socket) -> bool:
    """Whether the node closed it."""
    connection.setblocking(False)
    try:
        while connection.recv(4096):
            pass
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


@pytest.fixture
def node(start_node: Callable[..., Node], tokens: Path) -> Node:
    return start_node(token_file=tokens, connections=16)


@pytest.fixture
def watch(node: Node) -> Iterator[Iterator[bytes]]:
    """A stream that was let in: one call, and no other on its connection."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    with grpc.insecure_channel(f"127.0.0.1:{node.port}", options=options) as channel:
        metadata = [("authorization", f"Bearer {TOKEN}")]
        watch = channel.unary_stream("/kvstore.v1.Events/Watch")(b"", metadata=metadata, timeout=SECONDS)
        for _ in ("start", "complete"):
            assert next(watch)
        yield watch


def still_told(node: Node, watch: Iterator[bytes]) -> None:
    with kvstore.connect(f"unix://{node.config.socket}", timeout=SECONDS) as client:
        pages = client.namespace(kvstore.Layout(model="m", block_size=16, page_bytes=100))
        assert pages.store([bytes(32)], np.ones((1, 100), np.uint8)).stored == 1
    assert next(watch)


def test_a_flood_of_unauthenticated_connections_leaves_others_theirs_and_lets_in_more(node, tokens, watch, eventually):
    with ExitStack() as stack:
        flood = [opened(stack, node) for _ in range(100)]
        eventually(lambda: sum(map(ended, flood)) >= 100 - most_unauthenticated(16))
        url, mine = f"kv://127.0.0.1:{node.port}", tokens.with_name("mine")
        with kvstore.connect(url, token_file=mine, timeout=SECONDS) as client:
            assert client.status().instance == node.instance
    still_told(node, watch)


def test_an_unauthenticated_connection_is_closed_when_late_and_another_is_not(
    node, watch, eventually, monkeypatch, caplog
):
    with ExitStack() as stack:
        connection = opened(stack, node)
        monkeypatch.setattr(connection_guard, "UNAUTHENTICATED_SECONDS", 0.0)
        eventually(lambda: ended(connection))
    still_told(node, watch)
    assert "1 connections to port" in caplog.text


def test_a_watch_of_the_health_stays(node, eventually, monkeypatch):
    with ExitStack() as stack:
        channel = stack.enter_context(grpc.insecure_channel(f"127.0.0.1:{node.port}"))
        health = channel.unary_stream("/grpc.health.v1.Health/Watch")(b"", timeout=SECONDS)
        assert next(health)
        connection = opened(stack, node)
        monkeypatch.setattr(connection_guard, "UNAUTHENTICATED_SECONDS", 0.0)
        eventually(lambda: ended(connection))
        node._health.stop()
        assert next(health), "it is told that the node goes"


def test_unauthenticated_connections_are_closed_when_no_descriptor_is_left(node, eventually, monkeypatch):
    with ExitStack() as stack:
        connection = opened(stack, node)
        eventually(lambda: node._unauthenticated._connections())
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limit)
        highest = max(int(entry.name) for entry in Path("/proc/self/fd").iterdir())
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 16, limit[1]))
        monkeypatch.setattr(connection_guard, "UNAUTHENTICATED_SECONDS", 0.0)

        def ended_without_descriptors() -> bool:
            with suppress(OSError):  # whatever others give back meanwhile is used up, too
                while True:
                    stack.callback(os.close, os.dup(0))
            return ended(connection)

        eventually(ended_without_descriptors)


def test_what_a_tenant_has_beyond_its_half_is_closed(node, eventually):
    options = [("grpc.use_local_subchannel_pool", 1)]
    metadata = [("authorization", f"Bearer {OTHER}")]
    with ExitStack() as stack:
        for _ in range(12):
            channel = stack.enter_context(grpc.insecure_channel(f"127.0.0.1:{node.port}", options=options))
            call = channel.unary_unary("/kvstore.v1.Cache/Status")
            with suppress(grpc.RpcError):  # it may be closed in the middle
                call(b"", metadata=metadata, timeout=SECONDS, wait_for_ready=True)
        eventually(lambda: len(node._unauthenticated._connections()) <= 8)


@pytest.mark.parametrize("number", [15, 16385, 0])
def test_how_many_there_may_be(number):
    with pytest.raises(ConfigError, match=f"connections must lie between 16 and 16384, got {number}"):
        NodeConfig(connections=number)


@pytest.mark.parametrize("limit", [1 << 30, resource.RLIM_INFINITY])
def test_without_a_list_not_every_number_that_may_be_is_tried(monkeypatch, limit):
    def none_left(folder: Path) -> NoReturn:
        raise OSError(errno.ENFILE, "the machine has none left")

    monkeypatch.setattr(Path, "iterdir", none_left)
    monkeypatch.setattr(resource, "getrlimit", lambda what: (limit, limit))
    assert connection_guard._descriptors() == range(1 << 20)
