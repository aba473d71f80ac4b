"""What vLLM's scheduler calls never waits: not for a node that hangs, with long prompts, and with no block free.

Not by a clock: each call into the interpreter or into C that could wait is written down while the scheduler runs.
"""

from __future__ import annotations

import gc
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import kvstore

pytest.importorskip("vllm", reason="drives vLLM, which is not installed (make test-vllm)")

from tests.vllm.engine import transfer_config
from tests.vllm.loop import Loop, right_answer, run_all, run_until

_WAITING_MODULES = ("fcntl", "select", "_socket", "_ssl", "_queue")
_WAITING_C_CALLS = {("time", "sleep")}
_WAITING_CALLS = {
    ("threading", "wait"),  # of conditions, events and barriers
    ("threading", "join"),
    ("threading", "_wait_for_tstate_lock"),
    ("subprocess", "wait"),
}


def _is_free(lock: Any) -> bool:
    if free := lock.acquire(blocking=False):
        lock.release()
    return bool(free)


def _only_tries(frame: FrameType) -> bool:
    """Conditions ask so whether they are held; and what is logged is written by one thread at a time."""
    return frame.f_code.co_name == "_is_owned" or frame.f_globals.get("__name__") == "logging"


@contextmanager
def waits() -> Iterator[list[str]]:
    """What this thread calls meanwhile that may wait for somebody else."""
    found: list[str] = []

    def note(frame: FrameType, event: str, function: Any) -> None:
        if event == "c_call":
            owner = getattr(function, "__self__", None)
            # Of a method the class that has it: socket.socket's are those of _socket's.
            modules = (
                [function.__module__] if function.__module__ else [kind.__module__ for kind in type(owner).__mro__]
            )
            called = (modules[0], function.__name__)
            waits = called in _WAITING_C_CALLS or not set(modules).isdisjoint(_WAITING_MODULES)
            if called == ("_thread", "acquire"):
                waits = not _is_free(owner) and not _only_tries(frame)
        elif event == "call":
            module = frame.f_globals.get("__name__", "")
            called = (module, frame.f_code.co_name)
            waits = called in _WAITING_CALLS or module.partition(".")[0] == "grpc"
        else:
            return
        if waits:
            caller = frame if event == "c_call" else frame.f_back
            where = f" in {caller.f_code.co_filename}:{caller.f_lineno}" if caller is not None else ""
            found.append(".".join(called) + where)

    gc.disable()  # or it might end here what other tests have left, such as a channel
    sys.setprofile(note)
    try:
        yield found
    finally:
        sys.setprofile(None)
        gc.enable()


def test_what_waits_is_seen(node_process: Callable[..., Any]) -> None:
    with kvstore.connect(node_process().url) as client, waits() as found:
        client.status()
    assert found
    left, right = socket.socketpair()
    with left, right:
        left.sendall(b"x")
        with waits() as found:
            right.recv(1)
        assert [each.partition(" in ")[0] for each in found] == ["socket.recv"]
    lock = threading.Lock()
    with waits() as found:
        lock.acquire()
    assert found == []
    with waits() as found:
        lock.acquire(timeout=0)
    assert [each.partition(" in ")[0] for each in found] == ["_thread.acquire"]


def test_the_scheduler_waits_for_nobody(
    models: Callable[[str], Path],
    node_process: Callable[..., Any],
    prompt: Callable[..., list[int]],
    monkeypatch: pytest.MonkeyPatch,
    runner: str,
) -> None:
    node = node_process()
    extra = {"lookup_budget_ms": 20, "load_deadline_ms": 1000, "store_deadline_ms": 1000}
    loop = Loop(models("llama"), transfer_config(node.url, **extra), num_blocks=29, runner=runner)
    found: list[str] = []

    def watched(half: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            with waits() as each:
                result = half(*arguments)
            found.extend(each)
            return result

        return run

    for half in ("schedule", "update", "abort"):
        monkeypatch.setattr(loop, half, watched(getattr(loop, half)))
    full: list[bool] = []
    is_asked = loop.connector.has_pending_block_frees
    monkeypatch.setattr(loop.connector, "has_pending_block_frees", lambda: full.append(is_asked()) or full[-1])
    try:
        loop.add("before", prompt(440, 1))
        run_all(loop)
        node.pause()
        loop.reset_prefix_cache()
        prompts = {"again": prompt(440, 1)} | {f"new-{seed}": prompt(400, seed) for seed in range(2, 7)}
        for name, tokens in prompts.items():
            loop.add(name, tokens, max_tokens=60)
        loop.add("aborted", prompt(400, 9), max_tokens=50)
        run_until(loop, lambda: loop.status("aborted") == "RUNNING")
        loop.abort("aborted")
        run_all(loop)
        assert {name: loop.tokens[name] for name in prompts} == {
            name: right_answer(tokens, 60) for name, tokens in prompts.items()
        }
        assert full, "there was always a free block"
        assert found == []
    finally:
        node.resume()
        loop.close()
