"""Expiry: a namespace that no node has used for some time is dropped from Redis.

When a namespace was used last stands in Redis already, by the servers' own clocks: each bucket keeps its chunks in the
order of their last use, and every node tells what it uses in its arena. So nodes need no clock in common, and nothing
is kept for this but where a node found use last: there it asks first.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict

from kvstore.errors import ResourceError
from kvstore.tiers.redis.buckets import EvictedChunk, evicted_by
from kvstore.tiers.redis.context import Context
from kvstore.tiers.redis.net.clocks import Clocks

_BUCKETS_AT_ONCE = 64
_MOST_REMEMBERED = 1024
"""Namespaces of which it is known where they were in use last."""
_LONGEST = 10.0
"""Seconds for one call; what is still there then is left to the next one."""


class Expirer:
    """Safe for threads, and for several nodes at once."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._topology = context.topology
        self._buckets = context.buckets
        self._entries = context.entries
        self._clocks = Clocks()
        self._looking = threading.Lock()
        self._used_in: OrderedDict[bytes, int] = OrderedDict()
        """By namespace: a bucket where it was in use last; what was looked at last is at the end."""

    def look_at_clocks(self) -> None:
        """Ask some servers, or all, what time it is."""
        with self._looking:
            for bucket, said in self._buckets.times(self._context.timeout):
                self._clocks.saw(bucket, said, time.monotonic())

    def expire(self, namespace: bytes, seconds: float, stop: threading.Event, dropped: list[EvictedChunk]) -> bool:
        """Drop a namespace's chunks, unless any node used one of them within the last ``seconds``.

        One that is used while this goes on stays; the others are dropped.

        Args:
            namespace: its fingerprint.
            seconds: on the servers' clocks; behind a jump of one of these, from the jump on.
            stop: once it is set, what is still there is left.
            dropped: gets the chunks that were, also where this raises.

        Returns:
            Whether it was not in use. Nothing was changed where it was.

        Raises:
            ResourceError: not every server answered, it took too long, or ``stop`` was set: some chunks may still be
                there.
        """
        end = time.monotonic() + _LONGEST
        idle: dict[int, float] = {}
        for bucket, said in self._buckets.idle_seconds(
            namespace, self._context.timeout, first=self._used_in.get(namespace)
        ):
            # Whatever else the clocks did: it looks unused for longer than it is, if at all.
            if self._clocks.idle(said, time.monotonic()) < seconds:
                self._remember(namespace, bucket)
                return False
            idle[bucket] = said
        self.look_at_clocks()
        if any(self._clocks.idle(each, time.monotonic()) < seconds for each in idle.values()):
            return False
        holding = list(idle)
        while holding:
            some, holding = holding[:_BUCKETS_AT_ONCE], holding[_BUCKETS_AT_ONCE:]
            deadline = self._context.deadline()
            requests = [self._buckets.expiry(bucket, namespace, seconds) for bucket in some]
            replies = self._buckets.change(requests, some, deadline, writing=True)
            by_bucket = {bucket: evicted_by(bucket, reply) for bucket, reply in zip(some, replies, strict=True)}
            chunks = [chunk for each in by_bucket.values() for chunk in each]
            dropped += chunks
            self._topology.exchange(list(self._entries.deletions(chunks)), deadline)
            if not all(isinstance(reply, list) for reply in replies):
                raise ResourceError("redis: not every server answered: it may still have pages of the namespace")
            holding += [bucket for bucket, each in by_bucket.items() if each]
            if holding and (stop.is_set() or time.monotonic() > end):
                raise ResourceError(f"redis: still {len(holding)} buckets with pages of the namespace")
        return True

    def _remember(self, namespace: bytes, bucket: int) -> None:
        self._used_in[namespace] = bucket
        self._used_in.move_to_end(namespace)
        if len(self._used_in) > _MOST_REMEMBERED:
            self._used_in.popitem(last=False)
