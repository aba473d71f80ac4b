"""Messages in memory: how many come at once, how many large ones are worked on, and answers that nobody reads."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator

import grpc
import pytest

from kvstore.errors import LimitExceededError
from kvstore.security.grants import EVERYTHING, Grant, parse_grant
from kvstore.service.access import message_memory as module
from kvstore.service.access.message_memory import LARGE_BYTES, MessageMemory
from kvstore.v1 import cache_pb2 as pb
from kvstore.v1 import events_pb2

SECONDS = 50.0
LARGE, SMALL = bytes(LARGE_BYTES + 1), bytes(LARGE_BYTES)


class Call:
    """A call of a client that sends when it is told to."""

    def __init__(self) -> None:
        self.sent: queue.Queue[bytes | None] = queue.Queue()
        self.cancelled = threading.Event()
        self.callbacks: list[Callable[[], None]] = []
        self.over = False

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        message = self.sent.get(timeout=SECONDS)
        if message is None:
            raise grpc.RpcError
        return message

    def cancel(self) -> None:
        self.cancelled.set()
        self.sent.put(None)

    def is_active(self) -> bool:
        return not self.cancelled.is_set()

    def add_callback(self, callback: Callable[[], None]) -> bool:
        self.callbacks.append(callback)
        return not self.over

    def send(self, message: bytes) -> Call:
        self.sent.put(message)
        return self


A, B = parse_grant("a", ["tenant=a"]), parse_grant("b", ["tenant=b"])


class Receiver(threading.Thread):
    """A handler of one call; it works until it is told to end."""

    def __init__(self, messages: MessageMemory, grant: Grant, call: Call) -> None:
        super().__init__(daemon=True)
        self._messages, self._grant, self.call = messages, grant, call
        self.works, self.ends = threading.Event(), threading.Event()
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            with self._messages.receiving(self._grant, self.call, self.call):
                self.works.set()
                assert self.ends.wait(SECONDS)
        except Exception as error:  # noqa: BLE001 - the test looks at it
            self.error = error

    def end(self) -> None:
        self.ends.set()
        self.join(SECONDS)


def test_a_tenant_has_a_part_of_the_slots_and_the_rest_is_left_to_others(eventually):
    messages = MessageMemory(coming=8)
    slow = [Receiver(messages, A, Call()) for _ in range(2)]
    eventually(lambda: messages._coming.taken["a"] == 2)
    next_one = Receiver(messages, A, Call().send(SMALL))
    other = Receiver(messages, B, Call().send(SMALL))
    assert other.works.wait(SECONDS)
    assert not next_one.works.is_set()
    slow[0].call.send(SMALL)
    assert next_one.works.wait(SECONDS), "it has come: its slot is free though it is worked on"
    slow[1].call.send(SMALL)
    for each in (*slow, next_one, other):
        each.end()
        assert each.error is None
    assert not messages._coming.taken.total()


def test_who_sends_nothing_gives_way_to_who_waits(monkeypatch, eventually):
    monkeypatch.setattr(module, "COME_SECONDS", 0.0)
    messages = MessageMemory(coming=4)
    silent = Receiver(messages, A, Call())
    eventually(lambda: messages._coming.taken["a"] == 1)
    assert not silent.call.cancelled.is_set(), "nobody waits"
    other = Receiver(messages, A, Call().send(SMALL))
    assert other.works.wait(SECONDS)
    assert silent.call.cancelled.is_set()
    silent.join(SECONDS)
    assert isinstance(silent.error, grpc.RpcError)
    other.end()


def test_a_few_large_ones_are_worked_on_some_wait_and_more_are_refused(eventually):
    messages = MessageMemory(large=2, waiting=2)
    first = Receiver(messages, A, Call().send(LARGE))
    assert first.works.wait(SECONDS)
    second = Receiver(messages, A, Call().send(LARGE))
    eventually(lambda: messages._waiting.taken["a"] == 1)
    third = Receiver(messages, A, Call().send(LARGE))
    third.join(SECONDS)
    assert isinstance(third.error, LimitExceededError)
    assert "1 large messages wait for being worked on, the limit is 2" in str(third.error)
    small = Receiver(messages, A, Call().send(SMALL))
    assert small.works.wait(SECONDS), "small ones are not in their way"
    other = Receiver(messages, B, Call().send(LARGE))
    assert other.works.wait(SECONDS), "nor are others'"
    assert not second.works.is_set()
    first.end()
    assert second.works.wait(SECONDS)
    for each in (second, small, other):
        each.end()
        assert each.error is None


def test_who_went_away_waits_no_more(eventually):
    messages = MessageMemory(large=1)
    first = Receiver(messages, EVERYTHING, Call().send(LARGE))
    assert first.works.wait(SECONDS)
    second = Receiver(messages, EVERYTHING, Call().send(LARGE))
    eventually(lambda: messages._waiting.taken[None] == 1)
    second.call.cancelled.set()
    second.join(SECONDS)
    assert isinstance(second.error, LimitExceededError)
    first.end()


def test_answers_count_until_they_are_read():
    messages = MessageMemory(unread=1 << 20)
    calls = [Call() for _ in range(4)]
    for call in calls:
        messages.answering(A, 100_000, call)
    with pytest.raises(LimitExceededError, match="bytes of answers wait for being read, the limit is 1048576"):
        messages.answering(A, 100_000, Call())
    messages.answering(B, 100_000, Call())
    calls[0].callbacks[0]()
    over = Call()
    over.over = True
    for _ in range(20):
        messages.answering(A, 100_000, over)


BOMBS = {
    "Lookup": (b"\x0a\x00" * 2_000_000, "2000000 namespaces in one lookup, the limit is 4096"),
    "ReportUse": (b"\x0a\x00" * 2_000_000, "2000000 uses in one report, the limit is 4096"),
    "PrepareStore": (b"\x82\x01\x80\xc0\x7a" + b"\x0a\x00" * 1_003_520, "uses in one report, the limit is 4096"),
}


@pytest.mark.parametrize("method", BOMBS)
def test_millions_of_empty_parts_are_counted_before_they_are_looked_at(wire, method, monkeypatch):
    message, text = BOMBS[method]
    monkeypatch.setattr(wire.node.store, "lookup", None)
    with pytest.raises(grpc.RpcError) as caught:
        wire.channel.unary_unary(f"/kvstore.v1.Cache/{method}")(message, timeout=SECONDS)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert text in caught.value.details()


def test_a_message_that_can_not_be_read_is_an_invalid_request(wire):
    for method in ("Cache/Lookup", "Cache/Status", "Bulk/Open", "Events/Watch", "Pages/Load"):
        call = wire.channel.stream_stream(f"/kvstore.v1.{method}")(iter([b"\xff" * 10]), timeout=SECONDS)
        with pytest.raises(grpc.RpcError):
            list(call)
        assert call.code() is grpc.StatusCode.INVALID_ARGUMENT, method
        assert call.details() == "the call's message can't be read"


def test_a_watch_of_too_many_namespaces(wire):
    request = events_pb2.WatchRequest(fingerprints=[b"f" * 32] * 1025)
    call = wire.channel.unary_stream("/kvstore.v1.Events/Watch")(request.SerializeToString(), timeout=SECONDS)
    with pytest.raises(grpc.RpcError):
        list(call)
    assert call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_many_large_lookups_at_once_are_answered_or_refused(wire):
    fingerprint = wire.open()
    request = pb.LookupRequest(queries=[wire.pages(fingerprint, 20_000)])
    calls = [wire.stub.Lookup.future(request, timeout=SECONDS) for _ in range(40)]
    codes = {call.code() for call in calls}
    assert grpc.StatusCode.OK in codes
    assert codes <= {grpc.StatusCode.OK, grpc.StatusCode.RESOURCE_EXHAUSTED}
    assert wire.found(fingerprint, 1) == [0]
