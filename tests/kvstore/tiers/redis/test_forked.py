"""Connections to Redis in a forked child: there are none."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable

from forked import in_child
from redis_servers import RedisServer, servers_of

from kvstore.host.descriptors import open_descriptors
from kvstore.tiers.redis import RedisTier


def test_a_child_has_no_connection_of_the_tier(server: RedisServer, eventually: Callable[..., None]) -> None:
    """Or the server would wait for a dead node, and a child could spoil what the node asks."""
    tier = RedisTier(server.url, 1 << 30, refresh=3600.0)
    try:
        assert tier.contains([b"x" * 64]) == [False]
        [node] = servers_of(tier)
        # The first look around uses them, too.
        eventually(lambda: not node._opening and node._connected == len(node._idle) > 0)
        numbers = {connection._socket.fileno() for connection in node._idle}
        assert -1 not in numbers

        def left() -> tuple[list[int], list[int]]:
            sockets = open_descriptors(lambda fd: fd in numbers and stat.S_ISSOCK(os.fstat(fd).st_mode))
            return sockets, [connection._socket.fileno() for connection in node._idle]

        sockets, known = in_child(left)
        assert (sockets, set(known)) == ([], {-1})
        assert tier.contains([b"x" * 64]) == [False]
        assert {connection._socket.fileno() for connection in node._idle} == numbers, "the parent goes on with them"
    finally:
        tier.close()
