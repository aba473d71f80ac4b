"""Expiring: a namespace that no node uses any more leaves.

When a namespace was used last stands in Redis already, by the servers' own clocks: each bucket keeps its chunks in the
order of their last use, and every node tells what it uses in its arena. So nodes need no clock in common, and nothing
is kept for this.
"""

from __future__ import annotations

import threading
import time

from kvstore.errors import ResourceError
from kvstore.tiers.redis.buckets import Buckets, Left, left_of
from kvstore.tiers.redis.entries import Entries
from kvstore.tiers.redis.net.clocks import Clocks
from kvstore.tiers.redis.net.topology import Topology

_BUCKETS_AT_ONCE = 64
_LONGEST = 10.0
"""Seconds for one call; what is still there then is left to the next one."""


class Expirer:
    """Safe for threads, and for several nodes at once.

    Args:
        servers: where the buckets are.
        buckets: of chunks.
        entries: of pages.
        timeout: seconds for each request.
    """

    def __init__(self, servers: Topology, buckets: Buckets, entries: Entries, timeout: float) -> None:
        self._servers = servers
        self._buckets = buckets
        self._entries = entries
        self._timeout = timeout
        self._clocks = Clocks()
        self._looking = threading.Lock()

    def look_at_clocks(self) -> None:
        """Ask some servers, or all, what time it is."""
        with self._looking:
            for bucket, said in self._buckets.times(self._timeout):
                self._clocks.saw(bucket, said, time.monotonic())

    def expire(self, namespace: bytes, seconds: float, stop: threading.Event, gone: list[Left]) -> bool:
        """Let a namespace's chunks leave, unless any node used one of them within the last ``seconds``.

        One that is used while this goes on stays; the others go.

        Args:
            namespace: its fingerprint.
            seconds: on the servers' clocks; behind a jump of one of these, from the jump on.
            stop: once it is set, what is still there is left.
            gone: takes the chunks that left, also where this raises.

        Returns:
            Whether it was not in use. Nothing was changed where it was.

        Raises:
            ResourceError: not every server answered, it took too long, or ``stop`` was set: some chunks may still be
                there.
        """
        end = time.monotonic() + _LONGEST
        idle = dict(self._buckets.idle_seconds(namespace, self._timeout))
        self.look_at_clocks()
        if any(self._clocks.idle(each, time.monotonic()) < seconds for each in idle.values()):
            return False
        holding = list(idle)
        while holding:
            some, holding = holding[:_BUCKETS_AT_ONCE], holding[_BUCKETS_AT_ONCE:]
            deadline = time.monotonic() + self._timeout
            requests = [self._buckets.expiry(bucket, namespace, seconds) for bucket in some]
            replies = self._buckets.change(requests, some, deadline, writing=True)
            left = {bucket: left_of(bucket, reply) for bucket, reply in zip(some, replies, strict=True)}
            chunks = [chunk for each in left.values() for chunk in each]
            gone += chunks
            self._servers.exchange(list(self._entries.deletions(chunks)), deadline)
            if not all(isinstance(reply, list) for reply in replies):
                raise ResourceError("redis: not every server answered: it may still have pages of the namespace")
            holding += [bucket for bucket, each in left.items() if each]
            if holding and (stop.is_set() or time.monotonic() > end):
                raise ResourceError(f"redis: still {len(holding)} buckets with pages of the namespace")
        return True
