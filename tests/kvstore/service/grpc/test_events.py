"""``kvstore.v1.Events/Watch`` as any gRPC client has it."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import grpc
import pytest

from kvstore.events.ring import EventRing, PageEvent
from kvstore.layout import Layout
from kvstore.service.grpc.events import MOST_WATCHERS
from kvstore.v1 import cache_pb2, events_pb2_grpc
from kvstore.v1 import events_pb2 as pb

SECONDS = 60.0


def watch(wire, *fingerprints: bytes) -> Iterator[pb.Watched]:
    return events_pb2_grpc.EventsStub(wire.channel).Watch(pb.WatchRequest(fingerprints=fingerprints), timeout=SECONDS)


def until_complete(stream: Iterator[pb.Watched]) -> list[pb.PageEvent]:
    """What is told to be there, from one start on."""
    there: list[pb.PageEvent] = []
    for each in stream:
        there += each.events.events
        if each.WhichOneof("what") == "complete":
            return there
    raise AssertionError("the stream ended")


def test_what_is_there_and_then_what_changes(wire, payload):
    fingerprint = wire.open()
    wire.put(fingerprint, payload(2))
    wire.node.store.flush()
    stream = watch(wire)
    start = next(stream)
    assert (start.WhichOneof("what"), start.start.missed) == ("start", 0)
    assert start.start.instance == wire.node.instance and start.time > 1e9
    hashes = wire.pages(fingerprint, 2).hashes
    there: dict[int, bytes] = {}
    for event in until_complete(stream):
        there[event.tier] = there.get(event.tier, b"") + event.hashes
    assert there == dict.fromkeys((cache_pb2.PAGE_TIER_ARENA, cache_pb2.PAGE_TIER_DISK), hashes)
    wire.stub.Evict(wire.pages(fingerprint, 1), timeout=SECONDS)
    gone: dict[int, bytes] = {}
    while len(gone) < 2:
        for event in next(stream).events.events:
            assert (event.change, event.fingerprint) == (pb.PAGE_CHANGE_REMOVED, fingerprint)
            gone[event.tier] = event.hashes
    assert gone == dict.fromkeys((cache_pb2.PAGE_TIER_ARENA, cache_pb2.PAGE_TIER_DISK), hashes[:32])
    stream.cancel()


def test_only_the_namespaces_that_are_wanted(wire, payload):
    mine, other = wire.open("mine"), wire.open("other")
    stream = watch(wire, mine)
    until_complete(stream)
    wire.put(other, payload(2))
    wire.put(mine, payload(1))
    assert {event.fingerprint for event in next(stream).events.events} == {mine}
    stream.cancel()


class WatchedRing(EventRing):
    """Knows how far its reader has come."""

    reached = 0

    def read(self, start: int, most_pages: int, timeout: float) -> tuple[list[PageEvent], int, int]:
        events, self.reached, lost = super().read(start, most_pages, timeout)
        return events, self.reached, lost


def test_a_slow_reader_is_told_what_it_missed_and_told_everything_anew(wire, payload):
    """It does not read, gRPC takes no more for it, and the node remembers no more than it would for others."""
    store = wire.node.store
    store._state.events = store._state.residency._events = ring = WatchedRing(most_pages=1000)
    fingerprint = wire.open(page_bytes=64)
    stream = watch(wire)
    until_complete(stream)
    while ring.reached >= next(iter(ring._events), 0):
        wire.put(fingerprint, payload(200, 64))
        wire.stub.Evict(wire.pages(fingerprint, 200), timeout=SECONDS)
        assert sum(len(event.hashes) for event in list(ring._events.values())) <= 1000
    wire.put(fingerprint, payload(3, 64))
    missed = 0
    there: set[bytes] = set()
    while not missed or there != {number.to_bytes(32, "big") for number in range(3)}:
        each = next(stream)
        if each.WhichOneof("what") == "start":
            missed += each.start.missed
            there.clear()
        for event in each.events.events:
            hashes = {event.hashes[at : at + 32] for at in range(0, len(event.hashes), 32)}
            there = there | hashes if event.change == pb.PAGE_CHANGE_STORED else there - hashes
    stream.cancel()


def test_a_stopping_node_ends_its_streams(start_node, connect):
    node = start_node()
    stream = watch(connect(node))
    until_complete(stream)
    stopping = threading.Thread(target=node.stop)
    stopping.start()
    assert [each for each in stream if each.WhichOneof("what") != "events"] == []
    stopping.join(SECONDS)


def test_there_is_room_for_some(wire):
    streams = [watch(wire) for _ in range(MOST_WATCHERS)]
    for stream in streams:
        next(stream)
    with pytest.raises(grpc.RpcError, match=f"{MOST_WATCHERS} event streams are open"):
        next(watch(wire))
    for stream in streams:
        stream.cancel()


def test_no_more_namespaces_than_there_can_be(wire):
    with pytest.raises(grpc.RpcError, match="1025 namespaces, the limit is 1024"):
        next(watch(wire, *(number.to_bytes(32, "big") for number in range(1025))))


class TestTenants:
    @pytest.fixture
    def wire(self, start_node, connect, tmp_path):
        self.tokens = tmp_path / "tokens"
        self.write("a:the-long-token-of-a tenant=a\nb:the-long-token-of-b tenant=b\n")
        return connect(start_node(token_file=self.tokens), unix=True)  # where no token is needed

    def write(self, tokens: str) -> None:
        self.tokens.write_text(tokens)
        self.tokens.chmod(0o600)

    @staticmethod
    def watch(wire, token: str, *fingerprints: bytes) -> Iterator[pb.Watched]:
        metadata = (("authorization", f"Bearer {token}"),)
        request = pb.WatchRequest(fingerprints=fingerprints)
        return events_pb2_grpc.EventsStub(wire.channel).Watch(request, metadata=metadata, timeout=SECONDS)

    @staticmethod
    def open(wire, tenant: str) -> bytes:
        layout = Layout(model="m", block_size=16, page_bytes=5000, tenant=tenant).to_json()
        return wire.stub.OpenNamespace(cache_pb2.OpenNamespaceRequest(layout=layout), timeout=SECONDS).fingerprint

    def test_each_is_told_of_its_own_pages_to_the_end_of_their_namespace(self, wire, payload):
        mine, other = self.open(wire, "a"), self.open(wire, "b")
        wire.put(mine, payload(1))
        wire.put(other, payload(1))
        stream = self.watch(wire, "the-long-token-of-a")
        assert {event.fingerprint for event in until_complete(stream)} == {mine}
        for fingerprint in (other, mine):
            wire.stub.Clear(cache_pb2.ClearRequest(fingerprint=fingerprint), timeout=SECONDS)
        told = list(next(stream).events.events)
        while pb.PAGE_CHANGE_REMOVED not in {event.change for event in told}:
            told += next(stream).events.events
        assert {event.fingerprint for event in told} == {mine}
        stream.cancel()

    def test_anothers_namespace_is_one_that_does_not_exist(self, wire):
        other = self.open(wire, "b")
        with pytest.raises(grpc.RpcError, match="unknown namespace"):
            next(self.watch(wire, "the-long-token-of-a", other))

    def test_a_token_that_is_taken_away_ends_its_stream(self, wire):
        stream = self.watch(wire, "the-long-token-of-a")
        until_complete(stream)
        self.write("b:the-long-token-of-b tenant=b\n")
        wire.node.reload(wire.node.config)
        with pytest.raises(grpc.RpcError, match="no longer knows"):
            next(stream)

    def test_a_stream_tells_what_its_token_grants_now(self, wire, payload):
        """Also of namespaces that it told of before."""
        mine, other = self.open(wire, "a"), self.open(wire, "b")
        stream = self.watch(wire, "the-long-token-of-a")
        until_complete(stream)
        wire.put(mine, payload(1))
        assert {event.fingerprint for event in next(stream).events.events} == {mine}
        self.write("a:the-long-token-of-a tenant=b\n")
        wire.node.reload(wire.node.config)
        wire.stub.Evict(wire.pages(mine, 1), timeout=SECONDS)
        wire.put(other, payload(1))
        told = []
        while other not in {event.fingerprint for event in told}:
            told += next(stream).events.events
        assert mine not in {event.fingerprint for event in told if event.change == pb.PAGE_CHANGE_REMOVED}
        self.write("a:the-long-token-of-a tenant=b rights=write\n")
        wire.node.reload(wire.node.config)
        with pytest.raises(grpc.RpcError, match="Watch needs the right 'read'"):
            for _ in stream:  # what was on its way
                pass
