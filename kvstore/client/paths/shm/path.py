"""The mapped path: pages through the node's arena, mapped into this process. One copy, and no payload in a message."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path as FilePath
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from kvstore.arena.epochs import LONGEST_READ
from kvstore.client.paths.control import Connection
from kvstore.client.paths.deadline import locked, time_left
from kvstore.client.paths.path import OpenedNamespace, Path
from kvstore.client.paths.pending import PendingLoad, PendingStore
from kvstore.client.paths.results import StoreResult
from kvstore.client.paths.shm.admission import Share, StoreAdmission
from kvstore.client.paths.shm.attachment import Attachment
from kvstore.client.paths.shm.connection import LocalConnection, LocalConnectionPool, call
from kvstore.client.paths.shm.copies import copy_slots, slot_bytes
from kvstore.client.paths.shm.mapped_arena import MappedRead, copy_bytes
from kvstore.client.paths.shm.preallocation import Preallocation
from kvstore.client.paths.shm.reservation import Reservation
from kvstore.client.paths.transfer import Transfer
from kvstore.client.paths.use_reports import UseReports
from kvstore.errors import (
    DeadlineError,
    KVStoreError,
    NotAttachedError,
    ResourceError,
    UnavailableError,
)
from kvstore.hashing import HASH_BYTES
from kvstore.host.cutting import check_going
from kvstore.host.forking import register_forked, renewed
from kvstore.host.uninterrupted import uninterrupted
from kvstore.limits import LONGEST_LEASE
from kvstore.page_codes import NEWEST_TIER, TIER_NAMES, PageTier, StoreOutcome
from kvstore.v1 import cache_pb2 as pb

Bytes = npt.NDArray[np.uint8]
Pending = TypeVar("Pending")
_ARENA = TIER_NAMES[PageTier.ARENA] or ""
_MOST_NOTED = 1024
"""Most pages that the next call takes along: with more it might be too long for its connection."""
_OUTCOMES = bytes.maketrans(
    bytes([PageTier.ABSENT, PageTier.ARENA]), bytes([StoreOutcome.RESERVED, StoreOutcome.PRESENT])
)
"""What the index says of a page → what a store does with it."""
_STEP_BYTES = 16 << 20
"""Most bytes, unless it is one page, that are copied under one announcement: writers may be waiting."""


class ShmPath(Path):
    """:class:`kvstore.client.paths.path.Path` through the mapping of the arena whose folder is ``directory``. What is
    read without a call goes into the client's ``reports``.

    Raises:
        ResourceError: the arena can't be mapped from here.
        UnavailableError: the node can't be reached.
    """

    def __init__(self, connection: Connection, directory: FilePath, timeout: float, reports: UseReports) -> None:
        self._grpc = connection
        self._directory = directory
        self._connections = LocalConnectionPool(connection, directory)
        self._lock = threading.Lock()
        self._attachment: Attachment | None = None
        self._closed = threading.Event()
        self._use_reports = reports
        self._preallocation = Preallocation(self._connections)
        self._begun = threading.local()
        """``connection``: of the last store that this thread began and was not told of yet."""
        register_forked(self)
        deadline = time.monotonic() + timeout
        try:
            attachment = self._attach(deadline)
        except NotAttachedError:
            attachment = self._attach(deadline)
        self._admission = StoreAdmission(attachment.arena.pages.size * 3 // 8)
        attachment.done()

    def forked(self) -> None:
        """In a child: it attaches for itself."""
        self._lock = threading.Lock()
        self._closed = renewed(self._closed)
        self._begun = threading.local()

    @property
    def units(self) -> Bytes:
        """The arena as this process mapped it last, a row for each of its units: for registering it with a device."""
        attachment = self._attachment
        assert attachment is not None, "a path begins attached"
        return attachment.arena.pages.reshape(-1, attachment.arena.unit_bytes)

    def is_stale(self, namespace: OpenedNamespace) -> bool:
        """Whether the arena's edition is another one."""
        attachment = self._attachment
        return attachment is not None and attachment.arena.is_stale(namespace)

    def find(self, namespace: OpenedNamespace, hashes: bytes) -> bytes | None:
        """Look into the index, and into the summary of the lower tiers."""
        attachment = self._attachment
        if attachment is None or attachment.is_over or not attachment.speaks_of(namespace):
            return None
        return attachment.arena.find(namespace, hashes)

    def ask_where(self, queries: Sequence[tuple[bytes, bytes]], deadline: float) -> list[bytes] | None:
        """One exchange over the arena's socket, with a node that answers lookups there."""
        attachment = self._attachment
        if attachment is None or attachment.is_over or not attachment.arena.node_answers_lookups:
            return None
        pages = [
            pb.PageList(fingerprint=fingerprint, hashes=hashes, newest_tier=NEWEST_TIER)
            for fingerprint, hashes in queries
        ]
        with self._connections.lent(deadline) as connection:
            return list(call(connection, pb.LookupRequest(queries=pages), deadline).tiers)

    def touch_later(self, namespace: OpenedNamespace, hashes: bytes) -> bool:
        """Tell the node with the next call, or a moment later."""
        if len(hashes) > _MOST_NOTED * HASH_BYTES:
            return False
        self._use_reports.note(namespace.fingerprint, hashes, read=False)
        return True

    def prepare_store(self, namespace: OpenedNamespace, transfer: Transfer) -> PendingStore:
        """Reserve slots, lent as they lie in the arena."""
        deadline = transfer.deadline
        timeout = time_left(deadline)
        connection, reservation = self._operate(partial(self._reserve, namespace, transfer))
        try:
            self._preallocate(connection, reservation, 0, deadline)
        except BaseException as error:
            self._ended(connection, reservation, error)
            raise
        self._connections.give_back(connection)
        return PendingStore(reservation.views(), reservation.outcomes, partial(self._complete, reservation, timeout))

    def prepare_load(self, namespace: OpenedNamespace, transfer: Transfer) -> PendingLoad:
        """Lease slots, lent as they lie in the arena."""
        return self._operate(partial(self._prepare_load, namespace, transfer, time_left(transfer.deadline)))

    def store(self, namespace: OpenedNamespace, transfer: Transfer) -> StoreResult:
        """Copy pages into the arena."""
        return self.begin_store(namespace, transfer)()

    def begin_store(
        self, namespace: OpenedNamespace, transfer: Transfer, following: int = 0
    ) -> Callable[[], StoreResult]:
        """Copy pages into the arena; they are published behind the copy."""
        deadline = transfer.deadline
        share = Share(transfer.page_count * slot_bytes(namespace.layout.page_bytes))
        try:
            self._admission.take(share, deadline)
            connection, reservation = self._operate(partial(self._reserve, namespace, transfer))
            try:
                if reservation.ticket:
                    self._preallocate(connection, reservation, following, deadline)  # done while this one is copied
                    reservation.write(connection, self._use_reports.take, partial(self._settle_begun, deadline))
                    self._begun.connection = connection
                    if self._admission.is_tight:
                        # What was written must have left this client's hands before more is begun.
                        connection.settle(deadline)
            except BaseException as error:
                self._ended(connection, reservation, error)
                raise
        finally:
            self._admission.give_back(share)
        return lambda: reservation.before + self._result_of(connection, reservation, deadline)

    def load(self, namespace: OpenedNamespace, transfer: Transfer) -> list[str]:
        """Copy the leading pages out of the arena, leased by a call: each as soon as it is there."""
        return self._operate(partial(self._load, namespace, transfer))

    def load_here(self, namespace: OpenedNamespace, transfer: Transfer) -> tuple[int, bool]:
        """Copy the leading pages that are in the arena, announced."""
        # Little happens here, on purpose: with cold caches each line of code costs a microsecond.
        attachment = self._attachment
        if attachment is None or not attachment.use():
            return 0, False
        hashes, into, deadline, _ = transfer
        try:
            if not attachment.speaks_of(namespace):
                return 0, False
            arena, line = attachment.arena, attachment.line
            step = max(1, _STEP_BYTES // namespace.layout.page_bytes)
            loaded, pages = 0, len(into)
            nowhere = True
            while loaded < pages:
                part = transfer if pages <= step else transfer.part(loaded, loaded + step)
                announced = line.begin(min(deadline, time.monotonic() + LONGEST_READ))
                try:
                    good, nowhere = arena.load(namespace, part.hashes, part.pages)
                finally:
                    line.end(announced)
                loaded += good
                if good < step:
                    break
                check_going()
        finally:
            attachment.done()
        self._note_read(namespace, hashes, loaded, nowhere=nowhere)
        return loaded, nowhere

    def borrow(self, namespace: OpenedNamespace, transfer: Transfer) -> PendingLoad:
        """Lend pages as they lie in the arena: those that are there announced, and else the others leased."""
        lent = self._operate(partial(self._borrow_mapped, namespace, transfer))
        return lent if lent is not None else self.prepare_load(namespace, transfer)

    def close(self) -> None:
        """Detach behind the last operation under way."""
        self._closed.set()
        self._preallocation.close()
        self._connections.close()
        if self._attachment is not None:
            self._attachment.retire()

    def _operate(self, prepare: Callable[[], Pending]) -> Pending:
        """Begin an operation; when the node came back without knowing this client, begin it anew."""
        try:
            try:
                return prepare()
            except NotAttachedError:
                return prepare()
        except ResourceError as error:
            raise NotAttachedError(f"{self._grpc.name} has no arena there any more: {error}") from error

    def _borrow_mapped(self, namespace: OpenedNamespace, transfer: Transfer) -> PendingLoad | None:
        """Lend the leading pages that are in the arena; None where the first one may be elsewhere."""
        hashes, _, deadline, _ = transfer
        attachment = self._attach(deadline)
        lent: PendingLoad | None = None
        try:
            if attachment.arena.is_stale(namespace) or not attachment.speaks_of(namespace):
                return None
            announced = attachment.line.begin(min(deadline, time.monotonic() + LONGEST_READ))
            try:
                read = attachment.arena.read(namespace, hashes)
                behind = hashes[len(read.frames) * HASH_BYTES :][:HASH_BYTES]
                whole = not behind or attachment.arena.is_nowhere(namespace, behind)
                if whole or read.frames:
                    give_back = partial(self._give_back, attachment, announced, namespace, hashes, read, whole=whole)
                    tiers = [_ARENA] * len(read.frames)
                    lent = PendingLoad(_read_only(read.views()), tiers, give_back, more=not whole)
            finally:
                if lent is None:
                    attachment.line.end(announced)
        finally:
            if lent is None:
                attachment.done()
        return lent

    def _give_back(
        self,
        attachment: Attachment,
        announced: int,
        namespace: OpenedNamespace,
        hashes: bytes,
        read: MappedRead,
        *,
        whole: bool,
    ) -> int:
        try:
            good = attachment.arena.unchanged(read)
            attachment.line.end(announced)
        finally:
            attachment.done()
        self._note_read(namespace, hashes, good, nowhere=whole)
        return good

    def _note_read(self, namespace: OpenedNamespace, hashes: bytes, good: int, *, nowhere: bool) -> None:
        missed = len(hashes) // HASH_BYTES - good if nowhere else 0  # the others are asked for by a call
        if good or missed:
            self._use_reports.note(namespace.fingerprint, hashes[: good * HASH_BYTES], read=True, missed=missed)

    def _reserve(self, namespace: OpenedNamespace, transfer: Transfer) -> tuple[LocalConnection, Reservation]:
        """Slots for the pages that are not here, and the connection that they came by."""
        deadline = transfer.deadline
        attachment = self._attach(deadline)
        connection: LocalConnection | None = None
        try:
            connection = self._connections.take(deadline)
            reservation = self._preallocated(attachment, namespace, transfer)
            if reservation is None:
                attachment.check_current()
                reservation = self._reserve_now(connection, attachment, namespace, transfer)
        except BaseException as error:
            self._failed(attachment, error)
            attachment.done()
            if connection is not None:
                self._connections.give_back(connection)
            raise
        return connection, reservation

    def _preallocate(
        self, connection: LocalConnection, reservation: Reservation, following: int, deadline: float
    ) -> None:
        """Ask for the slots of the store behind this one, unless there are some."""
        if reservation.ticket:
            attachment, namespace = reservation.attachment, reservation.namespace
            if asked := self._preallocation.ask(connection, attachment, namespace, reservation.pages, following):
                connection.post(asked, deadline)

    def _reserve_now(
        self, connection: LocalConnection, attachment: Attachment, namespace: OpenedNamespace, transfer: Transfer
    ) -> Reservation:
        request = pb.PrepareStoreRequest(
            pages=pb.PageList(fingerprint=namespace.fingerprint, hashes=transfer.hashes, newest_tier=NEWEST_TIER),
            client=attachment.client,
            ttl_ms=_ttl_ms(transfer.deadline),
            parent=transfer.parent,
            used=self._use_reports.take(),
        )
        reply = call(connection, request, transfer.deadline)
        offsets = list(reply.offsets)
        return Reservation(attachment, namespace, transfer, reply.ticket, reply.outcomes, offsets, preallocated=False)

    def _preallocated(
        self, attachment: Attachment, namespace: OpenedNamespace, transfer: Transfer
    ) -> Reservation | None:
        """Slots that were reserved beforehand; None where there are none for these pages."""
        arena, hashes = attachment.arena, transfer.hashes
        if not hashes or arena.is_stale(namespace) or not arena.speaks_of(namespace):
            return None
        if arena.has(namespace, hashes[:HASH_BYTES]):
            here = arena.here(namespace, hashes)
        else:  # a prefix leaves its tail first: nothing of it is here, and if it is, its copies are in vain
            here = bytes(transfer.page_count)
        wanted = here.count(PageTier.ABSENT)
        slots = self._preallocation.take(attachment, namespace, wanted) if wanted else None
        if slots is None:
            return None
        outcomes = here.translate(_OUTCOMES)
        return Reservation(attachment, namespace, transfer, slots.ticket, outcomes, slots.offsets, preallocated=True)

    def _complete(self, reservation: Reservation, timeout: float, publish: bool) -> StoreResult:
        """Publish what a user wrote, or give it up."""
        deadline = time.monotonic() + timeout
        connection: LocalConnection | None = None
        try:
            if reservation.ticket:
                connection = self._connections.take(deadline)
                if publish:
                    reservation.publish(connection, self._use_reports.take, deadline)
                else:
                    reservation.give_up(connection, deadline)
        except BaseException as error:
            self._ended(connection, reservation, error)
            raise
        return self._result_of(connection, reservation, deadline)

    def _settle_begun(self, deadline: float) -> None:
        """Wait for the answers to the store that this thread began before: the pages of this one come behind its."""
        connection: LocalConnection | None = getattr(self._begun, "connection", None)
        if connection is not None and connection.good:  # else it was interrupted: nobody asks what became of its pages
            connection.settle(deadline)

    def _result_of(self, connection: LocalConnection | None, reservation: Reservation, deadline: float) -> StoreResult:
        """What became of a store's pages."""
        try:
            if connection is not None:
                connection.settle(deadline)
            result, known = reservation.result()
            if not known:
                # The node does not know the ticket: it was restarted, and keeps the slots until this client is gone.
                reservation.attachment.retire()
        except BaseException as error:
            self._ended(connection, reservation, error)
            raise
        self._ended(connection, reservation, None)
        return result

    def _prepare_load(self, namespace: OpenedNamespace, transfer: Transfer, timeout: float) -> PendingLoad:
        """Lease slots until the deadline; ending the lease may then take ``timeout`` seconds."""
        deadline = transfer.deadline
        attachment = self._attach(deadline)
        try:
            attachment.check_current()
            with self._connections.lent(deadline) as connection:
                parts = list(connection.parts(self._load_request(attachment, namespace, transfer), deadline))
        except BaseException as error:
            self._failed(attachment, error)
            attachment.done()
            raise
        length = namespace.layout.page_bytes
        pages = [attachment.view(offset, length) for part in parts for offset in part.offsets]
        tiers = [TIER_NAMES[tier] or "" for part in parts for tier in part.tiers]

        def finish() -> int:
            try:
                end = time.monotonic() + timeout
                with self._connections.lent(end) as connection:
                    return len(pages) * self._finish_load(connection, attachment, parts[-1].ticket, end)
            except (UnavailableError, DeadlineError):
                return 0
            finally:
                attachment.done()

        return PendingLoad(_read_only(pages), tiers, finish)

    def _load(self, namespace: OpenedNamespace, transfer: Transfer) -> list[str]:
        """Lease pages, and copy each as soon as it is there. Returns the tiers of those that stayed until the end."""
        into, deadline = transfer.pages, transfer.deadline
        attachment = self._attach(deadline)
        length = namespace.layout.page_bytes
        tiers: list[str] = []
        ticket = 0
        try:
            attachment.check_current()
            with self._connections.lent(deadline) as connection:
                for part in connection.parts(self._load_request(attachment, namespace, transfer), deadline):
                    ticket = part.ticket
                    some = into[len(tiers) : len(tiers) + len(part.offsets)]
                    copy_slots(attachment.arena.pages, part.offsets, slot_bytes(length), some, copy_bytes, out=True)
                    tiers += [TIER_NAMES[tier] or "" for tier in part.tiers]
                return tiers if self._finish_load(connection, attachment, ticket, deadline) else []
        except BaseException as error:
            self._failed(attachment, error)
            raise
        finally:
            attachment.done()

    def _load_request(
        self, attachment: Attachment, namespace: OpenedNamespace, transfer: Transfer
    ) -> pb.PrepareLoadRequest:
        return pb.PrepareLoadRequest(
            pages=pb.PageList(fingerprint=namespace.fingerprint, hashes=transfer.hashes, newest_tier=NEWEST_TIER),
            client=attachment.client,
            ttl_ms=_ttl_ms(transfer.deadline),
            used=self._use_reports.take(),
        )

    def _finish_load(self, connection: LocalConnection, attachment: Attachment, ticket: int, deadline: float) -> bool:
        """Whether a lease lasted until now."""
        try:
            request = pb.CompleteLoadRequest(ticket=ticket, client=attachment.client)
            return not ticket or call(connection, request, deadline).valid
        except (UnavailableError, DeadlineError) as error:
            # Nobody can say whether it did: what was copied counts as missed.
            self._failed(attachment, error)
            return False

    def _ended(self, connection: LocalConnection | None, reservation: Reservation, error: BaseException | None) -> None:
        """A store is over, one way or the other."""
        if error is not None:  # what the node still keeps for it is unknown: let it take all of it back
            reservation.attachment.retire()
        reservation.attachment.ended(reservation)
        reservation.attachment.done()
        if connection is not None:
            if getattr(self._begun, "connection", None) is connection:
                self._begun.connection = None
            self._connections.give_back(connection)

    def _attach(self, deadline: float) -> Attachment:
        """The attachment in use, made anew where there is none; an operation of it is begun."""
        attachment = self._attachment
        if attachment is not None and attachment.use():
            if not attachment.has_lost_slots():
                return attachment
            attachment.retire()  # an interrupted store can't say that it has stopped: the node takes everything back
            attachment.done()
        return self._attach_again(deadline)

    @uninterrupted
    def _attach_again(self, deadline: float) -> Attachment:
        with locked(self._lock, deadline):
            if self._closed.is_set():
                raise UnavailableError(f"the client of {self._grpc.name} is closed")
            if self._attachment is None or not self._attachment.use():
                self._attachment = Attachment(self._grpc, self._directory, time_left(deadline))
                self._attachment.use()
                if self._closed.is_set():  # meanwhile
                    self._attachment.retire()
            return self._attachment

    def _failed(self, attachment: Attachment, error: BaseException) -> None:
        """A call failed, and unless the node itself said so, what it reserved is unknown: it takes all of that back."""
        if not isinstance(error, KVStoreError) or isinstance(error, UnavailableError | DeadlineError):
            attachment.retire()


def _ttl_ms(deadline: float) -> int:
    return math.ceil(min(time_left(deadline), LONGEST_LEASE) * 1000)


def _read_only(pages: list[Bytes]) -> list[Bytes]:
    for page in pages:
        page.flags.writeable = False
    return pages
