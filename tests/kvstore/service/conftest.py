"""A node in this process, and the wire to it as any gRPC client has it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import grpc
import numpy as np
import pytest

from kvstore.hashing import checksum_of
from kvstore.layout import Layout
from kvstore.node.node import Node
from kvstore.store.statistics import StoreStatistics
from kvstore.v1 import cache_pb2 as pb
from kvstore.v1.cache_pb2_grpc import CacheStub

PAGE_BYTES = 5000
SECONDS = 50.0


@dataclass
class Wire:
    """Raw calls to a node over one channel."""

    node: Node
    channel: grpc.Channel

    def __post_init__(self) -> None:
        self.stub = CacheStub(self.channel)
        self.load_stream = self.channel.unary_stream(
            "/kvstore.v1.Pages/Load", request_serializer=pb.LoadPages.SerializeToString
        )
        self.store_stream = self.channel.stream_unary(
            "/kvstore.v1.Pages/Store", response_deserializer=pb.StoreCounts.FromString
        )

    def open(self, model: str = "raw", page_bytes: int = PAGE_BYTES) -> bytes:
        layout = Layout(model=model, block_size=16, page_bytes=page_bytes)
        return self.stub.OpenNamespace(pb.OpenNamespaceRequest(layout=layout.to_json()), timeout=SECONDS).fingerprint

    def pages(self, fingerprint: bytes, count: int, first: int = 0) -> pb.PageList:
        hashes = b"".join(number.to_bytes(32, "big") for number in range(first, first + count))
        return pb.PageList(fingerprint=fingerprint, hashes=hashes)

    def reserve(self, fingerprint: bytes, count: int, ttl_ms: int = 20_000, client: int = 0) -> pb.PrepareStoreReply:
        request = pb.PrepareStoreRequest(pages=self.pages(fingerprint, count), ttl_ms=ttl_ms, client=client)
        return self.stub.PrepareStore(request, timeout=SECONDS)

    def found(self, fingerprint: bytes, count: int) -> list[int]:
        request = pb.LookupRequest(queries=[self.pages(fingerprint, count)])
        [tiers] = self.stub.Lookup(request, timeout=SECONDS).tiers
        return list(tiers)

    def put(self, fingerprint: bytes, data: np.ndarray) -> None:
        """Store pages whole."""
        reply = self.reserve(fingerprint, len(data))
        header = pb.StorePages(ticket=reply.ticket, checksums=[checksum_of(page) for page in data])
        whole = data.tobytes()
        messages = [header.SerializeToString()] + [whole[at : at + (2 << 20)] for at in range(0, len(whole), 2 << 20)]
        counts = self.store_stream(iter(messages), timeout=SECONDS)
        assert counts.stored == len(data)

    # What the node holds, seen from inside.

    def used_bytes(self) -> int:
        return self.node.store.statistics().arena_used_bytes

    def snapshot(self) -> StoreStatistics:
        self.node.store.flush()
        return self.node.store.statistics()

    def receiving(self) -> int:
        """How many store streams are being received."""
        return sum(ticket.direct for ticket in list(self.node.store._state.leases.stores.values()))

    def at_rest(self) -> bool:
        """Whether nothing is reserved and nothing held."""
        return not self.node.store._state.leases.stores and not self.node.store._state.leases.loads


@pytest.fixture
def connect() -> Iterator[Callable[..., Wire]]:
    """Make a channel to a node, over TCP or the Unix socket; node and slots must be at rest when the test ends."""
    wires: list[Wire] = []

    def make(node: Node, *, unix: bool = False) -> Wire:
        target = f"unix:{node.config.socket}" if unix else f"127.0.0.1:{node.port}"
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", 8 << 20)]
        wires.append(Wire(node, grpc.insecure_channel(target, options=options)))
        return wires[-1]

    yield make
    for wire in wires:
        wire.channel.close()
        with wire.node.store.write_back.writing:  # or the write-back's own holds would be counted
            wire.node.store.check_integrity()


@pytest.fixture
def wire(start_node, connect) -> Wire:
    return connect(start_node())


@pytest.fixture
def payload() -> Callable[..., np.ndarray]:
    """Random bytes, ``(pages, page_bytes)``, the same for the same seed."""

    def make(count: int, page_bytes: int = PAGE_BYTES, seed: int = 0) -> np.ndarray:
        return np.random.default_rng(seed).integers(0, 256, (count, page_bytes), dtype=np.uint8)

    return make
