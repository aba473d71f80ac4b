"""Two engines beside one node: neither can take the arena, or the disk, from the other."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import kvstore
from kvstore.bringup import MOST_RUNS
from kvstore.node import Node
from kvstore.rules import NamespaceRule
from kvstore.segments.blockfile import Patience
from kvstore.tiers.disk import reads as reads_of_disk
from kvstore.tiers.disk.device import READS_AT_ONCE
from kvstore.tiers.disk.tier import DiskTier

PAGE = 64 << 10
TIMEOUT = 30.0


def layout(model: str) -> kvstore.Layout:
    return kvstore.Layout(model=model, block_size=16, page_bytes=PAGE)


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 2 * TIMEOUT
    while not condition():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.005)


def hashes(*numbers: int) -> list[bytes]:
    return [number.to_bytes(32, "big") for number in numbers]


def test_one_that_reserves_and_never_writes_leaves_half_of_the_arena(start_node: Callable[..., Node]) -> None:
    node = start_node(arena=64 * PAGE, disk_limit=0)
    url = f"unix://{node.config.socket}"
    with kvstore.connect(url, timeout=TIMEOUT) as greedy, kvstore.connect(url, timeout=TIMEOUT) as other:
        mine = greedy.namespace(layout("greedy"))
        pending = [mine.prepare_store(hashes(*range(at, at + 8))) for at in range(0, 64, 8)]
        assert sum(page is not None for each in pending for page in each.pages) <= 32
        pages = other.namespace(layout("other"))
        assert pages.store(hashes(*range(16)), np.full((16, PAGE), 7, np.uint8)).stored == 16
        into = np.zeros((16, PAGE), np.uint8)
        assert pages.load(hashes(*range(16)), into) == 16
        assert (into == 7).all()
        for each in pending:
            each.abort()


def test_one_that_holds_pages_for_ever_leaves_half_of_the_arena(start_node: Callable[..., Node]) -> None:
    node = start_node(arena=64 * PAGE, disk_limit=0)
    url = f"unix://{node.config.socket}"
    with kvstore.connect(url, timeout=TIMEOUT) as greedy, kvstore.connect(url, timeout=TIMEOUT) as other:
        mine = greedy.namespace(layout("greedy"))
        for at in range(0, 60, 4):
            mine.store(hashes(*range(at, at + 4)), np.ones((4, PAGE), np.uint8))
        held = [mine.prepare_load(hashes(*range(at, at + 4))) for at in range(0, 60, 4)]
        assert sum(len(each.pages) for each in held) <= 32
        pages = other.namespace(layout("other"))
        assert pages.store(hashes(*range(16)), np.full((16, PAGE), 7, np.uint8)).stored == 16
        assert pages.lookup(hashes(*range(16))).prefix == 16
        for load in held:
            load.complete()


def test_a_flood_takes_its_quota_and_no_more(start_node: Callable[..., Node]) -> None:
    node = start_node(arena=64 * PAGE, disk_limit=0, namespace=(NamespaceRule(match="greedy*", arena=32 * PAGE),))
    url = f"unix://{node.config.socket}"
    with kvstore.connect(url, timeout=TIMEOUT) as greedy, kvstore.connect(url, timeout=TIMEOUT) as other:
        pages = other.namespace(layout("other"))
        assert pages.store(hashes(*range(16)), np.full((16, PAGE), 7, np.uint8)).stored == 16
        mine = greedy.namespace(layout("greedy"))
        for at in range(0, 400, 8):  # six times the arena, and nobody reads the others' pages meanwhile
            mine.store(hashes(*range(at, at + 8)), np.ones((8, PAGE), np.uint8))
        assert pages.lookup(hashes(*range(16))).prefix == 16
        used = {each.name.split()[0]: each.used_bytes["arena"] for each in other.status().namespaces}
        assert used["greedy"] <= 32 * PAGE


FLOOD = """
import sys, threading
import numpy as np
import kvstore

url, model, first, loads, size = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])
hashes = [number.to_bytes(32, "big") for number in range(1000)]
with kvstore.connect(url, timeout=300) as client:
    pages = client.namespace(kvstore.Layout(model=model, block_size=16, page_bytes=size))
    told, ended = [], threading.Event()

    def load(number):
        told.append(pages.load(hashes[number : number + 1], np.zeros((1, size), np.uint8)))

    def store_and_look_up(number):
        while not ended.is_set():
            pages.store(hashes[900 + number : 901 + number], np.zeros((1, size), np.uint8))
            pages.lookup(hashes[800:900])

    threads = [threading.Thread(target=load, args=(number,)) for number in range(first, first + loads)]
    threads += [threading.Thread(target=store_and_look_up, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    print("began", flush=True)
    sys.stdin.readline()
    ended.set()
    for thread in threads:
        thread.join()
    print(sum(told), flush=True)
"""


def test_one_that_floods_a_slow_disk_keeps_the_other_waiting_for_a_turn_and_no_longer(
    start_node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The flood asks for 80 pages, each read of which waits here until it is let go."""
    node = start_node()
    url = f"unix://{node.config.socket}"
    books, [disk] = node.store._books, node.store.below.own
    assert isinstance(disk, DiskTier)
    threads = disk._device.reading.patience.threads
    monkeypatch.setattr(disk._reads, "_patience", Patience(threads, 10 * TIMEOUT))
    with kvstore.connect(url, timeout=TIMEOUT) as client:
        flooded, own = (client.namespace(replace(layout(name), page_bytes=4096)) for name in ("flood", "own"))
        flooded.store(hashes(*range(80)), np.ones((80, 4096), np.uint8))
        own.store(hashes(*range(4)), np.full((4, 4096), 7, np.uint8))
        client.flush()
        for stamps in books.pages_here():
            with books.lock:
                for slot in books.still_here(stamps):
                    books.residency.drop(slot)
        slow = {each.fingerprint for each in node.store.namespaces.known() if each.layout.model == "flood"}
        turns, ended = threading.Semaphore(0), threading.Event()
        reads: list[bytes] = []
        read = reads_of_disk._Run.__call__

        def read_slowly(run: Any) -> Any:
            reads.append(run._pages[0][0][:32])
            if reads[-1] in slow and not ended.is_set():
                turns.acquire()
            return read(run)

        monkeypatch.setattr(reads_of_disk._Run, "__call__", read_slowly)
        command = [sys.executable, "-c", FLOOD, url, "flood", "0", "80", "4096"]
        flood = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            assert flood.stdin is not None
            assert flood.stdout is not None
            assert flood.stdout.readline() == "began\n"
            wait_for(lambda: books.bringups._runs.taken == MOST_RUNS // 2 and len(reads) == READS_AT_ONCE)
            with ThreadPoolExecutor(1) as mine:
                into = np.zeros((2, 4096), np.uint8)
                loading = mine.submit(own.load, hashes(0, 1), into)
                wait_for(lambda: len(threads._turns._waiting) == 2)
                turns.release(2)  # the flood had its turn before, so it may have one more
                assert loading.result(TIMEOUT) == 2
            assert (into == 7).all()
            assert len([each for each in reads if each in slow]) <= READS_AT_ONCE + 2
            for number in range(4, 24):
                assert own.store(hashes(number), np.full((1, 4096), 7, np.uint8)).stored == 1
                assert own.lookup(hashes(*range(number + 1))).prefix == number + 1
            assert own.load(hashes(0, 1, 20), np.zeros((3, 4096), np.uint8)) == 3
        finally:
            ended.set()
            turns.release(80)
            said, _ = flood.communicate("\n", timeout=10 * TIMEOUT)
        assert 0 < int(said) <= 80
