"""Summaries: what buckets hold, asked for by one node and told to all. So it costs what there are buckets, not that
times as many nodes.

Buckets go in groups. What a group's buckets hold is in one value, which lives as long as nodes rest between two looks.
Who finds none puts an empty one, so that the others don't ask as well, asks all buckets of the group, and puts that.
If it dies meanwhile, the empty value's time ends, and the next one asks.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from kvstore.errors import FormatError
from kvstore.tiers.redis.accounting import BucketAccounting
from kvstore.tiers.redis.format import key_names, summary
from kvstore.tiers.redis.net.connection import Request
from kvstore.tiers.redis.net.resp import Reply
from kvstore.tiers.redis.net.topology import Topology

GROUP = 256
"""Buckets in one summary."""
_KEPT_PERIODS = 3
"""For so many rests what this node changed is newer than any summary: one may have been begun just before, by somebody
who took as long as it lives, and have lived as long again, until this node looked."""


class Summaries:
    """Safe for one thread.

    Args:
        topology: the servers where they are.
        accounting: gets what they say.
        seconds: between two looks.
    """

    def __init__(self, topology: Topology, accounting: BucketAccounting, seconds: float) -> None:
        self._topology = topology
        self._accounting = accounting
        self._seconds = seconds
        self._live_ms = b"%d" % max(1, int(seconds * 1000))

    def refresh(self, buckets: int, deadline: float) -> bool:
        """Learn what all buckets hold. False: of some nothing is known yet, since another node is just asking them."""
        names = [key_names.summary_name(buckets, group) for group in range(-(-buckets // GROUP))]
        since = self._accounting.updates
        found = self._exchange([[b"GET", name] for name in names], deadline)
        missing = [group for group, reply in enumerate(found) if reply is None]
        puts = [[b"SET", names[group], b"", b"NX", b"PX", self._live_ms] for group in missing]
        claimed = self._exchange(puts, deadline)
        mine = [group for group, reply in zip(missing, claimed, strict=True) if reply == b"OK"]
        before = time.monotonic() - _KEPT_PERIODS * self._seconds
        known = True
        for group, reply in enumerate(found):
            some = _members(group, buckets)
            if isinstance(reply, bytes) and reply:
                self._take(some, reply, before)
            elif group not in mine and (reply is None or reply == b""):
                known = known and all(self._accounting.knows(bucket) for bucket in some)
        self._ask([(names[group], _members(group, buckets)) for group in mine], since, deadline)
        return known

    def _ask(self, groups: Sequence[tuple[bytes, range]], since: int, deadline: float) -> None:
        """Ask the buckets of groups, and tell the other nodes."""
        asked = [bucket for _, some in groups for bucket in some]
        replies = self._exchange([[b"HGETALL", key_names.bucket_names(bucket)[2]] for bucket in asked], deadline)
        silent = set()
        for bucket, reply in zip(asked, replies, strict=True):
            if isinstance(reply, list):
                self._accounting.update(bucket, reply, since)
            else:
                silent.add(bucket)
        told = []
        for name, some in groups:
            if not silent.intersection(some):
                value = summary.encode([self._accounting.usage(bucket) for bucket in some])
                told.append([b"SET", name, value, b"XX", b"PX", self._live_ms])
        self._exchange(told, deadline)

    def _take(self, buckets: range, value: bytes, before: float) -> None:
        try:
            usages = summary.decode(value, len(buckets))
        except FormatError:
            return  # another version's: it leaves with its time, and somebody asks anew
        for bucket, usage in zip(buckets, usages, strict=True):
            self._accounting.summarised(bucket, usage, before)

    def _exchange(self, commands: Sequence[list[bytes]], deadline: float) -> list[Reply]:
        requests = [Request(self._topology.slot(command[1]), command) for command in commands]
        return self._topology.exchange(requests, deadline)


def _members(group: int, buckets: int) -> range:
    return range(group * GROUP, min((group + 1) * GROUP, buckets))
