"""A node that is stopped beside a disk that is slow, or stands still: it ends in time, and says what was left."""

from __future__ import annotations

import ctypes
import os
import platform
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from node_process import NodeProcess

import kvstore
from kvstore.config.load import load_config
from kvstore.errors import UnavailableError
from kvstore.node.node import Node

ROOT = Path(__file__).parents[3]
LAYOUT = kvstore.Layout(model="tiny", block_size=16, page_bytes=100_000)
PAGES = 40
HASHES = [bytes([number]) * 32 for number in range(PAGES)]
PATIENCE = 60.0

SERVE_BESIDE_A_DISK_THAT_STANDS_STILL = """\
import os, sys, time
os.pwritev = lambda *given: time.sleep(3600)
from kvstore.cli import main as cli
sys.exit(cli.main(["serve", *sys.argv[1:]]))
"""


def test_a_slow_disk_is_given_the_time_that_there_is(
    start_node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writes go on one by one while the node stops; stores are refused meanwhile; in the end all pages are on disk."""
    write, steps, waiting = os.pwritev, threading.Semaphore(0), threading.Event()

    def slow(*given: object) -> int:
        waiting.set()
        assert steps.acquire(timeout=PATIENCE)
        return write(*given)  # type: ignore[arg-type]

    node = start_node(drain_seconds=PATIENCE, disk_deadline=PATIENCE)
    url = f"unix://{node.config.socket}"
    monkeypatch.setattr(os, "pwritev", slow)
    with kvstore.connect(url, timeout=PATIENCE) as client:
        pages = client.namespace(LAYOUT)
        assert pages.store(HASHES, np.ones((PAGES, 100_000), np.uint8)).stored == PAGES
        assert waiting.wait(PATIENCE)
        stopped: list[bool] = []
        stopping = threading.Thread(target=lambda: stopped.append(node.stop()))
        stopping.start()
        with pytest.raises(UnavailableError):
            while not stopped:  # until it refuses what is new
                client.status()
        assert not stopped, "it waits for the disk"
        steps.release(1000)
        stopping.join(PATIENCE)
    assert stopped == [True]
    assert node.left_pages == 0
    (node.config.arena_directory / "headers").unlink()
    again = start_node()
    with kvstore.connect(f"unix://{again.config.socket}", timeout=PATIENCE) as client:
        assert client.namespace(LAYOUT).lookup(HASHES).tiers == ("disk",) * PAGES


@pytest.mark.skipif(platform.machine() != "x86_64", reason="names the system call by its number on x86-64")
def test_a_signal_that_another_thread_gets_stops_it_as_well(node_process: Callable[..., NodeProcess]) -> None:
    """The system gives a signal to any thread of the process that takes it."""
    node = node_process()
    other = max(int(task.name) for task in Path(f"/proc/{node.pid}/task").iterdir())
    assert other != node.pid
    tgkill = 234
    assert ctypes.CDLL(None).syscall(tgkill, node.pid, other, int(signal.SIGTERM)) == 0
    assert node.wait() == 0


def test_a_disk_that_stands_still_does_not_keep_a_node_and_what_is_left_is_said(
    short_folder: Path, shm_folder: Path
) -> None:
    settings = {"socket": short_folder / "s", "arena": "16MiB", "arena-dir": shm_folder / "arena"}
    settings |= {"disk": short_folder / "disk", "disk-limit": "64MiB"}
    flags = [f"--{name}={value}" for name, value in settings.items()]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KVSTORE_")}
    environment |= {"PYTHONPATH": str(ROOT), "KVSTORE_DRAIN_SECONDS": "1"}
    child = subprocess.Popen(
        [sys.executable, "-c", SERVE_BESIDE_A_DISK_THAT_STANDS_STILL, *flags],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with child:
        try:
            assert child.stdout is not None
            assert select.select([child.stdout], [], [], PATIENCE)[0]
            assert child.stdout.readline().startswith("kvstore: ready")
            with kvstore.connect(f"unix://{short_folder}/s", timeout=PATIENCE) as client:
                stored = client.namespace(LAYOUT).store(HASHES, np.ones((PAGES, 100_000), np.uint8))
                assert stored.stored == PAGES
            child.send_signal(signal.SIGTERM)
            _, said = child.communicate(timeout=PATIENCE)
        finally:
            child.kill()
    assert child.returncode == 3
    assert f"kvstore: {PAGES} pages were not written back to disk within 1 s" in said
    assert "Traceback" not in said
    # The next node has them in the arena, and writes them.
    flags_of_next = {name.replace("-", "_"): value for name, value in settings.items()}
    with_them = Node(load_config(flags=flags_of_next))
    try:
        assert with_them.store.kept_pages == PAGES
        assert with_them.store.flush() + with_them.store.statistics().lower_tiers["disk"].stored >= PAGES
    finally:
        assert with_them.stop()
