"""Processes in which vLLM is imported already: three quarters of what the start of an engine takes.

The first one starts a process that imports vLLM, once in a run of the tests, and forks what is asked for. It has no
thread by then. It ends with this process; what it has forked does not.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

MOST_BYTES = 1 << 20
"""Of a request: an environment, mostly."""


class ForkedProcess:
    """A process that runs a script, as ``subprocess.Popen`` in a process group of its own would, with pipes to its
    standard input and output. Not in a session of its own: Linux shares processors out among sessions, and beside ranks
    that spin on each of two processors 6.18 has given the others, the node's among them, nothing for a minute.

    Args:
        script: what it runs.
        errors: file descriptor for what it prints to standard error.
        folder: where it runs.
        environment: all of its variables. What vLLM reads when it is imported, and Python when it starts, is as in the
            environment of the first one.

    Raises:
        ChildProcessError: it could not be started.
    """

    def __init__(self, script: Path, errors: int, folder: Path, environment: Mapping[str, str]) -> None:
        self.returncode: int | None = None
        reads, stdin = os.pipe()
        stdout, writes = os.pipe()
        told, tells = os.pipe()
        request = json.dumps({"script": str(script), "folder": str(folder), "environment": dict(environment)}).encode()
        _Parent.ask(request, [reads, writes, errors, tells], environment)
        for each in (reads, writes, tells):
            os.close(each)
        self.stdin = os.fdopen(stdin, "wb")
        self.stdout = os.fdopen(stdout, "rb")
        self._told = os.fdopen(told)
        if not (pid := self._told.readline()):
            raise ChildProcessError("the process that imports vLLM has died")
        self.pid = int(pid)

    def poll(self) -> int | None:
        """Its exit code, as ``subprocess`` has it; None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code, when it has ended.

        Raises:
            subprocess.TimeoutExpired: it has not, within so many seconds.
        """
        if self.returncode is None:
            if not select.select([self._told], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("a forked process", timeout or 0.0)
            self.returncode = int(self._told.readline())
            self._told.close()
        return self.returncode


class _Parent:
    """The process that forks them, which is started by the first one."""

    requests: socket.socket | None = None

    @classmethod
    def ask(cls, message: bytes, descriptors: list[int], environment: Mapping[str, str]) -> None:
        if cls.requests is None:
            cls.requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                subprocess.Popen(
                    [sys.executable, __file__, str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    env=dict(environment),
                    pass_fds=[theirs.fileno()],
                )
        socket.send_fds(cls.requests, [message], descriptors)


def _serve(requests: socket.socket) -> None:
    """Fork what is asked for, until nobody can ask any more."""
    import vllm.v1.engine.llm_engine
    import vllm.v1.worker.cpu_worker  # noqa: F401

    gc.freeze()  # what is there now is shared by all of them
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that wait
    while True:
        message, descriptors, _, _ = socket.recv_fds(requests, MOST_BYTES, 4)
        if not message:
            return
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            requests.close()
            _run(json.loads(message), descriptors)
            return
        for each in descriptors:
            os.close(each)


def _run(request: Mapping[str, object], descriptors: list[int]) -> None:
    """One process runs the script, its parent tells how it ended."""
    *standard, tells = descriptors
    if child := os.fork():
        for each in standard:
            os.close(each)
        _, status = os.waitpid(child, 0)
        with contextlib.suppress(BrokenPipeError):
            os.write(tells, f"{os.waitstatus_to_exitcode(status)}\n".encode())
        os._exit(0)
    os.setpgrp()
    for number, each in enumerate(standard):
        os.dup2(each, number)
        os.close(each)
    os.write(tells, f"{os.getpid()}\n".encode())
    os.close(tells)
    os.chdir(str(request["folder"]))
    os.environ.clear()
    os.environ.update(request["environment"])  # type: ignore[call-overload]
    runpy.run_path(str(request["script"]), run_name="__main__")


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
