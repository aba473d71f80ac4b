"""Reading pages: ranges of packs, in parallel, within a deadline, each page verified before anybody has it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import xxhash

from kvstore.segments.io_threads import Job, LateError
from kvstore.tiers.objects.bucket import Bucket, GoneError
from kvstore.tiers.objects.catalog import Asked
from kvstore.tiers.objects.keys import PackKeys
from kvstore.tiers.objects.names import PackName
from kvstore.tiers.objects.planning import Extent, plan_ranges
from kvstore.tiers.tier import READER, PageBytes


@dataclass(slots=True)
class Fetched:
    """What became of one call's reads."""

    found: list[tuple[Asked, int]] = field(default_factory=list)
    """Pages, with the xxh3_64 of each."""
    damaged: list[Asked] = field(default_factory=list)
    gone: dict[PackName, list[Asked]] = field(default_factory=dict)
    """Packs that are no more, and what was wanted of them."""
    errors: int = 0
    """Requests that failed."""
    late: int = 0
    """Pages that did not come in time."""


class Reader:
    """Reads pages of packs. Safe for threads.

    The requests go on threads that may hang, into memory of their own; the caller's thread verifies what has come, and
    copies it. So nothing writes into the caller's arrays once :meth:`fetch` has returned.
    """

    def __init__(self, bucket: Bucket, keys: PackKeys) -> None:
        self._bucket = bucket
        self._keys = keys

    def fetch(self, keys: Sequence[bytes], asked: Sequence[Asked], into: Sequence[PageBytes], end: float) -> Fetched:
        """Read pages.

        Args:
            keys: of the call.
            asked: its pages that are to be read.
            into: the call's arrays, of the lengths that the pages have.
            end: by when (``time.monotonic``).
        """
        fetched = Fetched()
        by_pack: dict[PackName, list[Asked]] = defaultdict(list)
        for each in asked:
            by_pack[each.pack.name].append(each)
        runs: list[tuple[list[Asked], int]] = []
        for pages in by_pack.values():
            pages.sort(key=lambda each: each.place.offset)
            extents = [Extent(each.place.offset, each.place.length) for each in pages]
            runs += [
                (pages[run.start : run.stop], extents[run.stop - 1].end - extents[run.start].offset)
                for run in plan_ranges(extents)
            ]
        calls = [
            partial(self._bucket.get_range, pages[0].pack.name.path, pages[0].place.offset, length)
            for pages, length in runs
        ]
        try:
            jobs = self._bucket.begin(calls, READER.get())
        except OSError:
            fetched.errors += 1
            return fetched
        for (pages, _), job in zip(runs, jobs, strict=True):
            self._take(keys, pages, job, into, end, fetched)
        return fetched

    def _take(
        self,
        keys: Sequence[bytes],
        pages: Sequence[Asked],
        job: Job[memoryview],
        into: Sequence[PageBytes],
        end: float,
        fetched: Fetched,
    ) -> None:
        try:
            data = np.frombuffer(self._bucket.wait(job, end), np.uint8)
        except LateError:
            fetched.errors += 1
            fetched.late += len(pages)
            return
        except GoneError:
            fetched.gone.setdefault(pages[0].pack.name, []).extend(pages)
            return
        except OSError:
            fetched.errors += 1
            return
        first = pages[0].place.offset
        for each in pages:
            at = each.place.offset - first
            checksum = self._verify(keys[each.position], each, data[at : at + each.place.length], into[each.position])
            if checksum is None:
                fetched.damaged.append(each)
            else:
                fetched.found.append((each, checksum))

    def _verify(self, key: bytes, asked: Asked, stored: PageBytes, into: PageBytes) -> int | None:
        """Copy a page that is what it should be. Returns its xxh3_64."""
        if xxhash.xxh3_64_intdigest(stored.data) != asked.place.checksum:
            return None
        cipher = self._keys.of(asked.pack)
        if cipher is None:
            into[:] = stored
            return asked.place.checksum
        if not cipher.decrypt(asked.place.offset, key, stored, into):
            return None
        return xxhash.xxh3_64_intdigest(into.data)
