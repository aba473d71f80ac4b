"""Pages through the node's arena, mapped into this process: one copy, and no payload in any message."""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path as FilePath
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from kvstore.answers import ARENA, LONGEST_TICKET, RESERVED, TIER_NAMES
from kvstore.arena.readers import LONGEST_READ
from kvstore.client.control import Connection
from kvstore.client.deadline import locked, time_left
from kvstore.client.mapped import MappedArena, MappedRead
from kvstore.client.path import OpenedNamespace, Path, copy_in, copy_out
from kvstore.client.pending import PendingLoad, PendingStore
from kvstore.client.recency import Recency
from kvstore.client.results import StoreResult
from kvstore.errors import (
    DeadlineError,
    InvalidRequestError,
    LimitExceededError,
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
_STEP_BYTES = 16 << 20
"""Most bytes, unless it is one page, that are copied under one announcement: writers may be waiting."""


class Attachment:
    """This client at one node's arena: a mapping, and the lock that says that it lives.

    Closing it lets the lock go; the node then takes back whatever was reserved. So it is closed only when nothing
    writes through it any more.

    Raises:
        ResourceError: the folder's files can't be mapped.
        NotAttachedError: the node does not own this folder (any more).
        UnavailableError: the node can't be reached.
        DeadlineError: it did not answer in time.
    """

    def __init__(self, connection: Connection, directory: FilePath, timeout: float) -> None:
        name = f"new-{secrets.token_hex(16)}"
        path = directory / "clients" / name
        try:
            self._lock_fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ResourceError(f"{directory}: the arena can't be attached to: {error.strerror}") from error
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX)
            # Mapped before the node takes this client in: a folder replaced in between makes the call fail.
            self.arena = MappedArena(directory)
            self.client = connection.call(connection.stub.Attach, pb.AttachRequest(lock_name=name), timeout).client
            self._check_mapped(connection.name)
            self.line = self.arena.line(self.client & 0xFFFF)
        except BaseException as error:
            with contextlib.suppress(OSError):
                path.unlink()
            os.close(self._lock_fd)
            if isinstance(error, InvalidRequestError) and not isinstance(error, LimitExceededError):
                # The lock file is gone, or lies where the node does not look: the arena was replaced in between.
                raise NotAttachedError(f"{connection.name} does not own {directory}: {error}") from error
            raise
        self._uses = 0
        self._retired = False
        self._guard = threading.Lock()

    def _check_mapped(self, name: str) -> None:
        if self.arena.is_replaced():
            raise NotAttachedError(f"{name}: the arena was replaced when it was mapped")

    def check_current(self) -> None:
        """Find out whether the node has another arena by now.

        Raises:
            NotAttachedError: it has; this attachment is over.
        """
        if self.arena.is_replaced():
            self.retire()
            raise NotAttachedError("the arena was replaced: attach again")

    def view(self, offset: int, length: int) -> Bytes:
        """``length`` bytes of the arena, writable."""
        return self.arena.pages[offset : offset + length]

    def speaks_of(self, namespace: OpenedNamespace) -> bool:
        """Whether the mapping can tell of this namespace's pages; see :meth:`MappedArena.speaks_of`."""
        try:
            return self.arena.speaks_of(namespace)
        except NotAttachedError:
            if self.arena.is_replaced():
                self.retire()
            raise

    @property
    def is_over(self) -> bool:
        """Whether no operation can begin any more."""
        return self._retired

    def use(self) -> bool:
        """Begin an operation. False: this attachment is over."""
        with self._guard:
            if self._retired:
                return False
            self._uses += 1
            return True

    def done(self) -> None:
        """End an operation: nothing is written for it any more."""
        with self._guard:
            self._uses -= 1
            self._close_if_unused()

    def retire(self) -> None:
        """Close behind the last operation under way."""
        with self._guard:
            self._retired = True
            self._close_if_unused()

    def _close_if_unused(self) -> None:
        if self._retired and not self._uses and self._lock_fd >= 0:
            fcntl.flock(self._lock_fd, fcntl.LOCK_UN)  # a forked child may have the descriptor as well
            os.close(self._lock_fd)
            self._lock_fd = -1


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
            left = time_left(deadline)
            request = pb.PrepareStoreRequest(
                pages=pb.PageList(fingerprint=namespace.fingerprint, hashes=join_hashes(hashes)),
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
        finish = partial(self._finish_store, attachment, reply.ticket, len(reply.offsets), finish_in)
        return PendingStore(pages, reply.outcomes, finish)

    def _finish_store(
        self, attachment: Attachment, ticket: int, reserved: int, finish_in: Callable[[], float], publish: bool
    ) -> StoreResult:
        try:
            if not ticket:
                return StoreResult()
            request = pb.CompleteStoreRequest(ticket=ticket, publish=publish, client=attachment.client)
            counts = self._connection.call(self._connection.stub.CompleteStore, request, finish_in())
            if counts.stored + counts.present + counts.refused != reserved:
                # The node does not know the ticket: it was restarted, and keeps the slots until this client is gone.
                attachment.retire()
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
