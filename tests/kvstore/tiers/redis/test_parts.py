"""The parts that need no server."""

import math
import socket
import time
from collections.abc import Iterator

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.breaker import (
    FIRST_PAUSE,
    LONGEST_PAUSE,
    MOST_FAILURES,
    Breaker,
)
from kvstore.errors import ConfigError, DeadlineError, FormatError, KVStoreError, UnavailableError
from kvstore.tiers.redis.format.chunk import (
    CHUNK_BYTES,
    MOST_HEADER_BYTES,
    MOST_PAGES,
    MOST_POSITION,
    VALUE_BYTES,
    ChunkHeader,
    allocated,
    charge,
    decode_header,
    extents,
    pages_per_chunk,
    part_sizes,
)
from kvstore.tiers.redis.format.entry import decode
from kvstore.tiers.redis.format.key_names import page_pattern
from kvstore.tiers.redis.format.planning import NewPage, plan_chunks, positions
from kvstore.tiers.redis.net.address import Kind, parse_address
from kvstore.tiers.redis.net.resp import ServerError, Wire, encode

# --- addresses


@pytest.mark.parametrize(
    ("url", "kind", "hosts", "service", "some"),
    [
        ("redis://127.0.0.1:7000/3", Kind.SINGLE, [("127.0.0.1", 7000)], "", {"db": 3}),
        ("redis://127.0.0.1", Kind.SINGLE, [("127.0.0.1", 6379)], "", {}),
        ("redis://me:se%20cret@[::1]:1/", Kind.SINGLE, [("::1", 1)], "", {"username": "me", "password": "se cret"}),
        ("unix:///run/redis.sock?db=2", Kind.SINGLE, [], "", {"path": "/run/redis.sock", "db": 2}),
        ("unix://:secret@/run/redis.sock", Kind.SINGLE, [], "", {"path": "/run/redis.sock", "password": "secret"}),
        ("redis+cluster://a:1,b:2", Kind.CLUSTER, [("a", 1), ("b", 2)], "", {}),
        ("rediss+cluster://u:p@a", Kind.CLUSTER, [("a", 6379)], "", {"ssl": True, "username": "u", "password": "p"}),
        ("redis+sentinel://a,b:2/ours/4", Kind.SENTINEL, [("a", 26379), ("b", 2)], "ours", {"db": 4}),
        ("rediss+sentinel://a/ours?ssl_ca_certs=/x", Kind.SENTINEL, [("a", 26379)], "ours", {"ssl_ca_certs": "/x"}),
    ],
)
def test_addresses(url: str, kind: Kind, hosts: list[object], service: str, some: dict[str, object]) -> None:
    address = parse_address(url)
    assert (address.kind, list(address.hosts), address.service) == (kind, hosts, service)
    assert some.items() <= dict(address.options).items()
    assert "secret" not in repr(address)
    assert "se cret" not in repr(address)


@pytest.mark.parametrize(
    "url",
    [
        "127.0.0.1:6379",
        "http://a",
        "redis+ring://a",
        "unix+cluster:///a",
        "redis://",
        "redis://a:b",
        "redis://a:0",
        "redis://a:99999",
        "redis+cluster://a:1,",
        "redis+cluster://a/3",
        "redis+sentinel://a",
        "redis://a?db=x",
    ],
)
def test_what_is_no_address(url: str) -> None:
    with pytest.raises(ConfigError, match="redis"):
        parse_address(url.replace("//", "//me:geheim@", 1) if "://a" in url else url)
    try:
        parse_address(url.replace("//", "//me:geheim@", 1))
    except ConfigError as error:
        assert "geheim" not in str(error)


# --- the breaker


def test_the_breaker() -> None:
    now = [0.0]
    breaker = Breaker(clock=lambda: now[0])
    for _ in range(MOST_FAILURES - 1):
        breaker.failed()
    breaker.succeeded()
    for _ in range(MOST_FAILURES - 1):
        assert breaker.allows()
        breaker.failed()
    assert not breaker.is_open
    breaker.failed()
    assert breaker.is_open
    assert not breaker.allows()
    pause = FIRST_PAUSE
    for _ in range(10):
        now[0] += pause * 0.99
        assert not breaker.allows()
        now[0] += pause * 0.02
        assert breaker.allows()
        assert not breaker.allows(), "one trial at a time"
        breaker.failed()
        pause = min(2 * pause, LONGEST_PAUSE)
    now[0] += LONGEST_PAUSE
    assert breaker.allows()
    now[0] += LONGEST_PAUSE  # the trial never came to an end
    assert breaker.allows()
    breaker.succeeded()
    assert not breaker.is_open
    assert breaker.allows()


# --- chunks


HEADER = ChunkHeader(0, bytes(32), bytes(16), (b"a" * 32, b"b" * 32), (10, 20), (10, 15), (1, 2**64 - 1), 7, b"p" * 32)


def test_a_header_comes_back() -> None:
    data = HEADER.encode()
    assert decode_header(data + b"payload") == HEADER
    assert HEADER.offsets == [0, 10]


@given(st.integers(0, len(HEADER.encode()) - 1), st.integers(1, 255))
def test_any_changed_byte_of_a_header_is_noticed(at: int, change: int) -> None:
    data = bytearray(HEADER.encode())
    data[at] ^= change
    with pytest.raises(FormatError):
        decode_header(data)


@given(st.binary(max_size=200))
def test_anything_else_is_no_header_and_no_entry(data: bytes) -> None:
    with pytest.raises(FormatError):
        decode_header(b"kvch" + data)
    decode(data)
    assert decode(data[:40]) is None


def test_nonsense_with_a_right_checksum_is_no_header(monkeypatch: pytest.MonkeyPatch) -> None:
    for body in ([], {}, {"hashes": b"x" * 33}, {"namespace": 3, "hashes": 3}, 5, "text"):
        packed = msgpack.packb(body)
        monkeypatch.setattr(msgpack, "packb", lambda _, packed=packed: packed)
        data = HEADER.encode()
        monkeypatch.undo()
        with pytest.raises(FormatError):
            decode_header(data)


@given(st.integers(0, 10_000), st.integers(0, 3 * VALUE_BYTES), st.integers(1, 3 * VALUE_BYTES))
def test_extents_cover_a_range_once(header: int, offset: int, length: int) -> None:
    found = list(extents(header, offset, length))
    sizes = part_sizes(header, offset + length)
    assert sum(extent.length for extent in found) == length
    assert sum(sizes) == header + offset + length
    assert all(size <= VALUE_BYTES + (header if part == 0 else 0) for part, size in enumerate(sizes))
    at = offset
    for extent in found:
        assert extent.part * VALUE_BYTES + extent.start - (header if extent.part == 0 else 0) == at
        assert extent.start + extent.length <= sizes[extent.part]
        at += extent.length


@given(st.integers(1, 1 << 24))
def test_the_allocator_wastes_a_fifth_at_most(size: int) -> None:
    assert size <= allocated(size) <= max(size + 16, size * 1.25)
    assert charge([size], 1) > size


def test_a_chunk_of_any_page_size() -> None:
    assert pages_per_chunk(65_536) == 32
    assert pages_per_chunk(CHUNK_BYTES) == pages_per_chunk(8 * CHUNK_BYTES) == 1
    assert pages_per_chunk(1) == MOST_PAGES


@pytest.mark.parametrize("page_bytes", [1, 100, 2048, 2049, 65_536, CHUNK_BYTES - 1, CHUNK_BYTES, 2**32 - 1])
def test_no_header_is_longer_than_entries_may_say(page_bytes: int) -> None:
    pages = pages_per_chunk(page_bytes)
    hashes, lengths = (b"h" * 32,) * pages, (page_bytes,) * pages
    largest = ChunkHeader(1, bytes(32), bytes(16), hashes, lengths, lengths, (2**64 - 1,) * pages, 2**31, bytes(32))
    assert len(largest.encode()) <= MOST_HEADER_BYTES


# --- planning


def key(namespace: int, number: int) -> bytes:
    return bytes([namespace]) * 32 + number.to_bytes(32, "big")


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 40), st.sampled_from([400_000, 700_000])), max_size=40))
def test_chunks_are_runs_that_keep_to_their_rows(found: list[tuple[int, int, int]]) -> None:
    pages = [NewPage(key(namespace, position), length, position) for namespace, position, length in found]
    cuts = plan_chunks(pages)
    assert [at for cut in cuts for at in cut] == list(range(len(pages)))
    for cut in cuts:
        first = pages[cut[0]]
        row = pages_per_chunk(first.length)
        for step, at in enumerate(cut):
            assert pages[at].position == first.position + step
            assert pages[at].position // row == first.position // row
            assert (pages[at].length, pages[at].key[:32]) == (first.length, first.key[:32])


@given(st.integers(0, 60), st.integers(1, 60), st.integers(0, 60))
def test_everybody_cuts_a_chain_at_the_same_places(start: int, length: int, other: int) -> None:
    def ends(first: int) -> set[int]:
        pages = [NewPage(key(1, n), 200_000, n) for n in range(first, 121)]
        return {cut.stop + first for cut in plan_chunks(pages)}

    low, high = sorted((start, other))
    assert {end for end in ends(low) if end > high} == ends(high)


def test_positions() -> None:
    keys = [key(1, n) for n in range(6)]
    assert positions(keys[:3], [b""] * 3, {}) == [0, 1, 2]
    assert positions(keys[3:], [keys[2], keys[3], keys[4]], {keys[2]: 17}) == [18, 19, 20]
    assert positions(keys[3:], [keys[2], b"", b""], {}) == [0, 1, 2]
    assert positions([keys[0], key(2, 0), keys[1]], [b"", b"", b""], {}) == [0, 0, 0]
    assert positions([keys[5], keys[1]], [b"", keys[5]], {}) == [0, 1]
    assert positions(keys[:2], [keys[5], keys[0]], {keys[5]: 2**32 - 1}) == [0, 1], "beyond all that has a place"
    assert positions(keys[:2], [keys[5], keys[0]], {keys[5]: MOST_POSITION - 2}) == [MOST_POSITION - 1, 0]


def test_names() -> None:
    assert page_pattern(b"a*[\\]?-^z") == b"kvstore:page:a\\*\\[\\\\\\]\\?\\-\\^z*"


# --- the protocol


@pytest.fixture
def pair() -> Iterator[tuple[Wire, socket.socket]]:
    near, far = socket.socketpair()
    with near, far:
        yield Wire(near), far


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


@pytest.mark.parametrize("step", [1, 7, 4096])
def test_replies(pair: tuple[Wire, socket.socket], step: int) -> None:
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
        wire = Wire(near)
        try:
            for _ in range(200):
                wire.receive(soon(), [memoryview(bytearray(3))])
        except KVStoreError:
            return
        pytest.fail("more replies than bytes")


def test_a_deadline_ends_a_wait(pair: tuple[Wire, socket.socket]) -> None:
    wire, far = pair
    with pytest.raises(DeadlineError):
        wire.receive(time.monotonic() + 0.01)
    far.sendall(b"$100\r\nhalf")
    with pytest.raises(DeadlineError):
        wire.receive(time.monotonic() + 0.01, [memoryview(bytearray(100))])
    with pytest.raises(DeadlineError):
        wire.receive(-math.inf)


def test_a_deadline_ends_a_send(pair: tuple[Wire, socket.socket]) -> None:
    with pytest.raises(DeadlineError):
        pair[0].send([bytes(64 << 20)], time.monotonic() + 0.05)


def test_a_closed_connection(pair: tuple[Wire, socket.socket]) -> None:
    wire, far = pair
    far.close()
    with pytest.raises(UnavailableError):
        wire.receive(soon())
    with pytest.raises(UnavailableError):
        wire.send([bytes(64 << 20)], soon())
