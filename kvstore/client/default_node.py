"""The node that nobody named: where commands and engines look for it.

``KVSTORE_SOCKET`` comes first. Without it the sockets that nodes serve on by themselves are tried in turn: the one that
``kvstore serve`` would take here, then those of this user under another environment (a service has no
``XDG_RUNTIME_DIR``), then those of the machine (the systemd unit's, root's). The first one on which somebody listens is
taken; without one, the first, where a node may appear.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from kvstore.client.paths.reachability import listener_of
from kvstore.client.url import socket_url
from kvstore.config.load import load_settings
from kvstore.config.node import SYSTEM_SOCKETS, default_socket, user_sockets
from kvstore.config.setting import ENVIRONMENT_PREFIX
from kvstore.errors import ConfigError

SOCKET_VARIABLE = f"{ENVIRONMENT_PREFIX}SOCKET"
"""The environment's name for the node's socket, for who serves and for who asks."""
_NAME_IT = f"name another one's ({SOCKET_VARIABLE}, --url, or url)"
_CONTAINER_MARKS = (Path("/.dockerenv"), Path("/run/.containerenv"))


class DefaultNode(NamedTuple):
    """Where the node is that nobody named."""

    socket: Path
    note: str = ""
    """What there is to say: where else was looked, and what to do. Empty: it is where everybody looks first."""
    listens: bool = True
    """False: nobody does, so far."""

    @property
    def url(self) -> str:
        """The node's."""
        return socket_url(self.socket)


def default_node(environment: Mapping[str, str]) -> DefaultNode:
    """The node of this host, as ``environment`` and the sockets here say. It waits for nobody.

    Raises:
        ConfigError: the environment's socket is no path, or nobody but another user could serve at the default one.
    """
    if named := environment.get(SOCKET_VARIABLE):
        return DefaultNode(load_settings(environment={SOCKET_VARIABLE: named})["socket"].value)
    own = tuple(dict.fromkeys((default_socket(), *user_sockets())))
    return choose(own, SYSTEM_SOCKETS)


def located(url: str, environment: Mapping[str, str], logger: logging.Logger) -> str:
    """``url``; where it is empty, the default node's, and the log says what there is to say of that.

    Raises:
        ConfigError: as :func:`default_node`.
    """
    if url:
        return url
    found = default_node(environment)
    if found.note:
        logger.log(logging.INFO if found.listens else logging.WARNING, "%s", found.note)
    return found.url


def choose(own: Sequence[Path], of_machine: Sequence[Path]) -> DefaultNode:
    """The first socket on which somebody listens; without one the first of ``own``.

    Args:
        own: this user's, which are taken only where nobody but this user and root can have put them.
        of_machine: those that root decides on.

    Raises:
        ConfigError: nobody listens, and the folder in which a node would appear is another user's.
    """
    first, *others = places = tuple(dict.fromkeys((*own, *of_machine)))
    said: list[str] = []
    for path in places:
        finding = _look(path, path in own)
        if finding.listens:
            elsewhere = [f"no node serves on {first}, one does on {path}"] if path in others else []
            return DefaultNode(path, "; ".join([*elsewhere, *said, *finding.said]))
        said += finding.said
    if (stranger := _stranger(first)) is not None:
        raise ConfigError(f"{first.parent} is user {stranger}'s: no socket there is used; {_NAME_IT}")
    _claim(first.parent)
    if any(mark.exists() for mark in _CONTAINER_MARKS):
        said.append("this is a container: of a node outside, the socket's folder must be mounted here")
    looked = ", ".join(map(str, places))
    said = [f"no node serves on {looked}", *said, f"start one (`kvstore serve`), or {_NAME_IT}"]
    return DefaultNode(first, "; ".join(said), listens=False)


class _Finding(NamedTuple):
    listens: bool
    said: Sequence[str] = ()


def _look(path: Path, is_own: bool) -> _Finding:
    """Whether a node serves on a socket that may be used."""
    try:
        path.stat()
    except PermissionError:
        return _Finding(False, [_other_users(path)])
    except OSError:
        return _Finding(False)
    if is_own and (stranger := _stranger(path)) is not None:
        return _Finding(False, [f"{path} is left alone: user {stranger} has put it there"])
    try:
        pid = listener_of(path)
    except PermissionError:
        return _Finding(False, [_other_users(path)])
    except OSError as error:
        full = error.errno == errno.EAGAIN  # so many wait there already that no more can
        return _Finding(full, [] if full else [f"nobody listens on {path} any more"])
    if not pid:
        return _Finding(True, [f"the node on {path} is in a container: its arena's folder must be mounted here, too"])
    return _Finding(True)


def _other_users(path: Path) -> str:
    return (
        f"{path} is another user's, this is user {os.geteuid()}: run node and engine as one user, or give both a group"
        " (`kvstore serve --group NAME`)"
    )


def _stranger(path: Path) -> int | None:
    """Who else than this user and root may have put a socket there, or a link to one."""
    for each in (path.parent, path):
        for look in (each.lstat, each.stat):
            with suppress(OSError):
                if (user := look().st_uid) not in (0, os.geteuid()):
                    return user
    return None


def _claim(folder: Path) -> None:
    """Takes a folder's name in a folder of everybody's, as in ``/tmp``, where another user might put a socket later."""
    with suppress(OSError):
        if folder.parent.stat().st_mode & stat.S_IWOTH:
            folder.mkdir(0o700)
