"""The summary of what the node's own lower tiers hold, in shared memory: one process writes it, many read it without a
lock. "No" is certain, "maybe" is a question to the node.

It is an array of *buckets* of eight 32-bit places, half a cache line each. A page has a tag and two buckets; it lies in
a place of one of them, the emptier one when it came (two choices leave no bucket much fuller than another). A place
holds a tag, or 0: free. In a bucket's first place ``FULL`` says that pages found no place there: of those that have
this bucket everything is "maybe", until the summary is made anew.

The second bucket follows from the tag and the first one, and likewise the other way round. So two pages that have the
same tag and share a bucket share both, and either's place will do for the other: each takes a place of its own, and
when one leaves it does not matter which of the places becomes free. A page in two tiers takes two places.

Tags never move, and each is one aligned store: a page that stays is found at any moment, but for one case. Where two
pages have the same tag and buckets, one that leaves may free the place that a reader has not looked at yet, while the
one that it looked at before was still free. So withdrawals are counted before they are made, and a reader that sees the
count move says nothing. That count also makes a page seen that is promoted and leaves its tier between two looks; see
:mod:`kvstore.arena`.

A false "maybe" is as rare as an equal tag: with four pages a bucket 2 in 10^9 lookups of a page.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore.core import choice
from kvstore.hashing import HASH_BYTES

Places = npt.NDArray[np.uint32]

PLACES = 8
"""Of a bucket."""
BUCKET_BYTES = 4 * PLACES
DATA_OFFSET = 4096
"""Where the buckets lie, behind the file's header."""
WITHDRAWALS_OFFSET = 64
"""Where withdrawals are counted: one 64-bit word, in a cache line of its own."""
FULL = 0xFFFFFFFF
FEWEST_BUCKETS, MOST_BUCKETS = 128, 1 << 31
FEW_KEYS = 12
"""Up to so many keys a plain loop is faster than NumPy."""
KEY_BYTES = 64
"""A page's key: the fingerprint of its namespace, and its block hash."""

_MASK = (1 << 64) - 1
_FACTORS = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93)
_FINGERPRINT_FACTOR = 0xFF51AFD7ED558CCD
_FINAL_FACTOR = 0xBF58476D1CE4E5B9
_TAG_FACTOR = 0x9E3779B1
_HASH = struct.Struct("<4Q")

_NP_FACTORS = np.array(_FACTORS, np.uint64)
_NP_FINGERPRINT = np.uint64(_FINGERPRINT_FACTOR)
_NP_FINAL = np.uint64(_FINAL_FACTOR)
_NP_TAG = np.uint32(_TAG_FACTOR)
_NP_32 = np.uint64(32)
_NP_FULL = np.uint32(FULL)

_HEADER = struct.Struct("<8sIIQQ")
_MAGIC = b"KVSTSUMM"
VERSION = 1


class SummaryHeader(NamedTuple):
    """The first bytes of a summary's file."""

    buckets: int
    number: int
    """Of the file; the superblock of the arena says which one counts."""

    def pack(self) -> bytes:
        """The header as it lies in the file."""
        return _HEADER.pack(_MAGIC, VERSION, PLACES, *self)

    @classmethod
    def unpack(cls, data: bytes | memoryview) -> SummaryHeader | None:
        """The header of this format in ``data``, or None when it is another."""
        if len(data) < _HEADER.size:
            return None
        magic, version, places, *rest = _HEADER.unpack_from(data)
        return cls(*rest) if (magic, version, places) == (_MAGIC, VERSION, PLACES) else None


def summary_bytes(buckets: int) -> int:
    """Size of a summary's file."""
    return DATA_OFFSET + buckets * BUCKET_BYTES


def seed_of(fingerprint: bytes) -> int:
    """What the fingerprint of a namespace adds to the hashes of its pages."""
    return int.from_bytes(fingerprint[:8], "little") * _FINGERPRINT_FACTOR & _MASK


def place(seed: int, block_hash: bytes, buckets: int) -> tuple[int, int, int]:
    """A page's two buckets, and its tag."""
    a, b, c, d = _HASH.unpack(block_hash)
    f = _FACTORS
    mixed = a * f[0] + b * f[1] + c * f[2] + d * f[3] + seed & _MASK
    mixed = (mixed ^ mixed >> 32) * _FINAL_FACTOR & _MASK
    home, tag = (mixed >> 32) * buckets >> 32, min(max(mixed & 0xFFFFFFFF, 1), FULL - 1)
    partner = ((tag * _TAG_FACTOR & 0xFFFFFFFF) * buckets >> 32) - home
    return home, partner if partner >= 0 else partner + buckets, tag


class SummaryWriter:
    """The writing end: the node's alone. Not safe for threads.

    Args:
        buffer: the whole file, writable; zeros behind the header.
        buckets: how many it has.
    """

    def __init__(self, buffer: memoryview, buckets: int) -> None:
        self._buckets = buckets
        self._file = buffer
        self._places = buffer[DATA_OFFSET:].cast("I")
        self._withdrawals = buffer[WITHDRAWALS_OFFSET:][:8].cast("Q")
        self.full_buckets = 0
        """Buckets of which everything is "maybe" from now on."""

    def insert(self, keys: Sequence[bytes]) -> None:
        """Pages have come to a tier: from now on each is "maybe". One that came to two tiers leaves twice."""
        core = choice.native()
        if core is not None:
            self.full_buckets += core.put_tags(self._file, self._buckets, b"".join(keys))
            return
        places = self._places
        for home, partner, tag in self._places_of(keys):
            ours = places[home * PLACES : (home + 1) * PLACES].tolist()
            others = places[partner * PLACES : (partner + 1) * PLACES].tolist()
            if FULL in (ours[0], others[0]):
                continue
            free, free_there = ours.count(0), others.count(0)
            if free >= free_there and free:
                places[home * PLACES + ours.index(0)] = tag
            elif free_there:
                places[partner * PLACES + others.index(0)] = tag
            else:
                places[home * PLACES] = FULL
                self.full_buckets += 1

    def remove(self, keys: Sequence[bytes]) -> None:
        """Pages have left a tier to which they had come."""
        if not keys:
            return
        places = self._places
        self._withdrawals[0] += 1  # first: see above
        core = choice.native()
        if core is not None:
            core.take_tags(self._file, self._buckets, b"".join(keys))
            return
        for home, partner, tag in self._places_of(keys):
            for bucket in (home, partner):
                here = places[bucket * PLACES : (bucket + 1) * PLACES].tolist()
                if tag in here:
                    places[bucket * PLACES + here.index(tag)] = 0
                    break

    def _places_of(self, keys: Sequence[bytes]) -> Iterator[tuple[int, int, int]]:
        if len(keys) <= FEW_KEYS:
            return (place(seed_of(key), key[KEY_BYTES - HASH_BYTES :], self._buckets) for key in keys)
        words = np.frombuffer(b"".join(keys), np.uint64).reshape(-1, KEY_BYTES // 8)
        seeds = words[:, 0] * _NP_FINGERPRINT
        homes, partners, tags = _places(seeds, words[:, -HASH_BYTES // 8 :], self._buckets)
        return zip(homes.tolist(), partners.tolist(), tags.tolist(), strict=True)


class SummaryReader:
    """The reading end. Safe for threads, and for anything that the writer does meanwhile.

    Args:
        buffer: the whole file, as it is mapped.
        buckets: how many it has.
    """

    def __init__(self, buffer: memoryview, buckets: int) -> None:
        self.buckets = buckets
        self._rows = np.frombuffer(buffer, np.uint32, buckets * PLACES, DATA_OFFSET).reshape(-1, PLACES)
        self._places = buffer[DATA_OFFSET:].cast("I")
        self._withdrawals = buffer[WITHDRAWALS_OFFSET:][:8].cast("Q")

    @property
    def withdrawals(self) -> int:
        """How often pages were withdrawn. What :meth:`may_have` says holds if this is the same before and behind it."""
        return self._withdrawals[0]

    def may_have(self, seed: int, hashes: bytes) -> npt.NDArray[np.bool_]:
        """Which pages may be in a tier: False is certain.

        Args:
            seed: of their namespace (:func:`seed_of`).
            hashes: block hashes, 32 bytes each, joined.
        """
        if len(hashes) <= FEW_KEYS * HASH_BYTES:
            each = (hashes[at : at + HASH_BYTES] for at in range(0, len(hashes), HASH_BYTES))
            return np.array([self.may_have_one(seed, block_hash) for block_hash in each], np.bool_)
        keys = np.frombuffer(hashes, np.uint64).reshape(-1, HASH_BYTES // 8)
        homes, partners, tags = _places(np.uint64(seed), keys, self.buckets)
        maybe: npt.NDArray[np.bool_] = np.zeros(len(keys), np.bool_)
        for buckets in (homes, partners):
            rows = self._rows.take(buckets, axis=0, mode="clip")
            hits = (rows == tags[:, None]) | (rows == _NP_FULL)
            maybe |= hits.any(axis=1)
        return maybe

    def may_have_one(self, seed: int, block_hash: bytes) -> bool:
        """Whether one page may be."""
        home, partner, tag = place(seed, block_hash, self.buckets)
        for bucket in (home, partner):
            here = self._places[bucket * PLACES : (bucket + 1) * PLACES].tolist()
            if tag in here or FULL in here:
                return True
        return False


def _places(
    seeds: Any, keys: npt.NDArray[np.uint64], buckets: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], Places]:
    """:func:`place` for many pages at once."""
    mixed = keys @ _NP_FACTORS
    mixed += seeds
    mixed ^= mixed >> _NP_32
    mixed *= _NP_FINAL
    tags = mixed.astype(np.uint32)
    np.clip(tags, 1, FULL - 1, out=tags)
    mixed >>= _NP_32
    mixed *= np.uint64(buckets)
    mixed >>= _NP_32
    homes: npt.NDArray[np.int64] = mixed.view(np.int64)
    partners = ((tags * _NP_TAG).astype(np.uint64) * np.uint64(buckets) >> _NP_32).view(np.int64)
    partners -= homes
    partners += (partners < 0) * np.int64(buckets)
    return homes, partners, tags
