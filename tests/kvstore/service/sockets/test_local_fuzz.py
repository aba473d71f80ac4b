"""Frames and messages that no client sends, on the socket in the arena's folder, for a bounded time: the node lives,
small, serves the others, and never lets go of a slot that somebody may write.

FUZZ_SECONDS says how long (1 by default).
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from local_clients import LocalClient
from local_peer import Peer, names

import kvstore
from kvstore.service.sockets import local
from kvstore.v1 import cache_pb2 as pb
from kvstore.wire.frame import (
    CHECKSUM,
    HEADER,
    HEADER_BYTES,
    MAGIC,
    MOST_MESSAGE_BYTES,
    Kind,
    pack_frame,
)
from kvstore.wire.local import CALLS

SECONDS = float(os.environ.get("FUZZ_SECONDS", "1"))
PAGE = 5000
LAYOUT = kvstore.Layout(model="fuzzed", block_size=16, page_bytes=PAGE)
PATIENCE = 30.0
MOST_GROWTH = 96 << 20
"""Bytes that the process may grow by."""
_KINDS = {asked: kind for kind, (asked, _) in CALLS.items()}
_LENGTHS = [0, 1, HEADER_BYTES, MOST_MESSAGE_BYTES, MOST_MESSAGE_BYTES + 1, 2**31, 2**32 - 1]


def frame_of(request: Any) -> bytes:
    return pack_frame(_KINDS[type(request)], request.SerializeToString())


class Fuzzer:
    """A client gone mad. Every choice comes from one seed."""

    def __init__(self, node: Any, choose: random.Random, fingerprint: bytes, victim: int, stolen: int) -> None:
        self.node = node
        self.choose = choose
        self.fingerprint = fingerprint
        self.process = LocalClient(node.store.arena.directory)
        self.client = node.store.attach(self.process.name)
        self.victim = victim
        """Another client, in whose name it speaks, too."""
        self.stolen = stolen
        """The victim's lease, which is the victim's alone to end."""
        self.tickets = [1]
        self.standing: list[Peer] = []
        """Half-open: never read, never closed until the end."""
        self.fresh = 1000

    def strike(self) -> None:
        self.choose.choice(
            [self.garbage, self.bad_header, self.garbled, self.truncated, self.half_open, *[self.rubbish] * 5]
        )()

    # What is sent.

    def garbage(self) -> None:
        with Peer(self.node) as peer:
            self.push(peer, self.choose.randbytes(self.choose.randint(1, 5000)))

    def bad_header(self) -> None:
        fields = HEADER.pack(
            self.choose.choice([MAGIC, MAGIC, MAGIC, self.choose.randbytes(4)]),
            self.choose.choice([*Kind, self.choose.randrange(256)]),
            self.choose.choice([0, 100, 2**32 - 1]),
            self.choose.choice(_LENGTHS),
            self.choose.choice([0, 0, 1, 2**63, 2**64 - 1]),
        )
        with Peer.welcome(self.node) as peer:
            self.push(peer, fields + self.choose.randbytes(CHECKSUM.size + 200))

    def garbled(self) -> None:
        data = bytearray(frame_of(self.request()))
        if self.choose.random() < 0.5:  # garbled before it was sent, with the right checksum
            message = data[HEADER_BYTES:] or bytearray(1)
            message[self.choose.randrange(len(message))] ^= self.choose.randint(1, 255)
            data = bytearray(pack_frame(data[4], bytes(message)))
        else:
            for _ in range(self.choose.randint(1, 8)):
                data[self.choose.randrange(len(data))] ^= self.choose.randint(1, 255)
        with Peer.welcome(self.node) as peer:
            self.push(peer, bytes(data))
            with contextlib.suppress(OSError):
                peer.socket.shutdown(socket.SHUT_WR)  # nobody waits for bytes that a garbled length promises
            self.hear(peer)

    def truncated(self) -> None:
        data = frame_of(self.request())
        with Peer.welcome(self.node) as peer:
            self.push(peer, data[: self.choose.randrange(len(data))])

    def half_open(self) -> None:
        if len(self.standing) < 20:
            peer = self.choose.choice([Peer, Peer.welcome])(self.node)
            data = frame_of(self.request())
            self.push(peer, data[: self.choose.randrange(len(data))])
            self.standing.append(peer)

    def rubbish(self) -> None:
        """Messages that can be read, in any order, several before an answer is; then perhaps no answer is."""
        with Peer.welcome(self.node) as peer:
            requests = [self.request() for _ in range(self.choose.randint(1, 6))]
            self.push(peer, b"".join(map(frame_of, requests)))
            for _ in requests[: self.choose.randint(0, 6)]:
                self.hear(peer)

    def request(self) -> Any:
        """One whose parts fit each other, or do not."""
        some = self.choose.choice
        client = some([self.client] * 6 + [self.victim, 0, self.choose.getrandbits(64)])
        number = self.choose.randint(0, 4)
        self.fresh += 4
        hashes = b"".join(names(number, some([0, self.fresh, self.fresh - 4])))
        pages = pb.PageList(
            fingerprint=some([self.fingerprint] * 6 + [bytes(32), b""]), hashes=some([hashes] * 6 + [hashes + b"x"])
        )
        ticket = some([*self.tickets[-8:], self.stolen, self.choose.getrandbits(63)])
        if ticket == self.stolen and client == self.victim:
            client = self.client
        kind = some([*CALLS])
        if kind is Kind.PREPARE_STORE:
            if some([True, False]):
                pages.hashes = some([b""] * 6 + [hashes])
                ahead = some([1, 2, 4, 4, 2**31, 2**32 - 1])
                return pb.PrepareStoreRequest(
                    pages=pages, client=client, ttl_ms=some([0, 1, 300]), ahead=ahead, ahead_evict=some([True, False])
                )
            return pb.PrepareStoreRequest(
                pages=pages, client=client, ttl_ms=some([0, 1, 300, 2**32 - 1]), parent=some([b"", b"odd", bytes(32)])
            )
        if kind is Kind.COMPLETE_STORE:
            request = pb.CompleteStoreRequest(ticket=ticket, publish=some([True, True, False]), client=client)
            request.part_at, request.part_slots = some([0, 0, 1, 2, 2**32 - 1]), some([0, 0, 1, 2, 2**32 - 1])
            if some([True, False]):
                request.pages.CopyFrom(pages)
                request.outcomes = bytes(self.choose.choices([0, 0, 0, 1, 2, 255], k=some([number] * 6 + [5])))
                request.parent = some([b"", b"odd", bytes(32)])
            return request
        if kind is Kind.PREPARE_LOAD:
            use = pb.PageUse(fingerprint=pages.fingerprint, hashes=hashes, read=True, missed=some([0, 2**64 - 1]))
            uses = pb.UseReport(uses=[use] * some([0, 1, 2000]))
            return pb.PrepareLoadRequest(pages=pages, client=client, ttl_ms=some([0, 1, 300]), used=uses)
        return pb.CompleteLoadRequest(ticket=ticket, client=client)

    # Beside it.

    def push(self, peer: Peer, data: bytes) -> None:
        with contextlib.suppress(OSError):  # the node may have had enough
            peer.send(data)

    def hear(self, peer: Peer) -> None:
        """Take an answer, and remember its ticket if it has one."""
        with contextlib.suppress(EOFError, OSError, kvstore.KVStoreError):
            kind, message = peer.receive()
            if kind is Kind.ANSWER:
                for answer in (pb.PrepareStoreReply, pb.PrepareLoadReply):  # their tickets are the same field
                    with contextlib.suppress(Exception):
                        self.tickets.append(answer.FromString(message).ticket)


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:  # noqa: PTH123
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_the_node_outlives_whatever_is_sent_to_it(
    start_node: Callable[..., Any], seed: int, monkeypatch: pytest.MonkeyPatch, eventually: Callable[..., None]
) -> None:
    monkeypatch.setattr(local, "MESSAGE_SECONDS", 5.0)
    node = start_node(disk_limit=0, arena=64 << 20)
    kept, data = names(4), np.random.default_rng(1).integers(0, 256, (4, PAGE), dtype=np.uint8)
    into = np.zeros_like(data)
    before, threads = resident_bytes(), threading.active_count()
    with kvstore.connect(f"unix://{node.config.socket}", timeout=PATIENCE) as client:
        pages = client.namespace(LAYOUT)
        pages.store(kept, data)
        victim = client._session.path._attachment.client
        own = pages.prepare_store(names(3, 500))  # another client's word must not end it
        [stolen] = node.store._state.leases.stores
        fuzzer = Fuzzer(node, random.Random(seed), pages.fingerprint, victim, stolen)
        strikes = 0
        end = time.monotonic() + SECONDS
        try:
            while strikes < 40 or time.monotonic() < end:
                fuzzer.strike()
                strikes += 1
                if strikes % 20 == 0:
                    mine = kvstore.hash_blocks(list(range(4 * 16)), 16, extra_keys=(str(strikes),))
                    assert pages.store(mine, data).refused == 0, "garbage takes others' slots"
                    assert pages.load(mine, into) == 4
                    assert np.array_equal(into, data)
                    pages.evict(mine)
                    with node.store.write_back.writing:
                        node.store.check_integrity()
        finally:
            for peer in fuzzer.standing:
                peer.socket.close()
            fuzzer.process.die()
        for page in own.pages:
            page[:] = 5
        assert own.complete() == kvstore.StoreResult(stored=3)
        assert pages.load(kept, into) == 4
        assert np.array_equal(into, data)
        eventually(lambda: node._local.connections <= 1 + len(client._session.path._connections._idle))
    tickets = node.store._state.leases
    with node.store._state.lock:  # what was reserved in the name of clients from afar lapses in a minute at most
        for ticket in (*tickets.stores.values(), *tickets.loads.values()):
            ticket.deadline = 0.0
    eventually(lambda: not tickets.stores and not tickets.loads, "every slot is given back")
    eventually(lambda: node._local.connections == 0, "every connection ends")
    eventually(lambda: threading.active_count() <= threads + 20)
    assert resident_bytes() - before < MOST_GROWTH
    node.store.check_integrity()
