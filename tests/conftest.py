"""Nodes for tests: inside this process, or as real processes that can be stopped, paused and killed."""

from __future__ import annotations

import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstore.config import NodeConfig
from kvstore.node import Node

ROOT = Path(__file__).parents[1]
PATIENCE = 30.0
"""Seconds after which a test gives up on something that takes milliseconds."""


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A folder of the test's own with a path short enough for sockets."""
    folder = Path(tempfile.mkdtemp(prefix="kv", dir="/tmp"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def shm_folder() -> Iterator[Path]:
    """A folder of the test's own in shared memory."""
    folder = Path(tempfile.mkdtemp(prefix="kvstore-test-", dir="/dev/shm"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def eventually() -> Callable[[Callable[[], object]], None]:
    """Wait until a condition holds; fail when it does not."""

    def wait(condition: Callable[[], object], what: str = "") -> None:
        end = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < end, f"it did not happen: {what or condition}"
            time.sleep(0.005)

    return wait


@pytest.fixture
def start_node(short_folder: Path, shm_folder: Path) -> Iterator[Callable[..., Node]]:
    """Start a node in this process; settings win over the defaults of a small one on a socket and a port."""
    nodes: list[Node] = []

    def start(**settings: object) -> Node:
        defaults = {
            "socket": short_folder / "s",
            "listen": "127.0.0.1:0",
            "arena": 16 << 20,
            "arena_dir": shm_folder / "arena",
            "disk": short_folder / "disk",
            "disk_limit": 64 << 20,
            "drain_seconds": 5.0,
        }
        node = Node(NodeConfig(**(defaults | settings)))
        nodes.append(node)
        return node

    yield start
    for node in nodes:
        node.stop()


class NodeProcess:
    """``kvstore serve`` as a process of its own, with everything in folders of the test's own."""

    def __init__(self, folder: Path, shm: Path, **options: str) -> None:
        self.socket = folder / "s"
        self.disk = folder / "disk"
        self.arena_folder = shm / "arena"
        self.errors = folder / "stderr"
        self.options = {
            "socket": self.socket,
            "listen": "127.0.0.1:0",
            "arena": "16MiB",
            "arena-dir": self.arena_folder,
            "disk": self.disk,
            "disk-limit": "64MiB",
        } | options
        self.url = f"unix://{self.socket}"
        self.port = 0
        self.process: subprocess.Popen[str] | None = None

    @property
    def kv_url(self) -> str:
        return f"kv://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def launch(self) -> None:
        """Start it, and do not wait."""
        flags = [f"--{name}={value}" for name, value in self.options.items()]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("KVSTORE_")}
        with self.errors.open("a") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "kvstore.cli", "serve", *flags],
                cwd=ROOT,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )

    def start(self) -> None:
        """Start it, and wait until it is ready. It gets the same port each time."""
        self.launch()
        assert self.process is not None
        assert self.process.stdout is not None
        readable, _, _ = select.select([self.process.stdout], [], [], PATIENCE)
        line = self.process.stdout.readline() if readable else ""
        assert line.startswith("kvstore: ready"), f"{line!r}\n{self.errors.read_text()}"
        self.ready_line = line
        if (port := re.search(r" port (\d+)", line)) is not None:
            self.port = int(port[1])
            self.options["listen"] = f"127.0.0.1:{self.port}"

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def pause(self) -> None:
        """Stop it, and wait until none of its threads runs."""
        self.signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOWAIT)

    def resume(self) -> None:
        self.signal(signal.SIGCONT)

    def wait(self) -> int:
        assert self.process is not None
        code = self.process.wait(PATIENCE)
        if self.process.stdout is not None:
            self.process.stdout.close()
        return code

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        assert self.process is not None
        if self.process.poll() is None:
            self.signal(signal.SIGKILL)
        self.wait()

    def terminate(self) -> int:
        """SIGTERM. Returns the exit code."""
        self.signal(signal.SIGTERM)
        return self.wait()


@pytest.fixture
def node_process(short_folder: Path, shm_folder: Path) -> Iterator[Callable[..., NodeProcess]]:
    """Start a node as a process, with flags as keywords (``arena="1MiB"``); it is gone when the test ends."""
    processes: list[NodeProcess] = []

    def start(*, ready: bool = True, **options: str) -> NodeProcess:
        process = NodeProcess(
            short_folder, shm_folder, **{name.replace("_", "-"): value for name, value in options.items()}
        )
        processes.append(process)
        if ready:
            process.start()
        return process

    yield start
    for process in processes:
        if process.process is not None:
            process.kill()
