"""Pages through the node's arena, mapped into this process: one copy, and no payload in any message."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path as FilePath
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from kvstore.answers import ABSENT, ARENA, LONGEST_TICKET, PRESENT, RESERVED, TIER_NAMES
from kvstore.arena.readers import LONGEST_READ
from kvstore.client.ahead import Ahead
from kvstore.client.attachment import Attachment
from kvstore.client.control import Connection
from kvstore.client.deadline import locked, time_left
from kvstore.client.mapped import MappedRead
from kvstore.client.path import OpenedNamespace, Path, copy_in, copy_out, fill_reserved
from kvstore.client.pending import PendingLoad, PendingStore
from kvstore.client.recency import Recency
from kvstore.client.results import StoreResult
from kvstore.errors import (
    DeadlineError,
    NotAttachedError,
    ResourceError,
    UnavailableError,
)
from kvstore.hashing import HASH_BYTES
from kvstore.v1 import cache_pb2 as pb
from kvstore.wire import join_hashes

Bytes = npt.NDArray[np.uint8]
Pending = TypeVar("Pending")
_ARENA = TIER_NAMES[ARENA] or ""
_REPORT_TIMEOUT = 1.0
_OUTCOMES = bytes.maketrans(bytes([ABSENT, ARENA]), bytes([RESERVED, PRESENT]))
"""What the index says of a page → what a store does with it."""
_STEP_BYTES = 16 << 20
"""Most bytes, unless it is one page, that are copied under one announcement: writers may be waiting."""


class SharedPath(Path):
    """:class:`kvstore.client.path.Path` through the mapping.

    Args:
        connection: to the node, over its Unix socket.
        directory: the folder of its arena.

    Raises:
        ResourceError: the arena can't be mapped from here.
        UnavailableError: the node can't be reached.
    """

    def __init__(self, connection: Connection, directory: FilePath, timeout: float) -> None:
        self._connection = connection
        self._directory = directory
        self._lock = threading.Lock()
        self._attachment: Attachment | None = None
        self._closed = threading.Event()
        self._recency = Recency(partial(_report_use, connection))  # not this object's own: they would keep each other
        self._ahead = Ahead(connection)
        self._process = os.getpid()
        self._publisher = ThreadPoolExecutor(1, "kvstore-publish")  # its thread begins with the first work
        deadline = time.monotonic() + timeout
        try:
            self._attach(deadline).done()
        except NotAttachedError:
            self._attach(deadline).done()

    @property
    def pages(self) -> Bytes:
        """The arena as this process mapped it last: for registering it with a device."""
        attachment = self._attachment
        assert attachment is not None, "a path begins attached"
        return attachment.arena.pages

    def is_stale(self, namespace: OpenedNamespace) -> bool:
        """Whether the arena's edition is another one."""
        attachment = self._attachment
        return attachment is not None and attachment.arena.is_stale(namespace)

    def find(self, namespace: OpenedNamespace, hashes: bytes) -> tuple[bytes, bool] | None:
        """Look into the index."""
        attachment = self._attachment
        if attachment is None or attachment.is_over or not attachment.speaks_of(namespace):
            return None
        return attachment.arena.find(namespace, hashes)

    def note_wanted(self, namespace: OpenedNamespace, hashes: bytes) -> bool:
        """Tell the node with the next call, or a moment later."""
        self._recency.note(namespace.fingerprint, hashes, read=False)
        return True

    def prepare_store(
        self, namespace: OpenedNamespace, hashes: Sequence[bytes], timeout: float, parent: bytes = b""
    ) -> PendingStore:
        """Reserve slots, lent as they lie in the arena."""
        deadline = time.monotonic() + timeout
        return self._operate(partial(self._prepare_store, namespace, hashes, parent, lambda: timeout), deadline)

    def prepare_load(self, namespace: OpenedNamespace, hashes: Sequence[bytes], timeout: float) -> PendingLoad:
        """Hold slots, lent as they lie in the arena."""
        deadline = time.monotonic() + timeout
        return self._operate(partial(self._prepare_load, namespace, hashes, lambda: timeout), deadline)

    def store(
        self,
        namespace: OpenedNamespace,
        hashes: Sequence[bytes],
        pages: Sequence[Bytes],
        timeout: float,
        parent: bytes = b"",
    ) -> StoreResult:
        """Copy pages into the arena."""
        deadline = time.monotonic() + timeout
        prepare = partial(self._prepare_store, namespace, hashes, parent, partial(time_left, deadline))
        return copy_in(self._operate(prepare, deadline), pages)

    def begin_store(
        self,
        namespace: OpenedNamespace,
        hashes: Sequence[bytes],
        pages: Sequence[Bytes],
        timeout: float,
        parent: bytes = b"",
    ) -> Callable[[], StoreResult]:
        """Copy pages into the arena; the call that publishes them goes on behind it."""
        if os.getpid() != self._process:  # a forked child has none of its parent's threads
            return super().begin_store(namespace, hashes, pages, timeout, parent)
        deadline = time.monotonic() + timeout
        prepare = partial(self._prepare_store, namespace, hashes, parent, partial(time_left, deadline))
        pending = self._operate(prepare, deadline)
        try:
            fill_reserved(pending, pages)
            published = self._publisher.submit(pending.complete)
        except BaseException as error:
            pending.abort()
            if isinstance(error, RuntimeError):  # the publisher takes nothing more
                raise UnavailableError(f"the client of {self._connection.name} is closed") from error
            raise

        def told() -> StoreResult:
            try:
                return published.result(max(0.0, deadline - time.monotonic()))
            except TimeoutError as error:
                raise DeadlineError(f"{self._connection.name} did not answer in time") from error

        return told

    def load(
        self, namespace: OpenedNamespace, hashes: Sequence[bytes], into: Sequence[Bytes], timeout: float
    ) -> list[str]:
        """Copy the leading pages out of the arena, held by a call."""
        deadline = time.monotonic() + timeout
        prepare = partial(self._prepare_load, namespace, hashes, partial(time_left, deadline))
        return copy_out(self._operate(prepare, deadline), into)

    def load_here(
        self, namespace: OpenedNamespace, hashes: bytes, into: Sequence[Bytes], deadline: float
    ) -> tuple[int, bool]:
        """Copy the leading pages that are in the arena, announced."""
        # Little happens here, on purpose: with cold caches each line costs a microsecond.
        attachment = self._attachment
        if attachment is None or not attachment.use():
            return 0, False
        try:
            if not attachment.speaks_of(namespace):
                return 0, False
            arena, line = attachment.arena, attachment.line
            step = max(1, _STEP_BYTES // namespace.layout.page_bytes)
            loaded = 0
            nowhere = True
            while loaded < len(into):
                announced = line.begin(min(deadline, time.monotonic() + LONGEST_READ))
                try:
                    read = arena.read(namespace, hashes[loaded * HASH_BYTES : (loaded + step) * HASH_BYTES])
                    good = read.copy(into[loaded : loaded + step])
                finally:
                    line.end(announced)
                loaded += good
                nowhere = read.nowhere
                if good < step:
                    break
        finally:
            attachment.done()
        self._note_read(namespace, hashes, loaded, nowhere=nowhere)
        return loaded, nowhere

    def borrow(self, namespace: OpenedNamespace, hashes: Sequence[bytes], timeout: float) -> PendingLoad:
        """Lend pages as they lie in the arena: announced, where all that are anywhere are in it; else held."""
        deadline = time.monotonic() + timeout
        lent = self._operate(partial(self._borrow_mapped, namespace, join_hashes(hashes)), deadline)
        return lent if lent is not None else self.prepare_load(namespace, hashes, time_left(deadline))

    def close(self) -> None:
        """Detach behind the last operation under way."""
        self._closed.set()
        self._recency.close()
        self._ahead.close()
        self._publisher.shutdown(wait=False)
        if self._attachment is not None:
            self._attachment.retire()

    def _operate(self, prepare: Callable[[float], Pending], deadline: float) -> Pending:
        """Begin an operation; when the node came back without knowing this client, begin it anew."""
        try:
            try:
                return prepare(deadline)
            except NotAttachedError:
                return prepare(deadline)
        except ResourceError as error:
            raise NotAttachedError(f"{self._connection.name} has no arena there any more: {error}") from error

    def _borrow_mapped(self, namespace: OpenedNamespace, hashes: bytes, deadline: float) -> PendingLoad | None:
        """Lend the leading pages if all that are anywhere are in the arena."""
        attachment = self._attach(deadline)
        lent: PendingLoad | None = None
        try:
            if attachment.arena.is_stale(namespace) or not attachment.speaks_of(namespace):
                return None
            announced = attachment.line.begin(min(deadline, time.monotonic() + LONGEST_READ))
            try:
                read = attachment.arena.read(namespace, hashes)
                if read.nowhere or len(read.frames) * HASH_BYTES == len(hashes):
                    give_back = partial(self._give_back, attachment, announced, namespace, hashes, read)
                    lent = PendingLoad(_read_only(read.views()), [_ARENA] * len(read.frames), give_back)
            finally:
                if lent is None:
                    attachment.line.end(announced)
        finally:
            if lent is None:
                attachment.done()
        return lent

    def _give_back(
        self, attachment: Attachment, announced: int, namespace: OpenedNamespace, hashes: bytes, read: MappedRead
    ) -> int:
        try:
            good = attachment.arena.unchanged(read)
            attachment.line.end(announced)
        finally:
            attachment.done()
        self._note_read(namespace, hashes, good, nowhere=read.nowhere)
        return good

    def _note_read(self, namespace: OpenedNamespace, hashes: bytes, good: int, *, nowhere: bool) -> None:
        missed = len(hashes) // HASH_BYTES - good if nowhere else 0  # the others are asked for by a call
        if good or missed:
            self._recency.note(namespace.fingerprint, hashes[: good * HASH_BYTES], read=True, missed=missed)

    def _prepare_store(
        self,
        namespace: OpenedNamespace,
        hashes: Sequence[bytes],
        parent: bytes,
        finish_in: Callable[[], float],
        deadline: float,
    ) -> PendingStore:
        """Reserve slots until ``deadline``; completing them may then take the seconds that ``finish_in`` says."""
        attachment = self._attach(deadline)
        try:
            attachment.check_current()
            joined = join_hashes(hashes)
            ahead = self._store_ahead(attachment, namespace, joined, parent, finish_in)
            if ahead is not None:
                return ahead
            left = time_left(deadline)
            request = pb.PrepareStoreRequest(
                pages=pb.PageList(fingerprint=namespace.fingerprint, hashes=joined),
                client=attachment.client,
                ttl_ms=math.ceil(min(left, LONGEST_TICKET) * 1000),
                parent=parent,
                used=self._recency.take(),
            )
            reply = self._connection.call(self._connection.stub.PrepareStore, request, left)
        except BaseException as error:
            self._failed(attachment, error)
            attachment.done()
            raise
        offsets = iter(reply.offsets)
        pages = [
            attachment.view(next(offsets), namespace.layout.page_bytes) if outcome == RESERVED else None
            for outcome in reply.outcomes
        ]
        complete = pb.CompleteStoreRequest(ticket=reply.ticket, publish=True, client=attachment.client)
        reserved = len(reply.offsets)
        finish = partial(self._finish_store, attachment, namespace, complete, reserved, finish_in)
        return PendingStore(pages, reply.outcomes, finish)

    def _store_ahead(
        self,
        attachment: Attachment,
        namespace: OpenedNamespace,
        hashes: bytes,
        parent: bytes,
        finish_in: Callable[[], float],
    ) -> PendingStore | None:
        """A store into slots that were reserved ahead; None where there are none for it."""
        arena, page_bytes = attachment.arena, namespace.layout.page_bytes
        if arena.is_stale(namespace) or not arena.speaks_of(namespace):
            return None
        here, _ = arena.find(namespace, hashes)
        wanted = here.count(ABSENT)
        slots = self._ahead.take(attachment, namespace, wanted) if wanted else None
        if slots is None:
            return None
        offsets = iter(slots.offsets)
        pages = [attachment.view(next(offsets), page_bytes) if each == ABSENT else None for each in here]
        outcomes = here.translate(_OUTCOMES)
        request = pb.CompleteStoreRequest(
            ticket=slots.ticket,
            publish=True,
            client=attachment.client,
            pages=pb.PageList(fingerprint=namespace.fingerprint, hashes=hashes),
            outcomes=outcomes,
            parent=parent,
        )
        return PendingStore(
            pages, outcomes, partial(self._finish_store, attachment, namespace, request, wanted, finish_in)
        )

    def _finish_store(
        self,
        attachment: Attachment,
        namespace: OpenedNamespace,
        request: pb.CompleteStoreRequest,
        reserved: int,
        finish_in: Callable[[], float],
        publish: bool,
    ) -> StoreResult:
        try:
            if not request.ticket:
                return StoreResult()
            if not publish:
                request = pb.CompleteStoreRequest(ticket=request.ticket, publish=False, client=request.client)
            elif request.outcomes:
                request.used.CopyFrom(self._recency.take() or pb.UseReport())
            counts = self._connection.call(self._connection.stub.CompleteStore, request, finish_in())
            known = counts.stored + counts.present + counts.refused
            if known < reserved:
                # The node does not know the ticket: it was restarted, and keeps the slots until this client is gone.
                attachment.retire()
            elif counts.stored:
                self._ahead.refill(attachment, namespace, reserved)
            return StoreResult(counts.stored, counts.present, reserved - counts.stored - counts.present)
        except BaseException as error:
            self._failed(attachment, error)
            raise
        finally:
            attachment.done()

    def _prepare_load(
        self, namespace: OpenedNamespace, hashes: Sequence[bytes], finish_in: Callable[[], float], deadline: float
    ) -> PendingLoad:
        """Hold slots until ``deadline``; ending the hold may then take the seconds that ``finish_in`` says."""
        attachment = self._attach(deadline)
        try:
            attachment.check_current()
            left = time_left(deadline)
            request = pb.PrepareLoadRequest(
                pages=pb.PageList(fingerprint=namespace.fingerprint, hashes=join_hashes(hashes)),
                client=attachment.client,
                ttl_ms=math.ceil(min(left, LONGEST_TICKET) * 1000),
                used=self._recency.take(),
            )
            reply = self._connection.call(self._connection.stub.PrepareLoad, request, left)
        except BaseException as error:
            self._failed(attachment, error)
            attachment.done()
            raise
        pages = [attachment.view(offset, namespace.layout.page_bytes) for offset in reply.offsets]
        tiers = [TIER_NAMES[tier] or "" for tier in reply.tiers]
        finish = partial(self._finish_load, attachment, reply.ticket, finish_in)
        return PendingLoad(_read_only(pages), tiers, lambda: len(pages) * finish())

    def _finish_load(self, attachment: Attachment, ticket: int, finish_in: Callable[[], float]) -> bool:
        try:
            request = pb.CompleteLoadRequest(ticket=ticket, client=attachment.client)
            return not ticket or self._connection.call(self._connection.stub.CompleteLoad, request, finish_in()).valid
        except (UnavailableError, DeadlineError) as error:
            # Nobody can say whether the hold lasted: what was copied counts as missed.
            self._failed(attachment, error)
            return False
        finally:
            attachment.done()

    def _attach(self, deadline: float) -> Attachment:
        """The attachment in use, made anew where there is none; an operation of it is begun."""
        attachment = self._attachment
        if attachment is not None and attachment.use():
            return attachment
        with locked(self._lock, deadline):
            if self._closed.is_set():
                raise UnavailableError(f"the client of {self._connection.name} is closed")
            if self._attachment is None or not self._attachment.use():
                self._attachment = Attachment(self._connection, self._directory, time_left(deadline))
                self._attachment.use()
                if self._closed.is_set():  # meanwhile
                    self._attachment.retire()
            return self._attachment

    def _failed(self, attachment: Attachment, error: BaseException) -> None:
        """A call failed, and what it reserved is unknown: let the node take all of it back."""
        if isinstance(error, UnavailableError | DeadlineError):
            attachment.retire()


def _report_use(connection: Connection, report: pb.UseReport) -> None:
    connection.call(connection.stub.ReportUse, report, _REPORT_TIMEOUT)


def _read_only(pages: list[Bytes]) -> list[Bytes]:
    for page in pages:
        page.flags.writeable = False
    return pages
