"""Bulk connections to peers that break the rules, or stand still: what they cost ends, and nobody else pays for it."""

from __future__ import annotations

import contextlib
import select
import time

import grpc
import numpy as np
import pytest
import xxhash
from bulk_peer import Peer, frame, payload_of, token_of

import kvstore.service.sockets.bulk
from kvstore.service.access.one_time_tokens import OneTimeTokens
from kvstore.service.receipts import Receipts
from kvstore.store.results import Published
from kvstore.v1 import bulk_pb2
from kvstore.v1 import cache_pb2 as pb
from kvstore.v1.bulk_pb2_grpc import BulkStub
from kvstore.wire.frame import (
    CHECKSUM,
    HEADER,
    MAGIC,
    MOST_MESSAGE_BYTES,
    Kind,
    payload_bytes,
)

LARGE = 2 << 20


def raw(*fields: object) -> bytes:
    """A header with any fields, and their checksum."""
    packed = HEADER.pack(*fields)
    return packed + CHECKSUM.pack(xxhash.xxh3_64_intdigest(packed))


@pytest.fixture
def node(wire):
    return wire.node


@pytest.fixture
def large_wire(start_node, connect):
    return connect(start_node(arena=64 << 20))


def settle(wire, ticket: int) -> bulk_pb2.SettleReply:
    return BulkStub(wire.channel).Settle(bulk_pb2.SettleRequest(ticket=ticket), timeout=50.0)


class TestTokens:
    def test_a_token_is_good_once(self, node):
        token = token_of(node)
        with Peer(node, frame(Kind.HELLO, token)) as peer, Peer(node) as thief:
            assert peer.receive()[0].kind is Kind.READY
            thief.send(frame(Kind.HELLO, token))
            assert thief.failed().startswith("UnauthenticatedError\nthe token is unknown, was used before")
            assert thief.is_closed()

    @pytest.mark.parametrize("hello", [bytes(32), b"\xff" * 32])
    def test_a_token_that_was_never_given(self, node, hello):
        with Peer(node, frame(Kind.HELLO, hello)) as peer:
            assert peer.failed().startswith("UnauthenticatedError")
            assert peer.is_closed()

    def test_a_token_that_is_too_old(self, node):
        node._bulk.tokens.seconds = -1.0
        with Peer(node, frame(Kind.HELLO, node._bulk.tokens.issue())) as peer:
            assert peer.failed().startswith("UnauthenticatedError")

    @pytest.mark.parametrize("kind", [Kind.LOAD, Kind.RESERVE, Kind.PUT, Kind.READY])
    def test_nothing_is_answered_before_a_token(self, wire, payload, kind):
        space = wire.open()
        wire.put(space, payload(1))
        message = pb.LoadPages(pages=wire.pages(space, 1)).SerializeToString()
        with Peer(wire.node, frame(kind, message)) as peer, pytest.raises((EOFError, ConnectionError)):
            peer.read(1)

    @pytest.mark.parametrize("length", [0, 31, 33, MOST_MESSAGE_BYTES])
    def test_a_token_of_another_length(self, node, length):
        with Peer(node, frame(Kind.HELLO, bytes(length))) as peer:
            assert peer.is_closed()

    def test_so_many_may_wait_and_no_more(self, node, wire, monkeypatch):
        node._bulk.tokens._limit = 3
        stub = BulkStub(wire.channel)
        tokens = {stub.Open(bulk_pb2.OpenBulkRequest(), timeout=50.0).token for _ in range(3)}
        assert len(tokens) == 3
        with pytest.raises(grpc.RpcError, match="3 tokens for bulk connections wait") as caught:
            stub.Open(bulk_pb2.OpenBulkRequest(), timeout=50.0)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        with Peer(node, frame(Kind.HELLO, tokens.pop())) as peer:
            assert peer.receive()[0].kind is Kind.READY
            assert stub.Open(bulk_pb2.OpenBulkRequest(), timeout=50.0).token

    def test_old_ones_make_room(self):
        tokens = OneTimeTokens(2, 0.0)
        given = [tokens.issue() for _ in range(10)]
        assert len(set(given)) == 10
        assert not tokens.redeem(given[-1])


class TestNonsense:
    @pytest.mark.parametrize(
        "header",
        [
            raw(b"KVB2", Kind.LOAD, 1000, 10, 0),
            raw(b"GET ", Kind.LOAD, 1000, 10, 0),
            raw(MAGIC, 99, 1000, 10, 0),
            raw(MAGIC, Kind.STORED, 1000, 0, 0),
            raw(MAGIC, Kind.HELLO, 1000, 0, 0),
            raw(MAGIC, Kind.LOAD, 1000, 0xFFFF_FFFF, 0),
            raw(MAGIC, Kind.LOAD, 1000, MOST_MESSAGE_BYTES + 1, 0),
            raw(MAGIC, Kind.LOAD, 1000, 10, 1),
            raw(MAGIC, Kind.RESERVE, 1000, 10, 2**64 - 1),
            raw(MAGIC, Kind.LOAD, 1000, 10, 0)[:5] + b"\1" + raw(MAGIC, Kind.LOAD, 1000, 10, 0)[6:],
            frame(Kind.LOAD, b"a message")[:-1] + b"E",
            frame(Kind.LOAD, b"")[:9] + b"\1" + frame(Kind.LOAD, b"")[10:],
            frame(Kind.LOAD, b"\xff" * 50),
            frame(Kind.RESERVE, b"\xff" * 50),
            frame(Kind.PUT, b"\xff" * 50),
        ],
    )
    def test_what_is_no_request_ends_the_connection(self, node, header):
        with Peer.welcome(node) as peer:
            peer.send(header)
            assert peer.is_closed()

    @pytest.mark.parametrize("shift", [-1, 1, -5008, 2**60])
    def test_a_payload_of_another_length_is_not_stored(self, wire, payload, shift):
        space, data = wire.open(), payload(4)
        ticket = wire.reserve(space, 4).ticket
        with Peer.welcome(wire.node) as peer:
            peer.put(ticket, b"", milliseconds=60_000, length=payload_bytes(4, 5000) + shift)
            assert peer.is_closed()
        assert wire.at_rest()
        assert wire.found(space, 4) == [0] * 4
        assert wire.used_bytes() == 0
        wire.put(space, data)

    def test_one_wrong_checksum_and_nothing_is_stored(self, wire, payload):
        space, data = wire.open(), payload(4)
        ticket = wire.reserve(space, 4).ticket
        sent = bytearray(payload_of(data))
        sent[2 * 5008 + 17] ^= 1
        with Peer.welcome(wire.node) as peer:
            peer.put(ticket, bytes(sent))
            assert peer.failed().startswith("InvalidRequestError\n1 pages' bytes do not have")
            assert wire.found(space, 4) == [0] * 4
            assert wire.at_rest()
            ticket = wire.reserve(space, 4).ticket  # and the connection is good still
            peer.put(ticket, payload_of(data))
            header, message = peer.receive()
            assert (header.kind, pb.StoreCounts.FromString(message).stored) == (Kind.STORED, 4)

    def test_errors_of_the_store_are_answers(self, wire, payload):
        space, data = wire.open(), payload(2)
        wire.put(space, data)
        with Peer.welcome(wire.node) as peer:
            for pages, reason in (
                (wire.pages(b"x" * 32, 1), "UnknownNamespaceError"),
                (pb.PageList(fingerprint=space, hashes=b"x" * 33), "InvalidRequestError"),
                (wire.pages(space, 1000), "LimitExceededError"),
            ):
                peer.load(pages)
                assert peer.failed().startswith(reason)
                request = pb.PrepareStoreRequest(pages=pages, ttl_ms=1000)
                peer.send(frame(Kind.RESERVE, request.SerializeToString()))
                assert peer.failed().startswith(reason)
            peer.load(wire.pages(space, 3))
            header, message = peer.receive()
            assert len(pb.PageRun.FromString(message).tiers) == 2
            assert peer.read(header.payload) == payload_of(data)

    def test_a_number_that_nobody_has(self, wire, payload):
        with Peer.welcome(wire.node) as peer:
            peer.put(12345, payload_of(payload(3)))
            header, message = peer.receive()
            assert (header.kind, message) == (Kind.STORED, b"")


class TestStandingStill:
    def test_a_peer_that_says_nothing_is_sent_away(self, wire, monkeypatch, payload):
        monkeypatch.setattr(kvstore.service.sockets.bulk, "HELLO_SECONDS", 0.3)
        with Peer(wire.node) as silent, Peer(wire.node, frame(Kind.HELLO, bytes(32))[:40]) as stopped:
            wire.put(wire.open(), payload(2))
            assert silent.is_closed()
            assert stopped.is_closed()

    def test_a_byte_now_and_then_is_not_enough(self, wire, monkeypatch, eventually):
        monkeypatch.setattr(kvstore.service.sockets.bulk, "HELLO_SECONDS", 0.5)
        hello = frame(Kind.HELLO, wire.node._bulk.tokens.issue())
        with Peer(wire.node) as slow, pytest.raises(ConnectionError):
            for byte in hello[:-1]:  # ten seconds of them
                slow.send(bytes([byte]))
                select.select([slow.socket], [], [], 0.2)
        eventually(lambda: wire.node._bulk.connections == 0)

    def test_a_message_that_does_not_end(self, wire, monkeypatch):
        monkeypatch.setattr(kvstore.service.sockets.bulk, "MESSAGE_SECONDS", 0.3)
        with Peer.welcome(wire.node) as peer:
            peer.send(frame(Kind.LOAD, bytes(1000))[:-1])
            assert peer.is_closed()

    def test_an_idle_connection_ends(self, wire, monkeypatch):
        monkeypatch.setattr(kvstore.service.sockets.bulk, "IDLE_SECONDS", 0.3)
        with Peer.welcome(wire.node) as peer:
            assert peer.is_closed()

    def test_a_store_that_stops_in_the_middle_gives_its_slots_back(self, large_wire, payload, eventually):
        wire = large_wire
        space, data = wire.open(page_bytes=LARGE), payload(4, page_bytes=LARGE)
        ticket = wire.reserve(space, 4).ticket
        with Peer.welcome(wire.node) as peer:
            with contextlib.suppress(ConnectionError):  # the time may be over before all of this is sent
                peer.put(ticket, payload_of(data)[: 3 * LARGE], milliseconds=400, length=payload_bytes(4, LARGE))
            assert peer.is_closed()
            eventually(wire.at_rest)
        assert wire.used_bytes() == 0
        assert wire.found(space, 4) == [0] * 4

    def test_a_reader_that_stops_is_held_for_until_its_deadline(self, large_wire, payload, eventually):
        wire = large_wire
        space, data = wire.open(page_bytes=LARGE), payload(4, page_bytes=LARGE)
        wire.put(space, data)
        loads = wire.node.store._state.leases.loads

        def all_stand_still(seconds: float) -> bool:
            """Half of the arena, all together; False: the machine is too slow for that."""
            peers = [Peer.welcome(wire.node) for _ in range(4)]
            end = time.monotonic() + seconds
            for peer in peers:
                peer.load(wire.pages(space, 4), milliseconds=int(seconds * 1000))
            while len(loads) < 4 and time.monotonic() < end:
                time.sleep(0.001)
            together = len(loads) == 4
            assert wire.found(space, 4) == [1] * 4, "others are served"
            eventually(wire.at_rest)
            for peer in peers:
                if together:
                    header, _ = peer.receive()
                    with pytest.raises((EOFError, ConnectionError)):
                        peer.read(header.payload)
                peer.socket.close()
            return together

        assert any(map(all_stand_still, (1.5, 6.0, 24.0)))

    def test_pages_of_a_lapsed_hold_are_not_sent_on(self, large_wire, payload, monkeypatch, eventually):
        wire = large_wire
        space = wire.open(page_bytes=LARGE)
        wire.put(space, payload(8, page_bytes=LARGE))
        monkeypatch.setattr(wire.node.store, "still_held", lambda owner, ticket: False)
        with Peer.welcome(wire.node) as peer:
            peer.load(wire.pages(space, 8))
            header, _ = peer.receive()
            with pytest.raises((EOFError, ConnectionError)):
                peer.read(header.payload)
        eventually(wire.at_rest)


class TestTooMany:
    def test_unauthenticated_connections(self, wire, monkeypatch, payload, eventually):
        monkeypatch.setattr(kvstore.service.sockets.bulk, "MOST_UNAUTHENTICATED", 3)
        monkeypatch.setattr(kvstore.service.sockets.bulk, "HELLO_SECONDS", 60.0)
        unauthenticated = [Peer(wire.node) for _ in range(3)]
        eventually(lambda: wire.node._bulk.connections == 3)
        unauthenticated.append(Peer(wire.node))
        assert unauthenticated[0].is_closed(), "the oldest gives way"
        assert wire.node._bulk.connections == 3
        with Peer.welcome(wire.node):
            eventually(lambda: wire.node._bulk.connections == 3)
        for peer in unauthenticated:
            peer.socket.close()
        eventually(lambda: wire.node._bulk.connections == 0)
        monkeypatch.setattr(kvstore.service.sockets.bulk, "HELLO_SECONDS", 0.2)
        unauthenticated = [Peer(wire.node) for _ in range(3)]
        assert all(peer.is_closed() for peer in unauthenticated)
        eventually(lambda: wire.node._bulk.connections == 0)
        for peer in unauthenticated:
            peer.socket.close()

    def test_connections(self, wire, monkeypatch):
        monkeypatch.setattr(wire.node._bulk, "_most", 2)
        hello = frame(Kind.HELLO, wire.node._bulk.tokens.issue())
        with Peer.welcome(wire.node), Peer.welcome(wire.node), Peer(wire.node, hello) as third:
            assert third.failed() == "LimitExceededError\n2 bulk connections are open, the limit"
            assert third.is_closed()


class TestSettling:
    def test_a_store_whose_answer_nobody_read(self, wire, payload, eventually):
        space = wire.open()
        ticket = wire.reserve(space, 4).ticket
        with Peer.welcome(wire.node) as peer:
            peer.put(ticket, payload_of(payload(4)))
            eventually(lambda: wire.found(space, 4) == [1] * 4)
        reply = settle(wire, ticket)
        assert (reply.known, reply.stored, reply.present, reply.refused) == (True, 4, 0, 0)

    def test_a_store_in_the_middle_is_ended(self, wire, payload, eventually):
        space = wire.open()
        ticket = wire.reserve(space, 4).ticket
        with Peer.welcome(wire.node) as peer:
            peer.put(ticket, payload_of(payload(4))[:-1], length=payload_bytes(4, 5000))
            eventually(lambda: wire.receiving() == 1)
            reply = settle(wire, ticket)
            assert (reply.known, reply.stored, reply.refused) == (True, 0, 4)
            assert peer.is_closed()
        assert wire.at_rest()
        assert wire.found(space, 4) == [0] * 4

    def test_a_stream_in_the_middle_is_ended_too(self, wire, payload, eventually):
        space = wire.open()
        ticket = wire.reserve(space, 4).ticket
        header = pb.StorePages(ticket=ticket, checksums=[0] * 4).SerializeToString()

        def messages():
            yield header
            time.sleep(30)

        call = wire.store_stream.future(messages(), timeout=50.0)
        eventually(lambda: wire.receiving() == 1)
        reply = settle(wire, ticket)
        assert (reply.known, reply.stored, reply.refused) == (True, 0, 4)
        with pytest.raises((grpc.RpcError, grpc.FutureCancelledError)):
            call.result()
        assert wire.at_rest()

    def test_a_reservation_is_given_up(self, wire, payload):
        space = wire.open()
        ticket = wire.reserve(space, 4).ticket
        assert settle(wire, ticket).refused == 4
        assert wire.at_rest()
        with Peer.welcome(wire.node) as peer:
            peer.put(ticket, payload_of(payload(4)))
            assert peer.receive()[1] == b""
        assert wire.found(space, 4) == [0] * 4

    def test_a_number_that_nobody_has(self, wire):
        assert not settle(wire, 12345).known

    def test_so_many_results_are_kept(self, monkeypatch):
        monkeypatch.setattr("kvstore.service.receipts.MOST_RECEIPTS", 3)
        receipts = Receipts()
        for ticket in range(5):
            with receipts.receiving(ticket, lambda: None) as receipt:
                receipt.published = Published(ticket, 0, 0)
        assert [receipts.settle(ticket, 1.0) for ticket in range(5)] == [
            None,
            None,
            *(Published(ticket, 0, 0) for ticket in (2, 3, 4)),
        ]

    def test_a_thread_that_does_not_end(self):
        receipts = Receipts()
        with receipts.receiving(1, lambda: None), pytest.raises(TimeoutError):
            receipts.settle(1, 0.05)


class TestAtOnce:
    """Stores whose pages come with the request."""

    @staticmethod
    def message(wire, space: bytes, count: int, number: int = 77, ttl_ms: int = 20_000) -> pb.StorePages:
        request = pb.PrepareStoreRequest(pages=wire.pages(space, count), ttl_ms=ttl_ms)
        return pb.StorePages(ticket=number, request=request)

    @staticmethod
    def frame_of(message: pb.StorePages, data: np.ndarray) -> bytes:
        payload = payload_of(data)
        return frame(Kind.PUT, message.SerializeToString(), payload=len(payload)) + payload

    @staticmethod
    def counts(peer: Peer) -> tuple[int, int, int]:
        header, message = peer.receive()
        assert header.kind is Kind.STORED
        counts = pb.StoreCounts.FromString(message)
        return counts.stored, counts.present, counts.refused

    def loaded(self, wire, space: bytes, count: int) -> bytes:
        with Peer.welcome(wire.node) as peer:
            peer.load(wire.pages(space, count))
            return peer.read(peer.receive()[0].payload)

    def test_what_is_here_already_is_kept(self, wire, payload):
        space, first, second = wire.open(), payload(2), payload(4, seed=1)
        wire.put(space, first)
        with Peer.welcome(wire.node) as peer:
            peer.send(self.frame_of(self.message(wire, space, 4), second))
            assert self.counts(peer) == (2, 2, 0)
            peer.send(self.frame_of(self.message(wire, space, 4, number=78), first[[0, 1, 0, 1]]))
            assert self.counts(peer) == (0, 4, 0)
        assert self.loaded(wire, space, 4) == payload_of([*first, *second[2:]])
        assert settle(wire, 77).present == 2

    def test_pages_without_room_are_refused(self, start_node, connect, payload):
        wire = connect(start_node(arena=4 << 20))
        space = wire.open(page_bytes=1 << 20)
        with Peer.welcome(wire.node) as peer:
            tickets = [wire.stub.PrepareStore(self.message(wire, space, 1).request, timeout=50.0).ticket]
            peer.send(self.frame_of(self.message(wire, wire.open("b", 1 << 20), 1), payload(1, page_bytes=1 << 20)))
            assert self.counts(peer) == (1, 0, 0)
            request = pb.PrepareStoreRequest(pages=wire.pages(space, 1, first=9), ttl_ms=20_000)
            tickets.append(wire.stub.PrepareStore(request, timeout=50.0).ticket)
            peer.send(self.frame_of(self.message(wire, wire.open("c", 1 << 20), 1, 78), payload(1, page_bytes=1 << 20)))
            assert self.counts(peer) == (0, 0, 1), "half of the arena is in hand"
        assert settle(wire, 78).refused == 1
        for ticket in tickets:
            assert settle(wire, ticket).refused == 1

    @pytest.mark.parametrize("place", [0, 1, 3])
    def test_one_wrong_checksum_and_nothing_is_stored(self, wire, payload, place):
        space, data = wire.open(), payload(4)
        wire.put(space, data[:1])
        sent = bytearray(self.frame_of(self.message(wire, space, 4), data))
        sent[-(4 - place) * 5008 + 17] ^= 1
        with Peer.welcome(wire.node) as peer:
            peer.send(bytes(sent))
            assert peer.failed().startswith("InvalidRequestError\n1 pages' bytes do not have")
            assert wire.found(space, 4) == [1, 0, 0, 0]
            assert wire.at_rest()
            assert settle(wire, 77).refused == 4
            peer.send(self.frame_of(self.message(wire, space, 4, number=78), data))
            assert self.counts(peer) == (3, 1, 0)

    def test_a_refused_request_costs_its_payload_and_no_more(self, wire, payload, monkeypatch):
        space, data = wire.open(), payload(4)
        with Peer.welcome(wire.node) as peer:
            peer.send(self.frame_of(self.message(wire, b"x" * 32, 4), data))
            assert peer.failed().startswith("UnknownNamespaceError")
            monkeypatch.setattr("kvstore.service.incoming.AT_ONCE_BYTES", 19_999)
            peer.send(self.frame_of(self.message(wire, space, 4), data))
            assert peer.failed() == "LimitExceededError\n20000 bytes of pages without a reservation, the limit is 19999"
            monkeypatch.undo()
            peer.send(self.frame_of(self.message(wire, space, 4), data))
            assert self.counts(peer) == (4, 0, 0)
            too_long = frame(Kind.PUT, self.message(wire, b"x" * 32, 4).SerializeToString(), payload=2**62)
            peer.send(too_long)
            assert peer.is_closed()

    @pytest.mark.parametrize("shift", [-1, 1, -5008])
    def test_a_payload_of_another_length_is_not_stored(self, wire, payload, shift):
        space = wire.open()
        message = self.message(wire, space, 4).SerializeToString()
        with Peer.welcome(wire.node) as peer:
            peer.send(frame(Kind.PUT, message, payload=payload_bytes(4, 5000) + shift))
            assert peer.is_closed()
        assert wire.at_rest()
        assert wire.used_bytes() == 0

    def test_a_number_is_good_for_one_store(self, wire, payload):
        space, data = wire.open(), payload(4)
        with Peer.welcome(wire.node) as peer:
            peer.send(self.frame_of(self.message(wire, space, 2), data[:2]))
            assert self.counts(peer) == (2, 0, 0)
            peer.send(self.frame_of(self.message(wire, space, 4), data))
            assert peer.failed().startswith("InvalidRequestError\nthis store came before, or was settled")
        assert wire.found(space, 4) == [1, 1, 0, 0]

    def test_what_was_settled_before_it_came_is_not_stored(self, wire, payload):
        """Its bytes were still in the network when its connection was given up."""
        space, data = wire.open(), payload(4)
        assert not settle(wire, 77).known
        with Peer.welcome(wire.node) as peer:
            peer.send(self.frame_of(self.message(wire, space, 4), data))
            assert peer.failed().startswith("InvalidRequestError\nthis store came before, or was settled")
        assert wire.found(space, 4) == [0] * 4
        assert not settle(wire, 77).known

    def test_what_is_settled_in_the_middle_is_ended(self, wire, payload, eventually):
        space, data = wire.open(), payload(4)
        with Peer.welcome(wire.node) as peer:
            peer.send(self.frame_of(self.message(wire, space, 4), data)[:-1])
            eventually(lambda: wire.receiving() == 1)
            reply = settle(wire, 77)
            assert (reply.known, reply.stored, reply.refused) == (True, 0, 4)
            assert peer.is_closed()
        assert wire.at_rest()
        assert wire.found(space, 4) == [0] * 4

    def test_requests_may_be_sent_before_the_answers_are_read(self, wire, payload):
        space, data = wire.open(), payload(6)
        with Peer.welcome(wire.node) as peer:
            peer.send(self.frame_of(self.message(wire, space, 4), data[:4]))
            peer.load(wire.pages(space, 4))
            peer.send(self.frame_of(self.message(wire, space, 6, number=78), data))
            peer.load(wire.pages(space, 6))
            assert self.counts(peer) == (4, 0, 0)
            assert peer.read(peer.receive()[0].payload) == payload_of(data[:4])
            assert self.counts(peer) == (2, 4, 0)
            assert peer.read(peer.receive()[0].payload) == payload_of(data)


def test_a_stopping_node_ends_idle_connections_at_once_and_busy_ones_in_time(start_node, connect, payload, eventually):
    wire = connect(start_node(arena=64 << 20))
    space = wire.open(page_bytes=LARGE)
    wire.put(space, payload(8, page_bytes=LARGE))
    with Peer.welcome(wire.node) as idle, Peer.welcome(wire.node) as busy, Peer(wire.node) as unauthenticated:
        busy.load(wire.pages(space, 8))
        eventually(lambda: len(wire.node.store._state.leases.loads) == 1)
        wire.node._bulk.stop(0.5)
        assert idle.is_closed()
        assert busy.is_closed()
        assert unauthenticated.is_closed()
    assert wire.node._bulk.connections == 0
    assert wire.node.stop()
