"""Index objects: small ones, from which readers learn what is in packs, to bytes and back. No I/O.

Little-endian: magic ``KVOBJIX1``, the xxh3_64 of all the rest, version u32; then the numbers u32 of packs, of packs
that are gone, and of removed pages. Then these, one after the other::

    pack     writer 16 bytes, number u64, size u64, stamp 16 bytes, codec u32, check of the key 16 bytes, records u32;
             its records, 88 bytes each, as in the pack's footer
    gone     writer 16 bytes, number u64
    removed  page key 64 bytes, writer 16 bytes, number u64: this page is not to be found in this pack any more

What one says holds in whatever order it is read: a removal names the pack, so that a page which is stored again, in
another pack, is not removed by it. A damaged object, or one of a newer version, says nothing.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
import xxhash

from kvstore.segments import record
from kvstore.tiers.objects.names import PackName
from kvstore.tiers.objects.pack import Pack, Records, are_sound

VERSION = 1
MOST_BYTES = 64 << 20
"""A larger object is none of ours."""
PART_BYTES = 16 << 20
"""No larger one is written, but for one pack's entry: what is more is told in several."""
_MAGIC = b"KVOBJIX1"
_HEAD = struct.Struct("<8sQ")
_COUNTS = struct.Struct("<IIII")
_PACK = struct.Struct("<16sQQ16sI16sI")
_GONE = struct.Struct("<16sQ")
_REMOVED = struct.Struct("<64s16sQ")


@dataclass(slots=True)
class IndexContent:
    """What an index object says."""

    packs: list[tuple[Pack, Records]] = field(default_factory=list)
    gone: list[PackName] = field(default_factory=list)
    removed: list[tuple[bytes, PackName]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.packs or self.gone or self.removed)

    def add(self, other: IndexContent) -> None:
        """Say what another one says as well."""
        self.packs += other.packs
        self.gone += other.gone
        self.removed += other.removed


def index_bytes(pages: Iterable[int], gone: int = 0, removed: int = 0) -> int:
    """The size of an index object that names packs of so many pages, packs that are gone, and removed pages."""
    packs = list(pages)
    size = _HEAD.size + _COUNTS.size + len(packs) * _PACK.size + record.record_table_bytes(sum(packs))
    return size + gone * _GONE.size + removed * _REMOVED.size


def in_parts(content: IndexContent, most_bytes: int = PART_BYTES) -> Iterator[IndexContent]:
    """The same, as one or several that are small enough to be written: at least one. Removals come first, and
    packs that are gone last: what lay in them lies in others, which have to be known by then."""
    items = chain(
        ((_REMOVED.size, IndexContent(removed=[each])) for each in content.removed),
        ((_PACK.size + record.record_table_bytes(len(each[1])), IndexContent([each])) for each in content.packs),
        ((_GONE.size, IndexContent(gone=[each])) for each in content.gone),
    )
    part, size = IndexContent(), 0
    for cost, item in items:
        if size and size + cost > most_bytes:
            yield part
            part, size = IndexContent(), 0
        part.add(item)
        size += cost
    yield part


def encode_index(content: IndexContent) -> bytes:
    """The bytes of an index object."""
    parts = [_COUNTS.pack(VERSION, len(content.packs), len(content.gone), len(content.removed))]
    for pack, records in content.packs:
        parts.append(_PACK.pack(*pack.name, pack.size, pack.stamp, pack.codec, pack.key_check, len(records)))
        parts.append(records.tobytes())
    parts += [_GONE.pack(*name) for name in content.gone]
    parts += [_REMOVED.pack(key, *name) for key, name in content.removed]
    body = b"".join(parts)
    return _HEAD.pack(_MAGIC, xxhash.xxh3_64_intdigest(body)) + body


def decode_index(data: bytes) -> IndexContent | None:
    """What an index object says; None: it is damaged, or something else."""
    if len(data) < _HEAD.size + _COUNTS.size or len(data) > MOST_BYTES:
        return None
    magic, checksum = _HEAD.unpack_from(data)
    body = memoryview(data)[_HEAD.size :]
    if magic != _MAGIC or xxhash.xxh3_64_intdigest(body) != checksum:
        return None
    version, packs, gone, removed = _COUNTS.unpack_from(body)
    if version != VERSION:
        return None
    content = IndexContent()
    try:
        at = _COUNTS.size
        for _ in range(packs):
            writer, number, size, stamp, codec, check, count = _PACK.unpack_from(body, at)
            at += _PACK.size
            records = np.frombuffer(body, record.RECORDS, count, at)
            at += record.record_table_bytes(count)
            pack = Pack(PackName(writer, number), size, stamp, codec, check)
            if codec in (record.RAW, record.AES_GCM) and are_sound(pack, records):
                content.packs.append((pack, records))
        for _ in range(gone):
            content.gone.append(PackName(*_GONE.unpack_from(body, at)))
            at += _GONE.size
        for _ in range(removed):
            key, *name = _REMOVED.unpack_from(body, at)
            content.removed.append((key, PackName(*name)))
            at += _REMOVED.size
    except (struct.error, ValueError):  # shorter than it says
        return None
    return content


def folded(
    contents: Iterable[IndexContent], mine: Iterable[PackName], known: Iterable[PackName], gone: Iterable[PackName]
) -> IndexContent:
    """One index object in the place of several of one writer.

    Args:
        contents: of these.
        mine: the packs that this writer has now.
        known: all packs, of any writer, that are still there as far as one knows.
        gone: those of which it was told lately that they are gone: who has not read that yet reads it here.
    """
    here, anywhere, lately = set(mine), set(known), set(gone)
    told: dict[PackName, None] = {}
    packs: dict[PackName, tuple[Pack, Records]] = {}
    removed: dict[tuple[bytes, PackName], None] = {}
    for content in contents:
        packs |= {pack.name: (pack, records) for pack, records in content.packs if pack.name in here}
        told |= dict.fromkeys(name for name in content.gone if name in lately)
        removed |= dict.fromkeys(each for each in content.removed if each[1] in anywhere)
    return IndexContent(list(packs.values()), list(told), list(removed))
