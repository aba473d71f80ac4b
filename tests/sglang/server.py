"""SGLang's server with HiCache on a CPU, as a process that can be stopped, killed and started again."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ports import free_port

HERE = Path(__file__).parent
PAGE_SIZE = 16
START_SECONDS = 240.0
REQUEST_SECONDS = 120.0


class ServerError(Exception):
    """A server that does not do what it should."""


class Answer(NamedTuple):
    """Of one request."""

    tokens: tuple[int, ...]
    cached: int
    """Tokens of the prompt that were not computed."""
    stored: int
    """Of these, those that came from the storage."""


def backend(url: str, **options: Any) -> dict[str, Any]:
    """``--hicache-storage-backend-extra-config`` for kvstore."""
    return {
        "backend_name": "kvstore",
        "module_path": "kvstore.connector.sglang",
        "class_name": "KVStoreBackend",
        "interface_v1": 1,
        "prefetch_threshold": PAGE_SIZE,
        "url": url,
    } | options


class Starter:
    """The process that servers are forked from (:mod:`started`)."""

    def __init__(self, log: Path) -> None:
        paths = [str(HERE / "shim"), str(HERE / "backends"), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("KVSTORE_")} | {
            "PYTHONPATH": os.pathsep.join(paths),
            "SGLANG_USE_CPU_ENGINE": "1",
            "OMP_NUM_THREADS": "2",
            "HF_HUB_OFFLINE": "1",
        }
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                [sys.executable, str(HERE / "started.py")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=environment,
                cwd=log.parent,
            )
        if self._say("ready") != "ready":
            raise ServerError(f"SGLang can't be imported:\n{log.read_text()[-4000:]}")

    def start(self, flags: Sequence[str], environment: Mapping[str, str], log: Path) -> int:
        """Start a server. Returns its process id."""
        order = {"flags": list(flags), "environment": dict(environment), "log": str(log), "folder": str(log.parent)}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return int(self._say("a process id"))

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _say(self, what: str) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        if not line:
            raise ServerError(f"the process that starts servers ended where it should say {what}")
        return line


class ServerProcess:
    """A server with HiCache.

    Args:
        starter: forks it.
        model: a folder of :mod:`made_models`.
        log: file that takes what the process prints.
        extra: ``--hicache-storage-backend-extra-config``; None is SGLang without a storage backend.
        layout: ``--hicache-mem-layout``.
        storage: ``--hicache-storage-backend``.
        policy: ``--hicache-storage-prefetch-policy``.
        environment: variables that differ.
        flags: others.
        admin_key: what whoever attaches a backend while it runs has to know; empty: nobody can.
    """

    def __init__(
        self,
        starter: Starter,
        model: Path,
        log: Path,
        *,
        extra: Mapping[str, Any] | None,
        layout: str = "page_first_direct",
        storage: str = "dynamic",
        policy: str = "wait_complete",
        dtype: str = "float32",
        environment: Mapping[str, str] | None = None,
        flags: Sequence[str] = (),
        admin_key: str = "",
    ) -> None:
        self.port = free_port()
        self._admin_key = admin_key
        self.log = log
        self._starter = starter
        self._environment = dict(environment or {})
        hicache = ["--hicache-storage-backend", storage, "--hicache-storage-prefetch-policy", policy]
        hicache += ["--hicache-storage-backend-extra-config", json.dumps(extra)]
        self._flags = [
            *("--model-path", str(model), "--served-model-name", "model", "--skip-tokenizer-init"),
            *("--host", "127.0.0.1", "--port", str(self.port)),
            *("--device", "cpu", "--dtype", dtype, "--attention-backend", "torch_native"),
            *("--disable-overlap-schedule", "--mem-fraction-static", "0.6", "--max-total-tokens", "2048"),
            *("--context-length", "1536", "--page-size", str(PAGE_SIZE)),
            *("--enable-hierarchical-cache", "--hicache-ratio", "2", "--hicache-write-policy", "write_through"),
            *("--hicache-mem-layout", layout, "--enable-cache-report"),
            *("--hicache-io-backend", "kernel" if layout == "page_first" else "direct"),
            *(hicache if extra is not None else ()),
            *(("--admin-api-key", admin_key) if admin_key else ()),
            *flags,
        ]
        self.pid = 0

    def launch(self) -> None:
        """Start it, and do not wait."""
        self.pid = self._starter.start(self._flags, self._environment, self.log)

    def start(self) -> None:
        """Start it, and wait until it answers."""
        self.launch()
        self.wait_ready()

    def wait_ready(self) -> None:
        """Wait until it answers.

        Raises:
            ServerError: it died, or does not answer in time.
        """
        end = time.monotonic() + START_SECONDS
        while not self.healthy():
            if not self.alive():
                raise ServerError(f"the server ended:\n{self.tail()}")
            if time.monotonic() > end:
                raise ServerError(f"the server does not answer:\n{self.tail()}")
            time.sleep(0.1)

    def wait_ended(self) -> None:
        """Wait until it has ended by itself.

        Raises:
            ServerError: it goes on.
        """
        end = time.monotonic() + START_SECONDS
        while self.alive():
            if time.monotonic() > end:
                raise ServerError(f"the server goes on:\n{self.tail()}")
            time.sleep(0.1)

    def alive(self) -> bool:
        """Whether the process is there."""
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        return True

    def healthy(self) -> bool:
        """Whether it answers a request of one token."""
        try:
            return self.request("GET", "/health_generate", None, 20.0)[0] == 200
        except OSError:
            return False

    def answer(self, tokens: Sequence[int], *, most: int = 16, **fields: Any) -> Answer:
        """Greedy completion of a prompt of token ids.

        Raises:
            ServerError: any status but 200.
        """
        sampling = {"temperature": 0, "max_new_tokens": most, "ignore_eos": True}
        body = {"input_ids": list(tokens), "sampling_params": sampling, **fields}
        status, text = self.request("POST", "/generate", body, REQUEST_SECONDS)
        if status != 200:
            raise ServerError(f"status {status}: {text}\n{self.tail()}")
        told = json.loads(text)
        details = told["meta_info"].get("cached_tokens_details") or {}
        return Answer(tuple(told["output_ids"]), told["meta_info"]["cached_tokens"], details.get("storage") or 0)

    def flush(self, seconds: float = 60.0) -> float:
        """Drop what device and host have; the storage keeps its pages. It is refused while pages are on their way.

        Returns:
            Seconds that the call took which was not refused.

        Raises:
            ServerError: it is refused for too long, or fails.
        """
        return self.ask_idle("POST", "/flush_cache", {}, seconds)

    def ask_idle(self, method: str, path: str, body: Any, seconds: float = 60.0) -> float:
        """Ask for what a server does that has nothing else to do, until it does.

        Returns:
            Seconds that the call took which was not refused.

        Raises:
            ServerError: it is refused for too long, or fails.
        """
        end = time.monotonic() + seconds
        while True:
            begin = time.monotonic()
            status, text = self.request(method, path, body, REQUEST_SECONDS)
            if status == 200:
                return time.monotonic() - begin
            if status != 400 or time.monotonic() > end:
                raise ServerError(f"{method} {path}: status {status}: {text}\n{self.tail()}")
            time.sleep(0.2)

    def wait_stored(self, tokens: Sequence[int], stored: int, seconds: float = 60.0, **fields: Any) -> Answer:
        """Flush and ask until so many tokens come from the storage: a backend leaves a node alone for a while that was
        gone, and until its weights are read everything is a miss.

        Raises:
            ServerError: others come, for too long.
        """
        end = time.monotonic() + seconds
        while True:
            self.flush()
            answer = self.answer(tokens, **fields)
            if answer.stored == stored:
                return answer
            if time.monotonic() > end:
                raise ServerError(f"{answer.stored} tokens come from the storage, not {stored}:\n{self.tail()}")

    def processor_seconds(self) -> float:
        """Time on processors of all its processes so far."""
        ticks = 0
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                fields = stat.read_text().rpartition(")")[2].split()
                if fields[2] == str(self.pid):
                    ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def metrics(self) -> str:
        """What ``/metrics`` says."""
        return self.request("GET", "/metrics", None, 20.0)[1]

    def stop(self) -> None:
        """SIGTERM, and wait for its end."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGTERM)
        end = time.monotonic() + 60.0
        while self.alive() and time.monotonic() < end:
            time.sleep(0.05)
        self.kill()

    def kill(self) -> None:
        """SIGKILL for it and its processes. Nothing where it does not run."""
        if not self.pid:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        end = time.monotonic() + 60.0
        while _group_lives(self.pid) and time.monotonic() < end:
            time.sleep(0.05)
        self.pid = 0

    def printed(self) -> str:
        """What it has printed so far."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def tail(self) -> str:
        """The end of that."""
        return "\n".join(self.printed().splitlines()[-40:])

    def request(self, method: str, path: str, body: Any, seconds: float) -> tuple[int, str]:
        """Status and text of an answer.

        Raises:
            OSError: there was none.
        """
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=seconds)
        try:
            text = None if body is None else json.dumps(body)
            headers = {"Content-Type": "application/json"}
            if self._admin_key:
                headers["Authorization"] = f"Bearer {self._admin_key}"
            connection.request(method, path, text, headers)
            response = connection.getresponse()
            return response.status, response.read().decode(errors="replace")
        except http.client.HTTPException as error:
            raise ConnectionError(str(error)) from error
        finally:
            connection.close()


def _group_lives(leader: int) -> bool:
    """Whether a process of this group is left that is no zombie."""
    try:
        os.killpg(leader, 0)
    except (ProcessLookupError, PermissionError):
        return False
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, group = stat.read_text().rpartition(")")[2].split()[:3]
            if group == str(leader) and state != "Z":
                return True
    return False
