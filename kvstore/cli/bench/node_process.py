"""The node of a benchmark, in a process of its own: with an arena and no other tier."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvstore.config.setting import ENVIRONMENT_PREFIX
from kvstore.errors import ResourceError


def without_settings() -> dict[str, str]:
    """This process's environment without the settings in it: what is measured has those that the benchmark gives."""
    return {name: value for name, value in os.environ.items() if not name.startswith(ENVIRONMENT_PREFIX)}


@contextmanager
def serving(arena_bytes: int) -> Iterator[str]:
    """Start a node with an arena of so many bytes; it ends with the context, and its files go.

    Returns:
        Its URL.


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
        with subprocess.Popen(  # noqa: S603 - this interpreter, this package
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=without_settings()
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
