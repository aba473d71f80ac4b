"""``kvstore bench objects``: pages to object storage and back, beside plain ``obstore`` with the same bytes."""

from __future__ import annotations

import argparse
import json
import secrets
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from kvstore.units import format_size, parse_size

_PARALLEL = 16
_PLAIN_BYTES = 8 << 20
_HELP = """\
Credentials, endpoint and region are the environment's (AWS_…). What is written lies below a prefix of its own, and is
deleted in the end. Plain obstore writes the same bytes as objects of a pack's size, and reads them in ranges of 8 MiB,
16 at once.
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
    bench.add_argument("--json", action="store_true", help="print one JSON object a line")
    bench.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Measure and print."""
    for page_bytes in options.page or [2 << 20, 64 << 10]:
        told = _measure(options.objects, options.bytes // page_bytes, page_bytes)
        if options.json:
            print(json.dumps(told), flush=True)
            continue
        print(
            f"{format_size(page_bytes)} pages: written {told['written_gbps']:.2f} GB/s (plain"
            f" {told['plain_written_gbps']:.2f}, {told['written_ratio']:.2f} of it), read {told['read_gbps']:.2f} GB/s"
            f" (plain {told['plain_read_gbps']:.2f}, {told['read_ratio']:.2f} of it), {told['requests_per_gb']:.0f}"
            " requests a GB",
            flush=True,
        )
    return 0


def _measure(url: str, pages: int, page_bytes: int) -> dict[str, float]:
    import numpy as np
    import xxhash

    from kvstore.tiers.objects import ObjectTier
    from kvstore.tiers.objects.bucket import Bucket
    from kvstore.tiers.tier import PageWrite

    place = f"{url.rstrip('/')}/bench-{secrets.token_hex(8)}"
    size = pages * page_bytes
    memory = np.random.default_rng(0).integers(0, 256, size, dtype=np.uint8)
    views = [memory[at : at + page_bytes] for at in range(0, size, page_bytes)]
    writes = [
        PageWrite(at.to_bytes(64, "big"), xxhash.xxh3_64_intdigest(view.data), view) for at, view in enumerate(views)
    ]
    keys = [page.key for page in writes]
    tier = ObjectTier(place, 4 * size + (64 << 20), deadline=60.0)
    bucket = Bucket(place, 60.0)
    try:
        batch = max(1, (32 << 20) // page_bytes)
        began = time.perf_counter()
        written = sum(sum(tier.write(writes[at : at + batch])) for at in range(0, pages, batch))
        wrote = time.perf_counter() - began
        into = np.zeros(size, np.uint8)
        arrays = [into[at : at + page_bytes] for at in range(0, size, page_bytes)]
        before = sum(tier.traffic().requests.values())
        began = time.perf_counter()
        found = sum(
            answer is not None
            for at in range(0, pages, batch)
            for answer in tier.read(keys[at : at + batch], arrays[at : at + batch])
        )
        read = time.perf_counter() - began
        requests = sum(tier.traffic().requests.values()) - before
        body = memory.data
        parts = range(0, size, 32 << 20)
        began = time.perf_counter()
        for at in parts:
            bucket.put(f"plain/{at:016x}", bytes(body[at : at + (32 << 20)]))
        plain_wrote = time.perf_counter() - began
        ranges = [
            (at, start, min(_PLAIN_BYTES, min(at + (32 << 20), size) - at - start))
            for at in parts
            for start in range(0, min(32 << 20, size - at), _PLAIN_BYTES)
        ]

        def fetch(wanted: tuple[int, int, int]) -> None:
            at, start, length = wanted
            data = bucket.get_range(f"plain/{at:016x}", start, length)
            into[at + start : at + start + length] = np.frombuffer(data, np.uint8)

        began = time.perf_counter()
        with ThreadPoolExecutor(_PARALLEL) as threads:
            list(threads.map(fetch, ranges))
        plain_read = time.perf_counter() - began
    finally:
        tier.remove(keys)
        tier.close()
        bucket.delete([each.path for each in bucket.list("")])
        bucket.close()
    return {
        "page_bytes": page_bytes,
        "pages": pages,
        "written": written,
        "found": found,
        "written_gbps": size / wrote / 1e9,
        "read_gbps": size / read / 1e9,
        "plain_written_gbps": size / plain_wrote / 1e9,
        "plain_read_gbps": size / plain_read / 1e9,
        "written_ratio": plain_wrote / wrote,
        "read_ratio": plain_read / read,
        "requests_per_gb": requests / (size / 1e9),
    }
