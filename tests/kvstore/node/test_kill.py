"""SIGKILL at random moments while pages are stored: what was acknowledged is there afterwards, or counted as gone."""

from __future__ import annotations

import os
import random
import threading
import time
from dataclasses import dataclass, field

import numpy as np
import pytest

import kvstore
from kvstore.errors import DeadlineError, UnavailableError

KILLS = int(os.environ.get("KILLS", "5"))
WRITERS = 4
BATCH = 16
BATCHES_A_LIFE = 40
"""Most batches that the writers store, all together, before the node is killed again."""
MOST_CHECKED = 300
"""Batches that are read back after each kill; in the end it is every one."""
PROMPT_PAGES = 32
"""Pages of one prompt: each is stored in two batches, head first."""
SIZES = (1000, 4096, 20_000)
"""Page sizes of the namespaces, in bytes."""


@dataclass(frozen=True)
class Batch:
    """Pages that were stored by one call."""

    space: int
    prompt: int
    first: int


@dataclass
class Storm:
    """Writers, each with a seed of its own, and what the node told them."""

    seed: int
    urls: list[str]
    stop: threading.Event = field(default_factory=threading.Event)
    go: threading.Event = field(default_factory=threading.Event)
    """Cleared while the pages are read back."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    acknowledged: list[Batch] = field(default_factory=list)
    seen: set[Batch] = field(default_factory=set)
    failures: list[BaseException] = field(default_factory=list)

    def layout(self, space: int) -> kvstore.Layout:
        return kvstore.Layout(model=f"storm-{self.seed:x}", group=space, block_size=16, page_bytes=SIZES[space])

    def hashes(self, batch: Batch) -> list[bytes]:
        tokens = np.random.default_rng([self.seed, batch.space, batch.prompt]).integers(0, 50_000, PROMPT_PAGES * 16)
        return kvstore.hash_blocks(tokens, 16)[batch.first : batch.first + BATCH]

    def payload(self, batch: Batch) -> np.ndarray:
        """What nobody else's pages hold: a wrong page, or a torn one, is seen."""
        random_bytes = np.random.default_rng([self.seed, batch.space, batch.prompt, batch.first])
        return random_bytes.integers(0, 256, (BATCH, SIZES[batch.space]), dtype=np.uint8)

    def write(self, number: int) -> None:
        """Store prompts of many sizes until told to stop, and read some of one's own back."""
        choose = random.Random(f"{self.seed}/{number}")
        turn = 0
        try:
            with kvstore.connect(self.urls[number % len(self.urls)]) as client:
                while self.go.wait() and not self.stop.is_set():
                    turn += 1
                    # Two writers share each prompt now and then: both may store it at once.
                    batch = Batch(choose.randrange(len(SIZES)), (number // 2) * 1_000_000 + turn, 0)
                    for first in (0, BATCH):
                        self._write_one(client, Batch(batch.space, batch.prompt, first), choose)
        except BaseException as error:
            self.failures.append(error)
            raise

    def _write_one(self, client: kvstore.Client, batch: Batch, choose: random.Random) -> None:
        try:
            pages = client.namespace(self.layout(batch.space))
            result = pages.store(self.hashes(batch), self.payload(batch))
            assert result.stored + result.present + result.refused == BATCH
            if not result.refused:
                with self.lock:
                    if batch not in self.seen:
                        self.seen.add(batch)
                        self.acknowledged.append(batch)
            if choose.random() < 0.1:
                self.check(client, batch)
        except (UnavailableError, DeadlineError):
            self.stop.wait(0.002)  # the node is away

    def check(self, client: kvstore.Client, batch: Batch) -> int:
        """Load a batch page by page; every one that comes has exactly its bytes. Returns how many are missing."""
        hashes, expected = self.hashes(batch), self.payload(batch)
        into = np.zeros_like(expected)
        pages = client.namespace(self.layout(batch.space))
        here = pages.load(hashes, into)
        assert np.array_equal(into[:here], expected[:here]), f"wrong bytes in {batch}"
        missing = 0
        for page in range(here, BATCH):
            if pages.load(hashes[page : page + 1], into[page]):
                assert np.array_equal(into[page], expected[page]), f"wrong bytes in {batch}, page {page}"
            else:
                missing += 1
        return missing


def gone(client: kvstore.Client) -> int:
    """Pages that the node itself says are gone; the arena's counters outlive the process.

    A page that left the arena when the disk had it is on disk: only without a disk is an evicted page gone.
    """
    status = client.status()
    counters = status.tier("arena").counters
    return counters["overrun"] + (counters["evicted"] if len(status.tiers) == 1 else 0)


def run_storm(node, seed: int) -> tuple[int, int, int]:
    """Kill the node ``KILLS`` times under load.

    Returns:
        Pages acknowledged in all, and of them those missing in the end, and those that the node counts as gone.
    """
    moments = random.Random(seed)
    storm = Storm(seed, [node.url, node.url, node.url, node.kv_url])
    writers = [threading.Thread(target=storm.write, args=(number,)) for number in range(WRITERS)]
    for writer in writers:
        writer.start()
    try:
        for kill in range(KILLS):
            wanted = len(storm.acknowledged) + moments.randint(1, BATCHES_A_LIFE)
            storm.go.set()
            end = time.monotonic() + 60
            while len(storm.acknowledged) < wanted:
                assert not storm.failures, storm.failures
                assert time.monotonic() < end, "stores don't go on after a restart"
                time.sleep(0.0002)
            time.sleep(moments.uniform(0, 0.004))  # any moment of a store is as good as any other
            with storm.lock:
                promised = list(storm.acknowledged)
            storm.go.clear()
            node.kill()
            node.start()
            check_all(node, storm, moments.sample(promised, min(MOST_CHECKED, len(promised))), f"kill {kill + 1}")
    finally:
        storm.stop.set()
        storm.go.set()
        for writer in writers:
            writer.join()
    assert not storm.failures, storm.failures
    node.kill()
    node.start()
    missing, counted = check_all(node, storm, storm.acknowledged, "the end")
    return len(storm.acknowledged) * BATCH, missing, counted


def check_all(node, storm: Storm, batches: list[Batch], when: str) -> tuple[int, int]:
    with kvstore.connect(node.url, timeout=30.0) as client:
        missing = sum(storm.check(client, batch) for batch in batches)
        counted = gone(client)
        assert missing <= counted, f"{when}: {missing} pages are missing, {counted} are counted as gone"
        status = client.status()
        assert all(tier.used_bytes <= tier.limit_bytes for tier in status.tiers)
        assert not any(tier.counters["corrupt"] for tier in status.tiers)
    return missing, counted


@pytest.mark.kill
@pytest.mark.timeout(60 + 10 * KILLS)
def test_with_room_for_everything_nothing_is_missing(node_process, seed):
    """Nothing has to leave: every acknowledged page is in the arena after every kill."""
    node = node_process(arena=f"{8 + 5 * KILLS}MiB", disk_limit="0")
    pages, missing, counted = run_storm(node, seed)
    print(f"{pages} pages, {missing} missing, {counted} counted")
    assert pages >= 100 * KILLS
    assert counted == 0, "the arena was too small for this test"
    assert missing == 0


@pytest.mark.kill
@pytest.mark.timeout(60 + 10 * KILLS)
def test_with_a_small_arena_what_is_missing_is_counted(node_process, seed):
    """The arena overflows all the time, faster than the disk takes it: a page is there, or one that was overrun."""
    node = node_process(arena="512KiB", disk_limit=f"{64 * KILLS}MiB")
    pages, missing, counted = run_storm(node, seed)
    print(f"{pages} pages, {missing} missing, {counted} counted")
    assert pages >= 100 * KILLS
    assert missing <= counted
