"""The socket in the arena's folder, and peers on it that break the rules, or stand still."""

from __future__ import annotations

import contextlib
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from local_peer import Peer, names, raw

import kvstore
from kvstore.catalog.policies import ExpectedReuse
from kvstore.errors import UnavailableError
from kvstore.service.sockets import local
from kvstore.v1 import cache_pb2 as pb
from kvstore.wire import local as calls
from kvstore.wire.frame import (
    HEADER_BYTES,
    MAGIC,
    MOST_MESSAGE_BYTES,
    Kind,
    pack_frame,
)
from kvstore.wire.local import CALLS, SOCKET_NAME, Calls

PAGE = 5000
LAYOUT = kvstore.Layout(model="near", block_size=16, page_bytes=PAGE)
PATIENCE = 60.0


@pytest.fixture
def node(start_node: Callable[..., Any]) -> Any:
    return start_node(disk_limit=0)


@pytest.fixture
def near(node: Any) -> Iterator[kvstore.Namespace]:
    with kvstore.connect(f"unix://{node.config.socket}", timeout=PATIENCE) as client:
        yield client.namespace(LAYOUT)


def test_it_is_its_users_alone_and_goes_with_the_node(start_node: Callable[..., Any], shm_folder: Any) -> None:
    node = start_node(disk_limit=0)
    path = node.store.arena.directory / SOCKET_NAME
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    node.stop()
    assert not path.exists()
    path.write_text("what a killed node, or anybody, left there")
    with Peer.welcome(start_node(disk_limit=0)):
        pass


def test_an_error_is_answered_and_the_connection_stays_good(node: Any, near: kvstore.Namespace) -> None:
    near.store(names(2), np.zeros((2, PAGE), np.uint8))
    client = near._handle.current[1]._attachment.client
    with Peer.welcome(node) as peer:
        pages = pb.PageList(fingerprint=near.fingerprint, hashes=b"".join(names(2)))
        for request, reason in (
            (pb.PrepareStoreRequest(pages=pages, client=77), "NotAttachedError"),
            (pb.PrepareStoreRequest(pages=pb.PageList(fingerprint=bytes(32)), client=client), "UnknownNamespaceError"),
            (pb.PrepareLoadRequest(pages=pages, client=77), "NotAttachedError"),
            (pb.PrepareLoadRequest(pages=pb.PageList(hashes=b"x"), client=client), "InvalidRequestError"),
            (pb.CompleteLoadRequest(client=77), "NotAttachedError"),
            (pb.CompleteStoreRequest(client=77), "NotAttachedError"),
        ):
            assert peer.ask(request).startswith(reason + "\n")
        held = peer.ask(pb.PrepareLoadRequest(pages=pages, client=client, ttl_ms=10_000))
        assert len(held.offsets) == 2
        assert peer.ask(pb.CompleteLoadRequest(client=client, ticket=held.ticket)).valid
        assert not peer.ask(pb.CompleteLoadRequest(client=client, ticket=held.ticket)).valid


@pytest.mark.parametrize(
    "data",
    [
        raw(b"KVB2", Kind.PREPARE_LOAD, 0, 10, 0),
        raw(b"GET ", Kind.PREPARE_LOAD, 0, 10, 0),
        raw(MAGIC, 99, 0, 10, 0),
        raw(MAGIC, Kind.LOAD, 0, 0, 0),
        raw(MAGIC, Kind.HELLO, 0, 0, 0),
        raw(MAGIC, Kind.ANSWER, 0, 0, 0),
        raw(MAGIC, Kind.COMPLETE_STORE, 0, 0xFFFF_FFFF, 0),
        raw(MAGIC, Kind.COMPLETE_STORE, 0, MOST_MESSAGE_BYTES + 1, 0),
        raw(MAGIC, Kind.COMPLETE_STORE, 0, 10, 1),
        pack_frame(Kind.COMPLETE_LOAD, b"a message")[:-1] + b"E",
        *(pack_frame(kind, b"\xff" * 50) for kind in CALLS),
    ],
)
def test_what_is_no_request_ends_the_connection(node: Any, data: bytes) -> None:
    with Peer.welcome(node) as peer, Peer.welcome(node) as other:
        peer.send(data)
        assert peer.is_closed()
        assert other.ask(pb.CompleteLoadRequest(client=1)).startswith("NotAttachedError")


@pytest.mark.parametrize("sent", [0, 1, HEADER_BYTES, HEADER_BYTES + 3])
def test_silence_ends_the_connection(node: Any, sent: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "MESSAGE_SECONDS", 0.2)
    monkeypatch.setattr(local, "IDLE_SECONDS", 0.2)
    with Peer(node) as peer:
        with contextlib.suppress(ConnectionError):  # a late node's time may be over by now
            peer.send(pack_frame(Kind.COMPLETE_LOAD, b"a message")[:sent])
        with pytest.raises((EOFError, ConnectionError)):
            while peer.receive():
                pass


def test_there_are_so_many_connections_and_who_gets_none_has_grpc(
    node: Any, monkeypatch: pytest.MonkeyPatch, eventually: Callable[..., None]
) -> None:
    monkeypatch.setattr(local, "MOST_CONNECTIONS", 2)
    with Peer.welcome(node), Peer.welcome(node):
        with Peer(node) as third:
            kind, message = third.receive()
            assert (kind, message) == (Kind.FAILED, b"LimitExceededError\n2 connections are open, the limit")
            assert third.is_closed()
        with kvstore.connect(f"unix://{node.config.socket}", timeout=PATIENCE) as client:
            pages = client.namespace(LAYOUT)
            assert pages.store(names(2), np.ones((2, PAGE), np.uint8)).stored == 2
            assert not client._session.path._connections._idle
    eventually(lambda: node._local.connections == 0)


def test_a_client_that_goes_in_the_middle_of_a_load_holds_nothing(
    start_node: Callable[..., Any], eventually: Callable[..., None]
) -> None:
    """It closes its connection while pages are still being read for it."""
    node = start_node()
    with kvstore.connect(f"unix://{node.config.socket}", timeout=PATIENCE) as client:
        pages = client.namespace(LAYOUT)
        pages.store(names(3), np.ones((3, PAGE), np.uint8))
        node.store.flush()
        with node.store._state.lock:
            for name in names(3)[1:]:
                node.store._state.residency.drop(node.store._catalog.find(pages.fingerprint + name))
        [tier] = node.store.lower_tiers.own
        read, goes_on = tier.read, threading.Event()
        tier.read = lambda keys, into: goes_on.wait(PATIENCE) and read(keys, into)
        request = pb.PrepareLoadRequest(
            pages=pb.PageList(fingerprint=pages.fingerprint, hashes=b"".join(names(3))),
            client=client._session.path._attachment.client,
            ttl_ms=60_000,
        )
        with Peer.welcome(node) as peer:
            peer.send(pack_frame(Kind.PREPARE_LOAD, request.SerializeToString()))
            kind, part = peer.receive()
            assert kind is Kind.PART
            assert len(pb.PrepareLoadReply.FromString(part).offsets) == 1
            assert node.store._state.leases.loads
        goes_on.set()
        eventually(lambda: not node.store._state.leases.loads)
        del tier.read
        with node.store.write_back.writing:
            node.store.check_integrity()
        assert pages.load(names(3), np.zeros((3, PAGE), np.uint8)) == 3


def test_no_thread_is_left_when_the_node_stops(start_node: Callable[..., Any]) -> None:
    node = start_node(disk_limit=0)
    with Peer.welcome(node) as peer:
        begun = time.monotonic()
        node.stop()
        assert peer.is_closed()
        assert time.monotonic() - begun < PATIENCE
    assert not [thread for thread in threading.enumerate() if thread.name == "kvstore-local"]


def test_an_end_that_looks_without_sleeping_takes_what_comes_and_sees_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "_MAY_LOOK", True)
    near, far = socket.socketpair(socket.AF_UNIX)
    with near, far:
        channel = Calls(near, time.monotonic() + PATIENCE)
        channel.look(0.01)  # nothing came: nothing is said of it
        frame = pack_frame(Kind.READY, b"here")
        sender = threading.Timer(0.05, far.sendall, [frame[:30]])
        sender.start()
        channel.look(PATIENCE)
        sender.join()
        far.sendall(frame[30:])
        assert channel.receive()[1] == b"here"
        far.close()
        with pytest.raises(UnavailableError, match="closed by the other end"):
            channel.look(PATIENCE)


def test_others_are_answered_while_the_rest_of_a_store_is_looked_for(
    node: Any, near: kvstore.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "_LOOK_SECONDS", PATIENCE)
    near.store(names(1), np.zeros((1, PAGE), np.uint8))
    client = near._handle.current[1]._attachment.client
    with Peer.welcome(node) as first, Peer.welcome(node) as second:
        for number, peer in ((10, first), (20, second), (30, second)):  # nobody completes the first one meanwhile
            pages = pb.PageList(fingerprint=near.fingerprint, hashes=b"".join(names(2, number)))
            ticket = peer.ask(pb.PrepareStoreRequest(pages=pages, client=client, ttl_ms=30_000)).ticket
            part = pb.CompleteStoreRequest(ticket=ticket, publish=True, client=client, part_slots=1)
            assert peer.ask(part).stored == 1
            if peer is second:
                assert peer.ask(part).startswith("InvalidRequestError")
                part.part_at, part.part_slots = 1, 0
                assert peer.ask(part).stored == 1


def test_a_store_is_answered_before_the_order_of_eviction_is_worked_out(
    node: Any, near: kvstore.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    near.store(names(1), np.zeros((1, PAGE), np.uint8))
    node.store.catch_up()  # the node does so behind its answer, perhaps only now: it must not wait, holding the lock
    client = near._handle.current[1]._attachment.client
    known, go_on, touch = threading.Event(), threading.Event(), ExpectedReuse.touch

    def wait(policy: ExpectedReuse, slots: Sequence[int]) -> None:
        assert go_on.wait(PATIENCE)
        touch(policy, slots)
        known.set()

    monkeypatch.setattr(ExpectedReuse, "touch", wait)
    with Peer.welcome(node) as peer:
        pages = pb.PageList(fingerprint=near.fingerprint, hashes=b"".join(names(2, 10)))
        ticket = peer.ask(pb.PrepareStoreRequest(pages=pages, client=client, ttl_ms=30_000)).ticket
        try:
            assert peer.ask(pb.CompleteStoreRequest(ticket=ticket, publish=True, client=client)).stored == 2
            assert near.lookup(names(2, 10)).prefix == 2
        finally:
            go_on.set()
        assert known.wait(PATIENCE), "it is, without anybody asking"
