"""The native core beside the Python that it stands for, on one arena: same answers, same bytes, whatever is in it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.arena import format as fmt
from kvstore.arena.arena import Arena
from kvstore.arena.index import place
from kvstore.client.paths.buffers import Rows
from kvstore.client.paths.path import OpenedNamespace
from kvstore.client.paths.shm.mapped_arena import CAN_READ, MappedArena
from kvstore.core import choice
from kvstore.layout import Layout

pytestmark = [
    pytest.mark.skipif(choice.native() is None, reason=choice.CHOSEN.reason or "native"),
    pytest.mark.skipif(not CAN_READ, reason="this processor does not keep the order of stores"),
]
FRAMES = 64
NUMBER = 5
FRAME_MASK = np.uint64(0x7FFFFFFF)
PYTHON = choice.Choice(None, "a test says so")

keys = st.integers(0, 39)
STEPS = st.one_of(
    st.tuples(st.just("store"), keys, st.integers(0, FRAMES // 2 - 1)),
    st.tuples(st.just("evict"), st.integers(0, FRAMES // 2 - 1), st.just(0)),
    st.tuples(st.just("damage a header"), st.integers(0, FRAMES * 8 - 1), st.integers(0, (1 << 64) - 1)),
    st.tuples(st.just("flip a bit"), st.integers(0, FRAMES * 8 - 1), st.integers(0, 63)),
    st.tuples(st.just("damage the index"), st.integers(0, 1 << 16), st.integers(0, (1 << 64) - 1)),
    st.tuples(st.just("name another slot"), st.integers(0, 1 << 16), st.integers(0, (1 << 31) - 1)),
    st.tuples(st.just("damage a reach"), st.integers(0, 1 << 16), st.integers(0, 255)),
    st.tuples(st.just("another edition"), st.just(0), st.just(0)),
)
LOOKS = st.lists(keys, max_size=100, unique=False)


@cache
def hash_of(number: int) -> bytes:
    """The first twenty share a home bucket, which has room for eight."""
    buckets = fmt.buckets_for(FRAMES * fmt.FRAME_BYTES)
    if number >= 20:
        return number.to_bytes(8, "little") * 4
    alike = (each.to_bytes(8, "big") * 4 for each in range(1 << 20))
    return next(islice((each for each in alike if place(NUMBER, each, buckets)[0] == 3), number, None))


class Both:
    """One arena, and a client's mapping of it, asked by Python and by the core."""

    def __init__(self, folder: Path, length: int) -> None:
        self.arena = Arena(folder / "arena", FRAMES * fmt.FRAME_BYTES)
        self.arena.open_for_readers(own_tiers=False, shared_tier=False)
        self.mapped = MappedArena(folder / "arena")
        self.length, self.stride = length, fmt.frames_for(length)
        self.slots: dict[int, int] = {}
        self.namespace = OpenedNamespace(
            Layout(model="a", block_size=16, page_bytes=length), bytes(32), 100, "", NUMBER, self.arena.edition
        )
        start = fmt.index_offset(self.arena.arena_bytes)
        self.buckets = fmt.buckets_for(self.arena.arena_bytes)
        self.file = np.frombuffer(self.arena._headers_map, np.uint8)
        self.headers = self.file[fmt.SLOTS_OFFSET : start].view(np.uint64)
        self.words = self.file[start : start + self.buckets * fmt.BUCKET_BYTES].view(np.uint64)
        self.reach = self.file[start + self.buckets * fmt.BUCKET_BYTES :][: self.buckets]

    def close(self) -> None:
        del self.file, self.headers, self.words, self.reach, self.mapped
        self.arena.close()

    def do(self, step: str, place: int, value: int) -> None:
        match step:
            case "store":
                self.store(place, value % (FRAMES // self.stride) * self.stride)
            case "evict":
                self.evict(place % (FRAMES // self.stride) * self.stride)
            case "damage a header":
                self.headers[place] = value
            case "flip a bit":
                self.headers[place] ^= np.uint64(1 << value)
            case "damage the index":
                self.words[place % len(self.words)] = value
            case "name another slot":
                word = self.words[place % len(self.words)]
                self.words[place % len(self.words)] = word & np.uint64(0xFFFFFFFF << 32) | np.uint64(value)
            case "damage a reach":
                self.reach[place % self.buckets] = value
            case _:
                self.arena.new_edition()

    def evict(self, frame: int) -> None:
        self.slots.pop(frame, None)
        self.headers[frame * 8] |= np.uint64(1)
        with suppress(KeyError, ValueError):  # the writer has books of its own, which damage contradicts
            self.arena.begin_change(frame, 0)
        self.words[self.words & FRAME_MASK == frame] = 0  # one that damage has put elsewhere as well

    def store(self, key: int, frame: int) -> None:
        for other in [at for at, one in self.slots.items() if one == key]:
            self.evict(other)
        self.evict(frame)
        self.arena.view(frame, self.length)[:] = np.random.default_rng(key).integers(0, 256, self.length, np.uint8)
        self.arena.publish([frame], [hash_of(key)], NUMBER, self.length, [None])
        self.slots[frame] = key

    def look(self, wanted: list[int], *, as_list: bool) -> list[object]:
        """What a client is told of these pages."""
        hashes = b"".join(map(hash_of, wanted))
        table = np.zeros((len(wanted), self.length), np.uint8)
        into = list(table) if as_list else Rows(table)
        here = self.mapped.find(self.namespace, hashes)
        read = self.mapped.read(self.namespace, hashes)
        loaded = self.mapped.load(self.namespace, hashes, into)
        has = [self.mapped.has(self.namespace, hash_of(key)) for key in wanted[:3]]
        good = table[: loaded[0]].tobytes()
        return [here, read.frames, read.generations, loaded, has, good]


@contextmanager
def both_on_one_arena(length: int) -> Iterator[Both]:
    with tempfile.TemporaryDirectory(prefix="kvstore-test-", dir="/dev/shm") as folder:
        both = Both(Path(folder), length)
        yield both
        both.close()


@pytest.mark.parametrize("length", [4096, 5000])
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_both_answer_the_same(length: int, data: st.DataObject) -> None:
    with both_on_one_arena(length) as both:
        for key in range(12):
            both.store(key, key * both.stride)
        for _ in range(data.draw(st.integers(1, 4))):
            for step in data.draw(st.lists(STEPS, max_size=8)):
                both.do(*step)
            # A prefix that is here, most often, and then anything.
            wanted = [*range(data.draw(st.integers(0, 14))), *data.draw(LOOKS)]
            as_list = data.draw(st.booleans())
            native = both.look(wanted, as_list=as_list)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(choice, "CHOSEN", PYTHON)
                assert both.look(wanted, as_list=as_list) == native


def test_a_page_that_would_end_behind_the_arena_is_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    """A header that says so is damaged: nothing behind the mapping is read."""
    with both_on_one_arena(5000) as both:
        both.store(1, 0)
        both.store(2, 2)
        last = FRAMES - 1
        both.headers[last * 8 : last * 8 + 8] = both.headers[2 * 8 : 2 * 8 + 8]
        both.words[both.words & FRAME_MASK == 2] += np.uint64(last - 2)
        for chosen in (choice.CHOSEN, PYTHON):
            monkeypatch.setattr(choice, "CHOSEN", chosen)
            hashes = hash_of(1) + hash_of(2)
            table = np.zeros((2, 5000), np.uint8)
            assert both.mapped.load(both.namespace, hashes, Rows(table)) == (1, True)
            assert not table[1].any()
            assert both.mapped.read(both.namespace, hashes).frames[:1] == [0]
