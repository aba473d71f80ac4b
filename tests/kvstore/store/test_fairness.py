"""Engines beside one node, each a process: none can take the arena, or the disk, from the others."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import kvstore
from kvstore.config.rules import NamespaceRule
from kvstore.node.node import Node
from kvstore.segments.blockfile import Patience
from kvstore.store.promotion import MOST_RUNS
from kvstore.tiers.disk import reader as reads_of_disk
from kvstore.tiers.disk.device_trust import READS_AT_ONCE
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

ENGINE = """
import sys
import numpy as np
import kvstore

url, model, size = sys.argv[1], sys.argv[2], int(sys.argv[3])
with kvstore.connect(url, timeout=300) as client:
    pages = client.namespace(kvstore.Layout(model=model, block_size=16, page_bytes=size))
    held = []
    for line in sys.stdin:
        what, *numbers = line.split()
        hashes = [int(number).to_bytes(32, "big") for number in numbers]
        kv = np.zeros((len(hashes), size), np.uint8)
        of = np.array([int(number) % 251 for number in numbers], np.uint8)[:, None]
        if what == "store":
            kv[:] = of
            answer = pages.store(hashes, kv).stored
        elif what == "look_up":
            answer = pages.lookup(hashes).prefix
        elif what == "load":
            answer = pages.load(hashes, kv)
            assert (kv[:answer] == of[:answer]).all(), "wrong bytes"
        elif what == "hold":
            held.append(pages.prepare_load(hashes))
            answer = len(held[-1].pages)
        elif what == "reserve":
            held.append(pages.prepare_store(hashes))
            answer = sum(page is not None for page in held[-1].pages)
        print(answer, flush=True)
"""


class Engine:
    """A client in a process of its own, that does what it is told."""

    def __init__(self, url: str, model: str, page_bytes: int = PAGE) -> None:
        command = [sys.executable, "-c", ENGINE, url, model, str(page_bytes)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._threads = ThreadPoolExecutor(1)

    def begin(self, what: str, numbers: Iterable[int]) -> Future[int]:
        """One thing after the other, whoever waits for it."""
        return self._threads.submit(self._tell, f"{what} {' '.join(map(str, numbers))}\n")

    def do(self, what: str, numbers: Iterable[int]) -> int:
        return self.begin(what, numbers).result(2 * TIMEOUT)

    def _tell(self, line: str) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(line)
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def close(self) -> None:
        self._process.kill()
        self._threads.shutdown()
        self._process.communicate()


@pytest.fixture
def start_engine() -> Iterator[Callable[..., Engine]]:
    engines: list[Engine] = []

    def start(*arguments: Any) -> Engine:
        engines.append(Engine(*arguments))
        return engines[-1]

    yield start
    for engine in engines:
        engine.close()


def test_one_that_holds_reserves_and_stores_all_it_can_takes_nothing_from_another_process(
    start_node: Callable[..., Node], start_engine: Callable[..., Engine]
) -> None:
    rule = NamespaceRule(match="greedy*", arena=32 * PAGE)
    node = start_node(arena=64 * PAGE, disk_limit=0, namespace=(rule,))
    url = f"unix://{node.config.socket}"
    holding, reserving, storing = (start_engine(url, "greedy") for _ in range(3))
    own = start_engine(url, "own")
    assert holding.do("store", range(8)) == 8
    assert holding.do("hold", range(8)) == 8
    assert reserving.do("reserve", range(100, 108)) == 8
    for turn in range(12):
        numbers = range(16 * turn, 16 * turn + 16)
        flooding = [storing.begin("store", range(at, at + 8)) for at in range(1000 + 80 * turn, 1080 + 80 * turn, 8)]
        assert own.do("store", numbers) == 16
        assert own.do("look_up", numbers) == 16
        assert own.do("load", numbers) == 16
        assert sum(each.result(2 * TIMEOUT) for each in flooding) > 0
    with kvstore.connect(url, timeout=TIMEOUT) as client:
        used = {each.name.split()[0]: each.used_bytes["arena"] for each in client.status().namespaces}
    assert used["greedy"] <= 32 * PAGE <= used["own"]


def test_one_that_floods_a_slow_disk_with_stores_keeps_the_pages_of_the_other_waiting_for_a_turn_and_no_longer(
    start_node: Callable[..., Node], start_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each write to the disk waits here until it is let go, and takes an eighth of the arena at most: 32 pages."""
    node = start_node()
    url = f"unix://{node.config.socket}"
    [disk] = node.store.lower_tiers.own
    turns, ended = threading.Semaphore(0), threading.Event()
    writes: list[list[bytes]] = []
    write = disk.write

    def write_slowly(pages: Any) -> Any:
        writes.append([page.key[:32] for page in pages])
        if not ended.is_set():
            turns.acquire()
        return write(pages)

    monkeypatch.setattr(disk, "write", write_slowly)
    try:
        flood, own = start_engine(url, "flood"), start_engine(url, "own")
        assert flood.do("store", range(16)) == 16
        wait_for(lambda: len(writes) == 1)
        for first in range(16, 160, 16):
            assert flood.do("store", range(first, first + 16)) == 16
        assert own.do("store", range(4)) == 4
        turns.release(2)  # that one, and another turn of the flood's
        wait_for(lambda: len(writes) == 3)
        [fingerprint] = {each.fingerprint for each in node.store.namespaces.known() if each.layout.model == "own"}
        assert writes[2][:4] == [fingerprint] * 4
        assert len(writes[2]) == 32, "what is left of its turn is the others'"
        turns.release()
        wait_for(lambda: disk.used_by(fingerprint))
        assert disk.contains([fingerprint + number.to_bytes(32, "big") for number in range(4)]) == [True] * 4
    finally:
        ended.set()
        turns.release()


def test_one_that_floods_a_slow_disk_keeps_the_other_waiting_for_a_turn_and_no_longer(
    start_node: Callable[..., Node], start_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The flood asks for 80 pages, each read of which waits here until it is let go."""
    node = start_node()
    url = f"unix://{node.config.socket}"
    state, [disk] = node.store._state, node.store.lower_tiers.own
    assert isinstance(disk, DiskTier)
    threads = disk._device.reading.patience.threads
    monkeypatch.setattr(disk._reader, "_patience", Patience(threads, 10 * TIMEOUT))
    own = start_engine(url, "own", 4096)
    assert own.do("store", range(4)) == 4
    with kvstore.connect(url, timeout=TIMEOUT) as client:
        flooded = client.namespace(replace(layout("flood"), page_bytes=4096))
        flooded.store(hashes(*range(80)), np.ones((80, 4096), np.uint8))
        client.flush()
    for stamps in state.pages_here():
        with state.lock:
            for slot in state.still_here(stamps):
                state.residency.drop(slot)
    slow = {each.fingerprint for each in node.store.namespaces.known() if each.layout.model == "flood"}
    turns, ended = threading.Semaphore(0), threading.Event()
    reads: list[bytes] = []
    read = reads_of_disk._Run.__call__

    def read_slowly(run: Any) -> Any:
        reads.append(run.pages[0][0][:32])
        if reads[-1] in slow and not ended.is_set():
            turns.acquire()
        return read(run)

    monkeypatch.setattr(reads_of_disk._Run, "__call__", read_slowly)
    command = [sys.executable, "-c", FLOOD, url, "flood", "0", "80", "4096"]
    flood = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert flood.stdout is not None
        assert flood.stdout.readline() == "began\n"
        wait_for(lambda: state.promotions._runs.taken == MOST_RUNS // 2 and len(reads) == READS_AT_ONCE)
        loading = own.begin("load", (0, 1))
        wait_for(lambda: len(threads._turns._waiting) == 2)
        turns.release(2)  # the flood had its turn before, so it may have one more
        assert loading.result(TIMEOUT) == 2
        assert len([each for each in reads if each in slow]) <= READS_AT_ONCE + 2
        for number in range(4, 24):
            assert own.do("store", [number]) == 1
            assert own.do("look_up", range(number + 1)) == number + 1
        assert own.do("load", (0, 1, 20)) == 3
    finally:
        ended.set()
        turns.release(80)
        said, _ = flood.communicate("\n", timeout=10 * TIMEOUT)
    assert 0 < int(said) <= 80
