"""The gRPC path: pages as raw messages of a stream, where neither an arena nor a bulk connection is to be had."""

from __future__ import annotations

import math
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import grpc
import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError

from kvstore.client.paths.buffered import BufferedPath, pages_to_fill, pages_to_send
from kvstore.client.paths.control import Connection, Metadata
from kvstore.client.paths.deadline import time_left
from kvstore.client.paths.path import OpenedNamespace
from kvstore.client.paths.pending import PendingStore
from kvstore.client.paths.results import StoreResult
from kvstore.client.paths.transfer import Transfer
from kvstore.errors import InvalidRequestError, KVStoreError, UnavailableError
from kvstore.hashing import checksum_of
from kvstore.host.cutting import begin_cuttable, cuttable, work_here
from kvstore.host.uninterrupted import uninterrupted
from kvstore.limits import LONGEST_LEASE, MOST_LOOKUP_PAGES
from kvstore.page_codes import NEWEST_TIER, TIER_NAMES
from kvstore.v1 import bulk_pb2
from kvstore.v1 import cache_pb2 as pb
from kvstore.wire.messages import AT_ONCE_BYTES, fill, raw_messages

Bytes = npt.NDArray[np.uint8]
LOAD_BATCHES = 16
"""Batches that one request for pages may be of: few enough for the deadline that a stream must have."""


class GrpcPath(BufferedPath):
    """:class:`kvstore.client.paths.path.Path` over the payload streams."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.at_once = True
        """Whether the node knows stores that reserve for themselves, as far as is known."""

    def load_pages(self, namespace: OpenedNamespace) -> int:
        """Several batches, one behind the other in one stream."""
        return min(LOAD_BATCHES * namespace.batch_pages, MOST_LOOKUP_PAGES)

    @uninterrupted
    def prepare_store(self, namespace: OpenedNamespace, transfer: Transfer) -> PendingStore:
        """Reserve pages; they are sent when the store is completed."""
        timeout = time_left(transfer.deadline)
        ticket, outcomes = self._reserve(namespace, transfer)
        pages, reserved = pages_to_fill(outcomes, namespace.layout.page_bytes)
        return PendingStore(pages, outcomes, lambda publish: self.finish(ticket, reserved, timeout, publish=publish))

    @uninterrupted
    def store(self, namespace: OpenedNamespace, transfer: Transfer) -> StoreResult:
        """Store whole pages, sent from where they are."""
        pages, deadline = transfer.pages, transfer.deadline
        if self.at_once and sum(page.size for page in pages) <= AT_ONCE_BYTES:
            request = pb.StorePages(ticket=new_ticket(), request=store_request(namespace, transfer))
            counts: list[pb.StoreCounts] = []

            def send() -> pb.StoreCounts:
                counts.append(self._send(request, pages, deadline))
                return counts[0]

            result = self._finish(request, len(pages), send, deadline)
            if not counts or knows(counts[0]):
                return result
            self.at_once = False
        ticket, outcomes = self._reserve(namespace, transfer)
        wanted = pages_to_send(pages, outcomes)
        return PendingStore(
            [], outcomes, lambda publish: self.finish(ticket, wanted, time_left(deadline), publish=publish)
        ).complete()

    @uninterrupted
    def begin_store(
        self, namespace: OpenedNamespace, transfer: Transfer, following: int = 0
    ) -> Callable[[], StoreResult]:
        """Send whole pages. What became of the last ones is waited for later, while the next ones are sent."""
        pages, deadline = transfer.pages, transfer.deadline
        if self.at_once and sum(page.size for page in pages) <= AT_ONCE_BYTES:
            return super().begin_store(namespace, transfer)
        ticket, outcomes = self._reserve(namespace, transfer)
        wanted = pages_to_send(pages, outcomes)
        request = pb.StorePages(ticket=ticket)
        shown = self._connection.metadata
        begun = [self._begin_send(request, wanted, deadline)] if ticket else []

        def tell() -> pb.StoreCounts:
            # Who asks again has another token by now: the node took nothing from the one before.
            return begun.pop()() if begun else self._send(request, wanted, deadline)

        def finish(publish: bool) -> StoreResult:
            return self._finish(request, len(wanted), tell, deadline, shown) if ticket else StoreResult()

        return PendingStore([], outcomes, finish).complete

    @uninterrupted
    def load(self, namespace: OpenedNamespace, transfer: Transfer) -> list[str]:
        """Receive the leading pages into place, and verify them."""
        request = pb.LoadPages(
            pages=pb.PageList(fingerprint=namespace.fingerprint, hashes=transfer.hashes, newest_tier=NEWEST_TIER)
        )
        timeout = time_left(transfer.deadline)
        return self._connection.as_known(lambda: self._receive(request, transfer.pages, timeout))

    def _receive(self, request: pb.LoadPages, into: Sequence[Bytes], timeout: float) -> list[str]:
        tiers: list[str] = []
        try:
            with self._connection.errors():
                messages = self._connection.load(
                    request, timeout=min(timeout, LONGEST_LEASE), metadata=self._connection.metadata
                )
                with cuttable(messages.cancel):
                    while _receive_run(messages, into[len(tiers) :], tiers):
                        pass
                messages.cancel()  # behind its end this does nothing
        except KVStoreError:
            if not tiers:
                raise
        return tiers

    def close(self) -> None:
        """Nothing: the connection is the client's."""

    @uninterrupted
    def finish(self, ticket: int, pages: Sequence[Bytes], timeout: float, *, publish: bool) -> StoreResult:
        """Send the payloads of reserved slots, to be published, or give the slots up."""
        if not ticket:
            return StoreResult()
        if not publish:
            self._connection.call(
                self._connection.stub.CompleteStore, pb.CompleteStoreRequest(ticket=ticket, publish=False), timeout
            )
            return StoreResult(refused=len(pages))
        request, deadline = pb.StorePages(ticket=ticket), time.monotonic() + timeout
        return self._finish(request, len(pages), lambda: self._send(request, pages, deadline), deadline)

    def _reserve(self, namespace: OpenedNamespace, transfer: Transfer) -> tuple[int, bytes]:
        request = store_request(namespace, transfer)
        reply = self._connection.call(self._connection.stub.PrepareStore, request, time_left(transfer.deadline))
        return reply.ticket, reply.outcomes

    def _send(self, request: pb.StorePages, pages: Sequence[Bytes], deadline: float) -> pb.StoreCounts:
        """Send payloads, and wait for what became of them."""
        timeout = min(time_left(deadline), LONGEST_LEASE)
        messages = _store_messages(request, pages)
        if work_here() is None:
            return self._connection.store(messages, timeout=timeout, metadata=self._connection.metadata)
        counts: pb.StoreCounts = self._connection.awaited(
            self._connection.store.future(messages, timeout=timeout, metadata=self._connection.metadata)
        )
        return counts

    def _begin_send(
        self, request: pb.StorePages, pages: Sequence[Bytes], deadline: float
    ) -> Callable[[], pb.StoreCounts]:
        """Send payloads. What it returns waits for what became of them."""
        sent = threading.Event()
        messages = _store_messages(request, pages, sent.set)
        timeout = min(time_left(deadline), LONGEST_LEASE)
        with self._connection.errors():
            call = self._connection.store.future(messages, timeout=timeout, metadata=self._connection.metadata)
        begin_cuttable(call.cancel)
        call.add_done_callback(lambda call: sent.set())
        sent.wait()  # the call has a deadline

        def tell() -> pb.StoreCounts:
            try:
                return call.result()
            except grpc.FutureCancelledError as error:
                raise UnavailableError(f"the client of {self._connection.name} is closed") from error

        return tell

    def _finish(
        self,
        request: pb.StorePages,
        pages: int,
        tell: Callable[[], pb.StoreCounts],
        deadline: float,
        shown: Metadata | None = None,
    ) -> StoreResult:
        """What became of pages that were sent. A connection that breaks leaves a question, which the node answers when
        it can be reached again in time."""

        def ask() -> pb.StoreCounts:
            with self._connection.errors():
                return tell()

        try:
            counts = self._connection.as_known(ask, shown)
        except UnavailableError:
            settled = settle(self._connection, request.ticket, time_left(deadline))
            if not settled.stored and settled.present != pages:
                raise
            return StoreResult(settled.stored, settled.present, pages - settled.stored - settled.present)
        told = counts.stored + counts.present + counts.refused
        if not told:  # it lapsed, or an earlier node gave it
            return StoreResult(refused=pages)
        if told != pages:
            raise UnavailableError(f"{self._connection.name} lost the reservation")
        return StoreResult(counts.stored, counts.present, counts.refused)


def knows(counts: pb.StoreCounts) -> bool:
    """Whether a node that was sent pages with the request that stores them knew it: an older one counts nothing."""
    return bool(counts.stored or counts.present or counts.refused)


def store_request(namespace: OpenedNamespace, transfer: Transfer) -> pb.PrepareStoreRequest:
    """What reserves slots for a transfer's pages until its deadline."""
    return pb.PrepareStoreRequest(
        pages=pb.PageList(fingerprint=namespace.fingerprint, hashes=transfer.hashes, newest_tier=NEWEST_TIER),
        ttl_ms=math.ceil(min(time_left(transfer.deadline), LONGEST_LEASE) * 1000),
        parent=transfer.parent,
    )


def new_ticket() -> int:
    """The number of a store that reserves for itself: nobody else can guess it."""
    return secrets.randbits(63) or 1


def settle(connection: Connection, ticket: int, timeout: float) -> bulk_pb2.SettleReply:
    """Ask what became of payloads that were sent, when the answer was lost. They are not published any more.

    Raises:
        UnavailableError: the node can't be reached.
        DeadlineError: it did not answer in time.
    """
    reply: bulk_pb2.SettleReply = connection.call(
        connection.bulk.Settle, bulk_pb2.SettleRequest(ticket=ticket), timeout
    )
    return reply


def _receive_run(messages: Iterator[bytes], into: Sequence[Bytes], tiers: list[str]) -> bool:
    """Receive one run of pages into place, and add the tiers of those that came whole and right, also when the stream
    breaks. False: there is no more."""
    header = next(messages, None)
    if header is None:
        return False
    try:
        run = pb.PageRun.FromString(header)
    except DecodeError:
        return False  # whatever this is, it is not the pages
    targets = into[: len(run.checksums)]
    if not len(run.checksums) == len(run.tiers) == len(targets) or not targets:
        return False
    made: list[int] = []
    right = 0
    try:
        fill(targets, messages, made)
    except InvalidRequestError:
        return False
    finally:
        for mine, checksum, tier in zip(made, run.checksums, run.tiers, strict=False):
            if mine != checksum or tier >= len(TIER_NAMES):
                break
            tiers.append(TIER_NAMES[tier] or "")
            right += 1
    return right == len(targets)


def _store_messages(
    request: pb.StorePages, pages: Sequence[Bytes], copied: Callable[[], None] = lambda: None
) -> Iterator[bytes]:
    """The checksum of each page is made when the page is sent, and goes with the others behind the last one. ``copied``
    is told when the pages are not looked at any more."""
    made: list[int] = []

    def summed() -> Iterator[Bytes]:
        for page in pages:
            made.append(checksum_of(page))
            yield page

    yield request.SerializeToString()
    yield from raw_messages(summed())
    copied()
    yield pb.StorePages(ticket=request.ticket, checksums=made).SerializeToString()
