"""vLLM's OpenAI server as a process that can be stopped, killed and started again on the same port."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.vllm.engine import BLOCK_SIZE, EngineError, vllm_environment

START_SECONDS = 400.0
REQUEST_SECONDS = 120.0


def free_port() -> int:
    """A TCP port on loopback that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class ServerProcess:
    """``python -m vllm.entrypoints.openai.api_server``. Answers carry token ids: the model has no tokenizer.

    Args:
        model: a folder of :mod:`made_models`.
        log: file that takes what the process prints.
        transfer: ``--kv-transfer-config``; None is vLLM without a connector.
        environment: variables that differ.
        flags: other flags, such as ``"--num-gpu-blocks-override=64"``.
        words: whether the model has a tokenizer that requests need.
    """

    def __init__(
        self,
        model: Path,
        log: Path,
        *,
        transfer: Mapping[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
        flags: Sequence[str] = (),
        words: bool = False,
    ) -> None:
        self.port = free_port()
        self.log = log
        self._environment = vllm_environment(**(environment or {}))
        self._command = [
            *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", str(model), "--served-model-name", "model", "--host", "127.0.0.1", "--port", str(self.port)),
            *("--dtype", "float32", "--enforce-eager", "--block-size", str(BLOCK_SIZE)),
            *(() if words else ("--skip-tokenizer-init",)),
            *("--max-model-len", "1024", "--max-num-seqs", "16", "--prefix-caching-hash-algo", "sha256"),
            *(("--kv-transfer-config", json.dumps(transfer)) if transfer is not None else ()),
            *flags,
        ]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def launch(self) -> None:
        """Start it, and do not wait."""
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.log.parent,
                env=self._environment,
                process_group=0,  # engine core and workers die with it in kill()
            )

    def start(self) -> None:
        """Start it, and wait until it answers."""
        self.launch()
        self.wait_ready()

    def wait_ready(self) -> None:
        """Wait until it answers.

        Raises:
            EngineError: it died, or does not answer in time.
        """
        end = time.monotonic() + START_SECONDS
        while not self.healthy():
            assert self._process is not None
            if self._process.poll() is not None:
                raise EngineError(f"the server ended with exit code {self._process.returncode}:\n{self._tail()}")
            if time.monotonic() > end:
                raise EngineError(f"the server does not answer:\n{self._tail()}")
            time.sleep(0.1)

    def healthy(self) -> bool:
        """Whether ``/health`` says so."""
        try:
            return self._request("GET", "/health", None, 5.0)[0] == 200
        except OSError:
            return False

    def complete(
        self, tokens: Sequence[int], *, max_tokens: int = 8, replica: int | None = None, **fields: Any
    ) -> dict[str, Any]:
        """Greedy completion of a prompt of token ids; ``fields`` go into the request, such as ``kv_transfer_params``,
        and ``replica`` says which of a server's data-parallel engines answers.

        Returns:
            The answer's JSON; its token ids are in ``choices[0].token_ids``.

        Raises:
            EngineError: any status but 200.
            OSError: it can't be reached.
        """
        request = {
            "model": "model",
            "prompt": list(tokens),
            "max_tokens": max_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "return_token_ids": True,
            **fields,
        }
        replicas = {} if replica is None else {"X-data-parallel-rank": str(replica)}
        status, body = self._request("POST", "/v1/completions", json.dumps(request), REQUEST_SECONDS, replicas)
        if status != 200:
            raise EngineError(f"status {status}: {body}")
        answer: dict[str, Any] = json.loads(body)
        return answer

    def answer(self, tokens: Sequence[int], *, max_tokens: int = 8, **fields: Any) -> tuple[int, ...]:
        """Token ids of :meth:`complete`."""
        return tuple(self.complete(tokens, max_tokens=max_tokens, **fields)["choices"][0]["token_ids"])

    def reset_prefix_cache(self) -> None:
        """Forget the engines' own cached blocks, when nothing holds any of them. It needs ``VLLM_SERVER_DEV_MODE``."""
        end = time.monotonic() + REQUEST_SECONDS
        while not json.loads(self._request("POST", "/reset_prefix_cache", None, REQUEST_SECONDS)[1])["success"]:
            if time.monotonic() > end:
                raise EngineError(f"blocks are held:\n{self._tail()}")
            time.sleep(0.05)

    def metrics(self) -> str:
        """What ``/metrics`` says."""
        return self._request("GET", "/metrics", None, 10.0)[1]

    def stop(self) -> None:
        """SIGTERM, and wait for its end."""
        assert self._process is not None
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(60.0)
            except subprocess.TimeoutExpired:
                self.kill()
                raise EngineError(f"the server did not stop:\n{self._tail()}") from None
        self.kill()  # what is left of its workers

    def kill(self) -> None:
        """SIGKILL for it and its workers. Nothing where it does not run."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def printed(self) -> str:
        """What it has printed so far."""
        return self.log.read_text(errors="replace")

    def _request(
        self, method: str, path: str, body: str | None, seconds: float, headers: Mapping[str, str] | None = None
    ) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=seconds)
        try:
            connection.request(method, path, body, {"Content-Type": "application/json"} | dict(headers or {}))
            response = connection.getresponse()
            return response.status, response.read().decode(errors="replace")
        except http.client.HTTPException as error:
            raise ConnectionError(str(error)) from error
        finally:
            connection.close()

    def _tail(self) -> str:
        return "\n".join(self.printed().splitlines()[-40:])
