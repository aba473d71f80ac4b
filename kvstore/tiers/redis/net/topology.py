"""All the servers behind one address: which of them has a key, and one pipelined request to each of them at once."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from redis import Redis, RedisCluster
from redis.cluster import ClusterNode
from redis.connection import ConnectionPool
from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot
from redis.exceptions import RedisError
from redis.sentinel import Sentinel

from kvstore.breaker import Breaker, State
from kvstore.errors import KVStoreError, UnavailableError
from kvstore.status import TierHealth, TierState
from kvstore.tiers.redis.net.address import Address, Kind
from kvstore.tiers.redis.net.resp import Reply, ServerError
from kvstore.tiers.redis.net.server import LONGEST_PAUSE, Request, Server
from kvstore.tiers.tier import Peer

_log = logging.getLogger(__name__)

_MOVED = frozenset({"MOVED", "ASK", "TRYAGAIN", "CLUSTERDOWN"})
_MOST_NAMED = 4
"""Servers that a reason names."""
_REFRESH_SECONDS = 0.5
"""How often a Cluster is asked for its slots while one of its servers is away."""
NO_ANSWER = ServerError("NOANSWER")
"""Stands for every reply of a server that was not asked or did not answer."""


class Topology:
    """The servers. Safe for threads; opens connections when they are needed.

    Args:
        address: of one server, of Sentinels, or of a Cluster.
        scripts: loaded on each connection.
        timeout: seconds for each step of opening a connection.
        pause: the breakers' first pause, in seconds.
    """

    def __init__(self, address: Address, scripts: Sequence[str], timeout: float, pause: float) -> None:
        self._address = address
        self._scripts = scripts
        self._timeout = timeout
        self._pause = pause
        self._lock = threading.Lock()
        self._routed = threading.Condition(self._lock)
        self._servers: dict[str, Server] = {}
        self._table: list[Server | None] = []
        self._clients: list[Any] = []
        self._cluster: RedisCluster | None = None
        self._refreshing = False
        self._rounds = 0
        self._asked = 0.0
        self._discovery = Breaker(1, pause, LONGEST_PAUSE)
        self._opened = time.time()
        self._uncovered_since = 0.0
        self._closed = False
        self.is_cluster = address.kind is Kind.CLUSTER
        if not self.is_cluster:
            self._table = [self._new_server("redis", self._single_pool())]

    def slot(self, key: bytes) -> int:
        """The hash slot of a key; keys of one slot may stand in one command."""
        return key_slot(key) if self.is_cluster else 0

    def exchange(self, requests: Sequence[Request], deadline: float, *, writing: bool = False) -> list[Reply]:
        """Send each server its requests in one go, all servers at once. Those of one slot keep their order.

        A Cluster's slots that have moved are asked for anew, once.

        Returns:
            A reply for each request; ``NO_ANSWER`` where there was none by ``deadline``.
        """
        if not requests:
            return []
        replies = self._exchange(requests, deadline, writing=writing)
        moved = [
            place for place, reply in enumerate(replies) if isinstance(reply, ServerError) and reply.kind in _MOVED
        ]
        if moved and self.is_cluster:
            self._refresh(deadline)
            again = self._exchange([requests[place] for place in moved], deadline, writing=writing)
            for place, reply in zip(moved, again, strict=True):
                replies[place] = reply
        return replies

    def exchange_each(self, arguments: Sequence[bytes], cursors: dict[str, bytes], deadline: float) -> dict[str, Reply]:
        """Send a command, with a cursor behind its first word, to each server that ``cursors`` names, all at once.

        Returns:
            Their replies; of one that did not answer, none.
        """
        out: dict[str, Reply] = {}

        def ask(name: str, server: Server) -> None:
            try:
                command = [arguments[0], cursors[name], *arguments[1:]]
                out[name] = server.exchange([Request(0, command)], deadline, writing=False)[0]
            except KVStoreError as error:
                _log.debug("%s", error)

        asked = [(name, server) for name in cursors if (server := self._servers.get(name)) is not None]
        waiting = [server.threads.start(partial(ask, name, server)) for name, server in asked]
        for task in waiting:
            task.end(deadline)
        return out

    def primaries(self, deadline: float) -> list[str]:
        """The names of all servers that have slots."""
        if not self._table:
            self._refresh(deadline)
        return sorted({server.name for server in self._table if server is not None})

    def peers(self) -> list[Peer]:
        """Each server, and whether it is being asked or left alone since it failed."""
        with self._lock:
            servers = list(self._servers.values())
        single = "" if self.is_cluster else repr(self._address).strip("<>")
        return [Peer(single or server.name, server.breaker.state is State.CLOSED) for server in servers]

    def health(self) -> TierHealth:
        """Whether the servers answer, as far as they were asked; by how many of them there are."""
        with self._lock:
            servers = list(self._servers.values())
            undiscovered = self._discovery.failure if not self._table else None
            uncovered = sum(server is None for server in self._table)
        if undiscovered is not None:
            reason = f"no server of the Cluster at {self._place()}: {undiscovered.why}"
            return TierHealth(TierState.DOWN, undiscovered.since, reason)
        failing = [(server, failure) for server in servers if (failure := server.failure) is not None]
        if failing:
            said = "; ".join(f"{self._shown(server)} {failure.why}" for server, failure in failing[:_MOST_NAMED])
            many = f"{len(failing)} of {len(servers)} servers don't serve: " if len(servers) > 1 else ""
            since = [failure.since for _, failure in failing]
            if len(failing) == len(servers):
                return TierHealth(TierState.DOWN, max(since), many + said)
            return TierHealth(TierState.DEGRADED, min(since), many + said)
        if uncovered:
            reason = f"no server has {uncovered} of the Cluster's {len(self._table)} slots"
            return TierHealth(TierState.DEGRADED, self._uncovered_since, reason)
        full = [(server, failure) for server in servers if (failure := server.writes.failure) is not None]
        if full:
            said = "; ".join(f"{self._shown(server)} {failure.why}" for server, failure in full[:_MOST_NAMED])
            many = f"{len(full)} of {len(servers)} servers take" if len(servers) > 1 else "it takes"
            return TierHealth(TierState.DEGRADED, min(failure.since for _, failure in full), f"{many} no pages: {said}")
        return TierHealth(TierState.OK, max((server.breaker.since for server in servers), default=self._opened))

    def _shown(self, server: Server) -> str:
        return server.name if self.is_cluster else self._place()

    def _place(self) -> str:
        """Where the servers are, without any password."""
        hosts = ",".join(f"{host}:{port}" for host, port in self._address.hosts) or str(self._address.options["path"])
        return f"{self._address.service} (Sentinel {hosts})" if self._address.kind is Kind.SENTINEL else hosts

    def close(self) -> None:
        """Close all connections."""
        with self._lock:
            self._closed = True
            servers = list(self._servers.values())
            clients, self._clients = self._clients, []
            self._routed.notify_all()
        for server in servers:
            server.close()
        for client in clients:
            client.close()

    def _exchange(self, requests: Sequence[Request], deadline: float, *, writing: bool) -> list[Reply]:
        replies: list[Reply] = [NO_ANSWER] * len(requests)
        if not self._table:
            self._refresh(deadline)
        table = self._table
        if not table:
            return replies
        groups: dict[Server, list[int]] = {}
        for place, request in enumerate(requests):
            server = table[request.slot]
            if server is not None:
                groups.setdefault(server, []).append(place)
        if not groups:
            return replies

        def ask(server: Server, places: list[int]) -> None:
            try:
                answers = server.exchange([requests[place] for place in places], deadline, writing=writing)
            except KVStoreError as error:
                _log.debug("%s", error)
                return
            for place, answer in zip(places, answers, strict=True):
                replies[place] = answer

        first, *others = groups.items()
        waiting = [server.threads.start(partial(ask, server, places)) for server, places in others]
        ask(*first)
        for task in waiting:
            task.end(deadline)
        failing = any(server.breaker.state is not State.CLOSED for server in groups)
        if failing and time.monotonic() > self._asked + _REFRESH_SECONDS:
            self._start_refresh()  # perhaps another server has its slots by now
        return replies

    # -- finding the servers -----------------------------------------------------------------------------------------

    def _connection_options(self) -> dict[str, Any]:
        # RESP2: no reply comes unasked. No retries: a miss is cheaper than a second try.
        defaults = {
            "protocol": 2,
            "socket_timeout": self._timeout,
            "socket_connect_timeout": self._timeout,
            "decode_responses": False,
        }
        return defaults | dict(self._address.options)

    def _single_pool(self) -> Any:
        options = self._connection_options()
        if self._address.kind is Kind.SINGLE:
            if self._address.hosts:
                options["host"], options["port"] = self._address.hosts[0]
            return ConnectionPool(**options)
        own = {
            name.removeprefix("sentinel_"): options.pop(name) for name in list(options) if name.startswith("sentinel_")
        }
        shared = {name: value for name, value in options.items() if name.startswith(("ssl", "socket_"))}
        theirs = shared | own | {"protocol": 2}
        sentinel = Sentinel(list(self._address.hosts), sentinel_kwargs=theirs, **options)  # type: ignore[no-untyped-call]
        master: Redis = sentinel.master_for(self._address.service)  # type: ignore[no-untyped-call]
        self._clients += [master, *sentinel.sentinels]
        return master.connection_pool

    def _new_server(self, name: str, pool: Any) -> Server:
        server = Server(name, pool, self._scripts, self._timeout, self._pause)
        self._servers[name] = server
        return server

    def _refresh(self, deadline: float) -> None:
        """Ask the Cluster for its slots, in the background, and wait for that."""
        with self._routed:
            rounds = self._rounds
        self._start_refresh()
        with self._routed:
            while self._rounds == rounds and self._refreshing and not self._closed:
                left = deadline - time.monotonic()
                if left <= 0 or not self._routed.wait(left):
                    return

    def _start_refresh(self) -> None:
        with self._lock:
            if self._refreshing or self._closed or not self.is_cluster or not self._discovery.allows():
                return
            self._refreshing = True
            self._asked = time.monotonic()
        try:
            threading.Thread(target=self._discover, name="kvstore-redis-cluster", daemon=True).start()
        except RuntimeError as error:
            self._discovered()
            _log.warning("the Redis Cluster can't be asked for its slots: %s", error)

    def _discover(self) -> None:
        try:
            if self._cluster is None:
                options = self._connection_options()
                servers = [ClusterNode(*host) for host in self._address.hosts]  # type: ignore[no-untyped-call]
                options.pop("db", None)
                cluster = RedisCluster(startup_nodes=servers, require_full_coverage=False, **options)
                with self._lock:
                    self._cluster = cluster
                    self._clients.append(cluster)
            else:
                self._cluster.nodes_manager.initialize()
            self._install(self._cluster)
            self._discovery.succeeded()
        except (RedisError, OSError, KVStoreError) as error:
            self._discovery.failed(str(error))
            _log.warning("the Redis Cluster can't be reached: %s", error)
        except Exception as error:  # noqa: BLE001 - redis-py may raise anything at a peer that is no Redis
            self._discovery.failed(repr(error))
            _log.exception("the Redis Cluster can't be reached")
        finally:
            self._discovered()

    def _discovered(self) -> None:
        with self._routed:
            self._refreshing = False
            self._rounds += 1
            self._routed.notify_all()

    def _install(self, cluster: RedisCluster) -> None:
        """Route by what the Cluster says now. Servers that have no slots any more are let go."""
        slots = cluster.nodes_manager.slots_cache
        table: list[Server | None] = [None] * REDIS_CLUSTER_HASH_SLOTS
        with self._lock:
            if self._closed:
                raise UnavailableError("closed")
            for slot, members in slots.items():
                name = members[0].name
                server = self._servers.get(name)
                table[slot] = server or self._new_server(name, cluster.get_redis_connection(members[0]).connection_pool)
            used = {server.name for server in table if server is not None}
            leaving = [self._servers.pop(name) for name in set(self._servers) - used]
            if None in table and None not in self._table:
                self._uncovered_since = time.time()
            self._table = table
        for server in leaving:
            server.close()
