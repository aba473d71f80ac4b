"""Nodes for tests: inside this process, or as real processes that can be stopped, paused and killed."""

from __future__ import annotations

import importlib.util
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from node_process import NodeProcess

import kvstore
import kvstore.client.paths.bulk.pool
from kvstore.config.node import NodeConfig
from kvstore.core import choice
from kvstore.node.node import Node

with suppress(ImportError):  # tests without generated examples run without it
    from hypothesis import HealthCheck, settings

    untimed = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # however busy the machine is
    # A change is right or wrong by what it changes, not by the dice of the day; `make test-random` throws fresh ones.
    settings.register_profile("repeatable", untimed, derandomize=True)
    settings.register_profile("random", untimed, print_blob=True)
    settings.load_profile("repeatable")

PATIENCE = 60.0
"""Seconds after which a test gives up on something that takes milliseconds."""


_SHARED_MEMORY = Path("/dev/shm")
_before = pytest.StashKey[set[Path]]()


def _in_shared_memory() -> set[Path]:
    """Arenas in the default place, where nobody takes them away."""
    return set(_SHARED_MEMORY.glob(f"kvstore-{os.geteuid()}/*"))


def _is_random(config: pytest.Config) -> bool:
    return config.getoption("--hypothesis-profile", None) == "random"


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_before] = _in_shared_memory()
    # Healthy answers take long on a busy machine. Tests of deadlines say their own.
    kvstore.connect.__kwdefaults__["timeout"] = PATIENCE / 2
    kvstore.client.paths.bulk.pool.CONNECT_SECONDS = PATIENCE / 2
    if importlib.util.find_spec("redis") is not None:  # a machine with a device may be without it
        from kvstore.tiers.redis import RedisTier

        RedisTier.__init__.__kwdefaults__.update(timeout=PATIENCE / 2, lookup_timeout=PATIENCE / 2)
    config.addinivalue_line("markers", "dice: throws dice of its own (fixture seed); make test-random runs these, too")
    if not _is_random(config):
        with suppress(ImportError):
            from hypothesis.internal.conjecture import providers

            # Or numbers out of the modules that this process has loaded by now would be among the examples.
            providers._get_local_constants = lambda: providers._local_constants


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        parameters = getattr(getattr(item, "callspec", None), "params", {})
        if "seed" in getattr(item, "fixturenames", ()) and "seed" not in parameters:
            item.add_marker("dice")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Name what is new in shared memory: a test forgot ``shm_folder``, or somebody else works here, too."""
    for folder in sorted(_in_shared_memory() - config.stash[_before]):
        terminalreporter.write_line(f"new in shared memory since the start: {folder}", yellow=True)


@pytest.fixture
def python_core(monkeypatch) -> None:
    """What the native core does is done by Python, where tests can come between its steps."""
    monkeypatch.setattr(choice, "CHOSEN", choice.Choice(None, "a test says so"))


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """For a test's own dice: the same each time, but with ``make test-random``. Shown when a test fails; TEST_SEED
    throws those again."""
    fresh = secrets.randbits(32) if _is_random(request.config) else 0
    chosen = int(os.environ.get("TEST_SEED", fresh))
    print(f"TEST_SEED={chosen}")
    return chosen


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A folder of the test's own with a path short enough for sockets."""
    folder = Path(tempfile.mkdtemp(prefix="kv", dir="/tmp"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def shm_folder() -> Iterator[Path]:
    """A folder of the test's own in shared memory."""
    folder = Path(tempfile.mkdtemp(prefix="kvstore-test-", dir="/dev/shm"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def eventually() -> Callable[[Callable[[], object]], None]:
    """Wait until a condition holds; fail when it does not."""

    def wait(condition: Callable[[], object], what: str = "") -> None:
        end = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < end, f"it did not happen: {what or condition}"
            time.sleep(0.005)

    return wait


@pytest.fixture
def start_node(short_folder: Path, shm_folder: Path) -> Iterator[Callable[..., Node]]:
    """Start a node in this process; settings win over the defaults of a small one on a socket and a port."""
    nodes: list[Node] = []

    def start(**settings: object) -> Node:
        defaults = {
            "socket": short_folder / "s",
            "listen": "127.0.0.1:0",
            "arena": 16 << 20,
            "arena_dir": shm_folder / "arena",
            "disk": short_folder / "disk",
            "disk_limit": 64 << 20,
            "drain_seconds": PATIENCE / 2,
        }
        node = Node(NodeConfig(**(defaults | settings)))
        nodes.append(node)
        return node

    yield start
    for node in nodes:
        node.stop()


@pytest.fixture
def node_process(short_folder: Path, shm_folder: Path) -> Iterator[Callable[..., NodeProcess]]:
    """Start a node as a process, with flags as keywords (``arena="1MiB"``); it is gone when the test ends."""
    processes: list[NodeProcess] = []

    def start(*, ready: bool = True, **options: str) -> NodeProcess:
        process = NodeProcess(
            short_folder, shm_folder, **{name.replace("_", "-"): value for name, value in options.items()}
        )
        processes.append(process)
        if ready:
            process.start()
        return process

    yield start
    for process in processes:
        if process.process is not None:
            process.kill()
