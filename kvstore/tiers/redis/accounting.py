"""What the buckets hold, as far as the servers have said so. No I/O.

Whoever changes a bucket asks for its books in the same request, so that what this node did is known at once; what
others do is asked for now and then.
"""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field

from kvstore.tiers.redis.format.key_names import NAMESPACE_FIELD
from kvstore.tiers.redis.net.resp import Reply


@dataclass(slots=True)
class _Book:
    used_bytes: int = 0
    pages: int = 0
    by_namespace: dict[bytes, int] = field(default_factory=dict)
    said: int = 0
    """When, as counted by ``BucketAccounting``."""


class BucketAccounting:
    """The last known books of all buckets, and their sums. Safe for threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._books: dict[int, _Book] = {}
        self._sum = _Book()
        self._by_namespace: Counter[bytes] = Counter()

    @property
    def now(self) -> int:
        """The time, counted in answers."""
        return self._sum.said

    def said(self, bucket: int, reply: Reply, asked: int | None = None) -> None:
        """A server told a bucket's books.

        Args:
            bucket: its number.
            reply: to ``HGETALL``; anything but a list tells nothing.
            asked: what ``now`` was before asking, if others may have told something newer since.
        """
        if not isinstance(reply, list):
            return
        book = _read(reply)
        with self._lock:
            old = self._books.get(bucket, _Book())
            if asked is not None and old.said > asked:
                return
            self._sum.said += 1
            book.said = self._sum.said
            self._books[bucket] = book
            self._add(old, -1)
            self._add(book, 1)

    def forget_beyond(self, buckets: int) -> None:
        """There are only so many buckets."""
        with self._lock:
            for bucket in [bucket for bucket in self._books if bucket >= buckets]:
                self._add(self._books.pop(bucket), -1)

    def totals(self) -> tuple[int, int]:
        """Bytes and pages of all buckets."""
        with self._lock:
            return self._sum.used_bytes, self._sum.pages

    def used_by(self, namespace: bytes) -> int:
        """A namespace's bytes in all buckets."""
        with self._lock:
            return self._by_namespace[namespace]

    def holding(self, namespace: bytes) -> dict[int, int]:
        """A namespace's bytes in each bucket that has some."""
        with self._lock:
            return {
                bucket: book.by_namespace[namespace]
                for bucket, book in self._books.items()
                if namespace in book.by_namespace
            }

    def _add(self, book: _Book, sign: int) -> None:
        self._sum.used_bytes += sign * book.used_bytes
        self._sum.pages += sign * book.pages
        for namespace, size in book.by_namespace.items():
            self._by_namespace[namespace] += sign * size
            if not self._by_namespace[namespace]:
                del self._by_namespace[namespace]


def _read(reply: list[Reply]) -> _Book:
    book = _Book()
    for name, value in zip(reply[::2], reply[1::2], strict=False):
        if not isinstance(name, bytes) or not isinstance(value, bytes) or not value.isdigit():
            continue
        if name == b"bytes":
            book.used_bytes = int(value)
        elif name == b"pages":
            book.pages = int(value)
        elif name.startswith(NAMESPACE_FIELD):
            book.by_namespace[name[len(NAMESPACE_FIELD) :]] = int(value)
    return book
