"""A server that is killed while it holds pages for a load, or writes some: the node lets go of them at once."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.sglang.server import PAGE_SIZE, ServerError, backend

pytestmark = pytest.mark.timeout(600)

TOKENS = 400
WHOLE = TOKENS - PAGE_SIZE


@pytest.mark.parametrize(
    ("moment", "kind"), [("get 1 before", "loads"), ("set 3 middle", "stores")], ids=["holds", "writes"]
)
def test_what_a_killed_server_had_is_let_go(
    moment: str,
    kind: str,
    start_node: Callable[..., Any],
    start_server: Callable[..., Any],
    prompt: Callable[..., list[int]],
    eventually: Callable[..., None],
    tmp_path: Path,
) -> None:
    node = start_node(arena=64 << 20)
    order = tmp_path / "stop"
    extra = backend(f"unix://{node.config.socket}") | {"module_path": "holding_backend", "class_name": "HoldingBackend"}
    server = start_server(extra, environment={"KVSTORE_TEST_KILL": str(order)})
    stored = prompt(TOKENS)
    expected = server.answer(stored).tokens
    assert server.wait_stored(stored, WHOLE).tokens == expected
    server.flush()

    def leases() -> list[Any]:
        """Of pages that somebody has named: some are reserved ahead of that."""
        known = getattr(node.store._state.leases, kind)
        return [lease for lease in list(known.values()) if not getattr(lease, "ahead", False)]

    assert not leases()
    order.write_text(f"{moment} {-server.pid} {int(signal.SIGSTOP)}")  # all of its processes stand still

    def ask() -> None:
        with contextlib.suppress(OSError, ServerError):
            server.answer(stored if kind == "loads" else prompt(TOKENS, 8))

    asking = threading.Thread(target=ask)
    asking.start()
    eventually(leases)
    eventually(lambda: is_stopped(server.pid), "the server stands still")
    until = min(lease.deadline for lease in leases())
    server.kill()
    asking.join(60.0)
    eventually(lambda: not leases())
    assert time.monotonic() < until, "only its time was over"
    server.start()
    again = server.wait_stored(stored, WHOLE)
    assert again.tokens == expected


def is_stopped(process: int) -> bool:
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "T"
