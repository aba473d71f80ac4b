"""The payload streams: whole, cut off, wrong, and standing still."""

from __future__ import annotations

import queue
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest

import kvstore.service.grpc.pages
from kvstore.hashing import checksum_of
from kvstore.v1 import cache_pb2 as pb

ROOT = Path(__file__).parents[4]
SECONDS = 50.0
PAGE_BYTES = 5000


def header_of(ticket: int, data: np.ndarray) -> bytes:
    return pb.StorePages(ticket=ticket, checksums=[checksum_of(page) for page in data]).SerializeToString()


class Feed:
    """Messages that a test sends one at a time; ``None`` ends them."""

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()

    def send(self, message: bytes | None) -> None:
        self._waiting.put(message)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._waiting.get, None)


WRONG = {
    "nothing": (lambda ticket, data: [], "begins with a StorePages"),
    "garbage": (lambda ticket, data: [b"\xff" * 100, data.tobytes()], "begins with a StorePages"),
    "no payload": (lambda ticket, data: [header_of(ticket, data)], "after 0 of 15000 bytes"),
    "too few bytes": (
        lambda ticket, data: [header_of(ticket, data), data.tobytes()[:-1]],
        "after 14999 of 15000 bytes",
    ),
    "too many bytes": (lambda ticket, data: [header_of(ticket, data), data.tobytes() + b"x"], "15000 bytes"),
    "another message": (lambda ticket, data: [header_of(ticket, data), data.tobytes(), b"x"], "15000 bytes"),
    "an empty message more": (lambda ticket, data: [header_of(ticket, data), data.tobytes(), b""], "15000 bytes"),
    "a wrong checksum": (
        lambda ticket, data: [header_of(ticket, data), data[:2].tobytes() + data[0].tobytes()],
        "do not have the checksum",
    ),
    "no checksums, neither first nor last": (
        lambda ticket, data: [pb.StorePages(ticket=ticket).SerializeToString(), data.tobytes()],
        "no checksums came",
    ),
    "garbage for the last checksums": (
        lambda ticket, data: [pb.StorePages(ticket=ticket).SerializeToString(), data.tobytes(), b"\xff" * 30],
        "no checksums came",
    ),
    "wrong last checksums": (
        lambda ticket, data: [
            pb.StorePages(ticket=ticket).SerializeToString(),
            data.tobytes(),
            header_of(ticket, data[::-1]),
        ],
        "do not have the checksum",
    ),
    "too few last checksums": (
        lambda ticket, data: [
            pb.StorePages(ticket=ticket).SerializeToString(),
            data.tobytes(),
            header_of(ticket, data[:2]),
        ],
        "2 checksums .* 3",
    ),
    "too few checksums": (lambda ticket, data: [header_of(ticket, data[:2]), data.tobytes()], "2 checksums .* 3"),
    "too many checksums": (
        lambda ticket, data: [header_of(ticket, np.vstack([data, data])), data.tobytes()],
        "6 checksums .* 3",
    ),
}


class TestStore:
    def test_pages_that_came_whole_are_found(self, wire, payload):
        space, data = wire.open(), payload(3)
        reply = wire.reserve(space, 3)
        assert reply.outcomes == b"\0\0\0"
        counts = wire.store_stream(iter([header_of(reply.ticket, data), data.tobytes()]), timeout=SECONDS)
        assert (counts.stored, counts.present, counts.refused) == (3, 0, 0)
        assert wire.found(space, 4) == [1, 1, 1, 0]
        assert wire.at_rest()

    @pytest.mark.parametrize("size", [1, 999, 5000, 7001])
    def test_messages_may_be_cut_anywhere(self, wire, payload, size):
        space, data = wire.open(), payload(2)
        whole = data.tobytes()
        pieces = [whole[at : at + size] for at in range(0, len(whole), size)] if size > 1 else [b"", whole, b""][:2]
        ticket = wire.reserve(space, 2).ticket
        assert wire.store_stream(iter([header_of(ticket, data), *pieces]), timeout=SECONDS).stored == 2
        header, *messages = wire.load_stream(pb.LoadPages(pages=wire.pages(space, 2)), timeout=SECONDS)
        assert list(pb.PageRun.FromString(header).checksums) == [checksum_of(page) for page in data]
        assert b"".join(messages) == whole

    @pytest.mark.parametrize("wrong", WRONG)
    def test_a_stream_that_is_not_right_stores_nothing(self, wire, payload, eventually, wrong):
        make, words = WRONG[wrong]
        space, data = wire.open(), payload(3)
        other = wire.open("other")
        wire.put(other, payload(2, seed=1))
        before = wire.snapshot()
        ticket = wire.reserve(space, 3).ticket
        with pytest.raises(grpc.RpcError, match=words) as caught:
            wire.store_stream(iter(make(ticket, data)), timeout=SECONDS)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert dict(caught.value.trailing_metadata())["kvstore-reason"] == "InvalidRequestError"
        if wrong in ("nothing", "garbage"):  # nobody knows whose it was: the reservation is there to be tried again
            wire.stub.CompleteStore(pb.CompleteStoreRequest(ticket=ticket), timeout=SECONDS)
        assert wire.found(space, 3) == [0, 0, 0]
        assert wire.found(other, 2) == [1, 1]
        assert wire.at_rest()
        after = wire.snapshot()
        assert after.arena_used_bytes == before.arena_used_bytes
        assert after.counters["refused"] == before.counters["refused"] + 3
        wire.put(space, data)

    def test_an_unknown_reservation_is_refused_before_anything_is_sent(self, wire, payload):
        space, data = wire.open(), payload(3)
        before = wire.snapshot()
        for ticket in (0, 1, 2**64 - 1):
            counts = wire.store_stream(iter([header_of(ticket, data), data.tobytes()]), timeout=SECONDS)
            assert (counts.stored, counts.present, counts.refused) == (0, 0, 3)
        assert wire.snapshot() == before
        assert wire.found(space, 3) == [0, 0, 0]

    def test_a_large_stream_of_an_unknown_reservation_ends_at_once(self, wire, payload):
        sent = []

        def messages() -> Iterator[bytes]:
            yield pb.StorePages(ticket=7, checksums=[1] * 64).SerializeToString()
            for _ in range(64):
                sent.append(1)
                yield bytes(2 << 20)

        assert wire.store_stream(messages(), timeout=SECONDS).refused == 64
        assert len(sent) < 64

    def test_a_reservation_is_for_one_stream(self, wire, payload, eventually):
        space, data = wire.open(), payload(3)
        ticket = wire.reserve(space, 3).ticket
        first, second = Feed(), Feed()
        call = wire.store_stream.future(iter(first), timeout=SECONDS)
        first.send(header_of(ticket, data))
        first.send(data.tobytes()[:7000])
        eventually(lambda: wire.receiving() == 1)
        second.send(header_of(ticket, data))
        second.send(None)
        assert wire.store_stream(iter(second), timeout=SECONDS).refused == 3
        given_up = wire.stub.CompleteStore(pb.CompleteStoreRequest(ticket=ticket), timeout=SECONDS)
        assert (given_up.stored, given_up.refused) == (0, 0), "a stream that runs can't be given up from beside it"
        first.send(data.tobytes()[7000:])
        first.send(None)
        assert call.result().stored == 3
        again = wire.store_stream(iter([header_of(ticket, data), data.tobytes()]), timeout=SECONDS)
        assert (again.stored, again.refused) == (0, 3)

    def test_a_reservation_that_lapsed_is_refused(self, wire, payload, eventually):
        space, data = wire.open(), payload(3)
        ticket = wire.reserve(space, 3, ttl_ms=1).ticket
        eventually(wire.at_rest)
        assert wire.used_bytes() == 0
        assert wire.store_stream(iter([header_of(ticket, data), data.tobytes()]), timeout=SECONDS).refused == 3

    @pytest.mark.parametrize("sent", ["nothing", "header", "half"])
    def test_a_client_that_cancels(self, wire, payload, eventually, sent):
        space, data = wire.open(), payload(3)
        # What nothing came for lapses; what has begun to come ends with its stream.
        ticket = wire.reserve(space, 3, ttl_ms=500 if sent == "nothing" else 50_000).ticket
        feed = Feed()
        call = wire.store_stream.future(iter(feed), timeout=SECONDS)
        if sent != "nothing":
            feed.send(header_of(ticket, data))
            eventually(lambda: wire.receiving() == 1)
        if sent == "half":
            feed.send(data.tobytes()[:7000])
        call.cancel()
        feed.send(None)
        eventually(wire.at_rest)
        assert wire.used_bytes() == 0
        assert wire.found(space, 3) == [0, 0, 0]
        wire.put(space, data)

    def test_the_page_that_came_meanwhile_is_kept(self, wire, payload):
        space = wire.open()
        one, two = payload(3, seed=1), payload(3, seed=2)
        slow = wire.reserve(space, 3).ticket
        wire.put(space, one)
        counts = wire.store_stream(iter([header_of(slow, two), two.tobytes()]), timeout=SECONDS)
        assert (counts.stored, counts.present, counts.refused) == (0, 3, 0)
        _, *messages = wire.load_stream(pb.LoadPages(pages=wire.pages(space, 3)), timeout=SECONDS)
        assert b"".join(messages) == one.tobytes()


class TestStoreAtOnce:
    """Payloads behind the request that reserves their slots."""

    @staticmethod
    def header_of(wire, space: bytes, count: int, number: int = 77) -> bytes:
        request = pb.PrepareStoreRequest(pages=wire.pages(space, count), ttl_ms=20_000)
        return pb.StorePages(ticket=number, request=request).SerializeToString()

    def test_what_is_here_already_is_kept(self, wire, payload):
        space, first, second = wire.open(), payload(2), payload(4, seed=1)
        wire.put(space, first)
        sent = [self.header_of(wire, space, 4), second.tobytes(), header_of(77, second)]
        counts = wire.store_stream(iter(sent), timeout=SECONDS)
        assert (counts.stored, counts.present, counts.refused) == (2, 2, 0)
        _, *messages = wire.load_stream(pb.LoadPages(pages=wire.pages(space, 4)), timeout=SECONDS)
        assert b"".join(messages) == first.tobytes() + second[2:].tobytes()
        assert wire.at_rest()

    @pytest.mark.parametrize("wrong", [wrong for wrong in WRONG if "garbage" != wrong != "nothing"])
    def test_a_stream_that_is_not_right_stores_nothing(self, wire, payload, wrong):
        make, words = WRONG[wrong]
        space, data = wire.open(), payload(3)
        _, *rest = make(77, data)
        first = pb.StorePages.FromString(make(77, data)[0])
        first.request.CopyFrom(pb.PrepareStoreRequest(pages=wire.pages(space, 3), ttl_ms=20_000))
        with pytest.raises(grpc.RpcError, match=words):
            wire.store_stream(iter([first.SerializeToString(), *rest]), timeout=SECONDS)
        assert wire.at_rest()
        assert wire.used_bytes() == 0
        wire.put(space, data)

    def test_a_number_is_good_for_one_store(self, wire, payload):
        space, data = wire.open(), payload(2)
        sent = [self.header_of(wire, space, 2), data.tobytes(), header_of(77, data)]
        assert wire.store_stream(iter(sent), timeout=SECONDS).stored == 2
        with pytest.raises(grpc.RpcError, match="this store came before"):
            wire.store_stream(iter(sent), timeout=SECONDS)

    def test_more_than_may_come_at_once(self, start_node, connect, payload):
        wire = connect(start_node(arena=64 << 20))
        space = wire.open(page_bytes=2 << 20)
        with pytest.raises(grpc.RpcError, match="6291456 bytes of pages without a reservation, the limit is 4194304"):
            wire.store_stream(iter([self.header_of(wire, space, 3), bytes(2 << 20)]), timeout=SECONDS)
        with pytest.raises(grpc.RpcError, match="no pages"):
            wire.store_stream(iter([self.header_of(wire, space, 0)]), timeout=SECONDS)
        assert wire.used_bytes() == 0


class TestLoad:
    def test_the_leading_pages_come_with_their_checksums(self, wire, payload):
        space, data = wire.open(), payload(3)
        wire.put(space, data)
        header, *messages = wire.load_stream(pb.LoadPages(pages=wire.pages(space, 5)), timeout=SECONDS)
        run = pb.PageRun.FromString(header)
        assert run.tiers == b"\1\1\1"
        assert list(run.checksums) == [checksum_of(page) for page in data]
        assert b"".join(messages) == data.tobytes()
        assert wire.at_rest()

    def test_pages_that_are_not_here_are_an_empty_stream(self, wire):
        assert list(wire.load_stream(pb.LoadPages(pages=wire.pages(wire.open(), 3)), timeout=SECONDS)) == []
        assert list(wire.load_stream(pb.LoadPages(pages=wire.pages(wire.open(), 0)), timeout=SECONDS)) == []

    def test_more_pages_than_one_run_holds(self, start_node, connect, payload):
        wire = connect(start_node(arena=1 << 20))
        space, data = wire.open(), payload(100)
        for first in range(0, 100, 20):
            reply = wire.stub.PrepareStore(
                pb.PrepareStoreRequest(pages=wire.pages(space, 20, first), ttl_ms=20_000), timeout=SECONDS
            )
            part = data[first : first + 20]
            assert wire.store_stream(iter([header_of(reply.ticket, part), part.tobytes()]), timeout=SECONDS).stored
        stream = wire.load_stream(pb.LoadPages(pages=wire.pages(space, 100)), timeout=SECONDS)
        received, runs = b"", 0
        for header in stream:
            pages = len(pb.PageRun.FromString(header).checksums)
            runs += 1
            end = len(received) + pages * PAGE_BYTES
            while len(received) < end:
                received += next(stream)
        assert runs > 1
        assert received == data.tobytes()

    def test_messages_are_bounded(self, start_node, connect, payload):
        wire = connect(start_node(arena=64 << 20))
        space, data = wire.open(page_bytes=3 << 20), payload(3, page_bytes=3 << 20)
        wire.put(space, data)
        _, *messages = wire.load_stream(pb.LoadPages(pages=wire.pages(space, 3)), timeout=SECONDS)
        assert [len(message) for message in messages] == [2 << 20] * 4 + [1 << 20]
        assert b"".join(messages) == data.tobytes()

    @pytest.mark.parametrize(
        ("hashes", "namespace", "code", "reason", "words"),
        [
            (b"x" * 31, True, "INVALID_ARGUMENT", "InvalidRequestError", "32 bytes each, the field has 31"),
            (
                b"x" * 32 * 131_073,
                True,
                "RESOURCE_EXHAUSTED",
                "LimitExceededError",
                "131073 pages, the limit is 131072",
            ),
            (b"x" * 32, False, "NOT_FOUND", "UnknownNamespaceError", "unknown namespace 7878"),
        ],
    )
    def test_a_request_that_cannot_be_right(self, wire, hashes, namespace, code, reason, words):
        space = wire.open() if namespace else b"x" * 32
        with pytest.raises(grpc.RpcError, match=words) as caught:
            list(wire.load_stream(pb.LoadPages(pages=pb.PageList(fingerprint=space, hashes=hashes)), timeout=SECONDS))
        assert caught.value.code().name == code
        assert dict(caught.value.trailing_metadata())["kvstore-reason"] == reason

    def test_a_client_that_cancels_in_the_middle(self, start_node, connect, payload, eventually):
        wire = connect(start_node(arena=64 << 20))
        space = wire.open(page_bytes=2 << 20)
        wire.put(space, payload(8, page_bytes=2 << 20))
        stream = wire.load_stream(pb.LoadPages(pages=wire.pages(space, 8)), timeout=SECONDS)
        next(stream), next(stream)
        assert not wire.at_rest()
        stream.cancel()
        eventually(wire.at_rest)
        assert wire.found(space, 8) == [1] * 8

    def test_a_reader_slower_than_the_hold_is_cut_off_not_lied_to(self, wire, payload, monkeypatch, eventually):
        space = wire.open(page_bytes=4 << 20)
        wire.put(space, payload(1, page_bytes=4 << 20))
        left = iter([True, False])
        monkeypatch.setattr(wire.node.store, "still_held", lambda owner, ticket: next(left))
        received = []
        with pytest.raises(grpc.RpcError, match="slower than pages can be held") as caught:
            received.extend(wire.load_stream(pb.LoadPages(pages=wire.pages(space, 1)), timeout=SECONDS))
        assert received, "what was good was sent"
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert dict(caught.value.trailing_metadata())["kvstore-reason"] == "DeadlineError"
        eventually(wire.at_rest)


PEER = """
import sys, time, grpc
from kvstore.v1 import cache_pb2 as pb
from kvstore.hashing import checksum_of
import numpy as np
target, kind, ticket, request = sys.argv[1], sys.argv[2], int(sys.argv[3]), bytes.fromhex(sys.argv[4])
timeout = float(sys.argv[5])
channel = grpc.insecure_channel(target)
grpc.channel_ready_future(channel).result(60)
def messages():
    yield pb.StorePages(ticket=ticket, checksums=[1] * 8).SerializeToString()
    yield bytes(2 << 20)
    print("under way", flush=True)
    time.sleep(60)
if kind == "load":
    stream = channel.unary_stream("/kvstore.v1.Pages/Load")(request, timeout=timeout)
    next(stream), next(stream)
    print("under way", flush=True)
    time.sleep(60)
else:
    channel.stream_unary("/kvstore.v1.Pages/Store")(messages(), timeout=timeout)
"""


def in_time(attempt: Callable[[float], bool]) -> None:
    """With a deadline in seconds that is longer each time, until the machine is quick enough for what comes before."""
    assert any(attempt(seconds) for seconds in (1.5, 6.0, 24.0))


class TestStandingStill:
    def test_a_stream_must_have_a_deadline(self, wire, payload):
        space, data = wire.open(), payload(1)
        wire.put(space, data)
        for timeout, words in ((None, "it has none"), (3600, r"one of 3[56]\d\d s")):
            with pytest.raises(grpc.RpcError, match=rf"at most 60 s, .*{words}"):
                list(wire.load_stream(pb.LoadPages(pages=wire.pages(space, 1)), timeout=timeout))
            with pytest.raises(grpc.RpcError, match=rf"at most 60 s, .*{words}"):
                wire.store_stream(iter([header_of(1, data)]), timeout=timeout)
        assert list(wire.load_stream(pb.LoadPages(pages=wire.pages(space, 1)), timeout=60))

    def test_what_waits_for_a_slow_reader_is_bounded(self, start_node, connect, payload, monkeypatch, eventually):
        wire = connect(start_node(arena=128 << 20))
        space = wire.open(page_bytes=2 << 20)
        for _ in range(1):
            wire.put(space, payload(8, page_bytes=2 << 20))
        made = []
        original = kvstore.service.grpc.pages.raw_messages

        def counted(pages) -> Iterator[bytes]:
            for message in original([page for page in pages for _ in range(8)]):  # 128 MiB
                made.append(len(message))
                yield message

        monkeypatch.setattr(kvstore.service.grpc.pages, "raw_messages", counted)

        def stands_still(seconds: float) -> bool:
            made.clear()
            stream = wire.load_stream(pb.LoadPages(pages=wire.pages(space, 8)), timeout=seconds)
            begun = False
            with pytest.raises(grpc.RpcError) as caught:
                begun = bool(next(stream))
                eventually(wire.at_rest)  # nothing more is read; the deadline ends it
                assert sum(made) <= 32 << 20, "the node kept on making messages that nobody took"
                list(stream)
            assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            eventually(wire.at_rest)
            return begun and bool(made)

        in_time(stands_still)

    @pytest.mark.parametrize("kind", ["load", "store"])
    @pytest.mark.parametrize("end", [signal.SIGSTOP, signal.SIGKILL])
    def test_a_stopped_or_killed_peer_keeps_nothing(self, start_node, connect, payload, eventually, kind, end):
        wire = connect(start_node(arena=64 << 20))
        space = wire.open(page_bytes=2 << 20)
        if kind == "load":
            wire.put(space, payload(8, page_bytes=2 << 20))
        request = pb.LoadPages(pages=wire.pages(space, 8)).SerializeToString().hex()

        def ends(seconds: float) -> bool:
            ticket = wire.reserve(space, 8, ttl_ms=50_000).ticket if kind == "store" else 0
            where = f"127.0.0.1:{wire.node.port}"
            peer = subprocess.Popen(
                [sys.executable, "-c", PEER, where, kind, str(ticket), request, str(seconds)],
                cwd=ROOT,
                stdout=subprocess.PIPE,
                text=True,
            )
            try:
                assert peer.stdout is not None
                begun = peer.stdout.readline() == "under way\n"
                if begun and kind == "store":
                    eventually(lambda: wire.receiving() == 1 or peer.poll() is not None)
                peer.send_signal(end)
                eventually(wire.at_rest)
                return begun
            finally:
                peer.kill()
                peer.communicate()

        if end == signal.SIGKILL:  # long before its deadline
            assert ends(50.0)
        else:
            in_time(ends)
        assert wire.used_bytes() == (16 << 20 if kind == "load" else 0)
        assert wire.found(space, 8) == ([1] * 8 if kind == "load" else [0] * 8)

    def test_one_stream_too_many_is_told_so_and_control_calls_go_on(
        self, start_node, connect, payload, monkeypatch, eventually
    ):
        monkeypatch.setattr(kvstore.service.grpc.pages, "MOST_STREAMS", 2)
        wire = connect(start_node(arena=64 << 20))
        space, data = wire.open(), payload(1)
        wire.put(space, data)
        feeds = [Feed(), Feed()]
        tickets = [
            wire.stub.PrepareStore(
                pb.PrepareStoreRequest(pages=wire.pages(space, 1, first), ttl_ms=20_000), timeout=SECONDS
            ).ticket
            for first in (10, 20)
        ]
        calls = [wire.store_stream.future(iter(feed), timeout=SECONDS) for feed in feeds]
        for feed, ticket in zip(feeds, tickets, strict=True):
            feed.send(header_of(ticket, data))
        eventually(lambda: wire.receiving() == 2)
        with pytest.raises(grpc.RpcError, match="2 payload streams are open, the limit is 2") as caught:
            list(wire.load_stream(pb.LoadPages(pages=wire.pages(space, 1)), timeout=SECONDS))
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert wire.found(space, 1) == [1]
        for feed in feeds:
            feed.send(data.tobytes())
            feed.send(None)
        assert [call.result().stored for call in calls] == [1, 1]
        eventually(wire.at_rest)
        assert list(wire.load_stream(pb.LoadPages(pages=wire.pages(space, 1)), timeout=SECONDS))

    def test_as_many_streams_as_may_be_leave_room_for_control_calls(self, wire, payload, eventually):
        space, data = wire.open(), payload(1)
        feeds, calls = [], []
        for number in range(kvstore.service.grpc.pages.MOST_STREAMS):
            reply = wire.stub.PrepareStore(
                pb.PrepareStoreRequest(pages=wire.pages(space, 1, number), ttl_ms=20_000), timeout=SECONDS
            )
            feeds.append(Feed())
            calls.append(wire.store_stream.future(iter(feeds[-1]), timeout=SECONDS))
            feeds[-1].send(header_of(reply.ticket, data))
        eventually(lambda: wire.receiving() == len(feeds))
        assert wire.found(space, 1) == [0]
        for feed in feeds:
            feed.send(data.tobytes())
            feed.send(None)
        assert sum(call.result().stored for call in calls) == len(feeds)
