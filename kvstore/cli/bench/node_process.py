"""A node of a benchmark's own, in a process of its own, and time as a benchmark takes it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from kvstore.errors import ResourceError

SWEPT_BYTES = 128 << 20


@contextmanager
def serving(arena_bytes: int) -> Iterator[str]:
    """The URL of a node with an arena of this size and nothing below; gone in the end, with all its files.

    Raises:
        ResourceError: it does not start; the message is the node's.
    """
    with (
        tempfile.TemporaryDirectory(prefix="kvstore-bench-") as folder,
        tempfile.TemporaryDirectory(prefix="kvstore-bench-", dir="/dev/shm") as shm,
    ):
        socket = Path(folder) / "s"
        command = [sys.executable, "-m", "kvstore.cli", "serve", "--socket", str(socket), "--arena", str(arena_bytes)]
        command += ["--arena-dir", f"{shm}/arena", "--disk-limit", "0", "--listen", ""]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("KVSTORE_")}
        with subprocess.Popen(  # noqa: S603 - this interpreter, this package
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        ) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            try:
                if not process.stdout.readline().startswith("kvstore: ready"):
                    raise ResourceError(f"the node does not start: {process.stderr.read().strip()}")
                yield f"unix://{socket}"
            finally:
                process.send_signal(signal.SIGTERM)
                process.stdout.read()


class Clock:
    """Takes the time of calls, and sweeps the processor's caches between them."""

    def __init__(self) -> None:
        self._swept = np.zeros(SWEPT_BYTES, np.uint8)

    def sweep(self) -> None:
        """Nothing that was moved before lies in the processor's caches any more."""
        self._swept += 1

    def time(self, call: Callable[[], object]) -> float:
        """Seconds that a call takes."""
        start = time.perf_counter()
        call()
        return time.perf_counter() - start


def percentile(values: list[float], percent: float) -> float:
    """The value that this percentage of ``values`` is at most."""
    return float(np.percentile(values, percent))
