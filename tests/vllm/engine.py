"""vLLM's engine as a process of its own, which answers prompts given as token ids."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.vllm.forked_process import ForkedProcess

ROOT = Path(__file__).parents[2]
BLOCK_SIZE = 32
TWO_RANKS: dict[str, Any] = {"tensor_parallel_size": 2, "in_process": False}
"""An engine of two tensor-parallel workers, each a process of its own."""
PATIENT = {"lookup_budget_ms": 60_000, "load_deadline_ms": 60_000, "store_deadline_ms": 60_000}
"""Settings with which every hit is found, and every page loaded and stored, however busy the machine is."""
STORE_SECONDS = 120.0
"""For how long blocks may be held until they are stored, or given up: longer than the most patient setting."""
READ_AT_IMPORT = ("VLLM_", "PYTHON")
"""Beginnings of the names of variables that vLLM, or Python, may read before an engine is made."""
START_SECONDS = 400.0
COMMAND_SECONDS = 300.0
END_SECONDS = 60.0


class EngineError(Exception):
    """The process answered with an error, died, or did not answer in time. The message has its last words."""


@dataclass(frozen=True)
class Prompt:
    """A request.

    ``params`` are its ``kv_transfer_params``, ``lora`` the folder of an adapter, ``salt`` its cache salt, ``picture``
    the number of the picture that stands in it, in place of one token (:data:`made_models.PICTURE`), ``sampling``
    the fields of vLLM's ``SamplingParams`` that differ from those of a greedy answer to the last token.
    """

    tokens: Sequence[int]
    max_tokens: int = 8
    params: Mapping[str, Any] | None = None
    prompt_logprobs: int | None = None
    lora: Path | None = None
    salt: str | None = None
    picture: int | None = None
    sampling: Mapping[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "prompt": list(self.tokens),
            "max_tokens": self.max_tokens,
            "params": self.params,
            "prompt_logprobs": self.prompt_logprobs,
            "lora": str(self.lora) if self.lora else None,
            "salt": self.salt,
            "picture": self.picture,
            "sampling": dict(self.sampling) if self.sampling else None,
        }


@dataclass(frozen=True)
class Answer:
    """What became of a request. ``cached``: prompt tokens that were not computed, here or in kvstore."""

    tokens: tuple[int, ...]
    finish: str
    """``"length"``, ``"stop"``, ``"error"``, or ``"aborted"``."""
    cached: int
    first_token: float | None
    """Seconds from adding the request to its first token."""
    prompt_logprobs: list[list[float]] | None = None
    params: dict[str, Any] | None = None
    choices: tuple[tuple[int, ...], ...] = ()
    """All of a request for several, the first one among them."""


@dataclass(frozen=True)
class Answers:
    """The answers to prompts, in their order, and by how much vLLM's counters grew meanwhile."""

    answers: tuple[Answer, ...]
    counters: dict[str, float] = field(default_factory=dict, repr=False)
    killed: bool = False
    """Whether ``kill_at_load`` has come to it."""

    @property
    def tokens(self) -> list[tuple[int, ...]]:
        return [answer.tokens for answer in self.answers]

    @property
    def external_hits(self) -> int:
        """Tokens that came from kvstore."""
        return int(self.counters.get("vllm:external_prefix_cache_hits", 0))

    @property
    def local_hits(self) -> int:
        """Tokens that the engine had itself."""
        return int(self.counters.get("vllm:prefix_cache_hits", 0))

    @property
    def preemptions(self) -> int:
        return int(self.counters.get("vllm:num_preemptions", 0))


def transfer_config(url: str, **extra: Any) -> dict[str, Any]:
    """``--kv-transfer-config`` for a node."""
    return {
        "kv_connector": "KVStoreConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"url": url, **extra},
    }


def beside(other: dict[str, Any], url: str, first: bool, **extra: Any) -> dict[str, Any]:
    """A ``kv_transfer_config`` with kvstore and another connector, which says nothing of failed loads: as users do."""
    both = [transfer_config(url, **extra), other]
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": both if first else both[::-1]},
    }


def vllm_environment(**variables: str) -> dict[str, str]:
    """Environment for a process that runs vLLM, from this one's."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KVSTORE_")}
    path = [str(ROOT), *filter(None, [environment.get("PYTHONPATH")])]
    return environment | {
        "PYTHONPATH": os.pathsep.join(path),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "OMP_NUM_THREADS": "1",
        # vLLM would bind every engine's worker to the same core: one that starts starves there beside one that spins.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "INFO",
        **variables,
    }


class EngineProcess:
    """vLLM in a process of its own, from construction until :meth:`close`, which lets it shut down in order.

    Args:
        model: a folder of :mod:`made_models`.
        log: file that takes what the process prints.
        transfer: ``kv_transfer_config``; None is vLLM without a connector.
        environment: variables that differ, such as ``PYTHONHASHSEED``.
        python: another one than this, which has vLLM.
        in_process: engine and worker in one process. It starts in a few seconds instead of many, and its
            :meth:`state` can be asked.
        arguments: others of vLLM's ``EngineArgs``, such as ``num_gpu_blocks_override``.

    Raises:
        EngineError: it did not start.
    """

    def __init__(
        self,
        model: Path,
        log: Path,
        *,
        transfer: Mapping[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
        python: str = sys.executable,
        in_process: bool = True,
        **arguments: Any,
    ) -> None:
        self.log = log
        variables = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0" if in_process else "1", **(environment or {})}
        script = Path(__file__).with_name("engine_child.py")
        self._process: ForkedProcess | subprocess.Popen[bytes]
        with log.open("ab") as errors:
            if python != sys.executable or any(name.startswith(READ_AT_IMPORT) for name in environment or ()):
                self._process = subprocess.Popen(
                    [python, str(script)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    cwd=log.parent,
                    env=vllm_environment(**variables),
                    process_group=0,  # its own workers die with it in kill()
                )
            else:
                self._process = ForkedProcess(script, errors.fileno(), log.parent, vllm_environment(**variables))
        defaults = {
            "model": str(model),
            "dtype": "float32",
            "enforce_eager": True,
            "skip_tokenizer_init": True,
            "block_size": BLOCK_SIZE,
            "max_model_len": 1024,
            "max_num_seqs": 16,
            "enable_prefix_caching": True,
            "disable_log_stats": False,
            "prefix_caching_hash_algo": "sha256",
        }
        if transfer is not None:
            defaults["kv_transfer_config"] = dict(transfer)
        try:
            self._ask(defaults | arguments, START_SECONDS)
        except BaseException:
            self.kill()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def run(
        self,
        prompts: Sequence[Prompt | Sequence[int]],
        *,
        max_tokens: int = 8,
        concurrency: int = 16,
        abort_after: int | None = None,
        reset_after: int | None = None,
        kill_at_load: int | None = None,
    ) -> Answers:
        """Answer prompts, so many at a time.

        Args:
            prompts: token ids, or a :class:`Prompt` each.
            max_tokens: for those that are only token ids.
            concurrency: most at once.
            abort_after: abort what is under way after so many steps.
            reset_after: after so many steps reset the prefix cache, of requests that run and of the connector, too.
            kill_at_load: SIGKILL for the process of this number, a node's, when an asynchronous load is planned and its
                worker has not heard of it.
        """
        requests = [p if isinstance(p, Prompt) else Prompt(p, max_tokens) for p in prompts]
        result = self._ask(
            {
                "do": "generate",
                "requests": [request.to_json() for request in requests],
                "concurrency": concurrency,
                "abort_after": abort_after,
                "reset_after": reset_after,
                "kill_at_load": kill_at_load,
            },
            COMMAND_SECONDS,
        )
        answers = tuple(
            Answer(
                tuple(a["tokens"]),
                a["finish"],
                a["cached"],
                a["first_token"],
                a.get("prompt_logprobs"),
                a.get("params"),
                tuple(map(tuple, a.get("choices", ()))),
            )
            for a in result["answers"]
        )
        return Answers(answers, result["counters"], result["killed"])

    def drain(self) -> None:
        """Step on until the blocks of finished requests have been stored and given back."""
        assert self._ask({"do": "drain", "seconds": STORE_SECONDS}, STORE_SECONDS + 60), "blocks are still held"

    def forget(self, *, connector: bool = False) -> None:
        """Drop the engine's own prefix cache: what is found next comes from kvstore."""
        command = {"do": "reset_prefix_cache", "connector": connector, "seconds": STORE_SECONDS}
        assert self._ask(command, STORE_SECONDS + 60), "the prefix cache was not reset"

    def state(self) -> dict[str, Any]:
        """Requests that the scheduler knows, blocks in use, and so on (``engine_child.py``)."""
        state: dict[str, Any] = self._ask({"do": "state"}, 30.0)
        return state

    def counters(self) -> dict[str, float]:
        """vLLM's counters since the start."""
        counters: dict[str, float] = self._ask({"do": "counters"}, 30.0)
        return counters

    def do(self, name: str, **arguments: Any) -> Any:
        """Any other command of ``engine_child.py``."""
        return self._ask({"do": name, **arguments}, COMMAND_SECONDS)

    def printed(self) -> str:
        """What it has printed so far."""
        return self.log.read_text(errors="replace")

    def close(self) -> None:
        """Shut the engine down in order, and wait for its end.

        Raises:
            EngineError: it ended otherwise than with exit code 0, or not in time.
        """
        if self._process.poll() is None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            try:
                self._process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                self._abort()
                raise EngineError(f"vLLM did not end in {END_SECONDS:g} s:\n{self._tail(500)}") from None
        self._close_pipes()
        if self._process.returncode != 0:
            raise EngineError(f"vLLM ended with exit code {self._process.returncode}:\n{self._tail()}")

    def _abort(self) -> None:
        """Have it and its workers print where each of their threads is, and be gone."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGABRT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10.0)
        self.kill()

    def kill(self) -> None:
        """SIGKILL for it and its workers."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._close_pipes()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.kill()

    def _close_pipes(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()

    def _ask(self, command: Mapping[str, Any], seconds: float) -> Any:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(command).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise EngineError(f"vLLM has died:\n{self._tail()}") from None
        answer = json.loads(self._read_line(seconds))
        if "error" in answer:
            raise EngineError(f"{answer['error']}\n{self._tail()}")
        return answer["ok"]

    def _read_line(self, seconds: float) -> bytes:
        assert self._process.stdout is not None
        end = time.monotonic() + seconds
        line = b""
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while not line.endswith(b"\n"):
                if not selector.select(max(0.0, end - time.monotonic())):
                    raise EngineError(f"vLLM did not answer within {seconds:g} s:\n{self._tail()}")
                read = os.read(self._process.stdout.fileno(), 1 << 20)
                if not read:
                    raise EngineError(f"vLLM has died:\n{self._tail()}")
                line += read
        return line

    def _tail(self, lines: int = 40) -> str:
        return "\n".join(self.printed().splitlines()[-lines:])
