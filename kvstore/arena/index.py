"""The index from page keys to slots, in shared memory: one process writes it, many read it without a lock.

It is an array of *buckets* of eight 64-bit words, one cache line each, and one *reach* byte a bucket. A key has a home
bucket. It lies in the first free word from there on, at most ``MOST_REACH`` buckets further; the home's reach says how
far any of its keys went, so a search that finds nothing ends early. A word is::

    bit  63      62 ............... 32   31         30 ........ 0
         1       tag of the key          (unused)   slot: its first frame

or 0: free. Words never move and leave no trace, so a key that stays is found at any moment, whatever comes and goes
beside it. What a word says is a hint: the slot's header decides. It holds the whole key and a generation, and a search
reads the generation before and behind the key: so it may miss a page that is just being published, and never finds one
that is not there. This also holds for an index full of rubbish, which is why a new node need not trust the old one's.

Order of writes (they are seen in this order on x86-64): a page's word is written when its header is complete, and
cleared when its generation is odd already; a reach grows before the word that needs it is written.
"""

from __future__ import annotations

import mmap
import struct
import sys
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore.arena.format import (
    BUCKET_BYTES,
    BUCKET_WORDS,
    FRAME_BYTES,
    HEADER_BYTES,
    HEADER_WORDS,
    SLOTS_OFFSET,
    buckets_for,
    index_offset,
)
from kvstore.hashing import HASH_BYTES

Words = npt.NDArray[np.uint64]

MOST_REACH = 15
"""Furthest bucket from its home, in buckets, that a key may lie in. What finds no place there is not indexed."""
FEW_KEYS = 12
"""Up to so many keys a plain loop is faster than NumPy; with cold caches, up to many more."""

_MASK = (1 << 64) - 1
_FACTORS = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93)
_NAMESPACE_FACTOR = 0xFF51AFD7ED558CCD
_FINAL_FACTOR = 0xBF58476D1CE4E5B9
_IN_MEMORY = 1 << 31
"""In the upper half of a word."""
_FRAME_MASK = (1 << 31) - 1
_HASH = struct.Struct("<4Q")
_HEADER = struct.Struct("<4Q16xQ")
"""A header's hash and its last word (length, namespace and owner), behind the generation."""

_NP_FACTORS = np.array(_FACTORS, np.uint64)
_NP_FINAL = np.uint64(_FINAL_FACTOR)
_NP_32 = np.uint64(32)
_NP_ONE = np.uint64(1)
_NP_IN_MEMORY = np.uint32(_IN_MEMORY)


class Found(NamedTuple):
    """What a search found, one entry a key."""

    frames: npt.NDArray[np.int64]
    """First frame of the page's slot; -1: not found."""
    generations: Words
    """Even, and the slot's while the key was compared: the page is unchanged as long as its header says the same."""


def place(namespace: int, block_hash: bytes, buckets: int) -> tuple[int, int]:
    """A key's home bucket, and the upper half of its word."""
    a, b, c, d = _HASH.unpack(block_hash)
    f = _FACTORS
    mixed = a * f[0] + b * f[1] + c * f[2] + d * f[3] + namespace * _NAMESPACE_FACTOR & _MASK
    mixed = (mixed ^ mixed >> 32) * _FINAL_FACTOR & _MASK
    return (mixed >> 32) * buckets >> 32, _IN_MEMORY | mixed & _IN_MEMORY - 1


def description(namespace: int, length: int) -> int:
    """The last word of the header of a page: its length, its namespace, and no owner."""
    return length | namespace << 32


class IndexWriter:
    """The writing end: the node's alone. Not safe for threads.

    Args:
        words: of the buckets, as unsigned 64-bit numbers.
        reach: one byte a bucket.
    """

    def __init__(self, words: memoryview, reach: memoryview) -> None:
        self._words = words
        self._read = words
        """The same, to look at a whole bucket."""
        self._reach = reach
        self._buckets = len(reach)
        self._far: dict[int, list[int]] = {}
        """Home bucket → how far away each of its keys is that lies in another one."""
        self.unplaced: set[int] = set()
        """Slots of pages that found no place."""

    def clear(self) -> None:
        """Forget every page."""
        np.frombuffer(self._words, np.uint64)[:] = 0
        np.frombuffer(self._reach, np.uint8)[:] = 0
        self._far.clear()
        self.unplaced.clear()

    def insert_all(self, namespace: int, pages: Sequence[tuple[int, bytes]]) -> bool:
        """:meth:`insert` for pages of one namespace, (frame, hash) of each. False: there is no place for some."""
        places = self._places_of(namespace, [block_hash for _, block_hash in pages])
        # Homes first, as the native core does: a page that lies elsewhere takes no other one's home.
        far = [
            (home, upper, frame)
            for (home, upper), (frame, _) in zip(places, pages, strict=True)
            if not self._put(home, upper << 32 | frame)
        ]
        placed = [self._insert(*each) for each in far]
        return all(placed)

    def insert(self, namespace: int, block_hash: bytes, frame: int) -> bool:
        """Make a page findable whose header is complete. False: there is no place; it is found by asking the node."""
        return self._insert(*place(namespace, block_hash, self._buckets), frame)

    def _insert(self, home: int, upper: int, frame: int) -> bool:
        word = upper << 32 | frame
        if self._put(home, word):
            return True
        for distance in range(1, min(MOST_REACH + 1, self._buckets)):
            bucket = (home + distance) % self._buckets
            if self._has_room(bucket):
                self._far.setdefault(home, []).append(distance)
                self._reach[home] = max(self._reach[home], distance)  # before the word that needs it
                return self._put(bucket, word)
        self.unplaced.add(frame)
        return False

    def _has_room(self, bucket: int) -> bool:
        return 0 in self._read[bucket * BUCKET_WORDS : (bucket + 1) * BUCKET_WORDS].tolist()

    def _put(self, bucket: int, word: int) -> bool:
        """Into the first free place of a bucket. False: it has none."""
        start = bucket * BUCKET_WORDS
        here = self._read[start : start + BUCKET_WORDS].tolist()
        if 0 not in here:
            return False
        self._words[start + here.index(0)] = word
        return True

    def remove_all(self, namespace: int, pages: Sequence[tuple[int, bytes]]) -> None:
        """:meth:`remove` for pages of one namespace, (frame, hash) of each."""
        words = self._words
        places = self._places_of(namespace, [block_hash for _, block_hash in pages])
        for (home, upper), (frame, _) in zip(places, pages, strict=True):
            start = home * BUCKET_WORDS
            here = self._read[start : start + BUCKET_WORDS].tolist()
            word = upper << 32 | frame
            if word in here:  # nearly all lie in their home
                words[start + here.index(word)] = 0
            else:
                self._remove(home, upper, frame)

    def remove(self, namespace: int, block_hash: bytes, frame: int) -> None:
        """Let a page be found no longer; its generation is odd already. One that has no place here is passed over."""
        self._remove(*place(namespace, block_hash, self._buckets), frame)

    def _places_of(self, namespace: int, hashes: Sequence[bytes]) -> Iterable[tuple[int, int]]:
        if len(hashes) <= FEW_KEYS:
            return [place(namespace, block_hash, self._buckets) for block_hash in hashes]
        keys = np.frombuffer(b"".join(hashes), np.uint64).reshape(-1, HASH_BYTES // 8)
        homes, uppers = _places(namespace, keys, self._buckets)
        return zip(homes.tolist(), uppers.tolist(), strict=True)

    def _remove(self, home: int, upper: int, frame: int) -> None:
        self.unplaced.discard(frame)
        words, buckets = self._words, self._buckets
        word = upper << 32 | frame
        for distance in range(self._reach[home] + 1):
            start = (home + distance) % buckets * BUCKET_WORDS
            for position in range(start, start + BUCKET_WORDS):
                if words[position] == word:
                    words[position] = 0
                    if distance:
                        far = self._far[home]
                        far.remove(distance)
                        self._reach[home] = max(far, default=0)
                        if not far:
                            del self._far[home]
                    return


class IndexReader:
    """The reading end. Safe for threads, and for anything that the writer does meanwhile.

    Args:
        words: of the buckets, ``(buckets, 8)`` unsigned 64-bit numbers.
        reach: one byte a bucket.
        headers: of the slots, ``(frames, 8)`` unsigned 64-bit numbers.
    """

    def __init__(self, words: Words, reach: npt.NDArray[np.uint8], headers: Words) -> None:
        self._buckets = words
        self._reach = reach
        self._headers = headers
        self._generations = headers.reshape(-1)
        self._frames = len(headers)
        # The same memory for plain loops: single items are read many times faster than from arrays.
        self._word_view = words.reshape(-1).data.cast("B").cast("Q")
        self._reach_view = reach.data
        self._header_view = headers.reshape(-1).data.cast("B")
        self._header_words = self._header_view.cast("Q")

    @classmethod
    def of(cls, headers: mmap.mmap, arena_bytes: int) -> IndexReader:
        """The reading end of a mapped ``headers`` file."""
        frames, buckets = arena_bytes // FRAME_BYTES, buckets_for(arena_bytes)
        start = index_offset(arena_bytes)
        return cls(
            np.frombuffer(headers, np.uint64, buckets * BUCKET_WORDS, start).reshape(-1, BUCKET_WORDS),
            np.frombuffer(headers, np.uint8, buckets, start + buckets * BUCKET_BYTES),
            np.frombuffer(headers, np.uint64, frames * HEADER_WORDS, SLOTS_OFFSET).reshape(-1, HEADER_WORDS),
        )

    def words_in_use(self) -> int:
        """How many pages the index names now."""
        return int(np.count_nonzero(self._buckets))

    def find(self, namespace: int, length: int, hashes: bytes) -> Found:
        """Where pages are.

        Args:
            namespace: its number in headers.
            length: bytes of each page.
            hashes: block hashes, 32 bytes each, joined.
        """
        count = len(hashes) // HASH_BYTES
        if count <= FEW_KEYS:
            frames = np.empty(count, np.int64)
            generations = np.zeros(count, np.uint64)
            for place_, start in enumerate(range(0, len(hashes), HASH_BYTES)):
                frame, generation = self.find_one(namespace, length, hashes[start : start + HASH_BYTES])
                frames[place_], generations[place_] = frame, generation
            return Found(frames, generations)
        return self._find_many(namespace, length, hashes)

    def find_one(self, namespace: int, length: int, block_hash: bytes) -> tuple[int, int]:
        """Where one page is: its slot's first frame and generation, ``(-1, 0)`` when it is not here."""
        buckets = len(self._reach_view)
        home, upper = place(namespace, block_hash, buckets)
        for distance in range(min(self._reach_view[home], MOST_REACH) + 1):
            start = (home + distance) % buckets * BUCKET_WORDS
            for word in self._word_view[start : start + BUCKET_WORDS].tolist():
                if word >> 32 == upper:
                    frame = min(word & _FRAME_MASK, self._frames - 1)  # of rubbish; the header there decides
                    generation = self._generation_of(frame, namespace, length, block_hash)
                    if generation:
                        return frame, generation
        return -1, 0

    def generations(self, frames: npt.NDArray[np.int64]) -> Words:
        """The generations of slots now."""
        return self._generations.take(frames * HEADER_WORDS, mode="clip")

    def generation(self, frame: int) -> int:
        """The generation of one slot now."""
        return self._header_words[frame * HEADER_WORDS]

    def _generation_of(self, frame: int, namespace: int, length: int, block_hash: bytes) -> int:
        """The generation of a slot if it holds this page, else 0."""
        start = frame * HEADER_BYTES
        generation = self._header_words[start // 8]
        a, b, c, d, last = _HEADER.unpack_from(self._header_view, start + 8)
        if generation % 2 or (a, b, c, d) != _HASH.unpack(block_hash) or last != description(namespace, length):
            return 0
        return generation if self._header_words[start // 8] == generation else 0

    def _find_many(self, namespace: int, length: int, hashes: bytes) -> Found:
        # Few steps on purpose: with cold caches most of their time is the code, not the memory that they look into.
        keys = np.frombuffer(hashes, np.uint64).reshape(-1, HASH_BYTES // 8)
        homes, uppers = _places(namespace, keys, len(self._reach))
        rows = self._buckets.take(homes, axis=0, mode="clip").view(np.uint32)
        hits = (rows[:, 1::2] == uppers[:, None]).reshape(-1).nonzero()[0]
        named = len(hits)
        owners: slice | npt.NDArray[np.int64] = slice(named)
        if named:
            frames = rows.reshape(-1).take(hits * 2).astype(np.int64)
            np.minimum(frames, self._frames - 1, out=frames)  # of rubbish; the header there decides
            before = self.generations(frames)
            headers = self._headers.take(frames, axis=0, mode="clip")
            after = self.generations(frames)
            last = description(namespace, length)
            if not (  # the usual case: the buckets of the leading keys name one slot each, which holds it
                headers[:, 1:5].tobytes() == hashes[: named * HASH_BYTES]
                and headers[:, 7].tobytes() == last.to_bytes(8, sys.byteorder) * named
                and before.tobytes() == after.tobytes()
                and not np.bitwise_or.reduce(before) & _NP_ONE
            ):
                whose = hits >> 3
                good = (headers[:, 1:5] == keys.take(whose, axis=0)).all(axis=1)
                good &= headers[:, 7] == last
                good &= before & _NP_ONE == 0
                good &= after == before
                owners, frames, before = whose[good], frames[good], before[good]
            elif named == len(keys):
                return Found(frames, before)
        found = Found(np.full(len(keys), -1, np.int64), np.zeros(len(keys), np.uint64))
        if named:
            found.frames[owners] = frames  # a page lies in one slot
            found.generations[owners] = before
        # Rare: keys whose home bucket was full when they came.
        for place_ in self._reach.take(homes, mode="clip").nonzero()[0].tolist():
            if found.frames[place_] < 0:
                block_hash = hashes[place_ * HASH_BYTES : (place_ + 1) * HASH_BYTES]
                found.frames[place_], found.generations[place_] = self.find_one(namespace, length, block_hash)
        return found


def _places(namespace: int, keys: Words, buckets: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint32]]:
    """:func:`place` for many keys at once."""
    mixed = keys @ _NP_FACTORS
    mixed += np.uint64(namespace * _NAMESPACE_FACTOR & _MASK)
    mixed ^= mixed >> _NP_32
    mixed *= _NP_FINAL
    uppers = mixed.astype(np.uint32)
    uppers |= _NP_IN_MEMORY
    mixed >>= _NP_32
    mixed *= np.uint64(buckets)
    mixed >>= _NP_32
    homes: npt.NDArray[np.int64] = mixed.view(np.int64)
    return homes, uppers
