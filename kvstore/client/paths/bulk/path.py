"""Pages over bulk connections: for nodes on other hosts. Where none can be made, or one breaks, gRPC's streams go on.

A connection that breaks in a load has brought some pages whole, and the rest is asked for again. One that breaks in a
store leaves a question, which the node answers (``Settle``): its pages are published all or none, and if none, they are
stored again.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from functools import partial
from itertools import groupby
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from kvstore.client.paths.buffered import BufferedPath, pages_to_fill, pages_to_send
from kvstore.client.paths.bulk.parallel import in_background, load_in_parallel
from kvstore.client.paths.bulk.pool import BulkPool
from kvstore.client.paths.bulk.requests import BulkRequests
from kvstore.client.paths.control import Connection
from kvstore.client.paths.deadline import time_left
from kvstore.client.paths.grpc import (
    LOAD_BATCHES,
    GrpcPath,
    knows,
    new_ticket,
    settle,
    store_request,
)
from kvstore.client.paths.path import OpenedNamespace
from kvstore.client.paths.pending import PendingStore
from kvstore.client.paths.results import StoreResult
from kvstore.errors import (
    FormatError,
    InvalidRequestError,
    KVStoreError,
    UnauthenticatedError,
    UnavailableError,
    UnknownNamespaceError,
)
from kvstore.host.forking import tell_children
from kvstore.host.uninterrupted import uninterrupted
from kvstore.limits import RESERVED
from kvstore.v1 import cache_pb2 as pb
from kvstore.wire.messages import AT_ONCE_BYTES, join_hashes

Bytes = npt.NDArray[np.uint8]
Answer = TypeVar("Answer")
_TRIES = 2
"""Connections that one load or reservation tries: the first may have been closed while it was idle."""
STREAMS = 2
"""Connections that bring the batches of one load. (Of a store, the client begins one batch beside another.)"""


class BulkPath(BufferedPath):
    """:class:`kvstore.client.paths.path.Path` over bulk connections. What it lends is this process's own memory.

    Args:
        connection: to the node.
        pool: bulk connections to the same node; closed with the path.
    """

    def __init__(self, connection: Connection, pool: BulkPool) -> None:
        self._connection = connection
        self._pool = pool
        self._stream = GrpcPath(connection)
        self._lock = threading.Lock()
        self._under_way: dict[bytes, Future[StoreResult]] = {}
        """Batches that are being stored, by the fingerprint and hash of the last page of each."""
        tell_children(self)

    def forked(self) -> None:
        """In a child: the threads that store are its parent's."""
        self._lock = threading.Lock()
        self._under_way.clear()

    def load_pages(self, namespace: OpenedNamespace) -> int:
        """Several batches, by several connections."""
        return LOAD_BATCHES * namespace.batch_pages

    @uninterrupted
    def prepare_store(
        self, namespace: OpenedNamespace, hashes: Sequence[bytes], timeout: float, parent: bytes = b""
    ) -> PendingStore:
        """Reserve pages; they are sent when the store is completed."""
        reply = self._reserve(namespace, hashes, time.monotonic() + timeout, parent)
        pages, wanted = pages_to_fill(reply.outcomes, namespace.layout.page_bytes)

        @uninterrupted
        def finish(publish: bool) -> StoreResult:
            deadline = time.monotonic() + timeout
            if publish:
                return self._put(namespace, reply, hashes, wanted, parent, deadline)
            return self._stream.finish(reply.ticket, wanted, timeout, publish=False)

        return PendingStore(pages, reply.outcomes, finish)

    @uninterrupted
    def store(
        self,
        namespace: OpenedNamespace,
        hashes: Sequence[bytes],
        pages: Sequence[Bytes],
        timeout: float,
        parent: bytes = b"",
    ) -> StoreResult:
        """Store whole pages, sent from where they are."""
        deadline = time.monotonic() + timeout
        if self._stream.at_once and sum(page.size for page in pages) <= AT_ONCE_BYTES:
            return self._store_at_once(namespace, hashes, pages, deadline, parent)
        reply = self._reserve(namespace, hashes, deadline, parent)
        wanted = pages_to_send(pages, reply.outcomes)
        put = partial(self._put, namespace, reply, hashes, wanted, parent, deadline)
        return PendingStore([], reply.outcomes, lambda publish: put()).complete()

    @uninterrupted
    def begin_store(
        self,
        namespace: OpenedNamespace,
        hashes: Sequence[bytes],
        pages: Sequence[Bytes],
        timeout: float,
        parent: bytes = b"",
        following: int = 0,
    ) -> Callable[[], StoreResult]:
        """Send whole pages by a thread of its own: the next ones may be sent beside them, by another connection."""
        deadline = time.monotonic() + timeout
        if self._stream.at_once and sum(page.size for page in pages) <= AT_ONCE_BYTES:
            self._await(namespace, parent, deadline)
            return super().begin_store(namespace, hashes, pages, time_left(deadline), parent)
        reply = self._reserve(namespace, hashes, deadline, parent)
        wanted = pages_to_send(pages, reply.outcomes)
        await_before = partial(self._await, namespace, parent, deadline)
        put = partial(self._put, namespace, reply, hashes, wanted, parent, deadline, await_before)
        last = namespace.fingerprint + hashes[-1]
        sent = in_background(put)
        with self._lock:
            self._under_way[last] = sent
        sent.add_done_callback(partial(self._ended, last))
        return PendingStore([], reply.outcomes, lambda publish: sent.result()).complete

    def _ended(self, last: bytes, sent: Future[StoreResult]) -> None:
        with self._lock:  # another call may be sending the same page
            if self._under_way.get(last) is sent:
                del self._under_way[last]

    def _await(self, namespace: OpenedNamespace, parent: bytes, deadline: float) -> None:
        """Return when the pages before these are published, if they are being sent: heads come before their tails."""
        before = self._under_way.get(namespace.fingerprint + parent)
        if before is not None:
            wait([before], max(0.0, deadline - time.monotonic()))

    @uninterrupted
    def load(
        self, namespace: OpenedNamespace, hashes: Sequence[bytes], into: Sequence[Bytes], timeout: float
    ) -> list[str]:
        """Receive the leading pages into place, and verify them."""
        deadline = time.monotonic() + timeout
        size = namespace.batch_pages

        def load_batch(place: int) -> tuple[list[str], bool]:
            part = slice(place * size, (place + 1) * size)
            tiers = self._load_batch(namespace, hashes[part], into[part], deadline)
            return tiers, len(tiers) == len(hashes[part])

        return load_in_parallel(load_batch, math.ceil(len(hashes) / size), STREAMS)

    def _load_batch(
        self, namespace: OpenedNamespace, hashes: Sequence[bytes], into: Sequence[Bytes], deadline: float
    ) -> list[str]:
        tiers: list[str] = []

        def ask(requests: BulkRequests) -> list[str]:
            asked = pb.PageList(fingerprint=namespace.fingerprint, hashes=join_hashes(hashes[len(tiers) :]))
            requests.load(asked, into[len(tiers) :], tiers, deadline)
            return tiers

        try:
            if self._tried(ask, deadline) is None:
                behind = len(tiers)
                tiers += self._stream.load(namespace, hashes[behind:], into[behind:], time_left(deadline))
        except KVStoreError:
            if not tiers:
                raise
        return tiers

    def close(self) -> None:
        """Close the bulk connections. The gRPC connection is the client's."""
        self._pool.close()

    def _tried(self, ask: Callable[[BulkRequests], Answer], deadline: float) -> Answer | None:
        """The answer of a bulk connection; None when there is none, or when they break."""
        for _ in range(_TRIES):
            with self._pool.lent(deadline) as requests:
                if requests is None:
                    return None
                try:
                    return ask(requests)
                except (UnavailableError, FormatError):
                    if requests.good:  # the node's own answer
                        raise
                    self._pool.forget_idle()
                except UnauthenticatedError:  # it was opened with a token that is gone; the file may have another one
                    requests.good = False
                    self._pool.forget_idle()
        return None

    def _reserve(
        self, namespace: OpenedNamespace, hashes: Sequence[bytes], deadline: float, parent: bytes
    ) -> pb.PrepareStoreReply:
        request = store_request(namespace, hashes, deadline, parent)
        reply = self._tried(lambda requests: requests.reserve(request, deadline), deadline)
        if reply is None:
            reply = self._connection.call(self._connection.stub.PrepareStore, request, time_left(deadline))
        return reply

    def _store_at_once(
        self,
        namespace: OpenedNamespace,
        hashes: Sequence[bytes],
        pages: Sequence[Bytes],
        deadline: float,
        parent: bytes,
    ) -> StoreResult:
        """Send pages with the request that stores them."""
        for _ in range(_TRIES):
            request = pb.StorePages(ticket=new_ticket(), request=store_request(namespace, hashes, deadline, parent))
            with self._pool.lent(deadline) as requests:
                if requests is None:
                    break
                counts = self._told(requests, request, pages, deadline)
            if counts is None:
                settled = settle(self._connection, request.ticket, time_left(deadline))
                if not settled.stored and settled.present != len(pages):
                    continue
                counts = pb.StoreCounts(stored=settled.stored, present=settled.present)
            elif not knows(counts):
                self._stream.at_once = False
                return self.store(namespace, hashes, pages, time_left(deadline), parent)
            return StoreResult(counts.stored, counts.present, len(pages) - counts.stored - counts.present)
        return self._stream.store(namespace, hashes, pages, time_left(deadline), parent)

    def _put(
        self,
        namespace: OpenedNamespace,
        reply: pb.PrepareStoreReply,
        hashes: Sequence[bytes],
        pages: Sequence[Bytes],
        parent: bytes,
        deadline: float,
        before_last: Callable[[], object] | None = None,
    ) -> StoreResult:
        """Send what was reserved, and say what became of it; find that out when the connection breaks."""
        if not reply.ticket:
            return StoreResult()
        with self._pool.lent(deadline) as requests:
            if requests is None:
                return self._stream.finish(reply.ticket, pages, time_left(deadline), publish=True)
            counts = self._told(requests, pb.StorePages(ticket=reply.ticket), pages, deadline, before_last)
        if counts is not None:
            # Fewer than were sent: the reservation lapsed, or an earlier node gave it.
            return StoreResult(counts.stored, counts.present, len(pages) - counts.stored - counts.present)
        settled = settle(self._connection, reply.ticket, time_left(deadline))
        if settled.stored + settled.present == len(pages):
            return StoreResult(settled.stored, settled.present)
        return self._store_again(namespace, reply.outcomes, hashes, pages, deadline, parent)

    def _told(
        self,
        requests: BulkRequests,
        request: pb.StorePages,
        pages: Sequence[Bytes],
        deadline: float,
        before_last: Callable[[], object] | None = None,
    ) -> pb.StoreCounts | None:
        """Send payloads, and receive what became of them; None when the connection broke, or the pages on their way."""
        try:
            requests.put(request, pages, deadline, before_last)
            return requests.stored()
        except UnauthenticatedError:  # as above
            requests.good = False
            self._pool.forget_idle()
            return None
        except (UnavailableError, FormatError, InvalidRequestError):
            if not requests.good:
                self._pool.forget_idle()
            return None

    def _store_again(
        self,
        namespace: OpenedNamespace,
        outcomes: bytes,
        hashes: Sequence[bytes],
        pages: Sequence[Bytes],
        deadline: float,
        parent: bytes,
    ) -> StoreResult:
        """Store what was reserved once more, through gRPC: each run of neighbours by a call of its own, since the page
        before its first one is another."""
        result = StoreResult()
        start = sent = 0
        for reserved, run in groupby(outcomes, lambda outcome: outcome == RESERVED):
            count = len(list(run))
            end = start + count
            if reserved:
                before = hashes[start - 1] if start else parent
                some = pages[sent : sent + count]
                try:
                    result += self._stream.store(namespace, hashes[start:end], some, time_left(deadline), before)
                except UnknownNamespaceError:  # cleared meanwhile: nothing of it is wanted any more
                    result += StoreResult(refused=count)
                sent += count
            start = end
        return result
