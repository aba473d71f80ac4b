"""What is charged in each bucket, and to which namespace, as the servers last said. No I/O.

Who changes a bucket asks for its sums in the same request, so that what this node did is known at once; what other
nodes do is asked for now and then.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from dataclasses import dataclass

from kvstore.tiers.redis.format.key_names import NAMESPACE_FIELD
from kvstore.tiers.redis.format.summary import Usage
from kvstore.tiers.redis.net.resp import Reply


@dataclass(slots=True)
class _Usage(Usage):
    updated: int = 0
    """Which update said so."""
    changed_at: float = -math.inf
    """When this node changed the bucket last, by ``time.monotonic``."""


class BucketAccounting:
    """The last known usage of all buckets, and its sums. Safe for threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._buckets: dict[int, _Usage] = {}
        self._sum = _Usage()
        self._by_namespace: Counter[bytes] = Counter()

    @property
    def updates(self) -> int:
        """How many there were."""
        return self._sum.updated

    def update(self, bucket: int, reply: Reply, since: int | None = None) -> None:
        """A server said what a bucket holds.

        Args:
            bucket: its number.
            reply: to ``HGETALL`` of its sums; anything but a list says nothing.
            since: what ``updates`` was before asking, if others may have learnt something newer meanwhile: that stays.
                None: this node has changed the bucket.
        """
        if not isinstance(reply, list):
            return
        usage = _read(reply)
        with self._lock:
            old = self._buckets.get(bucket, _Usage())
            if since is not None and old.updated > since:
                return
            usage.changed_at = time.monotonic() if since is None else old.changed_at
            self._replace(bucket, old, usage)

    def summarised(self, bucket: int, said: Usage, before: float) -> None:
        """A summary says what a bucket holds, or held some time ago: what this node changed since ``before``
        (``time.monotonic``) stays."""
        with self._lock:
            old = self._buckets.get(bucket, _Usage())
            if old.changed_at < before:
                self._replace(bucket, old, _Usage(said.used_bytes, said.pages, said.by_namespace))

    def knows(self, bucket: int) -> bool:
        """Whether anything was said of a bucket."""
        with self._lock:
            return bucket in self._buckets

    def usage(self, bucket: int) -> Usage:
        """What a bucket holds, as far as is known. Not to be changed."""
        with self._lock:
            return self._buckets.get(bucket, _Usage())

    def forget_beyond(self, buckets: int) -> None:
        """There are only so many buckets."""
        with self._lock:
            for bucket in [bucket for bucket in self._buckets if bucket >= buckets]:
                self._add(self._buckets.pop(bucket), -1)

    def totals(self) -> tuple[int, int]:
        """Bytes and pages of all buckets."""
        with self._lock:
            return self._sum.used_bytes, self._sum.pages

    def used_by(self, namespace: bytes) -> int:
        """A namespace's bytes in all buckets."""
        with self._lock:
            return self._by_namespace[namespace]

    def buckets_of(self, namespace: bytes) -> dict[int, int]:
        """A namespace's bytes in each bucket that has some."""
        with self._lock:
            return {
                bucket: usage.by_namespace[namespace]
                for bucket, usage in self._buckets.items()
                if namespace in usage.by_namespace
            }

    def _replace(self, bucket: int, old: _Usage, usage: _Usage) -> None:
        self._sum.updated += 1
        usage.updated = self._sum.updated
        self._buckets[bucket] = usage
        self._add(old, -1)
        self._add(usage, 1)

    def _add(self, usage: _Usage, sign: int) -> None:
        self._sum.used_bytes += sign * usage.used_bytes
        self._sum.pages += sign * usage.pages
        for namespace, size in usage.by_namespace.items():
            self._by_namespace[namespace] += sign * size
            if not self._by_namespace[namespace]:
                del self._by_namespace[namespace]


def _read(reply: list[Reply]) -> _Usage:
    usage = _Usage()
    for name, value in zip(reply[::2], reply[1::2], strict=False):
        if not isinstance(name, bytes) or not isinstance(value, bytes) or not value.isdigit():
            continue
        if name == b"bytes":
            usage.used_bytes = int(value)
        elif name == b"pages":
            usage.pages = int(value)
        elif name.startswith(NAMESPACE_FIELD):
            usage.by_namespace[name[len(NAMESPACE_FIELD) :]] = int(value)
    return usage
