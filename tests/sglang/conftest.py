"""The real SGLang, on models made on the spot. Skipped where it is not installed."""

from __future__ import annotations

import contextlib
import importlib.util
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from made_models import ModelFolders
from node_process import NodeProcess

HERE = Path(__file__).parent
LEFT = ("sglang_loads_*", "sgl_shm_*", "psm_*")
"""Files that servers leave in shared memory."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if importlib.util.find_spec("sglang") is None:
        skip = pytest.mark.skip(reason="drives SGLang, which is not installed (make test-sglang)")
        for item in items:
            if HERE in item.path.parents:
                item.add_marker(skip)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> ModelFolders:
    """Models by the name and the arguments of their writers."""
    return ModelFolders(tmp_path_factory.mktemp("models"))


@pytest.fixture
def node(node_process: Callable[..., NodeProcess]) -> NodeProcess:
    """A node with room for all that a test stores."""
    return node_process(arena="64MiB")


@pytest.fixture(scope="session")
def starter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """What servers are forked from. What they leave in shared memory is removed at the end."""
    from tests.sglang.server import Starter

    shm = Path("/dev/shm")
    before = {path for pattern in LEFT for path in shm.glob(pattern)}
    starter = Starter(tmp_path_factory.mktemp("starter") / "log")
    yield starter
    starter.close()
    for path in {path for pattern in LEFT for path in shm.glob(pattern)} - before:
        with contextlib.suppress(OSError):
            path.unlink()


@pytest.fixture
def start_server(starter: Any, models: Callable[..., Path], tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Start a :class:`~tests.sglang.server.ServerProcess`, with ``ready=False`` without waiting for it. It is gone when
    the test ends."""
    from tests.sglang.server import ServerProcess

    servers: list[ServerProcess] = []

    def start(extra: Any = None, *, model: Path | None = None, ready: bool = True, **options: Any) -> ServerProcess:
        log = tmp_path / f"server-{len(servers)}.log"
        server = ServerProcess(starter, model or models(), log, extra=extra, **options)
        servers.append(server)
        server.launch()
        if ready:
            server.wait_ready()
        return server

    yield start
    for server in servers:
        server.kill()


@pytest.fixture
def prompt() -> Callable[..., list[int]]:
    """Make a prompt: token ids, so many, the same for the same seed."""

    def make(tokens: int = 800, seed: int = 7) -> list[int]:
        source = random.Random(seed)
        return [source.randrange(3, 1024) for _ in range(tokens)]

    return make
