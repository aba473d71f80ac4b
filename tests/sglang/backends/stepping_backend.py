"""The backend, with a place to kill its node at: each call to the node, and each copy, of each of its methods.

``KVSTORE_TEST_KILL`` names a file. It says ``method step moment process signal``: at that step of the next call of that
method, ``before`` or ``behind`` it, or in the ``middle`` of a copy, the process gets the signal, or the group of
processes where the number is negative. Without a signal it is SIGKILL. Then the file is removed.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvstore.connector.sglang import KVStoreBackend

_call = threading.local()


def _step(moment: str) -> None:
    """The node is killed if this is the moment."""
    path = Path(os.environ["KVSTORE_TEST_KILL"])
    with suppress(OSError):
        method, step, when, process, *number = path.read_text().split()
        if (method, int(step), when) == (getattr(_call, "method", ""), getattr(_call, "step", 0), moment):
            os.kill(int(process), int(*number) or signal.SIGKILL)
            path.unlink()


def _stepping(call: Callable[..., Any]) -> Callable[..., Any]:
    def stepping(*args: Any, **options: Any) -> Any:
        _call.step = getattr(_call, "step", 0) + 1
        _step("before")
        answer = call(*args, **options)
        _step("behind")
        if hasattr(answer, "complete"):
            answer.complete = _stepping(answer.complete)
        return answer

    return stepping


class _Stepping:
    """A namespace whose calls are steps."""

    def __init__(self, namespace: Any) -> None:
        self._namespace = namespace

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._namespace, name)
        return _stepping(value) if name in ("lookup", "prepare_load", "prepare_store", "borrow") else value


class SteppingBackend(KVStoreBackend):
    """See :mod:`stepping_backend`."""

    def __init__(self, storage_config: Any, kwargs: Any = None) -> None:
        super().__init__(storage_config, kwargs)
        whole = self._copy_runs
        opens = self._pages.open

        def copy(targets: Any, sources: Any, run_bytes: int) -> None:
            half = len(targets) // 2
            whole(targets[:half], sources[:half], run_bytes)
            _step("middle")
            whole(targets[half:], sources[half:], run_bytes)

        self._copy_runs = _stepping(copy)
        self._pages.open = lambda namespace: opens(_Stepping(namespace))

    def batch_exists(self, *args: Any) -> Any:
        _call.method, _call.step = "exists", 0
        return super().batch_exists(*args)

    def batch_get_v1(self, *args: Any) -> Any:
        _call.method, _call.step = "get", 0
        return super().batch_get_v1(*args)

    def batch_set_v1(self, *args: Any) -> Any:
        _call.method, _call.step = "set", 0
        return super().batch_set_v1(*args)
