"""Pages over bulk connections: for nodes on other hosts. Where none can be made, or one breaks, gRPC's streams go on.

A connection that breaks in a load has brought some pages whole, and the rest is asked for again. One that breaks in a
store leaves a question, which the node answers (``Settle``): its pages are published all or none, and if none, they are
stored again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import groupby
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from kvstore.answers import RESERVED
from kvstore.client.bulk_pool import BulkPool
from kvstore.client.bulk_requests import BulkRequests
from kvstore.client.control import Connection
from kvstore.client.deadline import time_left
from kvstore.client.path import OpenedNamespace, Path
from kvstore.client.pending import PendingLoad, PendingStore
from kvstore.client.results import StoreResult
from kvstore.client.stream import LOAD_BATCHES, StreamPath, new_ticket, settle, store_request
from kvstore.errors import FormatError, InvalidRequestError, KVStoreError, UnavailableError, UnknownNamespaceError
from kvstore.v1 import cache_pb2 as pb
from kvstore.wire import AT_ONCE_BYTES, join_hashes

Bytes = npt.NDArray[np.uint8]
Answer = TypeVar("Answer")
_TRIES = 2
"""Connections that one load or reservation tries: the first may have been closed while it was idle."""


class BulkPath(Path):
    """:class:`kvstore.client.path.Path` over bulk connections. What it lends is this process's own memory.

    Args:
        connection: to the node.
        pool: bulk connections to the same node; closed with the path.
    """

    def __init__(self, connection: Connection, pool: BulkPool) -> None:
        self._connection = connection
        self._pool = pool
        self._stream = StreamPath(connection)

    def load_pages(self, namespace: OpenedNamespace) -> int:
        """Several batches: each is asked for before the one before it is here."""
        return LOAD_BATCHES * namespace.batch_pages

    def prepare_store(
        self, namespace: OpenedNamespace, hashes: Sequence[bytes], timeout: float, parent: bytes = b""
    ) -> PendingStore:
        """Reserve pages; they are sent when the store is completed."""
        reply = self._reserve(namespace, hashes, time.monotonic() + timeout, parent)
        page_bytes = namespace.layout.page_bytes
        pages = [np.empty(page_bytes, np.uint8) if outcome == RESERVED else None for outcome in reply.outcomes]
        wanted = [page for page in pages if page is not None]

        def finish(publish: bool) -> StoreResult:
            deadline = time.monotonic() + timeout
            if publish:
                return self._begin_put(namespace, reply, hashes, wanted, parent, deadline)()
            return self._stream.finish(reply.ticket, wanted, timeout, publish=False)

        return PendingStore(pages, reply.outcomes, finish)

    def store(
        self,
        namespace: OpenedNamespace,
        hashes: Sequence[bytes],
        pages: Sequence[Bytes],
        timeout: float,
        parent: bytes = b"",
    ) -> StoreResult:
        """Store whole pages, sent from where they are."""
        return self.begin_store(namespace, hashes, pages, timeout, parent)()

    def begin_store(
        self,
        namespace: OpenedNamespace,
        hashes: Sequence[bytes],
        pages: Sequence[Bytes],
        timeout: float,
        parent: bytes = b"",
    ) -> Callable[[], StoreResult]:
        """Send whole pages; what became of them is asked for later, while the next ones are sent by another
        connection."""
        deadline = time.monotonic() + timeout
        if sum(page.size for page in pages) <= AT_ONCE_BYTES:
            stored = self._store_at_once(namespace, hashes, pages, deadline, parent)
            return lambda: stored
        reply = self._reserve(namespace, hashes, deadline, parent)
        wanted = [page for page, outcome in zip(pages, reply.outcomes, strict=True) if outcome == RESERVED]
        tell = self._begin_put(namespace, reply, hashes, wanted, parent, deadline)
        return PendingStore([], reply.outcomes, lambda publish: tell()).complete

    def prepare_load(self, namespace: OpenedNamespace, hashes: Sequence[bytes], timeout: float) -> PendingLoad:
        """Receive the leading pages."""
        pages: list[Bytes] = [np.empty(namespace.layout.page_bytes, np.uint8) for _ in hashes]
        tiers = self.load(namespace, hashes, pages, timeout)
        for page in pages:
            page.flags.writeable = False
        return PendingLoad(pages[: len(tiers)], tiers, lambda: len(tiers))

    def load(
        self, namespace: OpenedNamespace, hashes: Sequence[bytes], into: Sequence[Bytes], timeout: float
    ) -> list[str]:
        """Receive the leading pages into place, and verify them."""
        deadline = time.monotonic() + timeout
        tiers: list[str] = []
        if not hashes:
            return tiers

        def ask(requests: BulkRequests) -> list[str]:
            starts = range(len(tiers), len(hashes), namespace.batch_pages)
            batches = [hashes[start : start + namespace.batch_pages] for start in starts]
            lists = [pb.PageList(fingerprint=namespace.fingerprint, hashes=join_hashes(batch)) for batch in batches]
            requests.load(lists, into[len(tiers) :], tiers, deadline)
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
            tell = self._send(request, pages, deadline)
            if tell is None:
                break
            counts = tell()
            if counts is None:
                settled = settle(self._connection, request.ticket, time_left(deadline))
                if not settled.stored and settled.present != len(pages):
                    continue
                counts = pb.StoreCounts(stored=settled.stored, present=settled.present)
            return StoreResult(counts.stored, counts.present, len(pages) - counts.stored - counts.present)
        return self._stream.store(namespace, hashes, pages, time_left(deadline), parent)

    def _begin_put(
        self,
        namespace: OpenedNamespace,
        reply: pb.PrepareStoreReply,
        hashes: Sequence[bytes],
        pages: Sequence[Bytes],
        parent: bytes,
        deadline: float,
    ) -> Callable[[], StoreResult]:
        """Send what was reserved. What it returns says what became of it, also when the connection breaks."""
        if not reply.ticket:
            return StoreResult
        tell = self._send(pb.StorePages(ticket=reply.ticket), pages, deadline)
        if tell is None:
            stored = self._stream.finish(reply.ticket, pages, time_left(deadline), publish=True)
            return lambda: stored

        def told() -> StoreResult:
            counts = tell()
            if counts is not None:
                # Fewer than were sent: the reservation lapsed, or an earlier node gave it.
                return StoreResult(counts.stored, counts.present, len(pages) - counts.stored - counts.present)
            settled = settle(self._connection, reply.ticket, time_left(deadline))
            if settled.stored + settled.present == len(pages):
                return StoreResult(settled.stored, settled.present)
            return self._store_again(namespace, reply.outcomes, hashes, pages, deadline, parent)

        return told

    def _send(
        self, request: pb.StorePages, pages: Sequence[Bytes], deadline: float
    ) -> Callable[[], pb.StoreCounts | None] | None:
        """Send payloads by a connection; None: there is none to be had. What it returns waits for the answer: None
        when the connection broke, or the pages did on their way."""
        lent = ExitStack()
        requests = lent.enter_context(self._pool.lent(deadline))
        if requests is None:
            return None
        broke = False
        try:
            requests.put(request, pages, deadline)
        except (UnavailableError, FormatError):
            broke = True
        except BaseException:
            lent.close()
            raise

        def tell() -> pb.StoreCounts | None:
            with lent:
                try:
                    return None if broke else requests.stored()
                except (UnavailableError, FormatError, InvalidRequestError):
                    return None
                finally:
                    if not requests.good:
                        self._pool.forget_idle()

        return tell

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
