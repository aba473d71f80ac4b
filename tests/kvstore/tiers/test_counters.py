"""What lower tiers count outlives the node that counts, whichever way it ends."""

from __future__ import annotations

import mmap
import os
import signal
import sys
import threading
import urllib.request
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_pages import make_page, read_pages
from node_process import NodeProcess
from ports import free_port

import kvstore
from kvstore.arena import format as fmt
from kvstore.arena.arena import Arena
from kvstore.node.node import Node
from kvstore.tiers.counters import TierCounts
from kvstore.tiers.disk import DiskTier

LAYOUT = kvstore.Layout(model="tiny", block_size=16, page_bytes=5000)
HASHES = [bytes([number]) * 32 for number in range(40)]
MIB = 1 << 20

names = st.sampled_from(fmt.TIER_COUNTERS)


def words(memory: bytearray | mmap.mmap) -> memoryview:
    return memoryview(memory)[: 8 * len(fmt.TIER_COUNTERS)].cast("Q")


@given(
    st.lists(
        st.one_of(
            st.dictionaries(names, st.integers(0, 1 << 40)),
            st.sampled_from(["killed", "closed", "late"]),
        )
    )
)
def test_every_count_is_there_after_every_end(steps: list[dict[str, int] | str]) -> None:
    """Against a model: what was counted, in this life and in those before; after a close, nothing more."""
    memory = bytearray(8 * len(fmt.TIER_COUNTERS))
    counts, model = TierCounts(words(memory)), dict.fromkeys(fmt.TIER_COUNTERS, 0)
    for step in steps:
        if isinstance(step, dict):
            counts.add(**step)
            for name, count in step.items():
                model[name] += count
        elif step == "killed":
            counts = TierCounts(words(memory))
        else:
            counts.detach()
            if step == "late":  # a call that comes back behind the end
                counts.add(hit=1)
                assert counts.all()["hit"] == model["hit"] + 1
            assert counts.all()["stored"] == model["stored"]
            counts = TierCounts(words(memory))
        assert counts.all() == model


def test_a_counter_that_is_full_begins_anew_and_stops_nothing() -> None:
    memory = bytearray(b"\xff" * 8 * len(fmt.TIER_COUNTERS))
    counts = TierCounts(words(memory))
    counts.add(hit=3)
    assert counts.all()["hit"] == 2
    assert counts.all()["missed"] == (1 << 64) - 1


def test_no_count_is_lost_among_threads() -> None:
    counts = TierCounts()
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=lambda: [counts.add(asked=2, hit=1) for _ in range(5000)]) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert (counts.all()["asked"], counts.all()["hit"]) == (40_000, 20_000)


@pytest.mark.parametrize("after", [1, 50, 2000])
def test_a_process_killed_while_it_counts_leaves_what_it_said(after: int) -> None:
    """It counts, then says so; killed at any moment, at most one that it did not come to say is counted more."""
    memory = mmap.mmap(-1, 4096)
    told, say = os.pipe()
    child = os.fork()
    if not child:
        try:
            counts = TierCounts(words(memory))
            while True:
                counts.add(stored=1, written_bytes=(1 << 32) + 1)
                os.write(say, b".")
        finally:
            os._exit(1)  # nobody listens any more
    os.close(say)
    said = 0
    while said < after:
        said += len(os.read(told, after - said))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    while more := os.read(told, 1 << 16):
        said += len(more)
    os.close(told)
    counts = TierCounts(words(memory)).all()
    assert counts["stored"] - said in (0, 1)
    assert counts["written_bytes"] in ((counts["stored"]) * ((1 << 32) + 1), said * ((1 << 32) + 1))


def test_nothing_lies_over_the_tiers_counters(shm: Path) -> None:
    arena = Arena(shm / "arena", MIB)
    arena.count("unverified", 7)
    for tier in fmt.TIER_COUNTERS_OFFSETS:
        for place in range(len(fmt.TIER_COUNTERS)):
            arena.tier_counters(tier)[place] = (1 << 64) - 1
    assert arena.counters() == dict.fromkeys(fmt.COUNTERS, 0) | {"unverified": 7}
    assert arena.found() == ([], [])
    arena.close()
    again = Arena(shm / "arena", MIB)
    assert again.taken_over
    assert {*again.tier_counters("disk"), *again.tier_counters("redis")} == {(1 << 64) - 1}
    again.close()
    other = Arena(shm / "arena", 2 * MIB)
    assert {*other.tier_counters("disk"), *other.tier_counters("redis")} == {0}
    other.close()


def test_what_is_counted_behind_the_end_is_not_the_next_ones(tmp_path: Path) -> None:
    """A read that hangs over the end of its tier is counted in its own process alone."""
    memory = bytearray(8 * len(fmt.TIER_COUNTERS))
    page = make_page(1, 70_000)
    tier = DiskTier(tmp_path, 4 * MIB, counts=TierCounts(words(memory)))
    assert tier.write([page]) == [True]
    tier.close()
    assert read_pages(tier, [page]) == [False]
    assert tier.statistics().missed == 1
    again = DiskTier(tmp_path, 4 * MIB, counts=TierCounts(words(memory)))
    assert read_pages(again, [page]) == [True]
    counts = again.statistics()
    assert (counts.stored, counts.hit, counts.asked, counts.missed) == (1, 1, 1, 0)
    assert (counts.written_bytes, counts.read_bytes) == (70_000, 70_000)
    again.close()
    memory.clear()  # nobody looks at it any more


def counters(node: NodeProcess) -> dict[str, dict[str, int]]:
    with kvstore.connect(node.url, timeout=30.0) as client:
        return {tier.name: dict(tier.counters) for tier in client.status().tiers}


def metric(port: int, tier: str, event: str) -> float:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    [line] = [each for each in lines if each.startswith(f'kvstore_pages_total{{event="{event}",tier="{tier}"}}')]
    return float(line.split()[-1])


def test_the_counters_of_a_node_survive_its_kill(node_process: Callable[..., NodeProcess]) -> None:
    port = free_port()
    node = node_process(arena="1MiB", disk_limit="16MiB", metrics=str(port))
    for life in range(1, 3):
        with kvstore.connect(node.url, timeout=30.0) as client:
            pages = client.namespace(LAYOUT)
            for at in range(0, 40, 8):
                pages.store(HASHES[at : at + 8], np.full((8, 5000), life, np.uint8))
                client.flush()
            pages.evict(HASHES[:4])
            pages.load(HASHES[8:16], np.empty((8, 5000), np.uint8))
        before = counters(node)
        assert before["disk"]["stored"] >= 40
        assert before["disk"]["written_bytes"] >= 40 * 5000
        node.kill()
        node.start()
        after = counters(node)
        assert {name: count for name, count in after["disk"].items() if count < before["disk"][name]} == {}
        assert after["disk"]["stored"] == before["disk"]["stored"]
        assert after["arena"]["stored"] == before["arena"]["stored"]
        assert metric(port, "disk", "stored") == after["disk"]["stored"]
    assert node.terminate() == 0
    before, _ = after, node.start()
    assert counters(node)["disk"]["stored"] == before["disk"]["stored"]


def test_an_arena_that_is_made_anew_begins_anew(start_node: Callable[..., Node]) -> None:
    """All tiers of a node count from the same moment: ratios between them stay right."""

    def told(node: Node) -> list[int]:
        statistics = node.store.statistics()
        return [statistics.counters["stored"], statistics.lower_tiers["disk"].stored]

    node = start_node()
    with kvstore.connect(f"unix://{node.config.socket}", timeout=30.0) as client:
        assert client.namespace(LAYOUT).store(HASHES, np.ones((40, 5000), np.uint8)).stored == 40
        client.flush()
    assert told(node) == [40, 40]
    assert node.stop()
    again = start_node()
    assert told(again) == [40, 40]
    assert again.stop()
    assert told(start_node(arena=8 << 20)) == [0, 0]
