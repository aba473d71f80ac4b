"""The index: a dict over shared memory that others may read while it changes."""

from __future__ import annotations

import hashlib
import mmap
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvstore.arena import format as fmt
from kvstore.arena.index import FEW_KEYS, MOST_REACH, IndexReader, IndexWriter, _places, description, place

LENGTH = 4096
NAMESPACE = 3


class Memory:
    """Headers and index as they lie in shared memory, and a page's life in the order that the node writes it."""

    def __init__(self, frames: int, buckets: int, memory: object = None) -> None:
        self.frames, self.buckets = frames, buckets
        data = np.frombuffer(memory if memory is not None else bytearray(self.size(frames, buckets)), np.uint8)
        headers, words = frames * 64, frames * 64 + buckets * 64
        self.headers = data[:headers].view(np.uint64).reshape(-1, 8)
        self.words = data[headers:words].view(np.uint64).reshape(-1, 8)
        self.reach = data[words : words + buckets]
        self.reader = IndexReader(self.words, self.reach, self.headers)

    @staticmethod
    def size(frames: int, buckets: int) -> int:
        return frames * 64 + buckets * 65

    def writer(self) -> IndexWriter:
        words = memoryview(self.words.reshape(-1)).cast("B").cast("Q")
        return IndexWriter(words, memoryview(self.reach))

    def publish(self, writer: IndexWriter, frame: int, block_hash: bytes, namespace: int = NAMESPACE) -> bool:
        self.headers[frame, 0] |= 1
        self.headers[frame, 1:5] = np.frombuffer(block_hash, np.uint64)
        self.headers[frame, 7] = description(namespace, LENGTH)
        self.headers[frame, 0] += 1
        return writer.insert(namespace, block_hash, frame)

    def retire(self, writer: IndexWriter, frame: int, block_hash: bytes, namespace: int = NAMESPACE) -> None:
        self.headers[frame, 0] |= 1
        writer.remove(namespace, block_hash, frame)


def hash_of(number: int) -> bytes:
    return hashlib.sha256(number.to_bytes(8, "big")).digest()


def hashes_with_home(home: int, count: int, buckets: int) -> list[bytes]:
    found = (hash_of(number) for number in range(10**6) if place(NAMESPACE, hash_of(number), buckets)[0] == home)
    return [next(found) for _ in range(count)]


def frames_of(memory: Memory, hashes: list[bytes], namespace: int = NAMESPACE, length: int = LENGTH) -> list[int]:
    """By the loop and by NumPy: the two must agree."""
    one_by_one, together = both_ways(memory, hashes, namespace, length)
    assert one_by_one == together
    return [frame for frame, _ in one_by_one]


def both_ways(
    memory: Memory, hashes: list[bytes], namespace: int = NAMESPACE, length: int = LENGTH
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Frames and generations, by the loop and by NumPy."""
    one_by_one = [memory.reader.find_one(namespace, length, each) for each in hashes]
    padded = hashes + [b"\xee" * 32] * (FEW_KEYS + 1)
    frames, generations = memory.reader.find(namespace, length, b"".join(padded))
    assert frames.tolist()[len(hashes) :] == [-1] * (FEW_KEYS + 1)
    return one_by_one, list(zip(frames.tolist(), generations.tolist(), strict=True))[: len(hashes)]


def test_a_page_is_found_with_its_generation_until_it_leaves() -> None:
    memory = Memory(16, 8)
    writer = memory.writer()
    assert frames_of(memory, [hash_of(1)]) == [-1]
    memory.publish(writer, 5, hash_of(1))
    assert memory.reader.find_one(NAMESPACE, LENGTH, hash_of(1)) == (5, 2)
    assert frames_of(memory, [hash_of(1), hash_of(2)]) == [5, -1]
    memory.retire(writer, 5, hash_of(1))
    assert frames_of(memory, [hash_of(1)]) == [-1]
    assert not memory.words.any()
    memory.publish(writer, 5, hash_of(2))
    assert memory.reader.find_one(NAMESPACE, LENGTH, hash_of(2)) == (5, 4)
    assert memory.reader.generations(np.array([5])).tolist() == [4] == [memory.reader.generation(5)]


def test_a_hash_in_another_namespace_or_of_another_length_is_another_page() -> None:
    memory = Memory(16, 8)
    writer = memory.writer()
    memory.publish(writer, 1, hash_of(1), namespace=3)
    memory.publish(writer, 2, hash_of(1), namespace=4)
    assert frames_of(memory, [hash_of(1)], namespace=3) == [1]
    assert frames_of(memory, [hash_of(1)], namespace=4) == [2]
    assert frames_of(memory, [hash_of(1)], namespace=5) == [-1]
    assert frames_of(memory, [hash_of(1)], length=LENGTH - 1) == [-1]


@pytest.mark.parametrize("damage", ["odd generation", "other hash", "owner"])
def test_the_header_decides_not_the_word(damage: str) -> None:
    """Each of these is what a reader sees that comes in the middle of a change."""
    memory = Memory(32, 16)
    writer = memory.writer()
    hashes = [hash_of(number) for number in range(10)]
    for frame, block_hash in enumerate(hashes):
        memory.publish(writer, frame, block_hash)
    match damage:
        case "odd generation":
            memory.headers[4, 0] += 1
        case "other hash":
            memory.headers[4, 4] ^= 1 << 63
        case "owner":
            memory.headers[4, 7] |= 1 << 48
    assert frames_of(memory, hashes) == [0, 1, 2, 3, -1, 5, 6, 7, 8, 9]


@pytest.mark.parametrize("count", [1, 20])
@pytest.mark.parametrize("change", ["left", "left, came back", "left, another came"])
@pytest.mark.parametrize("looks", [1, 2])
def test_a_page_that_leaves_while_it_is_compared_is_no_hit(count: int, change: str, looks: int) -> None:
    """Forced behind the reader's first look at the generation, and behind its second."""
    memory = Memory(32, 16)
    writer = memory.writer()
    hashes = [hash_of(number) for number in range(count)]
    for frame, block_hash in enumerate(hashes):
        memory.publish(writer, frame, block_hash)
    left = looks

    def looked() -> None:
        nonlocal left
        left -= 1
        if not left:
            memory.retire(writer, 0, hashes[0])
            if change != "left":
                memory.publish(writer, 0, hashes[0] if change == "left, came back" else hash_of(99))

    class Words:
        """Headers as single words."""

        def __getitem__(self, position: int) -> int:
            word = words[position]
            looked()
            return word

    def generations(frames: np.ndarray) -> np.ndarray:
        array = look(frames)
        looked()
        return array

    words, look = memory.reader._header_words, memory.reader.generations
    memory.reader._header_words = Words()  # type: ignore[assignment]
    memory.reader.generations = generations  # type: ignore[method-assign]
    found = memory.reader.find(NAMESPACE, LENGTH, b"".join(hashes))
    assert left <= 0
    assert found.frames.tolist() == [0 if looks == 2 else -1, *range(1, count)]
    memory.reader._header_words, memory.reader.generations = words, look  # type: ignore[method-assign]
    if looks == 2:
        assert memory.reader.generation(0) != found.generations[0], "whoever copied must see it here"


def test_a_word_that_names_no_slot_is_no_hit() -> None:
    memory = Memory(4, 4)
    writer = memory.writer()
    for number in range(8):
        memory.publish(writer, 3, hash_of(number))
        memory.retire(writer, 3, hash_of(number))
        writer.insert(NAMESPACE, hash_of(number), (1 << 31) - 1 - number)
    assert frames_of(memory, [hash_of(number) for number in range(8)]) == [-1] * 8


def test_keys_whose_home_is_full_go_on_and_are_found() -> None:
    memory = Memory(64, 16)
    writer = memory.writer()
    hashes = hashes_with_home(15, 30, 16)
    for frame, block_hash in enumerate(hashes):
        assert memory.publish(writer, frame, block_hash)
    assert memory.reach.tolist() == [0] * 15 + [3]
    assert frames_of(memory, hashes) == list(range(30))
    for frame, block_hash in enumerate(hashes[:8]):  # no key moves, none is lost
        memory.retire(writer, frame, block_hash)
    assert frames_of(memory, hashes) == [-1] * 8 + list(range(8, 30))
    for frame in range(29, 7, -1):
        assert memory.reach[15] == frame // 8
        memory.retire(writer, frame, hashes[frame])
    assert not memory.words.any()
    assert not memory.reach.any()


def test_a_key_without_a_place_is_said_and_harms_nobody() -> None:
    memory = Memory(256, 32)
    writer = memory.writer()
    places = 8 * (MOST_REACH + 1)
    hashes = hashes_with_home(7, places + 1, 32)
    assert all(memory.publish(writer, frame, each) for frame, each in enumerate(hashes[:places]))
    assert not memory.publish(writer, places, hashes[places])
    assert frames_of(memory, hashes) == [*range(places), -1]
    memory.retire(writer, places, hashes[places])
    memory.retire(writer, 0, hashes[0])
    assert memory.publish(writer, places, hashes[places])
    assert frames_of(memory, hashes) == [-1, *range(1, places + 1)]


def test_hashes_that_hardly_differ_spread_over_the_buckets() -> None:
    """Nothing relies on the engine's hashes being good ones."""
    for kind in (lambda n: n.to_bytes(32, "big"), lambda n: n.to_bytes(32, "little"), lambda n: bytes([n % 256]) * 32):
        homes = [place(NAMESPACE, kind(number), 64)[0] for number in range(256)]
        assert max(map(homes.count, homes)) <= 20


@settings(deadline=None)
@given(st.lists(st.binary(min_size=32, max_size=32), max_size=20), st.integers(1, 0xFFFF), st.integers(1, 1 << 26))
def test_places_by_numpy_and_by_the_loop_are_the_same(hashes: list[bytes], namespace: int, buckets: int) -> None:
    keys = np.frombuffer(b"".join(hashes), np.uint64).reshape(-1, 4)
    homes, uppers = _places(namespace, keys, buckets)
    assert list(zip(homes.tolist(), uppers.tolist(), strict=True)) == [
        place(namespace, each, buckets) for each in hashes
    ]
    assert all(0 <= home < buckets for home in homes.tolist())


@settings(max_examples=30, deadline=None)
@given(st.randoms(use_true_random=False))
def test_an_index_full_of_rubbish_has_no_false_hit(random) -> None:  # type: ignore[no-untyped-def]
    memory = Memory(16, 4)
    writer = memory.writer()
    for frame in range(16):
        memory.publish(writer, frame, hash_of(frame))
    for _ in range(8):
        rubbish = np.frombuffer(random.randbytes(memory.words.nbytes), np.uint64).reshape(-1, 8)
        uppers = np.array([place(NAMESPACE, hash_of(number), 4)[1] for number in range(32)], np.uint64)
        memory.words[:] = np.where(rubbish % 2 == 0, uppers[random.randrange(32)] << 32 | rubbish % 18, rubbish)
        memory.reach[:] = np.frombuffer(random.randbytes(4), np.uint8)
        for found in both_ways(memory, [hash_of(number) for number in range(32)]):
            for number, (frame, generation) in enumerate(found):
                assert (frame, generation) in ((-1, 0), (number, 2) if number < 16 else (-1, 0))
    writer.clear()
    assert all(writer.insert(NAMESPACE, hash_of(frame), frame) for frame in range(16)), "a new node makes it again"
    assert frames_of(memory, [hash_of(frame) for frame in range(16)]) == list(range(16))


def test_a_word_of_rubbish_in_another_keys_bucket_may_lead_to_a_page_that_is_there() -> None:
    """The header decides: NumPy's way takes such a hit, the loop does not come by."""
    memory = Memory(16, 4)
    memory.publish(memory.writer(), 0, hash_of(0))
    memory.words[:] = 0
    home, upper = place(NAMESPACE, hash_of(1), 4)
    memory.words[home, 0] = upper << 32
    assert both_ways(memory, [hash_of(0), hash_of(1)]) == ([(-1, 0), (-1, 0)], [(0, 2), (-1, 0)])


def test_a_word_of_rubbish_that_names_no_slot_is_read_alike_by_both_ways() -> None:
    memory = Memory(16, 4)
    memory.publish(memory.writer(), 15, hash_of(15))
    [[row, column]] = np.argwhere(memory.words)
    memory.words[row, column] += np.uint64(2)
    assert frames_of(memory, [hash_of(15), hash_of(14)]) == [15, -1], "the header of the last slot decides"


class IndexMachine(RuleBasedStateMachine):
    """Against a dict, in an index that is much too small for its keys."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = Memory(200, 3)
        self.writer = self.memory.writer()
        self.there: dict[bytes, int] = {}
        self.unplaced: set[bytes] = set()
        self.free = list(range(200))

    @rule(numbers=st.lists(st.integers(0, 60), max_size=30))
    def publish(self, numbers: list[int]) -> None:
        for block_hash in map(hash_of, numbers):
            if block_hash not in self.there and block_hash not in self.unplaced:
                frame = self.free.pop()
                if self.memory.publish(self.writer, frame, block_hash):
                    self.there[block_hash] = frame
                else:
                    self.unplaced.add(block_hash)
                    assert len(self.there) == 24

    @rule(numbers=st.lists(st.integers(0, 60), max_size=30))
    def retire(self, numbers: list[int]) -> None:
        for block_hash in map(hash_of, numbers):
            if block_hash in self.there:
                frame = self.there.pop(block_hash)
                self.memory.retire(self.writer, frame, block_hash)
                self.free.insert(0, frame)

    @invariant()
    def the_same_as_a_dict(self) -> None:
        hashes = [hash_of(number) for number in range(61)]
        assert frames_of(self.memory, hashes) == [self.there.get(each, -1) for each in hashes]
        assert np.count_nonzero(self.memory.words) == len(self.there)


TestIndexMachine = IndexMachine.TestCase
TestIndexMachine.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


_READER = """
import mmap, os, random, sys
sys.path.insert(0, sys.argv[1])
from test_index import *

frames, stable, buckets, rounds = map(int, sys.argv[3:])
with open(sys.argv[2], "rb") as file:
    memory = Memory(frames, buckets, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))
choose = random.Random(1)
hits = misses = 0
print("reading", flush=True)
for turn in range(rounds):
    picked = [choose.randrange(stable) for _ in range(64)] + [choose.randrange(frames) for _ in range(192)]
    count = 3 if turn % 4 == 0 else len(picked)
    picked = choose.sample(picked, count)
    keys = [key_of(frame, int(memory.headers[frame, 0]) + choose.choice((0, 0, 0, 2)) & ~1) for frame in picked]
    found = memory.reader.find(NAMESPACE, LENGTH, b"".join(keys))
    for frame, key, at, generation in zip(picked, keys, found.frames.tolist(), found.generations.tolist()):
        if at >= 0:
            assert key == key_of(at, generation), "a false hit"
            hits += 1
        else:
            assert key != key_of(frame, 2) or frame >= stable, "a page that stays was missed"
            misses += 1
print(hits, misses, flush=True)
"""


def key_of(frame: int, generation: int) -> bytes:
    """The one key that a slot holds at one generation: whoever finds a key knows whether it was there."""
    return hash_of(frame << 40 | generation)


def test_a_reader_process_under_churn_has_no_false_hit_and_misses_no_page_that_stays(tmp_path: Path) -> None:
    frames, stable, buckets = 600, 200, 75  # as full as two keys for three words: nearly every bucket overflows
    path = tmp_path / "memory"
    path.write_bytes(bytes(-(-Memory.size(frames, buckets) // fmt.FRAME_BYTES) * fmt.FRAME_BYTES))
    with path.open("r+b") as file:
        memory = Memory(frames, buckets, mmap.mmap(file.fileno(), 0))
    writer = memory.writer()
    there: dict[int, bytes] = {}

    def publish(frame: int) -> None:
        there[frame] = key_of(frame, int(memory.headers[frame, 0]) + 2 & ~1)
        memory.publish(writer, frame, there[frame])

    for frame in range(400):
        publish(frame)
    command = [sys.executable, "-c", _READER, str(Path(__file__).parent), str(path)]
    command += [str(frames), str(stable), str(buckets), "400"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline() == "reading\n"
        churn = np.random.default_rng(2)
        turns = 0
        while reader.poll() is None:
            leaving, coming = churn.choice(np.arange(stable, frames), 2, replace=False).tolist()
            if leaving in there:
                memory.retire(writer, leaving, there.pop(leaving))
            if coming not in there and len(there) < 400:
                publish(coming)
            turns += 1
        hits, misses = map(int, reader.stdout.read().split())
        assert reader.returncode == 0
    assert turns > 1000
    assert hits > 10_000
    assert misses > 1000
