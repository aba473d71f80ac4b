"""The bulk path: pages over TCP or TLS, for nodes on other hosts; over gRPC's streams where no connection can be made.

A connection that breaks in a load has brought some pages whole, and the rest is asked for again. One that breaks in a
store leaves a question, which the node answers (``Settle``): its pages are published all or none, and if none, they are
stored again.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
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
from kvstore.client.paths.transfer import Transfer
from kvstore.errors import (
    FormatError,
    InvalidRequestError,
    KVStoreError,
    UnauthenticatedError,
    UnavailableError,
    UnknownNamespaceError,
)
from kvstore.hashing import HASH_BYTES
from kvstore.host.cutting import cuttable
from kvstore.host.forking import register_forked
from kvstore.host.uninterrupted import uninterrupted
from kvstore.page_codes import NEWEST_TIER, StoreOutcome
from kvstore.v1 import cache_pb2 as pb
from kvstore.wire.messages import AT_ONCE_BYTES

Bytes = npt.NDArray[np.uint8]
Answer = TypeVar("Answer")
_TRIES = 2
"""Connections that one load or reservation tries: the first may have been closed while it was idle."""
LOAD_CONNECTIONS = 2
"""Connections that bring the batches of one load. (Of a store, the client begins one batch while another is sent.)"""


class BulkPath(BufferedPath):
    """:class:`kvstore.client.paths.path.Path` over bulk connections. The pool is closed with the path."""

    def __init__(self, connection: Connection, pool: BulkPool) -> None:
        self._connection = connection
        self._pool = pool
        self._grpc = GrpcPath(connection)
        self._lock = threading.Lock()
        self._under_way: dict[bytes, Future[StoreResult]] = {}
        """Batches that are being stored, by the fingerprint and hash of the last page of each."""
        register_forked(self)

    def forked(self) -> None:
        """In a child: the threads that store are its parent's."""
        self._lock = threading.Lock()
        self._under_way.clear()

    def load_pages(self, namespace: OpenedNamespace) -> int:
        """Several batches, by several connections."""
        return LOAD_BATCHES * namespace.batch_pages

    @uninterrupted
    def prepare_store(self, namespace: OpenedNamespace, transfer: Transfer) -> PendingStore:
        """Reserve pages; they are sent when the store is completed."""
        timeout = time_left(transfer.deadline)
        reply = self._reserve(namespace, transfer)
        pages, wanted = pages_to_fill(reply.outcomes, namespace.layout.page_bytes)

        @uninterrupted
        def finish(publish: bool) -> StoreResult:
            if publish:
                completion = transfer._replace(deadline=time.monotonic() + timeout)
                return self._put(namespace, completion, reply, wanted)
            return self._grpc.finish(reply.ticket, wanted, timeout, publish=False)

        return PendingStore(pages, reply.outcomes, finish)

    @uninterrupted
    def store(self, namespace: OpenedNamespace, transfer: Transfer) -> StoreResult:
        """Store whole pages, sent from where they are."""
        if self._is_sent_at_once(transfer):
            return self._store_at_once(namespace, transfer)
        reply = self._reserve(namespace, transfer)
        put = partial(self._put, namespace, transfer, reply, pages_to_send(transfer.pages, reply.outcomes))
        return PendingStore([], reply.outcomes, lambda publish: put()).complete()

    @uninterrupted
    def begin_store(
        self, namespace: OpenedNamespace, transfer: Transfer, following: int = 0
    ) -> Callable[[], StoreResult]:
        """Send whole pages by a thread of its own: the next ones may be sent meanwhile, by another connection."""
        if self._is_sent_at_once(transfer):
            self._await_parent(namespace, transfer)
            return super().begin_store(namespace, transfer)
        reply = self._reserve(namespace, transfer)
        await_parent = partial(self._await_parent, namespace, transfer)
        wanted = pages_to_send(transfer.pages, reply.outcomes)
        last = namespace.fingerprint + transfer.hashes[-HASH_BYTES:]
        sent = in_background(partial(self._put, namespace, transfer, reply, wanted, await_parent))
        with self._lock:
            self._under_way[last] = sent
        sent.add_done_callback(partial(self._ended, last))
        return PendingStore([], reply.outcomes, lambda publish: sent.result()).complete

    def _is_sent_at_once(self, transfer: Transfer) -> bool:
        """Whether pages go with the request that stores them."""
        return self._grpc.at_once and sum(page.size for page in transfer.pages) <= AT_ONCE_BYTES

    def _ended(self, last: bytes, sent: Future[StoreResult]) -> None:
        with self._lock:  # another call may be sending the same page
            if self._under_way.get(last) is sent:
                del self._under_way[last]

    def _await_parent(self, namespace: OpenedNamespace, transfer: Transfer) -> None:
        """Return when the pages before these are published, if they are being sent: heads come before their tails."""
        before = self._under_way.get(namespace.fingerprint + transfer.parent)
        if before is not None:
            given_up: Future[StoreResult] = Future()
            with cuttable(given_up.cancel):
                wait([before, given_up], max(0.0, transfer.deadline - time.monotonic()), FIRST_COMPLETED)

    @uninterrupted
    def load(self, namespace: OpenedNamespace, transfer: Transfer) -> list[str]:
        """Receive the leading pages into place, and verify them."""
        size = namespace.batch_pages

        def load_batch(place: int) -> tuple[list[str], bool]:
            batch = transfer.part(place * size, (place + 1) * size)
            tiers = self._load_batch(namespace, batch)
            return tiers, len(tiers) == batch.page_count

        return load_in_parallel(load_batch, math.ceil(transfer.page_count / size), LOAD_CONNECTIONS)

    def _load_batch(self, namespace: OpenedNamespace, batch: Transfer) -> list[str]:
        tiers: list[str] = []

        def ask(requests: BulkRequests) -> list[str]:
            rest = batch.part(len(tiers), batch.page_count)
            asked = pb.PageList(fingerprint=namespace.fingerprint, hashes=rest.hashes, newest_tier=NEWEST_TIER)
            requests.load(asked, rest.pages, tiers, rest.deadline)
            return tiers

        try:
            if self._tried(ask, batch.deadline) is None:
                tiers += self._grpc.load(namespace, batch.part(len(tiers), batch.page_count))
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

    def _reserve(self, namespace: OpenedNamespace, transfer: Transfer) -> pb.PrepareStoreReply:
        request, deadline = store_request(namespace, transfer), transfer.deadline
        reply = self._tried(lambda requests: requests.reserve(request, deadline), deadline)
        if reply is None:
            reply = self._connection.call(self._connection.stub.PrepareStore, request, time_left(deadline))
        return reply

    def _store_at_once(self, namespace: OpenedNamespace, transfer: Transfer) -> StoreResult:
        """Send pages with the request that stores them."""
        pages, deadline = transfer.pages, transfer.deadline
        for _ in range(_TRIES):
            request = pb.StorePages(ticket=new_ticket(), request=store_request(namespace, transfer))
            with self._pool.lent(deadline) as requests:
                if requests is None:
                    break
                counts = self._sent(requests, request, pages, deadline)
            if counts is None:
                settled = settle(self._connection, request.ticket, time_left(deadline))
                if not settled.stored and settled.present != len(pages):
                    continue
                counts = pb.StoreCounts(stored=settled.stored, present=settled.present)
            elif not knows(counts):
                self._grpc.at_once = False
                return self.store(namespace, transfer)
            return StoreResult(counts.stored, counts.present, len(pages) - counts.stored - counts.present)
        return self._grpc.store(namespace, transfer)

    def _put(
        self,
        namespace: OpenedNamespace,
        transfer: Transfer,
        reply: pb.PrepareStoreReply,
        wanted: Sequence[Bytes],
        before_last: Callable[[], object] | None = None,
    ) -> StoreResult:
        """Send the payloads of the slots that ``reply`` reserves, ``wanted``, and say what became of them; find that
        out when the connection breaks."""
        deadline = transfer.deadline
        if not reply.ticket:
            return StoreResult()
        with self._pool.lent(deadline) as requests:
            if requests is None:
                return self._grpc.finish(reply.ticket, wanted, time_left(deadline), publish=True)
            counts = self._sent(requests, pb.StorePages(ticket=reply.ticket), wanted, deadline, before_last)
        if counts is not None:
            # Fewer than were sent: the reservation lapsed, or an earlier node gave it.
            return StoreResult(counts.stored, counts.present, len(wanted) - counts.stored - counts.present)
        settled = settle(self._connection, reply.ticket, time_left(deadline))
        if settled.stored + settled.present == len(wanted):
            return StoreResult(settled.stored, settled.present)
        return self._store_again(namespace, transfer, reply.outcomes, wanted)

    def _sent(
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
        self, namespace: OpenedNamespace, transfer: Transfer, outcomes: bytes, wanted: Sequence[Bytes]
    ) -> StoreResult:
        """Store what was reserved once more, through gRPC: each run of neighbours by a call of its own, since the page
        before its first one is another."""
        result = StoreResult()
        start = sent = 0
        for reserved, run in groupby(outcomes, lambda outcome: outcome == StoreOutcome.RESERVED):
            count = len(list(run))
            end = start + count
            if reserved:
                part = transfer.part(start, end)._replace(pages=wanted[sent : sent + count])
                try:
                    result += self._grpc.store(namespace, part)
                except UnknownNamespaceError:  # cleared meanwhile: nothing of it is wanted any more
                    result += StoreResult(refused=count)
                sent += count
            start = end
        return result
