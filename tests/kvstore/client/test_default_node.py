"""Where a node is looked for that nobody named: each finding is said in words, and nobody's trap is walked into."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from forked import in_child

from kvstore.client import default_node as module
from kvstore.client.default_node import DefaultNode, choose, default_node
from kvstore.config.node import NodeConfig, default_socket
from kvstore.errors import ConfigError


@pytest.fixture
def listen() -> Iterator[Callable[[Path], Path]]:
    """Listen on a socket."""
    with ExitStack() as open_sockets:

        def on(path: Path) -> Path:
            path.parent.mkdir(exist_ok=True)
            listener = open_sockets.enter_context(socket.socket(socket.AF_UNIX))
            listener.bind(str(path))
            listener.listen(8)
            return path

        yield on


@pytest.fixture(autouse=True)
def outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in a container, as far as the module sees."""
    monkeypatch.setattr(module, "_CONTAINER_MARKS", ())


def test_the_environment_comes_first(short_folder: Path, listen: Callable[[Path], Path]) -> None:
    named = short_folder / "named"
    assert default_node({"KVSTORE_SOCKET": str(named)}) == DefaultNode(named)


def test_what_serve_would_take_is_what_is_looked_for_first(monkeypatch: pytest.MonkeyPatch, short_folder: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short_folder))
    monkeypatch.setattr(module, "user_sockets", lambda: (short_folder / "other" / "kvstore.sock",))
    monkeypatch.setattr(module, "SYSTEM_SOCKETS", ())
    assert default_node({}).socket == NodeConfig().socket == default_socket() == short_folder / "kvstore.sock"


def test_the_first_one_that_listens_is_taken(short_folder: Path, listen: Callable[[Path], Path]) -> None:
    own, machines = short_folder / "a" / "s", short_folder / "b" / "s"
    listen(machines)
    assert choose([own], [machines]) == DefaultNode(machines, f"no node serves on {own}, one does on {machines}")
    listen(own)
    assert choose([own], [machines]) == DefaultNode(own)


def test_nobody_listens(short_folder: Path, listen: Callable[[Path], Path]) -> None:
    own, machines = short_folder / "a" / "s", short_folder / "b" / "s"
    with socket.socket(socket.AF_UNIX) as dead:
        machines.parent.mkdir()
        dead.bind(str(machines))  # and does not listen: as what a killed node leaves
    found = choose([own], [machines])
    assert (found.socket, found.listens) == (own, False)
    assert found.url == f"unix://{own}"
    assert f"no node serves on {own}, {machines}; nobody listens on {machines} any more; start one" in found.note
    assert "KVSTORE_SOCKET" in found.note


def test_what_another_user_has_put_there_is_left_alone(
    short_folder: Path, listen: Callable[[Path], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    own, machines = listen(short_folder / "a" / "s"), listen(short_folder / "b" / "s")
    if os.geteuid() == 0:
        os.chown(own.parent, 4711, 4711)
        stranger = 4711
    else:
        stranger = os.geteuid()
        monkeypatch.setattr("os.geteuid", lambda: stranger + 1)
    found = choose([own], [machines])
    assert found.socket == machines
    assert f"{own} is left alone: user {stranger} has put it there" in found.note
    with pytest.raises(ConfigError, match=f"is user {stranger}'s: no socket there is used; name another one's"):
        choose([own], [])


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a link away, which only root can")
def test_another_users_link_is_left_alone(short_folder: Path, listen: Callable[[Path], Path]) -> None:
    machines = listen(short_folder / "b" / "s")
    own = short_folder / "a" / "s"
    own.parent.mkdir()
    own.symlink_to(machines)
    assert choose([own], [machines]).socket == own
    os.chown(own, 4711, 4711, follow_symlinks=False)
    found = choose([own], [machines])
    assert found.socket == machines
    assert f"{own} is left alone: user 4711 has put it there" in found.note


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user, which only root can")
def test_another_users_node_is_said(short_folder: Path, listen: Callable[[Path], Path]) -> None:
    machines = listen(short_folder / "b" / "s")
    short_folder.chmod(0o755)
    machines.chmod(0o600)

    def look() -> str:
        os.seteuid(65534)
        return choose([short_folder / "a" / "s"], [machines]).note

    assert f"{machines} is another user's, this is user 65534" in in_child(look)


def test_a_container_is_said(
    short_folder: Path, listen: Callable[[Path], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_CONTAINER_MARKS", (short_folder,))
    own = short_folder / "a" / "s"
    assert "this is a container: of a node outside, the socket's folder must be mounted here" in choose([own], []).note
    listen(own)
    assert choose([own], []).note == ""
    monkeypatch.setattr(module, "listener_of", lambda path: 0)  # as the kernel says it of another container's process
    found = choose([own], [])
    assert found.listens
    assert f"the node on {own} is in a container: its arena's folder must be mounted here, too" in found.note


def test_a_name_in_everybodys_folder_is_taken_before_another_user_takes_it(short_folder: Path) -> None:
    short_folder.chmod(0o1777)
    own = short_folder / "mine" / "kvstore.sock"
    choose([own], [])
    assert own.parent.stat().st_mode & 0o777 == 0o700
    private = short_folder / "private"
    private.mkdir(0o700)
    choose([private / "folder" / "kvstore.sock"], [])
    assert not (private / "folder").exists()
