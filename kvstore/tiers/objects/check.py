"""The check of a bucket: every pack is read whole, and each of its pages verified. Nothing is changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import xxhash

from kvstore.segments import record
from kvstore.segments.record import BLOCK
from kvstore.tiers.objects import names
from kvstore.tiers.objects.bucket import Bucket, GoneError
from kvstore.tiers.objects.index_object import decode_index

_SECONDS = 60.0
Progress = Callable[[int, int], None]
"""Called with bytes that are verified, and bytes in all."""


@dataclass(frozen=True, slots=True)
class PackReport:
    """One pack."""

    name: str
    bytes: int
    pages: int
    damaged_pages: int
    """Of them, those whose bytes their checksum refuses."""
    told: bool
    """Whether an index object names it; a pack that is being written just now is not named yet."""
    unreadable: bool
    """Nothing in it can be trusted."""

    @property
    def damaged(self) -> bool:
        """Whether anything is wrong with it. What nobody is told of is deleted by who finds its writer dead."""
        return bool(self.damaged_pages or self.unreadable)


def check_bucket(url: str, progress: Progress = lambda done, size: None) -> Iterator[PackReport]:
    """Verify one pack after the other. Nodes may use the bucket meanwhile; a pack that leaves is passed over.

    Raises:
        ConfigError: no such URL.
        OSError: the bucket can't be read.
    """
    bucket = Bucket(url, _SECONDS)
    try:
        told: set[str] = set()
        for each in bucket.list(names.INDEX):
            try:
                content = decode_index(bucket.get(each.path))
            except GoneError:
                continue
            if content is not None:
                told.update(pack.name.path for pack, _ in content.packs)
        packs = [each for each in bucket.list(names.PACKS) if names.parse_pack(each.path) is not None]
        size, done = sum(each.size for each in packs), 0
        for each in packs:
            name = names.parse_pack(each.path)
            assert name is not None
            try:
                body = bucket.get(each.path)
            except GoneError:
                continue
            pages, damaged, unreadable = _verify(body, name.number)
            done += each.size
            progress(done, size)
            yield PackReport(each.path, len(body), pages, damaged, each.path in told, unreadable)
    finally:
        bucket.close()


def _verify(body: bytes, number: int) -> tuple[int, int, bool]:
    """How many pages a pack has, how many of these are damaged, and whether it is none at all."""
    header = record.decode_segment_header(body[:BLOCK])
    trailer = record.decode_trailer(body[-BLOCK:])
    if header is None or trailer is None or not header.id == trailer.segment == number:
        return 0, 0, True
    table = body[trailer.footer : trailer.footer + record.record_table_bytes(trailer.records)]
    if record.table_checksum(table) != trailer.checksum:
        return 0, 0, True
    records = np.frombuffer(table, record.RECORDS)
    memory = memoryview(body)
    damaged = 0
    for offset, length, checksum in zip(
        records["offset"].tolist(), records["length"].tolist(), records["checksum"].tolist(), strict=True
    ):
        stored = memory[offset : offset + length]
        damaged += len(stored) != length or xxhash.xxh3_64_intdigest(stored) != checksum
    return len(records), damaged, False
