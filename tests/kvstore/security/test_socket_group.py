"""Whose socket and arena are: one user's, or a group's. With real users, where the tests run as root."""

from __future__ import annotations

import logging
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import kvstore
from kvstore.arena.summary_file import number_of, summary_name
from kvstore.config.node import NodeConfig
from kvstore.errors import ConfigError, InvalidRequestError, ResourceError
from kvstore.security.socket_group import SocketGroup

NODE_USER, ENGINE_USER, OUTSIDER = 61001, 61002, 61003
GROUP = 61000
ROOT = Path(__file__).parents[3]
LAYOUT = kvstore.Layout(model="m", block_size=16, page_bytes=8192)
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be several users")


def modes(folder: Path) -> dict[str, str]:
    return {path.name: f"{stat.S_IMODE(path.stat().st_mode):04o}" for path in (folder, *folder.iterdir())}


def test_by_default_nobody_else_gets_in(start_node: Callable[..., Any], shm_folder: Path) -> None:
    node = start_node(socket=shm_folder / "run/s")
    assert modes(shm_folder / "run") == {"run": "0700", "s": "0600", "s.lock": "0600"}
    found = modes(shm_folder / "arena")
    assert {name: found[name] for name in ("arena", "clients")} == {"arena": "0700", "clients": "0700"}
    assert {mode for name, mode in found.items() if name not in ("arena", "clients")} == {"0600"}
    assert node.config.sharers == SocketGroup(None)


def test_a_group_gets_no_more_than_clients_need(
    start_node: Callable[..., Any], shm_folder: Path, eventually: Callable[..., None]
) -> None:
    group = os.getegid()
    node = start_node(socket=shm_folder / "run/s", group=str(group))
    assert modes(shm_folder / "run") == {"run": "0750", "s": "0660", "s.lock": "0600"}
    needed = {"arena": "0750", "clients": "2770", "headers": "0640"}
    needed |= {"pages": "0660", "readers": "0660", "calls": "0660"}
    word = node.store.arena.summaries._word
    eventually(lambda: word[0])  # the summary is made in the background
    needed |= {summary_name(number_of(word[0])): "0640"}
    found = modes(shm_folder / "arena")
    assert {name: found.pop(name) for name in needed} == needed
    assert set(found.values()) == {"0600"}
    assert node.stop()

    again = start_node(socket=shm_folder / "run/s")  # without the group, over the same pages
    assert again.store.arena.taken_over
    assert set(modes(shm_folder / "arena").values()) == {"0700", "0600"}


def test_a_group_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match="group: there is no group 'kv-nobody' on this host"):
        _ = NodeConfig(group="kv-nobody").sharers
    for number in ("4294967295", "9" * 5000):
        with pytest.raises(ConfigError, match="group: "):
            _ = NodeConfig(group=number).sharers
    assert NodeConfig(group="root").sharers == NodeConfig(group="0").sharers == SocketGroup(0)


@needs_root
def test_a_user_who_is_no_member_cannot_give_files_to_a_group(short_folder: Path) -> None:
    code = "from kvstore.security.socket_group import SocketGroup; from pathlib import Path; import sys\n"
    code += f"SocketGroup({GROUP}).set_modes(Path(sys.argv[1]), 0o600, 0o660)"
    path = short_folder / "file"
    path.touch()
    os.chown(path, NODE_USER, NODE_USER)
    short_folder.chmod(0o755)
    done = run(code, path, user=NODE_USER)
    assert ResourceError.__name__ in done.stderr
    assert f"can't be given to group {GROUP}: user {NODE_USER} is not a member of it" in done.stderr
    assert run(code, path, user=NODE_USER, member=True).returncode == 0
    assert (path.stat().st_gid, stat.S_IMODE(path.stat().st_mode)) == (GROUP, 0o660)


def test_a_folder_on_the_way_that_keeps_the_group_out_is_told(
    shm_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shm_folder.chmod(0o700)
    with caplog.at_level(logging.WARNING):
        SocketGroup(os.getegid() + 1).check_way_to(shm_folder / "arena")
    assert f"don't get to {shm_folder}/arena: {shm_folder} has mode 0700" in caplog.text
    caplog.clear()
    shm_folder.chmod(0o711)
    SocketGroup(os.getegid() + 1).check_way_to(shm_folder / "arena")
    SocketGroup().check_way_to(shm_folder / "arena")
    assert not caplog.records


# Everything is imported before: the other user may not read where this Python is installed.
_AS_USER = """
import os, sys
import numpy as np
import kvstore, kvstore.cli.main, kvstore.node.node, kvstore.cli.serve
import kvstore.client.paths.shm.path, kvstore.client.paths.grpc
user, group, member = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "True"
del sys.argv[1:4]
os.setgroups([group] if member else [])
os.setresgid(user, user, user)
os.setresuid(user, user, user)
os.umask(0o077)
"""


def command(code: str, user: int, *, member: bool) -> list[str]:
    return [sys.executable, "-c", _AS_USER + code, str(user), str(GROUP), str(member)]


def run(code: str, *arguments: object, user: int, member: bool = False) -> subprocess.CompletedProcess[str]:
    """Python code as another user."""
    return subprocess.run(
        [*command(code, user, member=member), *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )


_STORE_AND_LOAD = """
url, name = sys.argv[1:]
with kvstore.connect(url, timeout=30) as client:
    pages = client.namespace(kvstore.Layout(model="m", block_size=16, page_bytes=8192))
    hashes = kvstore.hash_blocks(list(range(64)) if name == "same" else [int(name)] * 64, block_size=16)
    bytes_of = [np.full(8192, each[0], np.uint8) for each in hashes]
    stored = pages.store(hashes, bytes_of)
    into = [np.zeros(8192, np.uint8) for _ in hashes]
    loaded = pages.load(hashes, into)
    print(stored.stored, stored.present, loaded, all(map(np.array_equal, into, bytes_of)), client.status().clients)
"""


@needs_root
def test_members_of_the_group_share_the_memory_and_others_do_not_get_in(
    node_process: Callable[..., Any], short_folder: Path, shm_folder: Path
) -> None:
    for folder in (short_folder, shm_folder):
        folder.chmod(0o755)
        os.chown(folder, NODE_USER, NODE_USER)
    node = node_process(ready=False, group=str(GROUP), listen="")
    node.command = command("sys.exit(kvstore.cli.main.main(sys.argv[1:]))", NODE_USER, member=True)
    node.start()
    # The last figure: clients with the arena mapped. By the socket alone there would be none.
    member = run(_STORE_AND_LOAD, node.url, "same", user=ENGINE_USER, member=True)
    assert member.stdout.split() == ["4", "0", "4", "True", "1"], member.stderr
    own = run(_STORE_AND_LOAD, node.url, "same", user=NODE_USER)
    assert own.stdout.split() == ["0", "4", "4", "True", "1"], own.stderr
    outsider = run(_STORE_AND_LOAD, node.url, "same", user=OUTSIDER)
    assert "UnavailableError" in outsider.stderr
    assert not outsider.stdout
    for file in ("pages", "headers", "readers", "clients"):
        listed = run("import os, sys; os.open(sys.argv[1], os.O_RDONLY)", shm_folder / "arena" / file, user=OUTSIDER)
        assert "PermissionError" in listed.stderr
    written = run(
        "import os, sys; os.open(sys.argv[1], os.O_RDWR)", shm_folder / "arena/headers", user=ENGINE_USER, member=True
    )
    assert "PermissionError" in written.stderr

    node.kill()  # the next one knows the group's clients again
    node.start()
    again = run(_STORE_AND_LOAD, node.url, "7", user=ENGINE_USER, member=True)
    assert again.stdout.split() == ["4", "0", "4", "True", "1"], again.stderr


@needs_root
def test_root_shares_the_memory_of_another_users_node(
    node_process: Callable[..., Any], short_folder: Path, shm_folder: Path
) -> None:
    """An operator's commands are root's, and a node's unit has a user of its own."""
    for folder in (short_folder, shm_folder):
        folder.chmod(0o755)
        os.chown(folder, NODE_USER, NODE_USER)
    node = node_process(ready=False, listen="")
    node.command = command("sys.exit(kvstore.cli.main.main(sys.argv[1:]))", NODE_USER, member=False)
    node.start()
    for _ in range(2):  # the first one's lock is the node's to take away
        root = run(_STORE_AND_LOAD, node.url, "same", user=0)
        assert root.stdout.split()[2:] == ["4", "True", "1"], root.stderr


@needs_root
@pytest.mark.parametrize("place", ["disk", "disk that is there", "arena-dir", "socket"])
def test_a_user_is_told_whose_a_place_is_and_which_one_to_take(
    short_folder: Path, shm_folder: Path, place: str
) -> None:
    """Before the arena's memory is populated, which takes long."""
    for folder in (short_folder, shm_folder):
        folder.chmod(0o755)
    own, roots = short_folder / "own", short_folder / "roots"
    own.mkdir()
    os.chown(own, OUTSIDER, OUTSIDER)
    if place == "disk that is there":
        roots.mkdir(mode=0o755)
    flags = {"socket": own / "s", "disk": own / "disk", "arena-dir": own / "arena"}
    name = place.partition(" ")[0]
    flags[name] = roots
    code = "sys.exit(kvstore.cli.main.main(sys.argv[1:]))"
    done = run(code, "serve", "--arena=1GiB", *(f"--{flag}={value}" for flag, value in flags.items()), user=OUTSIDER)
    assert done.returncode == 1, done.stderr
    assert done.stderr.count("\n") == 1, "nothing was populated before"
    assert f"Permission denied for user {OUTSIDER}; " in done.stderr
    make = f"name a folder of your own, or have root make this one: `install -d -o {OUTSIDER} -m 700 {roots}`"
    own_place = {
        "disk": make,
        "disk that is there": "it is user 0's: run as that user, or name a folder of your own",
        "arena-dir": make,
        "socket": "name one in a folder of your own (the default: ",
    }
    assert own_place[place] in done.stderr


def test_an_arena_in_the_sockets_folder_is_found_wherever_that_is_mounted(
    start_node: Callable[..., Any], short_folder: Path, shm_folder: Path
) -> None:
    node = start_node(socket=shm_folder / "s")
    elsewhere = short_folder / "mounted"
    elsewhere.symlink_to(shm_folder)
    with kvstore.connect(f"unix://{elsewhere}/s") as client:
        client.namespace(LAYOUT)
        assert client._session.directory == f"{elsewhere}/arena"
        assert node.store.statistics().clients == 1


def test_an_arena_that_is_mounted_apart_is_named_in_the_url(
    start_node: Callable[..., Any], short_folder: Path, shm_folder: Path
) -> None:
    node = start_node()
    elsewhere = short_folder / "memory"
    elsewhere.symlink_to(shm_folder / "arena")
    with kvstore.connect(f"unix://{short_folder}/s?arena_dir={elsewhere}") as client:
        client.namespace(LAYOUT)
        assert client._session.directory == str(elsewhere)
        assert node.store.statistics().clients == 1


@pytest.mark.parametrize("option", ["arena_dir=", "arena_dri=/x", "arena=1GiB", "arena_dir=/x&arena=1GiB"])
def test_other_options_are_refused(option: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"the only option of a unix URL is arena_dir=FOLDER"):
        kvstore.connect(f"unix:///run/kvstore.sock?{option}")
