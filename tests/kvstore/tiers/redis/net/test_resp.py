"""Redis's protocol on a socket: what is sent, what is read, and how a wait ends."""

from __future__ import annotations

import math
import socket
import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import DeadlineError, KVStoreError, UnavailableError
from kvstore.tiers.redis.net.resp import RespSocket, ServerError, encode


@pytest.fixture
def pair() -> Iterator[tuple[RespSocket, socket.socket]]:
    near, far = socket.socketpair()
    with near, far:
        yield RespSocket(near), far


def soon() -> float:
    return time.monotonic() + 60


def test_requests_are_what_redis_reads() -> None:
    large = memoryview(bytes(5000))
    sent = encode([[b"SET", b"k", [b"ab", large, b"c"]], [b"GET", b"k"]])
    assert (
        b"".join(sent)
        == b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$5003\r\nab" + bytes(5000) + b"c\r\n*2\r\n$3\r\nGET\r\n$1\r\nk\r\n"
    )
    assert any(buffer is large for buffer in sent), "not copied"


_SHORT = st.binary(max_size=6)
_MANY = st.integers(0, 9).flatmap(lambda length: st.lists(st.binary(min_size=length, max_size=length), max_size=40))


@given(_SHORT, _MANY | st.lists(_SHORT, max_size=20))
def test_many_arguments_are_read_as_they_were_written(name: bytes, arguments: list[bytes]) -> None:
    near, far = socket.socketpair()
    with near, far:
        far.sendall(b"".join(encode([[name, *arguments], [b"next"]])))
        wire = RespSocket(near)
        assert wire.receive(soon()) == [name, *arguments]
        assert wire.receive(soon()) == [b"next"]


def test_many_large_arguments_are_not_copied() -> None:
    large = [bytes(5000)] * 20
    assert [buffer for buffer in encode([[b"MSET", *large]]) if buffer is large[0]] == large


def _reply(value: object) -> bytes:
    if value is None:
        return b"$-1\r\n"
    if isinstance(value, bytes):
        return b"$%d\r\n%b\r\n" % (len(value), value)
    if isinstance(value, int):
        return b":%d\r\n" % value
    assert isinstance(value, list)
    return b"*%d\r\n" % len(value) + b"".join(map(_reply, value))


_VALUE = st.none() | st.just(b"12345") | _SHORT | st.integers(-9, 9)


@given(st.lists(_VALUE | st.lists(_VALUE, max_size=5), max_size=60), st.integers(1, 50))
def test_arrays_are_read_whatever_arrives_at_once(values: list[object], step: int) -> None:
    near, far = socket.socketpair()
    with near, far:
        wire, data = RespSocket(near), _reply(values) + b"+next\r\n"

        def send() -> None:
            for at in range(0, len(data), step):
                far.sendall(data[at : at + step])

        sender = threading.Thread(target=send)
        sender.start()
        assert wire.receive(soon()) == values
        assert wire.receive(soon()) == b"next"
        sender.join()


@pytest.mark.parametrize("step", [1, 7, 4096])
def test_replies(pair: tuple[RespSocket, socket.socket], step: int) -> None:
    wire, far = pair
    data = b"+OK\r\n-ERR no\r\n:-5\r\n$-1\r\n*-1\r\n$0\r\n\r\n$3\r\na\r\n\r\n*2\r\n:1\r\n*1\r\n$1\r\nx\r\n"
    data += b"$5\r\nhello\r\n$4\r\nlong\r\n"
    for at in range(0, len(data), step):
        far.sendall(data[at : at + step])
    found = [wire.receive(soon()) for _ in range(8)]
    assert found == [b"OK", ServerError("ERR no"), -5, None, None, b"", b"a\r\n", [1, [b"x"]]]
    into = [bytearray(2), bytearray(0), bytearray(3)]
    assert wire.receive(soon(), [memoryview(one) for one in into]) == 5
    assert b"".join(into) == b"hello"
    assert wire.receive(soon(), [memoryview(into[0])]) == 4, "of another length: thrown away"
    far.sendall(b"+next\r\n")
    assert wire.receive(soon()) == b"next"


@given(
    st.binary(max_size=100)
    | st.lists(st.sampled_from([b"*", b"$", b"1", b"-", b"\r\n", b":", b"9", b"x"])).map(b"".join)
)
def test_nonsense_is_an_error_or_a_reply(data: bytes) -> None:
    near, far = socket.socketpair()
    with near, far:
        far.sendall(data)
        far.close()
        wire = RespSocket(near)
        try:
            for _ in range(200):
                wire.receive(soon(), [memoryview(bytearray(3))])
        except KVStoreError:
            return
        pytest.fail("more replies than bytes")


def test_a_deadline_ends_a_wait(pair: tuple[RespSocket, socket.socket]) -> None:
    wire, far = pair
    with pytest.raises(DeadlineError):
        wire.receive(time.monotonic() + 0.01)
    far.sendall(b"$100\r\nhalf")
    with pytest.raises(DeadlineError):
        wire.receive(time.monotonic() + 0.01, [memoryview(bytearray(100))])
    with pytest.raises(DeadlineError):
        wire.receive(-math.inf)


def test_a_deadline_ends_a_send(pair: tuple[RespSocket, socket.socket]) -> None:
    with pytest.raises(DeadlineError):
        pair[0].send([bytes(64 << 20)], time.monotonic() + 0.05)


def test_a_closed_connection(pair: tuple[RespSocket, socket.socket]) -> None:
    wire, far = pair
    far.close()
    with pytest.raises(UnavailableError):
        wire.receive(soon())
    with pytest.raises(UnavailableError):
        wire.send([bytes(64 << 20)], soon())
