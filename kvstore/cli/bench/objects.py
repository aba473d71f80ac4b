"""``kvstore bench objects``: pages to object storage and back, beside plain ``obstore`` with the same bytes."""

from __future__ import annotations

import argparse
import json
import secrets
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvstore.cli.bench.flags import check_rounds
from kvstore.cli.bench.machine import this_machine
from kvstore.errors import ConfigError, KVStoreError, ResourceError
from kvstore.units import format_size, parse_size

if TYPE_CHECKING:
    from kvstore.tiers.objects.bucket import Bucket
    from kvstore.tiers.tier import PageBytes

_PARALLEL = 16
_PLAIN_BYTES = 8 << 20
_OBJECT_BYTES = 32 << 20
_DEADLINE = 60.0
_HELP = """\
Credentials, endpoint and region are the environment's (AWS_…). What is written lies below a prefix of its own, and is
deleted in the end. Plain obstore writes the same bytes as objects of 32 MiB, one behind the other as the tier does, and
reads them in ranges of 8 MiB, 16 at once. Both take turns; figures are medians over rounds.
"""


def add(group: argparse._SubParsersAction[Any]) -> None:
    """Its parser."""
    bench = group.add_parser(
        "objects",
        help="object storage, beside plain obstore with the same bytes",
        description="Store pages in object storage and load them, beside plain obstore with the same bytes.",
        epilog=_HELP,
    )
    bench.add_argument("objects", metavar="URL", help="s3://bucket/prefix")
    bench.add_argument("--bytes", type=parse_size, default=256 << 20, metavar="SIZE", help="of pages (default: 256MiB)")
    bench.add_argument(
        "--page", type=parse_size, action="append", metavar="SIZE", help="page size (default: 2MiB and 64KiB)"
    )
    bench.add_argument("--rounds", type=int, default=4, metavar="N", help="rounds a page size (default: %(default)s)")
    bench.add_argument("--json", action="store_true", help="print one JSON object a line")
    bench.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Measure and print."""
    check_rounds(options.rounds)
    sizes = options.page or [2 << 20, 64 << 10]
    if options.bytes < max(sizes):
        raise ConfigError(f"--bytes is {format_size(options.bytes)}, the least is a page, {format_size(max(sizes))}")
    if not options.json:
        print(this_machine().line())
    for page_bytes in sizes:
        try:
            told = _measure(options.objects, options.bytes // page_bytes, page_bytes, options.rounds)
        except KVStoreError:
            raise
        except OSError as error:
            raise ResourceError(f"{options.objects} can't be measured: {error.strerror or error}") from error
        if options.json:
            print(json.dumps(told), flush=True)
            continue
        print(
            f"{format_size(page_bytes)} pages: written {told['written_gbps']:.2f} GB/s (plain"
            f" {told['plain_written_gbps']:.2f}, {told['written_ratio']:.2f} of it), read {told['read_gbps']:.2f} GB/s"
            f" (plain {told['plain_read_gbps']:.2f}, {told['read_ratio']:.2f} of it), a GB"
            f" {told['write_requests_per_gb']:.0f} requests to write and {told['read_requests_per_gb']:.0f} to read",
            flush=True,
        )
    return 0


def _measure(url: str, pages: int, page_bytes: int, rounds: int) -> dict[str, float]:
    import numpy as np

    from kvstore.tiers.objects.bucket import Bucket

    size = pages * page_bytes
    memory = np.random.default_rng(0).integers(0, 256, size, dtype=np.uint8)
    taken: list[_Round] = []
    for number in range(rounds):
        place = f"{url.rstrip('/')}/bench-{secrets.token_hex(8)}"
        bucket = Bucket(place, _DEADLINE)
        bucket.list("")  # a place that can't be reached is said before anything is written
        try:
            taken.append(_round(place, bucket, memory, page_bytes, plain_first=bool(number % 2)))
        finally:
            bucket.delete([each.path for each in bucket.list("")])
            bucket.close()

    def median(name: str) -> float:
        return float(np.median([getattr(each, name) for each in taken]))

    gigabytes = size / 1e9
    return {
        "page_bytes": page_bytes,
        "pages": pages,
        "rounds": rounds,
        "written": min(each.written for each in taken),
        "found": min(each.found for each in taken),
        "written_gbps": gigabytes / median("write"),
        "read_gbps": gigabytes / median("read"),
        "plain_written_gbps": gigabytes / median("plain_write"),
        "plain_read_gbps": gigabytes / median("plain_read"),
        "written_ratio": median("plain_write") / median("write"),
        "read_ratio": median("plain_read") / median("read"),
        "write_requests_per_gb": median("write_requests") / gigabytes,
        "read_requests_per_gb": median("read_requests") / gigabytes,
    }


@dataclass(slots=True)
class _Round:
    """Seconds, pages and requests of one round."""

    written: int = 0
    found: int = 0
    write: float = 0.0
    read: float = 0.0
    plain_write: float = 0.0
    plain_read: float = 0.0
    write_requests: int = 0
    read_requests: int = 0


def _round(place: str, bucket: Bucket, memory: PageBytes, page_bytes: int, *, plain_first: bool) -> _Round:
    import numpy as np

    taken = _Round()
    into = np.ones(len(memory), np.uint8)  # touched: whoever reads first would pay for its pages, as zeros are none yet

    def plain() -> None:
        taken.plain_write, taken.plain_read = _plain(bucket, memory, into)

    if plain_first:
        plain()
    _pages(place, memory, into, page_bytes, taken)
    if not plain_first:
        plain()
    return taken


def _pages(place: str, memory: PageBytes, into: PageBytes, page_bytes: int, taken: _Round) -> None:
    """Through the tier: written in batches of 32 MiB, as a node does, and read by one call, as plain obstore does."""
    import xxhash

    from kvstore.tiers.objects import ObjectTier
    from kvstore.tiers.tier import PageWrite

    size = len(memory)
    views = [memory[at : at + page_bytes] for at in range(0, size, page_bytes)]
    writes = [
        PageWrite(at.to_bytes(64, "big"), xxhash.xxh3_64_intdigest(view.data), view) for at, view in enumerate(views)
    ]
    keys = [page.key for page in writes]
    arrays = [into[at : at + page_bytes] for at in range(0, size, page_bytes)]
    batch = max(1, _OBJECT_BYTES // page_bytes)
    tier = ObjectTier(place, 4 * size + (64 << 20), deadline=_DEADLINE)
    try:
        before, began = sum(tier.traffic().requests.values()), time.perf_counter()
        taken.written = sum(sum(tier.write(writes[at : at + batch])) for at in range(0, len(keys), batch))
        taken.write = time.perf_counter() - began
        between, began = sum(tier.traffic().requests.values()), time.perf_counter()
        taken.found = sum(answer is not None for answer in tier.read(keys, arrays))
        taken.read = time.perf_counter() - began
        taken.write_requests = between - before
        taken.read_requests = sum(tier.traffic().requests.values()) - between
    finally:
        tier.close()


def _plain(bucket: Bucket, memory: PageBytes, into: PageBytes) -> tuple[float, float]:
    """The same bytes by obstore alone. Returns the seconds of writing and of reading."""
    import numpy as np

    size, body = len(memory), memory.data
    parts = range(0, size, _OBJECT_BYTES)
    began = time.perf_counter()
    for at in parts:
        bucket.put(f"plain/{at:016x}", bytes(body[at : at + _OBJECT_BYTES]))
    wrote = time.perf_counter() - began
    ranges = [
        (at, start, min(_PLAIN_BYTES, min(at + _OBJECT_BYTES, size) - at - start))
        for at in parts
        for start in range(0, min(_OBJECT_BYTES, size - at), _PLAIN_BYTES)
    ]

    def fetch(wanted: tuple[int, int, int]) -> None:
        at, start, length = wanted
        data = bucket.get_range(f"plain/{at:016x}", start, length)
        into[at + start : at + start + length] = np.frombuffer(data, np.uint8)

    began = time.perf_counter()
    with ThreadPoolExecutor(_PARALLEL) as threads:
        list(threads.map(fetch, ranges))
    return wrote, time.perf_counter() - began
