"""Who is attached, and who of them lives: the kernel says so."""

import errno
import logging
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from local_clients import ChildClient, LocalClient

from kvstore.arena import clients
from kvstore.arena.clients import Clients
from kvstore.errors import InvalidRequestError, LimitExceededError, UnavailableError


@pytest.fixture
def folder(shm: Path) -> Path:
    (shm / "clients").mkdir()
    return shm


def names(folder: Path) -> set[str]:
    return {path.name for path in (folder / "clients").iterdir()}


def test_a_client_gets_a_number_and_its_file_that_name(folder: Path) -> None:
    attached = Clients(folder / "clients")
    one, other = LocalClient(folder), LocalClient(folder)
    assert [attached.attach(one.name), attached.attach(other.name)] == [1, 2]
    assert names(folder) == {"1", "2"}
    assert len(attached) == 2
    assert 1 in attached
    assert 3 not in attached
    assert attached.dead() == []
    one.die()
    assert attached.dead() == [1]
    attached.forget(1)
    assert 1 not in attached
    assert names(folder) == {"2"}
    other.die()


def test_a_killed_process_is_dead(folder: Path, child_client: Callable[[Path], ChildClient]) -> None:
    attached = Clients(folder / "clients")
    client = child_client(folder)
    number = attached.attach(client.name)
    assert attached.dead() == []
    client.die()
    assert attached.dead() == [number]


@pytest.mark.parametrize("name", ["", "1", "new-", "../x", "new-" + "0" * 31, "new-" + "0" * 33, "new-" + "G" * 32])
def test_what_is_no_lock_files_name_is_refused(folder: Path, name: str) -> None:
    with pytest.raises(InvalidRequestError, match="lock file"):
        Clients(folder / "clients").attach(name)


def test_a_file_that_nobody_holds_is_refused(folder: Path) -> None:
    attached = Clients(folder / "clients")
    client = LocalClient(folder)
    client.die()
    with pytest.raises(InvalidRequestError, match="not a locked file"):
        attached.attach(client.name)
    with pytest.raises(InvalidRequestError, match="not a locked file"):
        attached.attach("new-" + "0" * 32)


def test_there_are_not_more_than_the_limit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "MOST_CLIENTS", 2)
    attached = Clients(folder / "clients")
    here = [LocalClient(folder) for _ in range(3)]
    attached.attach(here[0].name)
    attached.attach(here[1].name)
    with pytest.raises(LimitExceededError, match="2 clients are attached, the limit is 2"):
        attached.attach(here[2].name)
    here[0].die()
    attached.forget(1)
    assert attached.attach(here[2].name) == 3
    for client in here:
        client.die()


def test_a_number_comes_again_only_behind_all_others(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "_LAST_NUMBER", 3)
    attached = Clients(folder / "clients")
    here = [LocalClient(folder) for _ in range(5)]
    assert [attached.attach(client.name) for client in here[:3]] == [1, 2, 3]
    for number in (1, 3):
        attached.forget(number)
    assert [attached.attach(client.name) for client in here[3:]] == [1, 3]
    for client in here:
        client.die()


def test_a_new_node_knows_who_still_lives(folder: Path) -> None:
    before = Clients(folder / "clients")
    here = [LocalClient(folder) for _ in range(3)]
    for client in here:
        before.attach(client.name)
    here[1].die()
    (folder / "clients" / "rubbish").touch()
    attaching, gone = LocalClient(folder), LocalClient(folder)
    gone.die()
    after = Clients(folder / "clients")
    assert [number in after for number in (1, 2, 3)] == [True, False, True]
    assert names(folder) == {"1", "3", attaching.name}
    assert after.attach(attaching.name) == 2
    for client in (*here, attaching):
        client.die()


def test_in_doubt_a_client_lives(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that can't ask the kernel must not give the slots of its clients away."""
    attached = Clients(folder / "clients")
    client = LocalClient(folder)
    number = attached.attach(client.name)
    client.die()

    def refuse(*_: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        patch.setattr(clients.fcntl, "flock", refuse)
        assert attached.dead() == []
    assert attached.dead() == [number]


def test_a_client_whose_file_was_deleted_lives(folder: Path) -> None:
    attached = Clients(folder / "clients")
    client = LocalClient(folder)
    number = attached.attach(client.name)
    (folder / "clients" / str(number)).unlink()
    assert attached.dead() == []
    client.die()
    assert attached.dead() == [number]
    attached.forget(number)


def test_files_of_clients_that_died_before_they_attached_are_removed(folder: Path) -> None:
    """Not of those that may just be about to lock theirs."""
    attached = Clients(folder / "clients")
    living, young, old = (LocalClient(folder) for _ in range(3))
    young.die()
    old.die()
    for client in (living, old):
        os.utime(folder / "clients" / client.name, (0, 0))
    attached.remove_abandoned()
    assert names(folder) == {living.name, young.name}
    living.die()


def test_a_folder_that_was_given_up_is_not_touched(folder: Path) -> None:
    """It may be another node's by now, and this number another client's."""
    attached = Clients(folder / "clients")
    client, other = LocalClient(folder), LocalClient(folder)
    number = attached.attach(client.name)
    attached.close()
    with pytest.raises(UnavailableError):
        attached.attach(other.name)
    attached.forget(number)
    assert names(folder) == {str(number), other.name}
    client.die()
    other.die()


def test_a_pipe_in_the_folder_is_not_waited_at(folder: Path) -> None:
    """Whoever shares the arena may write there."""
    attached = Clients(folder / "clients")
    os.mkfifo(folder / "clients" / "new-pipe")
    os.utime(folder / "clients" / "new-pipe", (0, 0))
    looking = threading.Thread(target=attached.remove_abandoned, daemon=True)
    looking.start()
    looking.join(30)
    assert not looking.is_alive()
    assert names(folder) == set()


def test_what_is_no_lock_file_keeps_no_node_from_starting(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Members of the group may put anything there."""
    client = LocalClient(folder)
    assert Clients(folder / "clients").attach(client.name) == 1
    monkeypatch.chdir(folder / "clients")  # the path of a socket is short
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("7")
    Path("new-folder").mkdir()
    Path("2").mkdir()
    os.mkfifo("8")
    Path("9").symlink_to(folder)
    for name in ("²", "0", "99999"):
        Path(name).touch()
    with caplog.at_level(logging.WARNING):
        attached = Clients(folder / "clients")
    assert attached.numbers() == [1]
    assert names(folder) == {"1", "2", "new-folder"}
    assert sorted(record.args[0].name for record in caplog.records if record.name == clients.__name__) == [
        "2",
        "new-folder",
    ]

    other, third = LocalClient(folder), LocalClient(folder)
    with pytest.raises(UnavailableError, match="can't be taken in"):
        attached.attach(other.name)
    assert attached.attach(third.name) == 3, "the folder is in the way once"
    os.utime("new-folder", (0, 0))
    attached.remove_abandoned()
    for each in (client, other, third):
        each.die()


def test_what_can_not_be_opened_for_lack_of_descriptors_is_not_given_up(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = LocalClient(folder)
    Clients(folder / "clients").attach(client.name)

    def refuse(*_: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        with pytest.raises(OSError, match="Too many"):
            Clients(folder / "clients")
    assert names(folder) == {"1"}
    client.die()


class TestNames:
    """What clients call themselves is for people: it lies beside their files, and nothing else depends on it."""

    def test_the_next_node_knows_them(self, folder: Path) -> None:
        attached = Clients(folder / "clients")
        one, other = LocalClient(folder), LocalClient(folder)
        attached.attach(one.name, "engine\n1")
        attached.attach(other.name, "engine 2")
        attached.close()
        assert attached.connected() == []
        other.die()
        again = Clients(folder / "clients")
        assert [(each.name, each.way) for each in again.connected()] == [("engine\\n1", "shm")]
        assert names(folder) == {"1", "1.name"}
        one.die()
        again.forget(1)
        assert names(folder) == set() and again.connected() == []

    @pytest.mark.parametrize("kind", ["missing", "long", "pipe", "folder", "link", "garbage"])
    def test_whatever_lies_there_a_node_starts(self, folder: Path, kind: str) -> None:
        client = LocalClient(folder)
        Clients(folder / "clients").attach(client.name, "engine")
        path = folder / "clients" / "1.name"
        path.unlink()
        if kind == "long":
            path.write_text("y" * 100_000)
        elif kind == "pipe":
            os.mkfifo(path)
        elif kind == "folder":
            path.mkdir()
        elif kind == "link":
            (folder / "secret").write_text("secret")
            path.symlink_to(folder / "secret")
        elif kind == "garbage":
            path.write_bytes(b"\xff\x00a")
        [told] = Clients(folder / "clients").connected()
        expected = {"long": "y" * 128, "garbage": "\N{REPLACEMENT CHARACTER}\\x00a"}
        assert told.name == expected.get(kind, "")
        client.die()
