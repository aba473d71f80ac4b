"""The node of ``kvstore bench lookup`` with pages on disk, a process of its own.

Its disk tier's catalog has as many pages as are asked for, made up: each has its row, its place in a segment and its
tag in the summary, and no bytes. Nothing is read of them; to write 64 GiB first would measure nothing else.
"""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from pathlib import Path

import numpy as np

from kvstore.cli.bench.prompts import PAGE_BYTES, PROMPT_PAGES, prompt_hashes, prompt_layout
from kvstore.config.node import NodeConfig
from kvstore.node.node import Node
from kvstore.segments import record
from kvstore.segments.segment import Segment
from kvstore.tiers.disk import DiskTier

DISK_BYTES_A_PAGE = 64 << 10
"""Of the disk's limit, for each page that is said to be there."""


def main() -> int:
    """Serve until SIGTERM. Prints ``ready`` when it does, and every page is in the summary."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--arena-dir", type=Path, required=True)
    parser.add_argument("--arena", type=int, required=True)
    parser.add_argument("--pages", type=int, required=True, help="on disk")
    parser.add_argument("--first", type=int, required=True, help="prompt of these pages")
    parser.add_argument("--redis", default="")
    options = parser.parse_args()
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda number, frame: stop.set())
    settings = {"redis": options.redis} if options.redis else {}
    node = Node(
        NodeConfig(
            socket=options.folder / "s",
            listen="",
            arena=options.arena,
            arena_dir=options.arena_dir,
            disk=options.folder / "disk",
            disk_limit=(options.pages + options.arena // PAGE_BYTES) * DISK_BYTES_A_PAGE,
            **settings,
        )
    )
    [tier] = node.store.lower_tiers.own
    assert isinstance(tier, DiskTier)
    _make_up(tier, options.pages // PROMPT_PAGES, options.first)
    while not options.redis and not node.store.summary.is_complete and not stop.is_set():
        stop.wait(0.01)
    print("ready", flush=True)
    stop.wait()
    node.stop()
    return 0


def _make_up(tier: DiskTier, prompts: int, first: int) -> None:
    fingerprint = prompt_layout().fingerprint
    for number in range(prompts):
        records = np.zeros(PROMPT_PAGES, record.RECORDS)
        keys = b"".join(fingerprint + each for each in prompt_hashes(first + number))
        records["key"] = np.frombuffer(keys, records.dtype["key"])
        records["offset"] = (1 + np.arange(PROMPT_PAGES)) * record.BLOCK
        records["length"] = PAGE_BYTES
        records["checksum"] = 1
        segment = Segment(Path("none"), (1 << 40) + number, None, record.BLOCK, direct=False, patience=None)
        tier._catalog.replay(0, segment, records)  # noqa: SLF001 - rows without their bytes


if __name__ == "__main__":
    sys.exit(main())
