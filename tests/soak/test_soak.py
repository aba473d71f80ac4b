"""Two nodes that share a Redis, and their clients, for as long as ``SOAK_SECONDS`` says, while all of them die.

What must hold all the time: no wrong byte, no limit passed, no answer behind its deadline, no counter that does not add
up, no growth of memory or descriptors; and in the end everything works.
"""

from __future__ import annotations

import json
import os
import random
import secrets
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from resource import RLIM_INFINITY, RLIMIT_FSIZE, prlimit
from typing import Any

import numpy as np
import pytest
from node_process import ROOT, NodeProcess
from redis import RedisError
from redis_servers import RedisServer

import kvstore
from kvstore.errors import DeadlineError, KVStoreError, UnavailableError

SECONDS = float(os.environ.get("SOAK_SECONDS", "15"))
MIB = 1 << 20
ARENA, DISK, REDIS = 32 * MIB, 96 * MIB, 64 * MIB
PATIENCE = 60.0
CLIENTS = ("unix", "unix", "kv")
"""How the clients of each node reach it. The first one is never killed."""
MOST_MORE_FILES = 8
"""Descriptors that a process may have more than after its start: connections come and go."""
MOST_MORE_MEMORY = 48 * MIB
"""By so much may a process's own memory grow behind its warm-up: an allocator keeps what peaks took."""


def files_of(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def memory_of(pid: int) -> int:
    """Bytes of a process's own memory; the arena is not in it."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) * 1024


def bytes_in(folder: Path) -> int:
    size = 0
    for path in folder.iterdir():
        with suppress(FileNotFoundError):
            size += path.stat().st_size
    return size


class Client:
    """A ``soak_client.py``."""

    def __init__(self, url: str, seed: int, errors: Path) -> None:
        self.url = url
        self.errors = errors
        with errors.open("a") as file:
            self.process = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("soak_client.py")), url, str(seed)],
                cwd=ROOT,
                env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
            )

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()

    def check(self) -> None:
        assert self.process.poll() is None, f"a client of {self.url} ended: {self.said()}"

    def end(self) -> dict[str, Any]:
        """Stop it. Returns what it did."""
        self.process.terminate()
        return self.said()

    def said(self) -> dict[str, Any]:
        out, _ = self.process.communicate(timeout=PATIENCE)
        lines = out.splitlines()
        last = json.loads(lines[-1]) if lines and lines[-1].startswith("{") else {"failure": "it printed nothing"}
        assert self.process.returncode == 0 and "failure" not in last, f"{last}\n{self.errors.read_text()[-3000:]}"
        return dict(last)


@dataclass
class Watched:
    """A process that lives as long as the test, and must not grow."""

    pid: int
    files: list[int] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)

    def look(self) -> None:
        self.files.append(files_of(self.pid))
        self.memory.append(memory_of(self.pid))

    def growth(self) -> int:
        """By how much its memory grew, from the middle of its life to the end of it, peaks left out."""
        quarter = max(1, len(self.memory) // 4)
        return int(np.median(self.memory[-quarter:]) - np.median(self.memory[2 * quarter : 3 * quarter] or [0]))


class Soak:
    """The nodes, their clients and Redis, and what was seen of them."""

    def __init__(self, folder: Path, shm: Path, seed: int) -> None:
        self.dice = random.Random(seed)
        self.folder = folder
        self.redis = RedisServer(folder / "redis")
        self.nodes: list[NodeProcess] = []
        self.clients: list[tuple[NodeProcess, str, Client]] = []
        self.events: Counter[str] = Counter()
        self.peaks: Counter[str] = Counter()
        self.failure: BaseException | None = None
        self.over = threading.Event()
        for name in ("steady", "victim"):
            (folder / name).mkdir()
            (shm / name).mkdir()
            options = {"arena": str(ARENA), "disk-limit": str(DISK), "redis": self.redis.url, "redis-limit": str(REDIS)}
            self.nodes.append(NodeProcess(folder / name, shm / name, **options))
            self.nodes[-1].start()
        self.steady, self.victim = self.nodes
        self.files_at_first = files_of(self.steady.pid)
        for node in self.nodes:
            for way in CLIENTS:
                self.add_client(node, way)
        self.watched = {"node": Watched(self.steady.pid), "client": Watched(self.clients[0][2].process.pid)}

    def add_client(self, node: NodeProcess, way: str) -> None:
        url = node.url if way == "unix" else node.kv_url
        self.clients.append((node, way, Client(url, self.dice.getrandbits(32), self.folder / "clients")))

    def close(self) -> None:
        self.over.set()
        for _, _, client in self.clients:
            client.kill()
        for node in self.nodes:
            if node.process is not None:
                node.resume() if node.process.poll() is None else None
                node.kill()
        self.redis.resume()
        self.redis.close()

    # -- what happens ----------------------------------------------------------------------------------------------

    def run(self, seconds: float) -> None:
        watch = threading.Thread(target=self.watch)
        watch.start()
        end = time.monotonic() + seconds
        deck: list[Callable[[], None]] = []
        told = time.monotonic()
        try:
            while time.monotonic() < end:
                if not deck:
                    deck = [
                        *[self.kill_a_client, self.kill_the_victim] * 2,
                        *[self.pause_a_node, self.disk_refuses, self.redis_dies, self.redis_is_emptied],
                        *[self.redis_hangs, self.redis_is_full],
                    ]
                    self.dice.shuffle(deck)
                event = deck.pop()
                event()
                self.events[event.__name__] += 1
                for _, _, client in self.clients:
                    client.check()
                assert self.failure is None, self.failure
                if time.monotonic() - told > 60:
                    told = time.monotonic()
                    print(f"{end - told:5.0f} s to go: {self.summary()}", flush=True)
                self.over.wait(self.dice.uniform(0.2, 1.0))
        finally:
            self.over.set()
            watch.join()
        assert self.failure is None, self.failure

    def kill_a_client(self) -> None:
        node, way, client = self.clients.pop(self.dice.randrange(1, len(self.clients)))
        client.kill()
        self.add_client(node, way)

    def kill_the_victim(self) -> None:
        self.victim.kill()
        self.victim.start()

    def pause_a_node(self) -> None:
        node = self.dice.choice(self.nodes)
        node.pause()
        time.sleep(self.dice.choice([0.2, 3.0]))
        node.resume()

    def disk_refuses(self) -> None:
        """Files of the node can't grow: what it would append is refused."""
        pid = self.dice.choice(self.nodes).pid
        prlimit(pid, RLIMIT_FSIZE, (MIB, RLIM_INFINITY))
        time.sleep(self.dice.uniform(0.2, 1.5))
        prlimit(pid, RLIMIT_FSIZE, (RLIM_INFINITY, RLIM_INFINITY))

    def redis_dies(self) -> None:
        self.redis.kill()
        time.sleep(self.dice.uniform(0, 1))
        self.redis.start()

    def redis_is_emptied(self) -> None:
        self.redis.client.flushall()

    def redis_hangs(self) -> None:
        self.redis.pause()
        time.sleep(self.dice.uniform(0.1, 2.5))
        self.redis.resume()

    def redis_is_full(self) -> None:
        self.redis.client.config_set("maxmemory", MIB)
        time.sleep(self.dice.uniform(0.1, 1))
        self.redis.client.config_set("maxmemory", 0)

    # -- what is looked at -----------------------------------------------------------------------------------------

    def watch(self) -> None:
        """Until the end, limits and sizes again and again."""
        turn = 0
        try:
            while not self.over.wait(0.1):
                for node in self.nodes:
                    self.check_disk(node)
                    if turn % 10 == 0:
                        self.check_status(node)
                if turn % 10 == 5:
                    self.check_redis()
                    for one in self.watched.values():
                        one.look()
                turn += 1
        except BaseException as error:  # noqa: BLE001 - told by the thread that waits
            self.failure = error
            self.over.set()

    def check_disk(self, node: NodeProcess) -> None:
        # Files come and go while they are counted: what is over the limit once may never have been.
        used = min(bytes_in(node.disk) for _ in range(3))
        self.peaks["disk"] = max(self.peaks["disk"], used)
        assert used <= DISK, f"{used} bytes on disk, the limit is {DISK}"

    def check_status(self, node: NodeProcess) -> None:
        with suppress(UnavailableError, DeadlineError), kvstore.connect(node.url, timeout=2.0) as client:
            status = client.status()
            for tier in status.tiers:
                assert tier.used_bytes <= tier.limit_bytes, f"{tier.name}: {tier.used_bytes} of {tier.limit_bytes}"
                assert tier.counters["asked"] == tier.counters["hit"] + tier.counters["missed"], tier
                assert not tier.counters["corrupt"], tier
                self.peaks[tier.name + " used"] = max(self.peaks[tier.name + " used"], tier.used_bytes)
            assert (node.arena_folder / "pages").stat().st_size <= ARENA

    def check_redis(self) -> None:
        """Neither the books nor the memory that pages take pass the limit."""
        with suppress(RedisError):
            books = self.redis.client.scan_iter(match="kvstore:{*}:books", count=1000)
            used = sum(int(self.redis.client.hget(name, "bytes") or 0) for name in books)
            assert used <= REDIS, f"{used} bytes in the books of Redis, the limit is {REDIS}"
            memory = self.redis.client.info("memory")
            # Redis' own "used_memory_dataset" is this difference without its sign: below zero, as when it has just
            # been emptied, it says nearly 2^64.
            dataset = memory["used_memory"] - memory["used_memory_overhead"]
            self.peaks["redis memory"] = max(self.peaks["redis memory"], dataset)
            assert dataset <= REDIS * 1.05 + 4 * MIB, f"pages take {dataset} bytes in Redis, the limit is {REDIS}"

    def summary(self) -> str:
        peaks = ", ".join(f"{name} {size / MIB:.0f}" for name, size in sorted(self.peaks.items()))
        events = ", ".join(f"{count} {name}" for name, count in sorted(self.events.items()))
        grown = ", ".join(
            f"{name} {one.memory[-1] / MIB:.0f} MiB ({one.growth() / MIB:+.0f}) {one.files[-1]} files"
            for name, one in self.watched.items()
            if one.memory
        )
        return f"peaks in MiB: {peaks} | {grown} | {events}"

    # -- in the end ------------------------------------------------------------------------------------------------

    def finish(self) -> dict[str, Counter[str]]:
        """Let the clients end. Returns what those of each node did, the killed ones left out."""
        did: dict[str, Counter[str]] = {"steady": Counter(), "victim": Counter()}
        for node, _, client in self.clients:
            said = client.end()
            worst = max(did["steady"]["worst"], said.pop("worst"))
            did["steady" if node is self.steady else "victim"].update(said)
            did["steady"]["worst"] = worst
        self.clients = []
        return did

    def check_end(self, node: NodeProcess, did: Counter[str], eventually: Callable[..., None]) -> None:
        with kvstore.connect(node.url, timeout=PATIENCE) as client:
            pages = client.namespace(kvstore.Layout(model="fresh", block_size=16, page_bytes=50_000))
            hashes = [secrets.token_bytes(32) for _ in range(8)]
            payload = np.random.default_rng(1).integers(0, 256, (8, 50_000), dtype=np.uint8)
            assert pages.store(hashes, payload).stored == 8

            def flushed() -> bool:
                with suppress(KVStoreError):  # the disk may rest for a while
                    client.flush()
                    return client.status().tier("arena").counters["dirty"] == 0
                return False

            eventually(flushed, "everything is on disk")
            eventually(lambda: client.status().clients <= 1, "the dead clients are forgotten")
            counters = client.status().tier("arena").counters
            assert counters["stored"] >= did["stored"], "clients were told of more pages than were stored"
            node.kill()
            node.start()
            into = np.zeros_like(payload)
            assert pages.load(hashes, into) == 8
            assert np.array_equal(into, payload)
        node.terminate()
        checked = subprocess.run(
            [sys.executable, "-m", "kvstore.cli", "check", str(node.disk)], cwd=ROOT, capture_output=True, text=True
        )
        assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.fixture
def soak(short_folder: Path, shm_folder: Path, seed: int) -> Iterator[Soak]:
    print(f"SOAK_SECONDS={SECONDS:.0f}")
    soak = Soak(short_folder, shm_folder, seed)
    yield soak
    soak.close()


@pytest.mark.soak
@pytest.mark.timeout(240 + 2 * SECONDS)
def test_everything_dies_and_nothing_is_wrong(soak: Soak, eventually: Callable[..., None]) -> None:
    soak.run(SECONDS)
    did = soak.finish()
    print(soak.summary())
    for name, counts in did.items():
        print(f"clients of {name} that lived: {dict(counts)}")
    assert all(counts["stored"] and counts["loaded"] for counts in did.values()), "clients did not get to work"
    node = soak.watched["node"]
    eventually(lambda: files_of(node.pid) <= soak.files_at_first + MOST_MORE_FILES, "descriptors are given back")
    for name, one in soak.watched.items():
        assert one.growth() <= MOST_MORE_MEMORY, f"the {name} grew by {one.growth()} bytes: {one.memory}"
        # The least of its last quarter: a server that hangs just then has more connections opened to it.
        last = min(one.files[-max(1, len(one.files) // 4) :])
        assert last <= max(one.files[: len(one.files) // 2]) + MOST_MORE_FILES, f"{name}: {one.files}"
    for process, counts in zip(soak.nodes, did.values(), strict=True):
        soak.check_end(process, counts, eventually)
