"""Pages through the node's arena, mapped into this process: one copy, and no payload in any message."""

from __future__ import annotations

import contextlib
import fcntl
import math
import mmap
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

from kvstore.answers import LONGEST_TICKET, RESERVED, TIER_NAMES
from kvstore.client.control import Connection
from kvstore.client.deadline import locked, time_left
from kvstore.client.path import OpenedNamespace, copy_in, copy_out
from kvstore.client.pending import PendingLoad, PendingStore
from kvstore.client.results import StoreResult
from kvstore.errors import (
    DeadlineError,
    InvalidRequestError,
    LimitExceededError,
    NotAttachedError,
    ResourceError,
    UnavailableError,
)
from kvstore.v1 import cache_pb2 as pb
from kvstore.wire import join_hashes

Bytes = npt.NDArray[np.uint8]
Pending = TypeVar("Pending")


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
            self.pages = _map_pages(directory)
            self.client = connection.call(connection.stub.Attach, pb.AttachRequest(lock_name=name), timeout).client
            self._check_size(directory, connection.name)
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

    def _check_size(self, directory: FilePath, name: str) -> None:
        if self.pages.size != (directory / "pages").stat().st_size:
            raise NotAttachedError(f"{name}: the arena was still being made when it was mapped")

    def view(self, offset: int, length: int) -> Bytes:
        """``length`` bytes of the arena, writable."""
        return self.pages[offset : offset + length]

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


class SharedPath:
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
        return attachment.pages

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
        """Copy the leading pages out of the arena."""
        deadline = time.monotonic() + timeout
        prepare = partial(self._prepare_load, namespace, hashes, partial(time_left, deadline))
        return copy_out(self._operate(prepare, deadline), into)

    def close(self) -> None:
        """Detach behind the last operation under way."""
        self._closed.set()
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
            left = time_left(deadline)
            request = pb.PrepareStoreRequest(
                pages=pb.PageList(fingerprint=namespace.fingerprint, hashes=join_hashes(hashes)),
                client=attachment.client,
                ttl_ms=math.ceil(min(left, LONGEST_TICKET) * 1000),
                parent=parent,
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
            left = time_left(deadline)
            request = pb.PrepareLoadRequest(
                pages=pb.PageList(fingerprint=namespace.fingerprint, hashes=join_hashes(hashes)),
                client=attachment.client,
                ttl_ms=math.ceil(min(left, LONGEST_TICKET) * 1000),
            )
            reply = self._connection.call(self._connection.stub.PrepareLoad, request, left)
        except BaseException as error:
            self._failed(attachment, error)
            attachment.done()
            raise
        pages = [attachment.view(offset, namespace.layout.page_bytes) for offset in reply.offsets]
        for page in pages:
            page.flags.writeable = False
        tiers = [TIER_NAMES[tier] or "" for tier in reply.tiers]
        return PendingLoad(pages, tiers, partial(self._finish_load, attachment, reply.ticket, finish_in))

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


def _map_pages(directory: FilePath) -> Bytes:
    try:
        fd = os.open(directory / "pages", os.O_RDWR | os.O_CLOEXEC)
        try:
            return np.frombuffer(mmap.mmap(fd, os.fstat(fd).st_size), np.uint8)
        finally:
            os.close(fd)
    except (OSError, ValueError) as error:  # ValueError: a file that a node is just making is empty
        raise ResourceError(f"{directory}: the arena can't be mapped: {error}") from error
