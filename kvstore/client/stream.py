"""Pages as raw gRPC messages: for nodes whose arena this process can't map."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence

import grpc
import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError

from kvstore.answers import LONGEST_TICKET, RESERVED, TIER_NAMES
from kvstore.checksum import checksum_of
from kvstore.client.control import Connection
from kvstore.client.deadline import time_left
from kvstore.client.path import OpenedNamespace, Path
from kvstore.client.pending import PendingLoad, PendingStore
from kvstore.client.results import StoreResult
from kvstore.errors import InvalidRequestError, KVStoreError, UnavailableError
from kvstore.v1 import bulk_pb2
from kvstore.v1 import cache_pb2 as pb
from kvstore.v1.bulk_pb2_grpc import BulkStub
from kvstore.wire import LOAD_STREAM, STORE_STREAM, fill, join_hashes, raw_messages

Bytes = npt.NDArray[np.uint8]


class StreamPath(Path):
    """:class:`kvstore.client.path.Path` over the payload streams. What it lends is this process's own memory."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._load: grpc.UnaryStreamMultiCallable[pb.LoadPages, bytes] = connection.channel.unary_stream(
            LOAD_STREAM, request_serializer=pb.LoadPages.SerializeToString, response_deserializer=None
        )
        self._store: grpc.StreamUnaryMultiCallable[bytes, pb.StoreCounts] = connection.channel.stream_unary(
            STORE_STREAM, request_serializer=None, response_deserializer=pb.StoreCounts.FromString
        )

    def prepare_store(
        self, namespace: OpenedNamespace, hashes: Sequence[bytes], timeout: float, parent: bytes = b""
    ) -> PendingStore:
        """Reserve pages; they are sent when the store is completed."""
        ticket, outcomes = self._reserve(namespace, hashes, timeout, parent)
        page_bytes = namespace.layout.page_bytes
        pages = [np.empty(page_bytes, np.uint8) if outcome == RESERVED else None for outcome in outcomes]
        reserved = [page for page in pages if page is not None]
        return PendingStore(pages, outcomes, lambda publish: self.finish(ticket, reserved, timeout, publish=publish))

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
        ticket, outcomes = self._reserve(namespace, hashes, timeout, parent)
        wanted = [page for page, outcome in zip(pages, outcomes, strict=True) if outcome == RESERVED]
        return PendingStore(
            [], outcomes, lambda publish: self.finish(ticket, wanted, time_left(deadline), publish=publish)
        ).complete()

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
        request = pb.LoadPages(pages=pb.PageList(fingerprint=namespace.fingerprint, hashes=join_hashes(hashes)))
        tiers: list[str] = []
        try:
            with self._connection.errors():
                messages = self._load(request, timeout=min(timeout, LONGEST_TICKET), metadata=self._connection.metadata)
                while _receive_run(messages, into[len(tiers) :], tiers):
                    pass
                messages.cancel()  # behind its end this does nothing
        except KVStoreError:
            if not tiers:
                raise
        return tiers

    def close(self) -> None:
        """Nothing: the connection is the client's."""

    def _reserve(
        self, namespace: OpenedNamespace, hashes: Sequence[bytes], timeout: float, parent: bytes
    ) -> tuple[int, bytes]:
        reply = self._connection.call(
            self._connection.stub.PrepareStore,
            pb.PrepareStoreRequest(
                pages=pb.PageList(fingerprint=namespace.fingerprint, hashes=join_hashes(hashes)),
                ttl_ms=math.ceil(min(timeout, LONGEST_TICKET) * 1000),
                parent=parent,
            ),
            timeout,
        )
        return reply.ticket, reply.outcomes

    def finish(self, ticket: int, pages: Sequence[Bytes], timeout: float, *, publish: bool) -> StoreResult:
        """Send the payloads of reserved slots, to be published, or give the slots up.

        A connection that breaks leaves a question, which the node answers when it can be reached again in time.
        """
        if not ticket:
            return StoreResult()
        deadline = time.monotonic() + timeout
        if not publish:
            request = pb.CompleteStoreRequest(ticket=ticket, publish=False)
            self._connection.call(self._connection.stub.CompleteStore, request, timeout)
            return StoreResult(refused=len(pages))
        try:
            with self._connection.errors():
                counts = self._store(
                    _store_messages(ticket, pages),
                    timeout=min(timeout, LONGEST_TICKET),
                    metadata=self._connection.metadata,
                )
        except UnavailableError:
            settled = settle(self._connection, ticket, time_left(deadline))
            if settled.stored + settled.present != len(pages):
                raise
            return StoreResult(settled.stored, settled.present)
        if not counts.stored + counts.present + counts.refused:  # it lapsed, or an earlier node gave it
            return StoreResult(refused=len(pages))
        if counts.stored + counts.present + counts.refused != len(pages):
            raise UnavailableError(f"{self._connection.name} lost the reservation")
        return StoreResult(counts.stored, counts.present, counts.refused)


def settle(connection: Connection, ticket: int, timeout: float) -> bulk_pb2.SettleReply:
    """Ask what became of payloads that were sent, when the answer was lost. They are not published any more.

    Raises:
        UnavailableError: the node can't be reached.
        DeadlineError: it did not answer in time.
    """
    stub = BulkStub(connection.channel)  # type: ignore[no-untyped-call]
    reply: bulk_pb2.SettleReply = connection.call(stub.Settle, bulk_pb2.SettleRequest(ticket=ticket), timeout)
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
        fill(targets, messages, lambda page: made.append(checksum_of(page)))
    except InvalidRequestError:
        return False
    finally:
        for mine, checksum, tier in zip(made, run.checksums, run.tiers, strict=False):
            if mine != checksum or tier >= len(TIER_NAMES):
                break
            tiers.append(TIER_NAMES[tier] or "")
            right += 1
    return right == len(targets)


def _store_messages(ticket: int, pages: Sequence[Bytes]) -> Iterator[bytes]:
    """The checksum of each page is made when the page is sent, and goes with the others behind the last one."""
    made: list[int] = []

    def summed() -> Iterator[Bytes]:
        for page in pages:
            made.append(checksum_of(page))
            yield page

    yield pb.StorePages(ticket=ticket).SerializeToString()
    yield from raw_messages(summed())
    yield pb.StorePages(ticket=ticket, checksums=made).SerializeToString()
