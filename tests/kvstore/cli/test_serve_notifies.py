"""``kvstore serve`` under a service manager: it is told when the node serves, reloads and stops, and not before."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from node_process import PATIENCE, NodeProcess

from kvstore.config.node import NodeConfig

UNIT = Path(__file__).parents[3] / "deploy/kvstore.service"


class Manager:
    """What systemd is to a service: a datagram socket."""

    def __init__(self, address: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.settimeout(PATIENCE)
        self._socket.bind(address)

    def told(self) -> dict[str, str]:
        """The next message."""
        lines = self._socket.recv(65536).decode().splitlines()
        return dict(line.split("=", 1) for line in lines)

    def told_until(self, name: str) -> list[dict[str, str]]:
        """All messages up to the first one that says so."""
        messages = [self.told()]
        while name not in messages[-1]:
            messages.append(self.told())
        return messages

    def close(self) -> None:
        self._socket.close()


@pytest.fixture(params=["path", "abstract"])
def manager(request: pytest.FixtureRequest, short_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Manager]:
    path = str(short_folder / "notify")
    manager = Manager(path if request.param == "path" else f"\0{path}")
    monkeypatch.setenv("NOTIFY_SOCKET", path if request.param == "path" else f"@{path}")
    yield manager
    manager.close()


def answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(path)) == 0


def test_it_is_ready_when_its_socket_answers_and_says_when_it_stops(
    manager: Manager, node_process: Callable[..., NodeProcess]
) -> None:
    node = node_process(ready=False)
    node.launch()
    *starting, ready = manager.told_until("READY")
    assert answers(node.socket) and (node.arena_folder / "pages").stat().st_size == 16 << 20
    assert ready["STATUS"].startswith(f"ready on {node.url}")
    assert starting[0]["STATUS"].startswith("populating the arena: ")
    assert starting[-1]["STATUS"] == "opening the disk"
    assert all(int(each["EXTEND_TIMEOUT_USEC"]) >= 90_000_000 for each in starting), "a large arena is waited for"
    assert node.terminate() == 0
    stopping = manager.told_until("STOPPING")[-1]
    assert int(stopping["EXTEND_TIMEOUT_USEC"]) > NodeConfig().drain_seconds * 1_000_000


def test_a_reload_begins_and_ends_and_a_mistake_is_in_the_status(
    manager: Manager, node_process: Callable[..., NodeProcess], tmp_path: Path
) -> None:
    file = tmp_path / "kvstore.toml"
    file.write_text('log_level = "info"\n')
    node = node_process(config=str(file))
    manager.told_until("READY")
    for text, wrong in (("drain = 1\n", "unknown key 'drain'"), ("drain_seconds = 1\n", "")):
        file.write_text(text)
        before = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
        os.kill(node.pid, signal.SIGHUP)
        reloading, ready = manager.told(), manager.told()
        assert reloading["RELOADING"] == "1"
        assert before <= int(reloading["MONOTONIC_USEC"]) <= time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
        assert ready["READY"] == "1"
        assert ("the last reload failed" in ready["STATUS"]) == bool(wrong)
        assert wrong in ready["STATUS"]


def test_a_socket_that_nobody_reads_keeps_no_node_from_serving(
    node_process: Callable[..., NodeProcess], short_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", str(short_folder / "nobody"))
    node = node_process()
    assert answers(node.socket)
    assert node.terminate() == 0
    assert "the service manager can't be told READY: " in node.errors.read_text()


def test_the_unit_waits_for_it() -> None:
    assert "\nType=notify\n" in UNIT.read_text()
