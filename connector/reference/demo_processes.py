"""The demo's other processes: a node, and engines that each do one job and end."""

from __future__ import annotations

import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from kvstore.connector.reference.jobs import Job, JobResult
from kvstore.errors import DeadlineError, UnavailableError

_NODE_START_SECONDS = 60.0
_NODE_STOP_SECONDS = 30.0
_JOB_SECONDS = 600.0


class NodeProcess:
    """A node: ``kvstore serve`` as a process of its own, from construction until it is stopped or killed.

    Args:
        socket: where it serves.
        arena_dir: of its arena, on a tmpfs.
        arena: size of it, as ``"32MiB"``.
        disk: folder of its disk tier.
        disk_limit: size of it.
        verify_checksums: False: damaged pages are served.

    Raises:
        UnavailableError: it ended before it was ready; the message has its last words.
        DeadlineError: it was not ready in time.
    """

    def __init__(
        self, *, socket: Path, arena_dir: Path, arena: str, disk: Path, disk_limit: str, verify_checksums: bool = True
    ) -> None:
        disk.mkdir(parents=True, exist_ok=True)
        config = disk.with_suffix(".toml")
        config.write_text(f"verify_checksums = {str(verify_checksums).lower()}\n")
        self.url = f"unix://{socket}"
        self._log = disk.with_suffix(".log")
        command = [sys.executable, "-m", "kvstore.cli", "serve", "--socket", str(socket), "--config", str(config)]
        command += ["--arena", arena, "--arena-dir", str(arena_dir), "--disk", str(disk), "--disk-limit", disk_limit]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log)  # noqa: S603
        try:
            self._wait_ready()
        except BaseException:
            self.kill()
            raise

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def kill(self) -> None:
        """SIGKILL: nothing is written back, nothing is said goodbye to."""
        self._process.kill()
        self._process.wait()
        self._close()

    def stop(self) -> None:
        """SIGTERM, and wait for its end.

        Raises:
            UnavailableError: it did not end with exit code 0.
        """
        self._process.send_signal(signal.SIGTERM)
        try:
            code = self._process.wait(_NODE_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
            raise UnavailableError(f"the node did not stop within {_NODE_STOP_SECONDS:g} s") from None
        self._close()
        if code != 0:
            raise UnavailableError(f"the node ended with exit code {code}:\n{_tail(self._log)}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.kill()

    def _close(self) -> None:
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _wait_ready(self) -> None:
        assert self._process.stdout is not None
        deadline = time.monotonic() + _NODE_START_SECONDS
        line = b""
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while not line.endswith(b"\n"):
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise DeadlineError(f"the node was not ready within {_NODE_START_SECONDS:g} s")
                read = self._process.stdout.read1()  # type: ignore[attr-defined]
                if not read:
                    raise UnavailableError(f"the node did not start:\n{_tail(self._log)}")
                line += read


def run_job(job: Job, log: Path, on_line: Callable[[str], None]) -> JobResult:
    """Have an engine process do a job, and wait for its end.

    Args:
        job: what to do.
        log: file that takes what the process writes to standard error.
        on_line: told each line that the process says on its way (see
            :mod:`kvstore.connector.reference.engine_process`).

    Raises:
        UnavailableError: it ended with an error, or did not end in time; the message has its last words.
    """
    command = [sys.executable, "-m", "kvstore.connector.reference.engine_process"]
    with (
        log.open("ab") as errors,
        subprocess.Popen(  # noqa: S603
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
        ) as process,
    ):
        late = threading.Event()

        def end() -> None:
            late.set()
            process.kill()

        limit = threading.Timer(_JOB_SECONDS, end)
        limit.daemon = True
        limit.start()
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            last = ""
            try:
                process.stdin.write(job.to_json() + "\n")
                process.stdin.close()
            except BrokenPipeError:
                pass  # it died at once: its exit code and its last words say more
            for line in process.stdout:
                last = line.strip()
                on_line(last)
            code = process.wait()
        except BaseException:
            process.kill()
            raise
        finally:
            limit.cancel()
    if late.is_set():
        raise UnavailableError(f"an engine process did not end within {_JOB_SECONDS:g} s: is the machine busy?")
    if code < 0:
        raise UnavailableError(f"an engine process was killed by {signal.Signals(-code).name}\n{_tail(log)}".strip())
    if code != 0:
        raise UnavailableError(f"an engine process ended with exit code {code}:\n{_tail(log)}")
    return JobResult.from_json(last)


def _tail(log: Path) -> str:
    """The last lines that a process wrote to standard error."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-12:])
