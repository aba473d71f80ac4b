"""Garbage, truncation and silence on both TCP ports: the node lives, small, and serves the others.

FUZZ_STRIKES says how often (300 times by default).
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import threading

import grpc
import numpy as np
import xxhash
from bulk_peer import Peer, frame, payload_of

import kvstore
import kvstore.service.sockets.bulk
from kvstore.v1 import cache_pb2 as pb
from kvstore.wire.frame import (
    CHECKSUM,
    HEADER,
    HEADER_BYTES,
    MAGIC,
    Kind,
    payload_bytes,
)

STRIKES = int(os.environ.get("FUZZ_STRIKES", "300"))
PAGE_BYTES = 40_000
MOST_GROWTH = 96 << 20
"""Bytes that the process may grow by: far less than one header could ask for."""


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:  # noqa: PTH123
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Fuzzer:
    """Sends what no client sends. Every choice comes from one seed."""

    def __init__(self, wire, choose: random.Random) -> None:
        self.wire = wire
        self.choose = choose
        self.space = wire.open(page_bytes=PAGE_BYTES)
        self.data = np.random.default_rng(1).integers(0, 256, (4, PAGE_BYTES), dtype=np.uint8)
        wire.put(self.space, self.data)
        self.standing: list[Peer] = []
        """Half-open: never read, never closed until the end."""
        self.fresh = 1000

    def strike(self) -> None:
        self.choose.choice(
            [self.garbage, self.bad_hello, self.bad_header, self.garbled, self.truncated, self.half_open, self.messages]
        )()

    def some_bytes(self, most: int = 200) -> bytes:
        return self.choose.randbytes(self.choose.randint(1, most))

    def request(self) -> bytes:
        """A right request, whole: a load, a reservation, a store at once, or one of what was just reserved."""
        self.fresh += 4
        pages = self.wire.pages(self.space, 4, self.choose.choice([0, self.fresh]))
        milliseconds = self.choose.choice([0, 1, 300, 2**32 - 1])
        kind = self.choose.choice([Kind.LOAD, Kind.RESERVE, Kind.PUT])
        if kind is Kind.LOAD:
            return frame(kind, pb.LoadPages(pages=pages).SerializeToString(), milliseconds=milliseconds)
        request = pb.PrepareStoreRequest(pages=pages, ttl_ms=500)
        if kind is Kind.RESERVE:
            return frame(kind, request.SerializeToString(), milliseconds=milliseconds)
        payload = payload_of(self.data)
        if self.choose.random() < 0.5:
            message = pb.StorePages(ticket=self.choose.getrandbits(63), request=request).SerializeToString()
        else:
            ticket = self.wire.stub.PrepareStore(request, timeout=20.0).ticket or self.choose.getrandbits(63)
            message = pb.StorePages(ticket=ticket).SerializeToString()
        return frame(kind, message, payload=len(payload), milliseconds=2000) + payload

    # What is sent.

    def garbage(self) -> None:
        with Peer(self.wire.node, self.some_bytes(5000)):
            pass

    def bad_hello(self) -> None:
        token = self.choose.choice([self.choose.randbytes(32), self.some_bytes(100), b""])
        with Peer(self.wire.node, frame(Kind.HELLO, token) + self.request()) as peer:
            assert not self.answers_pages(peer), "pages without a token"

    def bad_header(self) -> None:
        lengths = [0, 1, 32, 65_536, 65_537, 2**31, 2**32 - 1]
        with Peer.welcome(self.wire.node) as peer:
            fields = HEADER.pack(
                self.choose.choice([MAGIC, MAGIC, MAGIC, self.choose.randbytes(4)]),
                self.choose.choice([*Kind, self.choose.randrange(256)]),
                self.choose.choice([0, 100, 2**32 - 1]),
                self.choose.choice(lengths),
                self.choose.choice([*lengths, payload_bytes(4, PAGE_BYTES), 2**63, 2**64 - 1]),
            )
            message = self.some_bytes()
            peer.send(fields + CHECKSUM.pack(xxhash.xxh3_64_intdigest(fields + message)) + message)

    def garbled(self) -> None:
        data = bytearray(self.request())
        if self.choose.random() < 0.5:  # what was garbled before it was sent, with the right checksum
            message = bytearray(data[HEADER_BYTES:][:200])
            message[self.choose.randrange(len(message))] ^= self.choose.randint(1, 255)
            with Peer.welcome(self.wire.node) as peer:
                self.push(peer, frame(data[4], bytes(message)))
        for _ in range(self.choose.randint(1, 8)):
            data[self.choose.randrange(min(len(data), self.choose.choice([24, 100, len(data)])))] ^= (
                self.choose.randint(1, 255)
            )
        with Peer.welcome(self.wire.node) as peer:
            self.push(peer, bytes(data))

    def truncated(self) -> None:
        data = self.request()
        with Peer.welcome(self.wire.node) as peer:
            self.push(peer, data[: self.choose.randrange(len(data))])
            if self.choose.random() < 0.5:
                with contextlib.suppress(OSError):
                    peer.socket.shutdown(socket.SHUT_WR)

    def half_open(self) -> None:
        if len(self.standing) < 20:
            peer = self.choose.choice([Peer, Peer.welcome])(self.wire.node)
            data = self.request()
            self.push(peer, data[: self.choose.randrange(len(data) + 1)])
            self.standing.append(peer)

    def messages(self) -> None:
        """Garbled messages to gRPC's calls and streams."""
        request = bytearray(
            pb.PrepareStoreRequest(pages=self.wire.pages(self.space, 4, 900), ttl_ms=200).SerializeToString()
        )
        request[self.choose.randrange(len(request))] ^= self.choose.randint(1, 255)
        method = self.choose.choice(
            ["Cache/PrepareStore", "Cache/Lookup", "Cache/PrepareLoad", "Cache/OpenNamespace", "Bulk/Settle"]
        )
        channel = self.wire.channel
        with contextlib.suppress(grpc.RpcError):
            channel.unary_unary(f"/kvstore.v1.{method}")(bytes(request), timeout=5.0)
        with contextlib.suppress(grpc.RpcError):
            list(channel.unary_stream("/kvstore.v1.Pages/Load")(bytes(request), timeout=5.0))
        with contextlib.suppress(grpc.RpcError):
            sent = [bytes(request), self.some_bytes(5000)]
            if self.choose.random() < 0.5:
                sent[0] = pb.StorePages(ticket=self.choose.getrandbits(63)).SerializeToString() + b"\x1a"
                sent[0] += bytes([len(request) & 0x7F | 0x80, len(request) >> 7]) + bytes(
                    request
                )  # its field `request`
            channel.stream_unary("/kvstore.v1.Pages/Store")(iter(sent), timeout=5.0)

    def push(self, peer: Peer, data: bytes) -> None:
        with contextlib.suppress(OSError):  # the node may have had enough
            peer.send(data)

    def answers_pages(self, peer: Peer) -> bool:
        with contextlib.suppress(EOFError, OSError, kvstore.KVStoreError):
            return peer.receive()[0].kind is not Kind.FAILED
        return False


def test_the_node_outlives_whatever_is_sent_to_it(wire, seed, monkeypatch, eventually):
    for name, seconds in (("HELLO_SECONDS", 60.0), ("MESSAGE_SECONDS", 0.5), ("IDLE_SECONDS", 5.0)):
        monkeypatch.setattr(kvstore.service.sockets.bulk, name, seconds)
    fuzzer = Fuzzer(wire, random.Random(seed))
    before = resident_bytes()
    threads = threading.active_count()
    layout = kvstore.Layout(model="other", block_size=16, page_bytes=20_000)
    data = np.random.default_rng(2).integers(0, 256, (8, 20_000), dtype=np.uint8)
    try:
        with kvstore.connect(f"kv://127.0.0.1:{wire.node.port}", timeout=20.0) as client:
            others = client.namespace(layout)
            for strike in range(STRIKES):
                fuzzer.strike()
                if strike % 10:
                    continue
                names = kvstore.hash_blocks(list(range(8 * 16)), 16, extra_keys=(str(strike),))
                stored = others.store(names, data)
                assert stored.refused == 0, "garbage takes others' slots"
                into = np.zeros_like(data)
                assert others.load(names, into) == 8
                assert np.array_equal(into, data)
                others.evict(names)
                with wire.node.store.write_back.writing:
                    wire.node.store.check_integrity()
    finally:
        for peer in fuzzer.standing:
            peer.socket.close()
    monkeypatch.undo()
    # What was there before the first strike is there, byte for byte, and nothing is still in anybody's hand.
    with Peer.welcome(wire.node) as peer:
        peer.load(wire.pages(fuzzer.space, 4))
        header, _ = peer.receive()
        assert peer.read(header.payload) == payload_of(fuzzer.data)
    eventually(wire.at_rest, "every slot is given back")
    eventually(lambda: wire.node._bulk.connections == 0, "every connection ends")
    eventually(lambda: threading.active_count() <= threads + 20)
    assert resident_bytes() - before < MOST_GROWTH
    with kvstore.connect(f"unix://{wire.node.config.socket}") as client:
        assert client.status().tier("arena").counters["corrupt"] == 0
