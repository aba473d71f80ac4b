"""The format of the ``headers`` file: offsets and types. No files here, and no mappings."""

from __future__ import annotations

import struct
from typing import NamedTuple

import numpy as np

MAGIC = b"KVSTARNA"
VERSION = 2
FRAME_BYTES = 4096
"""Slots start at, and are padded to, multiples of this many bytes."""
HEADER_BYTES = 64
HEADER_WORDS = HEADER_BYTES // 8
MAX_UNITS = 1024
BUCKET_WORDS = 8
BUCKET_BYTES = 8 * BUCKET_WORDS
"""A bucket of the index: one cache line of 64-bit words."""

EDITION_OFFSET = 512
"""Where the node's edition lies: another number whenever what clients know of it may be out of date, since the node was
restarted or a namespace dropped; 0 while a node makes the index, and in files that were replaced. One 64-bit word."""
ELSEWHERE_OFFSET = 520
"""Where the node says whether a page that is not in the index may be here all the same, and where: 0 (nowhere), or some
of the four below. One 64-bit word."""
SOMEWHERE, IN_OWN_TIER, IN_SHARED_TIER, UNPLACED = 1, 2, 4, 8
"""In some lower tier, which is all that older nodes say; in one of whose pages the node knows by itself and the summary
tells (disk, object storage); in a shared one that has to be asked (Redis); in the arena, without a place in the index.
Older clients ask the node whatever it is."""
SUMMARY_OFFSET = 528
"""Where the node says which file is the summary of its own tiers (``kvstore.arena.summary``): its number, times 256,
and the version of its format; 0: there is none, or it is not complete. Files of older versions have 0 here. One 64-bit
word."""
EPOCH_OFFSET = 576
"""Where the node's epoch lies, in a cache line of its own; see ``kvstore.arena.epochs``. One 64-bit word."""
COUNTERS_OFFSET = 1024
"""Where the node's persistent counters lie: unsigned 64-bit numbers, in the order of ``COUNTERS``."""
UNITS_OFFSET = 4096
"""Where the unit table lies: for each unit the slab that it belongs to."""
SLOTS_OFFSET = UNITS_OFFSET + 8 * MAX_UNITS

COUNTERS = (
    "asked",
    "hit",
    "missed",
    "stored",
    "present",
    "refused",
    "evicted",
    "overrun",
    "lapsed",
    "corrupt",
    "shared",
    "unshared",
    "expired",
    "unverified",
    "archived",
    "unarchived",
)
"""Pages by what happened to them; they survive the node's death together with the pages. What a version appends is 0 in
the file of an older one."""

TIER_COUNTERS_OFFSETS = {"disk": 2048, "redis": 2304, "objects": 2560}
"""Where the counters of the lower tiers lie: unsigned 64-bit numbers, in the order of ``TIER_COUNTERS``; zeros in the
file of an older version.

They tell what this node has done, like those of the arena, and so they live here, and as long as those: a disk's folder
may be another node's tomorrow, and Redis and a bucket are everybody's. To count in memory that outlives the process
costs no I/O, and never waits for a disk that hangs."""
TIER_COUNTERS = (
    "asked",
    "hit",
    "missed",
    "corrupt",
    "errors",
    "stored",
    "refused",
    "evicted",
    "read_bytes",
    "written_bytes",
    "late",
    "carried",
)
"""Those of :class:`kvstore.tiers.tier.TierStatistics`."""

GENERATION_WORD = 0
"""Which of a header's eight 64-bit words is the generation."""
CHECKSUM_WORD = 5
"""And which the checksum."""
DESCRIPTION_WORD = 7
LENGTH_MASK = 0xFFFFFFFF
"""And which length, namespace and owner, with the length in these bits."""
OWNER_PLACE = 31
"""Which of its 16-bit numbers is the owner."""

HEADER = np.dtype(
    [
        ("generation", "<u8"),
        ("hash", "V32"),
        ("checksum", "<u8"),  # xxh3_64 of the payload; 0: not made yet
        ("sequence", "<u8"),  # order of publication, so that recency survives a restart
        ("length", "<u4"),  # bytes of payload
        ("namespace", "<u2"),
        ("owner", "<u2"),  # client that may write into the slot; 0: none
    ]
)
HEADER_BODY = struct.Struct("<32sQQIHH")
"""A header without its generation."""
BODY_OFFSET = 8

UNIT = np.dtype([("slab", "<u4"), ("slot_frames", "<u4")])  # first unit of the slab; 0 frames: the unit is free

_SUPERBLOCK = struct.Struct("<8sIIQQ16sQ")
_GEOMETRY = struct.Struct("<5Q")
RETIRED_OFFSET = 48
"""Where the superblock's ``retired`` lies, in every version."""
RETIRED = struct.pack("<Q", 1)


class Superblock(NamedTuple):
    """The first bytes of ``headers``."""

    arena_bytes: int
    """Size of ``pages``, a multiple of the unit."""
    unit_bytes: int
    arena_id: bytes
    """16 random bytes: tells one pair of files from the next."""
    retired: int = 0
    """1: these files were replaced; map the new ones."""

    def pack(self) -> bytes:
        """The superblock as it lies in the file."""
        return _SUPERBLOCK.pack(MAGIC, VERSION, FRAME_BYTES, *self)

    @classmethod
    def unpack(cls, data: bytes | memoryview) -> Superblock | None:
        """The superblock of this format and version in ``data``, or None when it is another."""
        if len(data) < _SUPERBLOCK.size:
            return None
        magic, version, frame, *rest = _SUPERBLOCK.unpack_from(data)
        if (magic, version, frame) != (MAGIC, VERSION, FRAME_BYTES):
            return None
        return cls(*rest)


def frames_for(length: int) -> int:
    """Frames that a payload of ``length`` bytes takes."""
    return -(-length // FRAME_BYTES)


def index_offset(arena_bytes: int) -> int:
    """Where the buckets of the index lie; their reach bytes come behind them."""
    return SLOTS_OFFSET + arena_bytes // FRAME_BYTES * HEADER_BYTES


def headers_bytes(arena_bytes: int) -> int:
    """Size of the ``headers`` file for an arena of this size."""
    size = index_offset(arena_bytes) + buckets_for(arena_bytes) * (BUCKET_BYTES + 1)
    return -(-size // FRAME_BYTES) * FRAME_BYTES


def buckets_for(arena_bytes: int) -> int:
    """Buckets of the index: at most 0.4 pages for each of its words, if every page takes one frame only."""
    return -(-arena_bytes // FRAME_BYTES * 5 // (2 * BUCKET_WORDS))


def geometry(arena_bytes: int) -> bytes:
    """Where the parts of the ``headers`` file lie, as :mod:`kvstore.core` is told: where the slots, the buckets and
    their reach bytes begin; how many frames and buckets there are. Five 64-bit words."""
    start, buckets = index_offset(arena_bytes), buckets_for(arena_bytes)
    reach = start + buckets * BUCKET_BYTES
    return _GEOMETRY.pack(SLOTS_OFFSET, start, reach, arena_bytes // FRAME_BYTES, buckets)


def unit_bytes_for(arena_bytes: int) -> int:
    """Size of a unit: a 64th of the arena, between one frame and 64 MiB, and at most ``MAX_UNITS`` of them."""
    unit = min(max(arena_bytes // 64, FRAME_BYTES), 64 << 20)
    unit = max(unit, -(-arena_bytes // MAX_UNITS))
    return -(-unit // FRAME_BYTES) * FRAME_BYTES
