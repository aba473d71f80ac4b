"""Limits on gRPC's TCP connections: unauthenticated ones are few and short, and a tenant has at most half of the rest.

gRPC counts connections, whoever made them, so unauthenticated ones could take up its whole limit. This keeps them to a
part of it: it finds this process's connections by their descriptors, knows from the calls that were let in whose they
are, and shuts down those that are too many, or too long without such a call. gRPC sees that their peers went away.

It needs no descriptor for that, so that connections that use all of them up are found and closed as well.
"""

from __future__ import annotations

import errno
import ipaddress
import logging
import os
import resource
import socket
import stat
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from urllib.parse import unquote

from kvstore.rare_lines import RareLines
from kvstore.security.grants import Grant
from kvstore.service.access.rate_limits import TENANT_SHARE

UNAUTHENTICATED_SECONDS = 10.0
"""How long a connection may be open before its first call that is let in."""
_UNAUTHENTICATED_SHARE = 4
"""There may be one unauthenticated connection for every so many authenticated ones."""
_LOOK_SECONDS = 0.25
_SAY_SECONDS = 60.0
_MOST_LOOKED_AT = 1 << 20
_log = logging.getLogger(__name__)
Address = tuple[str, int]
"""IP address without zone, and port."""


@dataclass(frozen=True, slots=True)
class TcpConnection:
    """One TCP connection to gRPC's port."""

    number: int
    """Inode of its socket: another one for each connection."""
    peer: Address
    since: float
    """When it was seen first, on the clock of ``time.monotonic``."""


def most_unauthenticated(limit: int) -> int:
    """How many unauthenticated connections there may be beside at most ``limit`` authenticated ones."""
    return max(1, limit // _UNAUTHENTICATED_SHARE)


def surplus(
    connections: Iterable[TcpConnection],
    let_in: Mapping[Address, Grant | None],
    limit: int,
    now: float,
    watching: Collection[Address] = (),
) -> list[TcpConnection]:
    """Which connections are to be closed.

    Args:
        connections: that are open.
        let_in: the peers that made a call that was let in, and what they may do; None: nothing any more, but what is
            under way goes on.
        limit: most authenticated ones.
        now: on the clock of ``since``.
        watching: unauthenticated peers that watch the node's health, which lasts: as many of them stay as there may be
            unauthenticated connections.

    Returns:
        Unauthenticated ones that are late; the oldest of the others, and of those that may do nothing any more, as far
        as they are too many: whoever comes to stay shows a token at once; of one tenant, the youngest beyond its part.
    """
    unauthenticated: list[TcpConnection] = []
    closed: list[TcpConnection] = []
    watchers = 0
    of_tenant: Counter[str] = Counter()
    for each in sorted(connections, key=lambda connection: connection.since):
        grant = let_in.get(each.peer)
        if grant is None and each.peer in watching and watchers < most_unauthenticated(limit):
            watchers += 1
        elif grant is None:
            late = each.peer not in let_in and now - each.since > UNAUTHENTICATED_SECONDS
            (closed if late else unauthenticated).append(each)
        elif not grant.every:
            of_tenant[grant.tenant] += 1
            if of_tenant[grant.tenant] > limit // TENANT_SHARE:
                closed.append(each)
    return closed + unauthenticated[: max(0, len(unauthenticated) - most_unauthenticated(limit))]


class UnauthenticatedConnections:
    """Closes surplus connections to one port, four times a second, until it is stopped. Safe for threads.

    Args:
        port: that gRPC listens on.
        limit: most authenticated connections.
        grant_of: what a pass grants now.
    """

    def __init__(self, port: int, limit: int, grant_of: Callable[[bytes], Grant | None]) -> None:
        self._port = port
        self._limit = limit
        self._grant_of = grant_of
        self._shown: dict[str, bytes] = {}
        """What gRPC calls a peer → the pass that it showed last."""
        self._seen: dict[int, TcpConnection | None] = {}
        """By inode; None: another kind of socket."""
        self._watching: list[str] = []
        """What gRPC calls those that watch the node's health, once for each watch."""
        self._null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self._spare = os.dup(self._null)
        """Becomes another descriptor's duplicate for a moment, which needs no new one."""
        self._lines = RareLines(_SAY_SECONDS)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvstore-guard", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Watch no more."""
        self._stopping.set()
        self._thread.join()
        os.close(self._spare)
        os.close(self._null)

    @contextmanager
    def watched_by(self, peer: str) -> Iterator[None]:
        """Around a watch of the node's health by a peer, as gRPC names it."""
        self._watching.append(peer)
        try:
            yield
        finally:
            self._watching.remove(peer)

    def note(self, peer: str, shown: bytes) -> None:
        """A call of a peer (as gRPC names it) was let in. Takes a microsecond."""
        if self._shown.get(peer) != shown:
            self._shown[peer] = shown

    def look(self) -> None:
        """Close what is too much now."""
        shown = dict(self._shown)  # before connections are listed: whoever is not among them is gone
        connections = self._connections()
        here = {each.peer for each in connections}
        for peer in shown:
            if address_of(peer) not in here:
                self._shown.pop(peer, None)

        let_in = {
            address: self._grant_of(each) for peer, each in shown.items() if (address := address_of(peer)) is not None
        }
        watching = {address_of(peer) for peer in list(self._watching)}
        closed = surplus(connections, let_in, self._limit, time.monotonic(), {each for each in watching if each})
        if closed:
            self._shut_down({each.number for each in closed})
            self._lines.say(
                _log.warning,
                "%d connections to port %d were closed, of %d: they made no accepted call within %g s, there were"
                " too many such at once (the limit is %d), or one tenant had more than half of all places",
                len(closed),
                self._port,
                len(connections),
                UNAUTHENTICATED_SECONDS,
                most_unauthenticated(self._limit),
                count=False,
            )

    def _run(self) -> None:
        while not self._stopping.wait(_LOOK_SECONDS):
            try:
                self.look()
            except Exception:  # noqa: BLE001 - it is tried again
                _log.exception("connections without an accepted call can't be checked")
                self._stopping.wait(_SAY_SECONDS)

    def _shut_down(self, numbers: set[int]) -> None:
        """End connections by their sockets' inodes."""
        for fd, number in _sockets():
            if number in numbers:
                with suppress(OSError):
                    os.dup2(fd, self._spare, inheritable=False)  # a descriptor may become another socket's; this won't
                    if _inode(self._spare) == number:
                        connection = socket.socket(fileno=self._spare)
                        try:
                            connection.shutdown(socket.SHUT_RDWR)
                        finally:
                            connection.detach()
        os.dup2(self._null, self._spare, inheritable=False)  # what was shut down must be closed, too

    def _connections(self) -> list[TcpConnection]:
        seen: dict[int, TcpConnection | None] = {}
        for fd, number in _sockets():
            known = self._seen.get(number)
            seen[number] = known if number in self._seen else self._inspect(fd, number)
        self._seen = seen
        return [each for each in seen.values() if each is not None]

    def _inspect(self, fd: int, number: int) -> TcpConnection | None:
        """A descriptor's connection, if it is one to this port. It may be closed, or another's, at any moment."""
        try:
            looked_at = socket.socket(fileno=fd)
        except OSError:
            return None
        try:
            if looked_at.family not in (socket.AF_INET, socket.AF_INET6) or looked_at.getsockname()[1] != self._port:
                return None
            peer = looked_at.getpeername()
        except OSError:  # it listens
            return None
        finally:
            looked_at.detach()
        return TcpConnection(number, _normal(peer[0], peer[1]), time.monotonic()) if _inode(fd) == number else None


@lru_cache(maxsize=4096)
def address_of(peer: str) -> Address | None:
    """The address in gRPC's name of a peer, ``ipv4:127.0.0.1:5000`` or ``ipv6:%5B::1%5D:5000``; None: there is none."""
    kind, _, rest = peer.partition(":")
    host, _, port = unquote(rest).rpartition(":")
    if kind not in ("ipv4", "ipv6") or not port.isdecimal():
        return None
    try:
        return _normal(host.strip("[]"), int(port))
    except ValueError:
        return None


def _normal(host: str, port: int) -> Address:
    address = ipaddress.ip_address(host.partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address), port


def _sockets() -> Iterator[tuple[int, int]]:
    """Descriptor and inode of every socket of this process."""
    for fd in _descriptors():
        number = _inode(fd)
        if number is not None:
            yield fd, number


def _descriptors() -> Iterable[int]:
    try:
        return [int(entry.name) for entry in Path("/proc/self/fd").iterdir()]
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        # All of them are in use, or all of the machine's: then the limit may be a billion, or none.
        return range(min(limit, _MOST_LOOKED_AT) if limit != resource.RLIM_INFINITY else _MOST_LOOKED_AT)


def _inode(fd: int) -> int | None:
    with suppress(OSError):  # closed meanwhile
        status = os.fstat(fd)
        if stat.S_ISSOCK(status.st_mode):
            return status.st_ino
    return None
