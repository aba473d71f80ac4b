"""Use objects: which pages of others' packs a writer has read lately, and which namespaces it uses, as bytes. No I/O.

Little-endian: magic ``KVOBJUS1``, the xxh3_64 of all the rest, version u32, numbers u32 of namespaces and of packs;
then the namespaces' fingerprints, 32 bytes each; then of each pack writer 16 bytes, number u64, number of pages u32,
and where these lie, in blocks of 4 KiB, u32 each. One object a writer, written anew. What it says makes packs stay for
longer; who writes nonsense there makes others keep the wrong ones.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Mapping
from typing import NamedTuple

import numpy as np
import xxhash

from kvstore.segments.record import FINGERPRINT_BYTES
from kvstore.tiers.objects.names import PackName

VERSION = 1
MOST_BYTES = 1 << 18
_MAGIC = b"KVOBJUS1"
_HEAD = struct.Struct("<8sQ")
_COUNTS = struct.Struct("<III")
_PACK = struct.Struct("<16sQI")


class Uses(NamedTuple):
    """What a writer has used."""

    namespaces: frozenset[bytes]
    packs: Mapping[PackName, Collection[int]]
    """Where the pages lie that were read, in blocks."""


def encode_uses(uses: Uses) -> bytes:
    """The bytes of a use object; packs that would make it larger than ``MOST_BYTES`` are left out."""
    namespaces = sorted(uses.namespaces)[: MOST_BYTES // 2 // FINGERPRINT_BYTES]
    parts, size, packs = [*namespaces], len(namespaces) * FINGERPRINT_BYTES + 64, 0
    for name, blocks in uses.packs.items():
        size += _PACK.size + 4 * len(blocks)
        if size > MOST_BYTES:
            break
        packs += 1
        parts += [_PACK.pack(*name, len(blocks)), np.array(sorted(blocks), "<u4").tobytes()]
    body = _COUNTS.pack(VERSION, len(namespaces), packs) + b"".join(parts)
    return _HEAD.pack(_MAGIC, xxhash.xxh3_64_intdigest(body)) + body


def decode_uses(data: bytes) -> Uses | None:
    """What a use object says; None: it is damaged, or something else."""
    if not _HEAD.size + _COUNTS.size <= len(data) <= MOST_BYTES:
        return None
    magic, checksum = _HEAD.unpack_from(data)
    body = data[_HEAD.size :]
    if magic != _MAGIC or xxhash.xxh3_64_intdigest(body) != checksum:
        return None
    version, namespaces, packs = _COUNTS.unpack_from(body)
    if version != VERSION:
        return None
    at = _COUNTS.size + namespaces * FINGERPRINT_BYTES
    fingerprints = body[_COUNTS.size : at]
    found: dict[PackName, Collection[int]] = {}
    try:
        for _ in range(packs):
            writer, number, count = _PACK.unpack_from(body, at)
            at += _PACK.size
            found[PackName(writer, number)] = np.frombuffer(body, "<u4", count, at).tolist()
            at += 4 * count
    except (struct.error, ValueError):
        return None
    if len(fingerprints) != namespaces * FINGERPRINT_BYTES:
        return None
    return Uses(
        frozenset(fingerprints[n : n + FINGERPRINT_BYTES] for n in range(0, len(fingerprints), FINGERPRINT_BYTES)),
        found,
    )
