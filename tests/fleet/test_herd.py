"""A herd: many clients of several nodes ask for one new prefix at once, and each stores it.

The short form is in the suite; FLEET=1 (``make test-fleet``) has 50 clients on 10 nodes.
"""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
from real_fleet import RealFleet, block_hash, real_fleet, serve_prompt
from redis_recount import Recount
from redis_servers import PATIENCE

import kvstore
from kvstore.tiers.redis.buckets import BUCKET_CHUNKS
from kvstore.tiers.redis.quotas import FULL_CHUNK

WHOLE = bool(os.environ.get("FLEET"))
NODES, CLIENTS = (10, 50) if WHOLE else (3, 9)
PAGES = 512 if WHOLE else 128
ARENA, LIMIT = 32 << 20, 128 << 20


def ask_at_once(fleet: RealFleet, prompt: list[bytes]) -> list[int]:
    """Each client looks the prompt up, loads what is there and stores the rest, all at one moment. Returns how much
    each found; what it loaded was right."""
    gate = threading.Barrier(CLIENTS)

    def serve(client: kvstore.Client) -> int:
        pages = client.namespace(fleet.pages[0].layout)
        gate.wait(60)
        return serve_prompt(pages, prompt)

    with ExitStack() as stack:
        clients = [
            stack.enter_context(kvstore.connect(fleet.nodes[at % NODES].url, timeout=PATIENCE)) for at in range(CLIENTS)
        ]
        with ThreadPoolExecutor(CLIENTS) as threads:
            return list(threads.map(serve, clients))


@pytest.mark.timeout(600)
def test_a_herd_stores_one_new_prefix(short_folder: Path, shm_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is in Redis once, sent once and not by each node, no server is over its limit, and every answer is right."""
    prompt = [block_hash(number) for number in range(PAGES)]
    with real_fleet(short_folder, shm_folder, NODES, 3, ARENA, LIMIT) as fleet:
        found = ask_at_once(fleet, prompt)
        again = ask_at_once(fleet, prompt)
        peaks = [server.client.info("memory")["used_memory_peak"] for server in fleet.servers]
        counts = fleet.counted()
        budget = LIMIT // (LIMIT // (BUCKET_CHUNKS * FULL_CHUNK))
        there = Recount([server.client for server in fleet.servers], budget)  # no bucket is over it
    size = PAGES * fleet.pages[0].layout.page_bytes
    if WHOLE:
        with capsys.disabled():
            print(
                f"\n{CLIENTS} clients of {NODES} nodes, {PAGES} pages: found at once {sorted(found)}; sent to Redis"
                f" {counts.sent_bytes / size:.2f} times, by {counts.commands:,} commands, {counts.scripts:,} scripts;"
                f" {counts.written} entries; {there.used_bytes / size:.2f} times its bytes are charged; memory of the"
                f" servers at most {max(peaks) / 2**20:.1f} MiB each"
            )
    assert again == [PAGES] * CLIENTS
    there.check_entries()
    assert counts.written == len(there.entries) == there.pages == PAGES
    assert there.used_bytes <= counts.sent_bytes
    assert counts.sent_bytes < 3 * size  # all commands included; where each node sent it, that was more than as many
    assert max(peaks) < LIMIT // len(peaks)
