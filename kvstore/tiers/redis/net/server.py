"""One server: a pool of connections that are opened in the background, and breakers that say when not to ask it.

Opening a connection (:mod:`.connection`: address, TLS, login, database) may take as long as it likes: it has a thread
of its own, and whoever wants the connection waits until their own deadline only.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from redis.exceptions import RedisError

from kvstore.breaker import Breaker, Failure
from kvstore.errors import DeadlineError, FormatError, KVStoreError, ResourceError, UnavailableError
from kvstore.fairness import Turns
from kvstore.jitter import jittered
from kvstore.tiers.redis.net.connection import Request, ServerConnection
from kvstore.tiers.redis.net.resp import Reply, ServerError
from kvstore.tiers.redis.net.threads import ServerThreads
from kvstore.tiers.tier import READER

_log = logging.getLogger(__name__)

MOST_CONNECTIONS = 8
"""Connections to one server; of more callers, readers take turns."""
IDLE_SECONDS = 30.0
"""Behind so long without a use a connection is closed, but for one: a thousand nodes have as many connections to each
server as they need, not as they once needed at the most."""
BATCH_BYTES = 32 << 20
"""Bytes of pages that are sent, or asked for, under one deadline."""
BATCH_PAGES = 1024
"""Pages whose entries are asked for at once: some milliseconds of a server, which serves nobody else meanwhile."""
FAILURES = 3
"""Failures in a row behind which a server is left alone."""
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 2.0
"""Seconds for which it is."""
FAIR_SECONDS = 0.02
"""A server that had less time than this is not blamed for being late: its caller came too late."""

_SICK = frozenset({"LOADING", "MASTERDOWN", "CLUSTERDOWN", "NOAUTH", "WRONGPASS", "NOPERM"})
"""Error replies of a server that serves nothing at all now."""
_FULL = frozenset({"OOM", "READONLY", "NOREPLICAS", "MISCONF"})
"""Error replies of a server that takes no writes now."""
_Item = TypeVar("_Item")


def batches(items: Sequence[_Item], sizes: Sequence[int]) -> Iterable[list[_Item]]:
    """Runs of items of up to ``BATCH_BYTES``, or of one item."""
    batch: list[_Item] = []
    total = 0
    for item, size in zip(items, sizes, strict=True):
        if batch and total + size > BATCH_BYTES:
            yield batch
            batch, total = [], 0
        batch.append(item)
        total += size
    if batch:
        yield batch


def runs(items: Sequence[_Item]) -> list[Sequence[_Item]]:
    """Runs of items of up to ``BATCH_PAGES``."""
    return [items[at : at + BATCH_PAGES] for at in range(0, len(items), BATCH_PAGES)]


@dataclass(slots=True, eq=False)
class _Waiter:
    """A caller that waits for a connection."""

    woken: threading.Condition
    connection: ServerConnection | None = None
    """His from now on."""


class Server:
    """One server. Safe for threads.

    Args:
        name: for logs.
        pool: redis-py's pool of connections.
        scripts: loaded by the first connection, where they are missing; and again behind one that broke, since the
            server may have been started anew.
        timeout: most seconds for the greeting of a new connection, by each of its steps.
        pause: seconds for which the server is left alone after it failed, at first.
    """

    def __init__(self, name: str, pool: Any, scripts: Sequence[str], timeout: float, pause: float) -> None:
        self.name = name
        self._pool = pool
        self._scripts = scripts
        self._timeout = timeout
        # Each node's are its own, or all that lost a server would come back to it in the same moment.
        pause, longest = jittered(pause), jittered(LONGEST_PAUSE)
        self.breaker = Breaker(FAILURES, pause, longest)
        """For everything."""
        self.writes = Breaker(FAILURES, pause, longest)
        """For writes alone: a server may be full, or read-only, and still answer reads."""
        self.threads = ServerThreads(MOST_CONNECTIONS, f"kvstore-{name}")
        self._lock = threading.Lock()
        self._idle: list[ServerConnection] = []
        """Empty while somebody waits. Those that were used last are the last."""
        self._turns: Turns[_Waiter] = Turns()
        self._waiting: set[_Waiter] = set()
        self._connected = 0
        self._opening = 0
        self._refused = 0
        self._loaded = False
        """Whether it has the scripts, as far as is known."""
        self._why = ""
        self._trouble = ""
        """Why no connection could be opened last time, in short."""
        self._troubled_since = 0.0
        self._closed = False

    def exchange(self, requests: Sequence[Request], deadline: float, *, writing: bool) -> list[Reply]:
        """Send requests in one go, and receive their replies.

        Raises:
            UnavailableError: the server is away, or a breaker is open.
            ResourceError: this machine has no thread for a connection.
            DeadlineError: it is too slow; or ``deadline`` was over before it was asked, for which nobody blames it.
        """
        began = time.monotonic()
        if began >= deadline:
            raise DeadlineError(f"{self.name} was not asked: the deadline was over before")
        if (writing and not self.writes.allows()) or not self.breaker.allows():
            raise UnavailableError(f"{self.name} is left alone for a while")
        try:
            connection = self._take(deadline)
        except DeadlineError:
            self._late(began, deadline)
            raise
        except ResourceError:
            raise  # this machine's failure
        except KVStoreError as error:
            self.breaker.failed(self._trouble or str(error))
            raise
        asked = time.monotonic()
        if connection is None or asked >= deadline:
            if connection is not None:
                self._put_back(connection)
            raise DeadlineError(f"{self.name} was not asked: all connections were in use until the deadline")
        try:
            replies = connection.roundtrip(requests, deadline)
        except DeadlineError:
            self._drop(connection)
            self._late(asked, deadline)
            raise
        except (FormatError, ValueError) as error:  # ValueError: redis-py closed the socket under it
            self._drop(connection)
            self.breaker.failed(str(error))
            raise UnavailableError(f"{self.name}: {error}") from error
        except BaseException as error:
            self._drop(connection)
            self.breaker.failed(str(error))
            raise
        said = {reply.kind: reply.message for reply in replies if isinstance(reply, ServerError)}
        kinds = said.keys()
        if sick := kinds & _SICK:
            self.breaker.failed(f"answers {said[min(sick)]}")
        else:
            self.breaker.succeeded()
        if full := kinds & _FULL:
            self.writes.failed(f"answers {said[min(full)]}")
        elif writing and not kinds & _SICK:
            self.writes.succeeded()
        if kinds & {
            "READONLY",
            "NOSCRIPT",
            "NOAUTH",
        }:  # a new connection may lead to the new master, and looks for scripts
            self._drop(connection)
            self._drop_idle()
        else:
            self._put_back(connection)
        return replies

    @property
    def failure(self) -> Failure | None:
        """Since when it does not answer, and why. None: it does, as far as one knows. One that refuses connections does
        not, whether or not it was asked often enough to leave it alone."""
        if self._trouble and not self._connected and self.breaker.failure is None:
            return Failure(self._troubled_since, self._trouble)
        return self.breaker.failure

    def close(self) -> None:
        """Close all connections; those in use when they come back."""
        with self._lock:
            self._closed = True
            self._wake_all()
        self._drop_idle()
        self.threads.close()

    def _late(self, asked: float, deadline: float) -> None:
        """No answer came between these two."""
        if deadline - asked >= FAIR_SECONDS:
            self.breaker.failed(self._trouble or "does not answer in time")

    def _take(self, deadline: float) -> ServerConnection | None:
        """A connection of one's own. None: others had all of them until ``deadline``.

        Raises:
            UnavailableError: the server can't be reached.
            DeadlineError: none could be opened in time.
            ResourceError: no thread can be started to open one.
        """
        dead: list[ServerConnection] = []
        try:
            with self._lock:
                if self._closed:
                    raise UnavailableError(f"{self.name} was closed")
                while self._idle:  # so nobody waits
                    connection = self._idle.pop()
                    if connection.is_quiet():
                        return connection
                    self._connected -= 1
                    self._loaded = False
                    dead.append(connection)
                waiter = _Waiter(threading.Condition(self._lock))
                self._waiting.add(waiter)
                try:
                    return self._wait(waiter, deadline, dead)
                finally:
                    self._waiting.remove(waiter)
                    if waiter.connection is not None:
                        self._hand_on(waiter.connection)
                    if not self._waiting:
                        self._turns = Turns()  # without those who gave up
        finally:
            for connection in dead:
                connection.close()

    def _wait(self, waiter: _Waiter, deadline: float, dead: list[ServerConnection]) -> ServerConnection | None:
        """Wait for one's turn with a connection; see ``_take``. The caller holds the lock, and closes the dead ones."""
        refused = self._refused
        self._turns.add(READER.get(), [waiter])
        while True:
            if waiter.connection is not None:
                connection, waiter.connection = waiter.connection, None
                if connection.is_quiet():
                    return connection
                self._connected -= 1
                self._loaded = False
                dead.append(connection)
                self._turns.add(READER.get(), [waiter])
            if self._closed:
                raise UnavailableError(f"{self.name} was closed")
            if self._refused != refused:
                raise UnavailableError(f"{self.name} can't be reached: {self._why}")
            if not self._opening and self._connected < MOST_CONNECTIONS:
                self._start_opening()
            left = deadline - time.monotonic()
            if (left <= 0 or not waiter.woken.wait(left)) and waiter.connection is None:
                if self._connected >= MOST_CONNECTIONS:
                    return None
                raise DeadlineError(f"{self.name} gave no connection in time")

    def _hand_on(self, connection: ServerConnection) -> None:
        """Give a connection to whoever's turn it is. The caller holds the lock."""
        while self._turns:
            waiter = self._turns.take()
            if waiter in self._waiting:  # else he gave up
                waiter.connection = connection
                waiter.woken.notify()
                return
        connection.idle_since = time.monotonic()
        self._idle.append(connection)

    def _take_unused(self) -> list[ServerConnection]:
        """Take out connections that nobody has used for a while, for the caller to close, who holds the lock."""
        before = time.monotonic() - IDLE_SECONDS
        unused = [connection for connection in self._idle[:-1] if connection.idle_since <= before]
        del self._idle[: len(unused)]
        self._connected -= len(unused)
        return unused

    def _wake_all(self) -> None:
        """Those who wait look what has changed. The caller holds the lock."""
        for waiter in self._waiting:
            waiter.woken.notify()

    def _start_opening(self) -> None:
        self._opening += 1
        try:
            threading.Thread(target=self._open, name=f"kvstore-{self.name}", daemon=True).start()
        except RuntimeError as error:
            self._opening -= 1
            raise ResourceError(f"{self.name}: no thread for a connection: {error}") from error

    def _open(self) -> None:
        connection: ServerConnection | None = None
        why = trouble = ""
        try:
            connection = ServerConnection(self._pool, () if self._loaded else self._scripts, self._timeout)
        except (RedisError, KVStoreError, OSError) as error:
            why = str(error)
            trouble = _in_short(error)
        except Exception as error:  # noqa: BLE001 - redis-py may raise anything at a peer that is no Redis
            why = trouble = repr(error)
        with self._lock:
            self._opening -= 1
            if connection is None:
                self._refused += 1
                if why != self._why:
                    _log.warning("%s can't be reached: %s", self.name, why)
                if not self._trouble:
                    self._troubled_since = time.time()
                self._why, self._trouble = why, trouble
            else:
                self._why = self._trouble = ""
                self._loaded = True
                if not self._closed:
                    self._connected += 1
                    self._hand_on(connection)
                    connection = None
            self._wake_all()
        if connection is not None:
            connection.close()

    def _put_back(self, connection: ServerConnection) -> None:
        with self._lock:
            closed = self._closed
            unused = []
            if not closed:
                self._hand_on(connection)
                unused = self._take_unused()
        for each in unused:
            each.close()
        if closed:
            self._drop(connection)

    def _drop(self, connection: ServerConnection) -> None:
        connection.close()
        with self._lock:
            self._connected -= 1
            self._loaded = False
            self._wake_all()

    def _drop_idle(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
            self._connected -= len(idle)
        for connection in idle:
            connection.close()


def _in_short(error: Exception) -> str:
    """Why a server can't be reached, for who knows which one it is."""
    match error.__context__ if isinstance(error, RedisError) and error.__context__ is not None else error:
        case ConnectionRefusedError():
            return "refused the connection"
        case TimeoutError():
            return "does not answer in time"
        case OSError() as cause if cause.strerror:
            return cause.strerror
    return str(error)
