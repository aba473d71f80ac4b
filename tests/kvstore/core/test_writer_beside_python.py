"""What the native core writes for readers, beside Python: the same bytes in headers, index and summary."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvstore.arena import format as fmt
from kvstore.arena import summary
from kvstore.arena.arena import Arena
from kvstore.arena.index import place
from kvstore.arena.summary import SummaryHeader, SummaryWriter, summary_bytes
from kvstore.core import choice

pytestmark = pytest.mark.skipif(choice.native() is None, reason=choice.CHOSEN.reason or "native")
FRAMES = 64
GEOMETRY = fmt.geometry(FRAMES * fmt.FRAME_BYTES)
CORES = (choice.CHOSEN, choice.Choice(None, "a test says so"))
ABOVE = fmt.SUMMARY_OFFSET
"""In the superblock: what differs from arena to arena."""


@cache
def hash_of(number: int) -> bytes:
    """The first thirty share a home bucket, which has room for eight: the rest lies elsewhere."""
    buckets = fmt.buckets_for(FRAMES * fmt.FRAME_BYTES)
    if number >= 30:
        return number.to_bytes(8, "little") * 4
    alike = (each.to_bytes(8, "big") * 4 for each in range(1 << 20))
    return next(islice((each for each in alike if place(1, each, buckets)[0] == 3), number, None))


@contextmanager
def two_arenas() -> Iterator[list[Arena]]:
    with tempfile.TemporaryDirectory(prefix="kvstore-test-", dir="/dev/shm") as folder:
        arenas = [Arena(Path(folder, name), FRAMES * fmt.FRAME_BYTES) for name in ("native", "python")]
        yield arenas
        for arena in arenas:
            arena.close()


numbers = st.lists(st.integers(0, 39), unique=True, min_size=1, max_size=20)
CHANGES = st.one_of(
    st.tuples(st.just("publish"), numbers, st.integers(1, 2), st.integers(0, 60_000)),
    st.tuples(st.just("begin"), numbers, st.sampled_from([0, 7, 0xFFFF]), st.just(0)),
)


OVERFLOWING = [*range(9), 34]
"""The ninth lies in the home bucket of the last one, if it comes before it."""


@given(st.lists(CHANGES, max_size=12))
@example([("publish", OVERFLOWING, 1, 100), ("begin", OVERFLOWING[:5], 7, 0), ("publish", [20, 21, *range(5)], 1, 9)])
@settings(max_examples=80, deadline=None)
def test_both_write_the_same(changes: list[tuple[str, list[int], int, int]]) -> None:
    """A page lies in the frame of its own number, so that none is twice."""
    with two_arenas() as arenas, pytest.MonkeyPatch.context() as patch:
        for core, arena in zip(CORES, arenas, strict=True):
            patch.setattr(choice, "CHOSEN", core)
            for what, frames, value, more in changes:
                arena.begin_changes(frames, value if what == "begin" else 3)
                if what == "publish":
                    hashes = [hash_of(number) for number in frames]
                    sums = [None if number % 3 else (1 << 64) - 1 - number for number in frames]
                    arena.publish(frames, hashes, value, more % 4096 + 1, sums)
        native, python = ((bytes(arena._headers_map), arena._retired_at.tolist(), arena._index) for arena in arenas)
        assert native[0][ABOVE:] == python[0][ABOVE:]
        assert native[1] == python[1]
        assert (native[2]._far, native[2].unplaced) == (python[2]._far, python[2].unplaced)


def key_of(number: int) -> bytes:
    return bytes([number % 3]) * 32 + np.random.default_rng(number).bytes(32)


@given(
    steps=st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 80), unique=True, max_size=40)), max_size=8),
    buckets=st.sampled_from([1, 2, 7, 128]),
)
@settings(max_examples=80, deadline=None)
def test_both_tell_the_same_of_lower_tiers(steps: list[tuple[bool, list[int]]], buckets: int) -> None:
    files = []
    with pytest.MonkeyPatch.context() as patch:
        for core in CORES:
            patch.setattr(choice, "CHOSEN", core)
            file = np.zeros(summary_bytes(buckets) // 8, np.uint64).view(np.uint8)
            file[: len(SummaryHeader(buckets, 1).pack())] = np.frombuffer(SummaryHeader(buckets, 1).pack(), np.uint8)
            writer, here = SummaryWriter(memoryview(file), buckets), set()
            for comes, some in steps:
                some = [number for number in some if (number in here) != comes]
                (writer.insert if comes else writer.remove)([key_of(number) for number in some])
                here ^= set(some)
            files.append((file.tobytes(), writer.full_buckets))
    assert files[0] == files[1]


HEADERS = np.zeros(fmt.headers_bytes(FRAMES * fmt.FRAME_BYTES) // 8, np.uint64).view(np.uint8)


@pytest.mark.parametrize(
    ("changed", "error", "text"),
    [
        ({"headers": bytes(HEADERS)}, TypeError, "read-write bytes-like object"),
        ({"headers": HEADERS[:100]}, ValueError, "the headers end before"),
        ({"geometry": GEOMETRY[1:]}, ValueError, "the geometry is not 5 words"),
        ({"frames": (1, 2)}, TypeError, "numbers come in a list"),
        ({"frames": [1, FRAMES]}, ValueError, f"frame {FRAMES} is none of {FRAMES}"),
        ({"frames": [1, -1]}, OverflowError, "negative"),
        ({"frames": [1, "2"]}, TypeError, "int"),
        ({"hashes": bytes(63)}, ValueError, "hashes take 32 bytes each"),
        ({"hashes": bytes(96)}, ValueError, "2 frames, 3 hashes and 2 checksums"),
        ({"sums": [1]}, ValueError, "2 frames, 2 hashes and 1 checksums"),
        ({"sums": [1, 1 << 64]}, OverflowError, "int"),
        ({"namespace": 1 << 16}, ValueError, "16 bits"),
        ({"length": 1 << 32}, ValueError, "a page's length 32"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_wrong_pages_are_errors_in_words_and_nothing_is_written(
    changed: dict[str, Any], error: type[Exception], text: str
) -> None:
    core = choice.native()
    assert core is not None
    headers = HEADERS.copy()
    right: dict[str, Any] = {"headers": headers, "geometry": GEOMETRY, "frames": [1, 2], "hashes": bytes(64)}
    right |= {"sums": [0, 0], "sequence": 5, "namespace": 1, "length": 100}
    with pytest.raises(error, match=text):
        core.publish(*(right | changed).values())
    if "frames" in changed:
        with pytest.raises(error, match=text):
            core.begin_changes(headers, GEOMETRY, changed["frames"], 1)
    assert not headers.any()
    assert core.begin_changes(headers, GEOMETRY, [1, 2], 1) == bytes(2)
    assert core.publish(*right.values()) == b"\1\1", "nothing is held"


def test_numbers_may_be_numpys() -> None:
    core = choice.native()
    assert core is not None
    headers = HEADERS.copy()
    frames: Any = list(np.array([3, 4], np.uint32))
    assert core.begin_changes(headers, GEOMETRY, frames, 1) == bytes(2)
    assert core.publish(headers, GEOMETRY, frames, bytes(64), list(np.array([5, 6], np.uint64)), 1, 1, 1) == b"\1\1"


@pytest.mark.parametrize("owner", [-1, 1 << 16])
def test_an_owner_has_sixteen_bits(owner: int) -> None:
    core = choice.native()
    assert core is not None
    with pytest.raises(ValueError, match=f"an owner has 16 bits, got {owner}"):
        core.begin_changes(HEADERS.copy(), GEOMETRY, [1], owner)


@pytest.mark.parametrize(
    ("size", "buckets", "keys", "text"),
    [
        (summary.DATA_OFFSET, 1, bytes(64), "the summary ends before"),
        (2 * summary.DATA_OFFSET, 0, bytes(64), "a summary has 1 to"),
        (2 * summary.DATA_OFFSET, 1, bytes(63), "keys take 64 bytes each"),
    ],
)
def test_wrong_tags_are_errors_in_words(size: int, buckets: int, keys: bytes, text: str) -> None:
    core = choice.native()
    assert core is not None
    file = np.zeros(size // 8, np.uint64).view(np.uint8)
    for call in (core.put_tags, core.take_tags):
        with pytest.raises(ValueError, match=text):
            call(file, buckets, keys)
    assert not file.any()
