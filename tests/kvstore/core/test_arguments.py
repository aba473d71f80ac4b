"""The native core is given wrong arguments, odd memory, many threads and a fork: errors in words, and no crash."""

from __future__ import annotations

import mmap
import os
import socket
import struct
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.arena import format as fmt
from kvstore.arena.index import IndexWriter, description
from kvstore.core import choice

pytestmark = pytest.mark.skipif(choice.native() is None, reason=choice.CHOSEN.reason or "native")
ARENA = 16 * fmt.FRAME_BYTES
GEOMETRY = fmt.geometry(ARENA)
NUMBER, LENGTH, EDITION = 1, 4096, 9
Bytes = npt.NDArray[np.uint8]


def core() -> Any:
    return choice.native()


def key(number: int) -> bytes:
    return number.to_bytes(32, "little")


def filled() -> tuple[Bytes, Bytes]:
    """Headers and pages: page N is in frame N, and all its bytes are N."""
    headers = np.frombuffer(mmap.mmap(-1, fmt.headers_bytes(ARENA)), np.uint8)
    slots, words, reach, frames, buckets = struct.unpack("<5Q", GEOMETRY)
    writer = IndexWriter(memoryview(headers[words:reach].view(np.uint64)), memoryview(headers[reach : reach + buckets]))
    table = headers[slots:words].view(np.uint64).reshape(-1, 8)
    headers[fmt.EDITION_OFFSET :][:8].view(np.uint64)[0] = EDITION
    for frame in range(frames):
        table[frame, 0], table[frame, 7] = 2, description(NUMBER, LENGTH)
        table[frame, 1:5] = np.frombuffer(key(frame), np.uint64)
        writer.insert(NUMBER, key(frame), frame)
    return headers, np.repeat(np.arange(frames, dtype=np.uint8), fmt.FRAME_BYTES)


HASHES = b"".join(map(key, range(16)))


def test_buffers_of_any_alignment_are_filled_and_nothing_beside_them() -> None:
    headers, pages = filled()
    room = np.full(16 * LENGTH + 9, 255, np.uint8)
    for shift in range(9):
        room[:] = 255
        into = room[shift : shift + 16 * LENGTH]
        assert core().load(headers, GEOMETRY, pages, NUMBER, LENGTH, EDITION, HASHES, into) == 16
        assert np.array_equal(into, pages)
        assert (room[:shift] == 255).all()
        assert (room[shift + 16 * LENGTH :] == 255).all()
    scattered = [bytearray(LENGTH) for _ in range(16)]
    assert core().load(headers, GEOMETRY, pages, NUMBER, LENGTH, EDITION, HASHES, scattered) == 16
    assert b"".join(scattered) == pages.tobytes()
    assert core().load(headers, GEOMETRY, pages, NUMBER, LENGTH, EDITION + 1, HASHES, scattered) == 0
    assert core().load(headers, GEOMETRY, pages, NUMBER, LENGTH, EDITION, b"", []) == 0


def with_geometry(**parts: int) -> bytes:
    names = ("slots", "words", "reach", "frames", "buckets")
    return struct.pack("<5Q", *(dict(zip(names, struct.unpack("<5Q", GEOMETRY), strict=True)) | parts).values())


@pytest.mark.parametrize(
    ("changed", "error", "text"),
    [
        ({"headers": np.zeros(100, np.uint8)}, ValueError, "the headers end before what they should hold"),
        ({"headers": np.zeros(1 << 17, np.uint8)[1:]}, ValueError, "the headers must begin at a multiple of 8"),
        ({"headers": 7}, TypeError, "bytes-like object is required"),
        ({"geometry": GEOMETRY[1:]}, ValueError, "the geometry is not 5 words of 8 bytes"),
        ({"geometry": with_geometry(frames=0)}, ValueError, "an arena has at least 1 frame"),
        ({"geometry": with_geometry(frames=1 << 60)}, ValueError, "the headers end before"),
        ({"geometry": with_geometry(buckets=1 << 31)}, ValueError, "the headers end before"),
        ({"geometry": with_geometry(words=(1 << 64) - 8)}, ValueError, "the headers end before"),
        ({"namespace": 1 << 16}, ValueError, "a namespace's number has 16 bits"),
        ({"length": 1 << 32}, ValueError, "a page's length 32"),
        ({"hashes": HASHES[1:]}, ValueError, "hashes take 32 bytes each"),
        ({"into": np.zeros(16 * LENGTH - 1, np.uint8)}, ValueError, "a buffer of 65535 bytes can't hold 16 pages"),
        ({"into": [bytearray(LENGTH)] * 15}, ValueError, "15 buffers were given for 16 pages"),
        ({"into": [bytearray(LENGTH)] * 15 + [bytearray(5)]}, ValueError, "a buffer of 5 bytes can't hold 1 pages"),
        ({"into": bytes(16 * LENGTH)}, BufferError, "not writable"),
        ({"into": np.zeros((16, 2 * LENGTH), np.uint8)[:, ::2]}, ValueError, "not C-contiguous"),
        ({"into": [None] * 16}, TypeError, "bytes-like object is required"),
    ],
    ids=str,
)
def test_wrong_arguments_are_errors_in_words(changed: dict[str, Any], error: type[Exception], text: str) -> None:
    headers, pages = filled()
    right = {"headers": headers, "geometry": GEOMETRY, "pages": pages, "namespace": NUMBER, "length": LENGTH}
    right |= {"edition": EDITION, "hashes": HASHES, "into": np.zeros(16 * LENGTH, np.uint8)}
    with pytest.raises(error, match=text):
        core().load(*(right | changed).values())
    assert core().load(*right.values()) == 16, "nothing is held"


def test_pages_that_end_before_a_slot_are_misses() -> None:
    headers, pages = filled()
    into = np.zeros(16 * LENGTH, np.uint8)
    for size, good in ((16 * LENGTH - 1, 15), (3 * LENGTH, 3), (0, 0)):
        assert core().load(headers, GEOMETRY, pages[:size], NUMBER, LENGTH, EDITION, HASHES, into) == good
        assert np.array_equal(into[: good * LENGTH], pages[: good * LENGTH])


@given(data=st.binary(min_size=64, max_size=4096), seed=st.integers(0, 1 << 32))
def test_rubbish_is_a_miss_and_never_a_crash(data: bytes, seed: int) -> None:
    headers, pages = filled()
    random = np.random.default_rng(seed)
    for _ in range(8):
        start = int(random.integers(fmt.SLOTS_OFFSET, headers.size - 64))
        piece = np.frombuffer(data, np.uint8)[: headers.size - start]
        headers[start : start + piece.size] = piece
    into = np.zeros(16 * LENGTH, np.uint8)
    good = core().load(headers, GEOMETRY, pages, NUMBER, LENGTH, EDITION, HASHES, into)
    here = core().find(headers, GEOMETRY, NUMBER, LENGTH, HASHES)
    frames, generations = core().search(headers, GEOMETRY, NUMBER, LENGTH, HASHES)
    assert len(frames) == len(generations) == good == (here + b"\0").index(0)


def test_slots_are_filled_and_read_and_those_outside_are_errors() -> None:
    arena = np.zeros(ARENA, np.uint8)
    pages = np.random.default_rng(0).integers(0, 256, (3, 5000), np.uint8)
    core().copy_slots(arena, [8192, 0, 16384], 5000, pages, False)
    assert np.array_equal(arena[8192:13192], pages[0])
    assert not arena[13192:16384].any()
    back = [bytearray(5000) for _ in range(3)]
    core().copy_slots(arena, [8192, 0, 16384], 5000, back, True)
    assert b"".join(back) == pages.tobytes()
    with pytest.raises(ValueError, match=f"a slot of 5000 bytes at {ARENA - 4999} lies outside an arena of {ARENA}"):
        core().copy_slots(arena, [0, ARENA - 4999], 5000, pages[:2], False)
    for wrong in ([-1], ["0"], [1 << 64]):
        with pytest.raises((OverflowError, TypeError)):
            core().copy_slots(arena, wrong, 5000, pages[:1], False)


@pytest.mark.parametrize("out", [False, True])
@given(st.integers(0, 70), st.integers(0, 70), st.integers(0, 200) | st.integers(16_300, 16_600) | st.just(32_768))
def test_pages_of_any_size_and_alignment_are_copied_whole_and_nothing_beside_them(
    out: bool, slot: int, page: int, length: int
) -> None:
    """Also larger ones, which go past the processor's caches in whole lines."""
    arena, buffer = np.random.default_rng(length).integers(0, 256, (2, 33_000), np.uint8)
    expected = [arena.copy(), buffer.copy()]
    there, here = expected[0][slot : slot + length], expected[1][page : page + length]
    here[:], there[:] = (there, there) if out else (here, here)
    core().copy_slots(arena, [slot], length, [buffer[page : page + length]], out)
    assert np.array_equal(arena, expected[0])
    assert np.array_equal(buffer, expected[1])


@given(st.integers(0, 20_000), st.integers(0, 20_000))
def test_a_page_that_is_a_view_of_the_arena_is_copied_as_it_was(slot: int, page: int) -> None:
    arena = np.random.default_rng(0).integers(0, 256, 40_000, np.uint8)
    expected = arena.copy()
    expected[slot : slot + 20_000] = arena[page : page + 20_000]
    core().copy_slots(arena, [slot], 20_000, [arena[page : page + 20_000]], False)
    assert np.array_equal(arena, expected)


@given(data=st.data())
def test_runs_are_copied_in_order_as_numpy_copies_them(data: st.DataObject) -> None:
    """Also where a run and its target overlap, or a later run reads what an earlier one wrote."""
    run = data.draw(st.integers(0, 40))
    places = st.integers(0, 200 - run)
    pairs = data.draw(st.lists(st.tuples(places, places), max_size=20))
    memory = np.arange(200, dtype=np.uint8)
    expected = memory.copy()
    for target, source in pairs:
        expected[target : target + run] = expected[source : source + run].copy()
    start = memory.ctypes.data
    targets, sources = (np.array([start + pair[which] for pair in pairs], np.uint64) for which in (0, 1))
    half = data.draw(st.integers(0, 200))
    whole = [(start, half), (start, 200)]
    core().copy_runs(targets, sources, run, np.array(whole, np.uint64))
    assert np.array_equal(memory, expected)


@pytest.mark.parametrize("outside", [-1, 1, 1 << 40])
@pytest.mark.parametrize("which", ["target", "source"])
def test_a_run_that_lies_in_no_region_is_an_error_and_nothing_is_copied(outside: int, which: str) -> None:
    """The rows touch: a run over their border lies in none."""
    memory = np.zeros((2, 64), np.uint8)
    memory[1] = 7
    regions = np.array([(row.ctypes.data, 64) for row in memory], np.uint64)
    targets, sources = (
        np.array([memory[0].ctypes.data] * 2, np.uint64),
        np.array([memory[1].ctypes.data] * 2, np.uint64),
    )
    wrong = targets if which == "target" else sources
    wrong[1] = int(wrong[1]) + outside
    with pytest.raises(ValueError, match=f"{which} 1, 64 bytes at 0x[0-9a-f]+, lies in none of the regions"):
        core().copy_runs(targets, sources, 64, regions)
    assert not memory[0].any()
    with pytest.raises(ValueError, match="as many targets as sources"):
        core().copy_runs(targets, sources[:1], 64, regions)


def test_hashes_are_joined_and_what_is_none_is_told() -> None:
    for count in (0, 1, 1000):
        hashes = [os.urandom(32) for _ in range(count)]
        assert core().join(hashes) == b"".join(hashes)
    for odd in ((key(1),), [key(1), b"short"], [key(1), bytearray(32)], [None], "text", None):
        assert core().join(odd) is None


def test_threads_look_and_load_at_once() -> None:
    headers, pages = filled()

    def work(number: int) -> int:
        into = np.zeros(16 * LENGTH, np.uint8)
        for _ in range(50):
            assert core().find(headers, GEOMETRY, NUMBER, LENGTH, HASHES * 300) == b"\1" * 4800
            assert core().load(headers, GEOMETRY, pages, NUMBER, LENGTH, EDITION, HASHES, into) == 16
            assert np.array_equal(into, pages)
        return number

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(work, range(4))) == [0, 1, 2, 3]


def test_a_forked_child_reads_as_its_parent_does() -> None:
    headers, pages = filled()
    child = os.fork()
    if not child:
        into = np.zeros(16 * LENGTH, np.uint8)
        good = core().load(headers, GEOMETRY, pages, NUMBER, LENGTH, EDITION, HASHES, into)
        os._exit(0 if good == 16 and np.array_equal(into, pages) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_read_only_mappings_are_read() -> None:
    headers, pages = filled()
    headers.flags.writeable = pages.flags.writeable = False
    into = np.zeros(16 * LENGTH, np.uint8)
    assert core().load(headers, GEOMETRY, pages, NUMBER, LENGTH, EDITION, HASHES, into) == 16
    with pytest.raises((BufferError, ValueError, TypeError)):
        core().copy_slots(pages, [0], LENGTH, into[:LENGTH], False)


def test_small_messages_are_sent_and_received_without_waiting() -> None:
    ours, theirs = socket.socketpair()
    room = bytearray(100)
    with ours, theirs:
        assert not core().look(ours.fileno(), 0)
        assert not core().look(ours.fileno(), 1000)
        assert core().receive(ours.fileno(), room) == -1, "nothing is there, and it does not wait"
        assert core().send(theirs.fileno(), b"hello") == 5
        assert core().look(ours.fileno(), 0)
        assert core().receive(ours.fileno(), room) == 5
        assert room[:5] == b"hello"
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        sent = 0
        while some := core().send(theirs.fileno(), bytes(1000)):  # until it would have to wait
            sent += some
        assert sent == sum(iter(lambda: max(core().receive(ours.fileno(), room), 0), 0))
        theirs.close()
        assert core().look(ours.fileno(), 0)
        assert core().receive(ours.fileno(), room) == 0, "the end"
        with pytest.raises(BrokenPipeError):
            core().send(ours.fileno(), b"more")
    for call in (lambda: core().receive(-1, room), lambda: core().send(-1, b"x")):
        with pytest.raises(OSError, match="Bad file descriptor"):
            call()


def test_while_it_looks_other_threads_run() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, ThreadPoolExecutor(1) as pool:
        looking = pool.submit(core().look, ours.fileno(), 60_000_000)
        theirs.send(b"x")  # only a thread that has the interpreter's lock can
        assert looking.result(60)
