"""The pool of bulk connections to one node: each lent to one call at a time, made when none is free."""

from __future__ import annotations

import contextlib
import logging
import socket
import ssl
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

from kvstore.breaker import Breaker, State
from kvstore.client.paths.bulk.requests import BulkRequests
from kvstore.client.paths.control import Connection
from kvstore.client.paths.reachability import PortLooks
from kvstore.errors import FormatError, InvalidRequestError, KVStoreError, UnavailableError
from kvstore.host.cutting import check_going, cuttable
from kvstore.host.forking import register_forked
from kvstore.host.uninterrupted import cut_by_interrupt, uninterrupted
from kvstore.v1 import bulk_pb2
from kvstore.wire.channel import Channel
from kvstore.wire.frame import Kind

MOST_IDLE = 8
"""Most connections that are kept for later."""
CONNECT_SECONDS = 1.0
"""How long making a connection may take before pages go another way."""
SHORTEST_BACKOFF, LONGEST_BACKOFF = 1.0, 60.0
"""How long no connection is tried after one could not be made; twice as long each time."""
_log = logging.getLogger(__name__)


class BulkPool:
    """Bulk connections of one client. Safe for threads.

    Where none can be made, a call gets none and goes another way. The next one is tried a while later, by a thread of
    its own: no call waits twice for a port that nobody answers on. The gRPC connection gives the tokens.
    """

    def __init__(
        self, connection: Connection, host: str, tls: ssl.SSLContext | None = None, ports: PortLooks | None = None
    ) -> None:
        self._connection = connection
        self._host = host
        self._tls = tls
        self._ports = ports or PortLooks()
        self._lock = threading.Lock()
        self._idle: list[BulkRequests] = []
        # A trial may take longer than the pause, and no call is to wait for it: one thread at a time makes it.
        self._breaker = Breaker(1, SHORTEST_BACKOFF, LONGEST_BACKOFF, single_trial=False)
        self._trying = False
        self._closed = False
        self._channels: weakref.WeakSet[Channel] = weakref.WeakSet()
        """Of all connections that are open."""
        register_forked(self)

    def forked(self) -> None:
        """In a child: the connections are its parent's, and so is the thread that tries to make one."""
        self._lock = threading.Lock()
        self._breaker.forked()
        self._idle.clear()
        self._trying = False
        for channel in list(self._channels):
            channel.close()

    @contextmanager
    def lent(self, deadline: float) -> Iterator[BulkRequests | None]:
        """A connection; None where there is none to be had. It is kept for later when it is good still.

        Raises:
            UnavailableError: the node can't be reached at all.
            DeadlineError: it did not answer in time.
        """
        check_going()
        requests = self._take() or self._try(deadline)
        if requests is None:
            yield None
            return
        try:
            with cut_by_interrupt(requests.channel.cut), cuttable(requests.channel.cut):
                yield requests
        finally:
            self._give_back(requests)

    def forget_idle(self) -> None:
        """Close the connections that nobody uses: one broke, so these may have broken as well."""
        with self._lock:
            idle, self._idle = self._idle, []
        for requests in idle:
            requests.channel.close()

    def close(self) -> None:
        """Close everything; calls under way fail."""
        with self._lock:
            self._closed = True
        self.forget_idle()

    def _take(self) -> BulkRequests | None:
        """The connection that was used last, if the node has not closed it meanwhile."""
        while True:
            with self._lock:
                requests = self._idle.pop() if self._idle else None
            if requests is None or requests.channel.is_quiet():
                return requests
            requests.channel.close()

    def _give_back(self, requests: BulkRequests) -> None:
        with self._lock:
            kept = requests.good and not self._closed and len(self._idle) < MOST_IDLE
            if kept:
                self._idle.append(requests)
        if not kept:
            requests.channel.close()

    def _try(self, deadline: float) -> BulkRequests | None:
        """A new connection, or None; behind a failure made by another thread, for later calls."""
        with self._lock:
            if self._closed:
                raise UnavailableError(f"the client of {self._connection.name} is closed")
            if self._breaker.state is not State.CLOSED:
                if not self._trying and self._breaker.allows():
                    with contextlib.suppress(RuntimeError):  # no thread to be had now: a later call tries again
                        thread = threading.Thread(target=self._try_later, name="kvstore-bulk-connect", daemon=True)
                        uninterrupted(thread.start)()
                        self._trying = True
                return None
        return self._open(deadline)

    def _try_later(self) -> None:
        try:
            with contextlib.suppress(KVStoreError):
                requests = self._open(time.monotonic() + 2 * CONNECT_SECONDS)
                if requests is not None:
                    self._give_back(requests)
        finally:
            with self._lock:
                self._trying = False

    def _open(self, deadline: float) -> BulkRequests | None:
        """Make a connection. None, and a back-off, where the node has none to give or its port can't be reached.

        Raises:
            UnavailableError: the node can't be reached at all.
            DeadlineError: it did not answer in time.
        """
        left = deadline - time.monotonic()
        try:
            request = bulk_pb2.OpenBulkRequest(name=self._connection.client)
            reply = self._connection.call(self._connection.bulk.Open, request, max(left, 1e-3))
        except (FormatError, InvalidRequestError) as error:  # an older node, or one with too many clients
            self._failed(error)
            return None
        try:
            requests = self._connect(reply.port, reply.token, min(deadline, time.monotonic() + CONNECT_SECONDS))
        except (KVStoreError, OSError) as error:
            self._failed(error, reply.port, deadline)
            return None
        with self._lock:
            if self._breaker.state is not State.CLOSED:
                _log.info("%s: bulk connections can be made again", self._connection.name)
            self._breaker.succeeded()
        return requests

    def _failed(self, error: Exception, port: int = 0, deadline: float = 0.0) -> None:
        """``port``: of the bulk connection that could not be made, if it came to that."""
        with self._lock:
            first = self._breaker.state is State.CLOSED
            self._breaker.failed()
        if not first:
            return
        left = deadline - time.monotonic()
        found = self._ports.look(self._host, port, tls=self._tls is not None, seconds=left) if port else None
        _log.warning("%s: pages go through gRPC: no bulk connection: %s", self._connection.name, found or error)

    def _connect(self, port: int, token: bytes, deadline: float) -> BulkRequests:
        left = max(deadline - time.monotonic(), 1e-3)
        connected = socket.create_connection((self._host, port), timeout=left)
        try:
            if self._tls is not None:
                connected = self._tls.wrap_socket(connected, server_hostname=self._host)
            channel = Channel(connected, deadline)
            self._channels.add(channel)
            channel.send(Kind.HELLO, token)
            requests = BulkRequests(channel)
            requests.begin()
        except BaseException:
            connected.close()
            raise
        return requests
