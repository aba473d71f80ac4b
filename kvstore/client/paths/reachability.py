"""Why a node can't be reached: looks at its socket or its port, once a call has failed, and says what to do."""

from __future__ import annotations

import contextlib
import enum
import errno
import grp
import os
import pwd
import socket
import ssl
import stat
import struct
import threading
import time
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from kvstore.host.forking import register_forked

_LONGEST_SECONDS = 0.5
"""For a look at a port."""
_PEER = struct.Struct("3i")
_TLS_RECORDS = (0x15, 0x16)
"""First bytes of what a port with TLS says to somebody who greets it: an alert, or its own greeting."""


class Finding(NamedTuple):
    """Why a node can't be reached."""

    what: str
    """In words."""
    advice: str
    """What to do."""

    def __str__(self) -> str:
        return f"{self.what}; {self.advice}"


_START = "start it (`kvstore serve`), or name another one's socket (--url unix:///…, KVSTORE_SOCKET)"


def look_at_socket(path: Path, *, late: bool) -> Finding | None:
    """Why nobody answers on a Unix socket. It waits for nobody. None: that can't be seen.

    Args:
        path: the socket's.
        late: whether the answer did not come in time; else the connection was refused, or broke.
    """
    try:
        status = path.stat()
    except FileNotFoundError:
        return Finding(f"{path} is not there: no node runs on this socket", _START)
    except PermissionError:
        return _closed_way(path)
    except OSError as error:
        return Finding(f"{path}: {error.strerror}", _START)
    if not stat.S_ISSOCK(status.st_mode):
        return Finding(f"{path} is no socket", "name the node's socket (--url unix:///…, KVSTORE_SOCKET)")
    try:
        pid = listener_of(path)
    except PermissionError:
        return Finding(f"{_owner(path, status)}; this is user {_user(os.geteuid())}", _SAME_USER)
    except ConnectionRefusedError:
        return Finding(f"nobody listens on {path}: the node is not running", _START)
    except OSError as error:
        if error.errno != errno.EAGAIN:
            return None
        pid = 0  # so many wait already that no more can
        late = True
    if not late:
        return None
    which = f"pid {pid}, " if pid else ""
    advice = "look at its log and at what it does"
    if pid:
        advice += f" (`top -H -p {pid}`; state T: it was stopped, `kill -CONT {pid}` lets it go on)"
    return Finding(f"the node does not answer ({which}hung or overloaded)", f"{advice}; if it stays so, restart it")


def listener_of(path: Path) -> int:
    """The pid of the process that listens on a Unix socket; 0: it is another container's.

    Raises:
        OSError: it can't be connected to: nobody listens, this user may not, or (EAGAIN) too many wait already.
    """
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        probe.connect(str(path))
        pid, _, _ = _PEER.unpack(probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
        return int(pid)


_SAME_USER = "run as the node's user, or give both a group: `kvstore serve --group NAME`"


def _closed_way(path: Path) -> Finding:
    """The folder that keeps this user from a socket."""
    folder = path.parent
    for each in reversed(path.absolute().parents):
        if not os.access(each, os.X_OK):
            folder = each
            break
    with contextlib.suppress(OSError):
        return Finding(
            f"user {_user(os.geteuid())} does not get to {path}: {_owner(folder, folder.stat())}", _SAME_USER
        )
    return Finding(f"user {_user(os.geteuid())} does not get to {path}", _SAME_USER)


def _owner(path: Path, status: os.stat_result) -> str:
    mode = stat.S_IMODE(status.st_mode)
    return f"{path} is user {_user(status.st_uid)}'s and group {_group(status.st_gid)}'s, mode {mode:04o}"


def _user(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)


def _group(number: int) -> str:
    try:
        return grp.getgrgid(number).gr_name
    except KeyError:
        return str(number)


class PortLooks:
    """A client's looks at ports. One at a time: a name server that hangs keeps one thread, however often is looked."""

    def __init__(self) -> None:
        self._free = threading.Lock()
        register_forked(self)

    def forked(self) -> None:
        """In a child: the thread that looks is its parent's."""
        self._free = threading.Lock()

    def look(self, host: str, port: int, *, tls: bool, seconds: float) -> Finding | None:
        """Why a node can't be reached at a port. None: that can't be seen in this time, or the look before is not over.

        Args:
            host: as the URL names it.
            port: of the node.
            tls: whether it was spoken to in TLS.
            seconds: most that this may take; half a second is enough.
        """
        free = self._free
        if seconds <= 0 or not free.acquire(blocking=False):
            return None
        seconds = min(seconds, _LONGEST_SECONDS)
        end = time.monotonic() + seconds
        found: Future[Finding | None] = Future()

        def look() -> None:
            try:
                found.set_result(_look_at_port(host, port, tls, end))
            except BaseException as error:  # noqa: BLE001 - raised by whoever waits for it
                found.set_exception(error)
            finally:
                free.release()

        try:
            threading.Thread(target=look, name="kvstore-look", daemon=True).start()
        except RuntimeError:  # no thread is to be had
            free.release()
            return None
        try:
            return found.result(seconds)
        except TimeoutError:
            return None


def _look_at_port(host: str, port: int, tls: bool, end: float) -> Finding | None:
    """The same until ``end``, but for a name server: no call that asks one can be told how long to wait."""
    where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        with _connected(host, port, end) as connection:
            speaks = _speaks(connection, end)
    except ConnectionRefusedError:
        return Finding(
            f"nobody listens on {where}: the node is not running, or not with this port",
            f"start it (`kvstore serve --listen ADDRESS:{port}`), or name another one",
        )
    except (socket.gaierror, UnicodeError):  # the latter: it can't be one's name
        return Finding(f"no host is known by the name {host}", "name the node's host: kv://HOST:PORT")
    except OSError:
        return None
    if tls and speaks is _Speaks.PLAIN:
        return Finding(
            f"{where} speaks no TLS",
            f"write kv://{where}, or give the node a certificate (`kvstore serve --tls-cert FILE --tls-key FILE`)",
        )
    if tls and speaks is _Speaks.NOTHING_MORE:
        return Finding(
            f"{where} ends the connection when it is greeted in TLS",
            f"it speaks none (then write kv://{where}), or has too many connections",
        )
    if not tls and speaks is _Speaks.TLS:
        return Finding(f"{where} speaks TLS", f"write kvs://{where}")
    return None


def _connected(host: str, port: int, end: float) -> socket.socket:
    """A connection to the first of a host's addresses that takes it.

    Raises:
        OSError: none does; the last one's error. TimeoutError: not in time.
    """
    failed: OSError = TimeoutError()
    for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        left = end - time.monotonic()
        if left <= 0:
            raise TimeoutError
        with ExitStack() as stack:
            try:
                connection = stack.enter_context(socket.socket(family, kind, protocol))
                connection.settimeout(left)
                connection.connect(address)
            except OSError as error:
                failed = error
            else:
                stack.pop_all()
                return connection
    raise failed


class _Speaks(enum.Enum):
    """What a port says when it is greeted in TLS."""

    TLS = enum.auto()
    PLAIN = enum.auto()
    NOTHING_MORE = enum.auto()
    """It ends the connection."""


def _speaks(connection: socket.socket, end: float) -> _Speaks:
    """What the other end says.

    Raises:
        TimeoutError: nothing in time.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # nothing is sent but the greeting, and nobody trusted
    context.set_alpn_protocols(["h2"])
    sent = ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), sent, server_hostname="kvstore").do_handshake()
    connection.settimeout(max(end - time.monotonic(), 0.001))
    try:
        connection.sendall(sent.read())
        came = connection.recv(1)
    except ConnectionError:
        return _Speaks.NOTHING_MORE
    if not came:
        return _Speaks.NOTHING_MORE
    return _Speaks.TLS if came[0] in _TLS_RECORDS else _Speaks.PLAIN
