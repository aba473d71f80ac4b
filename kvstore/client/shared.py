"""Pages through the node's arena, mapped into this process: one copy, and no payload in any message."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import math
import mmap
import os
import secrets
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path as FilePath

import numpy as np
import numpy.typing as npt

from kvstore.answers import LONGEST_TICKET, RESERVED, TIER_NAMES
from kvstore.client.control import Connection
from kvstore.client.path import OpenedNamespace, copy_in, copy_out
from kvstore.client.pending import PendingLoad, PendingStore
from kvstore.client.results import StoreResult
from kvstore.errors import DeadlineError, NotAttachedError, ResourceError, UnavailableError
from kvstore.v1 import cache_pb2 as pb
from kvstore.wire import join_hashes

Bytes = npt.NDArray[np.uint8]
_log = logging.getLogger(__name__)


class Attachment:
    """This client at one node's arena: a mapping, and the lock that says that it lives.

    Closing it lets the lock go; the node then takes back whatever was reserved. So it is closed only when nothing
    writes through it any more.
    """

    def __init__(self, connection: Connection, directory: FilePath, timeout: float) -> None:
        name = f"new-{secrets.token_hex(16)}"
        path = directory / "clients" / name
        self._lock_fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX)
            # Mapped before the node takes this client in: a folder replaced in between makes the call fail.
            fd = os.open(directory / "pages", os.O_RDWR | os.O_CLOEXEC)
            try:
                self._map = mmap.mmap(fd, os.fstat(fd).st_size)
            finally:
                os.close(fd)
            self.pages: Bytes = np.frombuffer(self._map, np.uint8)
            reply = connection.call(connection.stub.Attach, pb.AttachRequest(lock_name=name), timeout)
            self.client = reply.client
        except BaseException:
            with contextlib.suppress(OSError):
                path.unlink()
            os.close(self._lock_fd)
            raise
        self._uses = 0
        self._retired = False
        self._guard = threading.Lock()

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
        self._closed = False
        self._attach(timeout).done()

    @property
    def pages(self) -> Bytes:
        """The arena as this process maps it now: for registering it with a device."""
        with self._lock:
            if self._attachment is None:
                raise UnavailableError(f"{self._connection.name} is not attached")
            return self._attachment.pages

    def prepare_store(self, namespace: OpenedNamespace, hashes: Sequence[bytes], timeout: float) -> PendingStore:
        """Reserve slots, lent as they lie in the arena."""
        try:
            return self._prepare_store(namespace, hashes, timeout)
        except NotAttachedError:
            return self._prepare_store(namespace, hashes, timeout)

    def prepare_load(self, namespace: OpenedNamespace, hashes: Sequence[bytes], timeout: float) -> PendingLoad:
        """Hold slots, lent as they lie in the arena."""
        try:
            return self._prepare_load(namespace, hashes, timeout)
        except NotAttachedError:
            return self._prepare_load(namespace, hashes, timeout)

    def store(
        self, namespace: OpenedNamespace, hashes: Sequence[bytes], pages: Sequence[Bytes], timeout: float
    ) -> StoreResult:
        """Copy pages into the arena."""
        return copy_in(self.prepare_store(namespace, hashes, timeout), pages)

    def load(
        self, namespace: OpenedNamespace, hashes: Sequence[bytes], into: Sequence[Bytes], timeout: float
    ) -> list[str]:
        """Copy the leading pages out of the arena."""
        return copy_out(self.prepare_load(namespace, hashes, timeout), into)

    def close(self) -> None:
        """Detach behind the last operation under way."""
        with self._lock:
            self._closed = True
            attachment, self._attachment = self._attachment, None
        if attachment is not None:
            attachment.retire()

    def _prepare_store(self, namespace: OpenedNamespace, hashes: Sequence[bytes], timeout: float) -> PendingStore:
        attachment = self._attach(timeout)
        request = pb.PrepareStoreRequest(
            pages=pb.PageList(fingerprint=namespace.fingerprint, hashes=join_hashes(hashes)),
            client=attachment.client,
            ttl_ms=math.ceil(min(timeout, LONGEST_TICKET) * 1000),
        )
        try:
            reply = self._connection.call(self._connection.stub.PrepareStore, request, timeout)
        except BaseException as error:
            self._failed(attachment, error)
            attachment.done()
            raise
        offsets = iter(reply.offsets)
        pages = [
            attachment.view(next(offsets), namespace.layout.page_bytes) if outcome == RESERVED else None
            for outcome in reply.outcomes
        ]
        finish = partial(self._finish_store, attachment, reply.ticket, len(reply.offsets), timeout)
        return PendingStore(pages, reply.outcomes, finish)

    def _finish_store(
        self, attachment: Attachment, ticket: int, reserved: int, timeout: float, publish: bool
    ) -> StoreResult:
        try:
            if not ticket:
                return StoreResult()
            request = pb.CompleteStoreRequest(ticket=ticket, publish=publish, client=attachment.client)
            counts = self._connection.call(self._connection.stub.CompleteStore, request, timeout)
            if counts.stored + counts.present + counts.refused != reserved:
                # The node does not know the ticket: it was restarted, and keeps the slots until this client is gone.
                self._renew(attachment)
            return StoreResult(counts.stored, counts.present, reserved - counts.stored - counts.present)
        except BaseException as error:
            self._failed(attachment, error)
            raise
        finally:
            attachment.done()

    def _prepare_load(self, namespace: OpenedNamespace, hashes: Sequence[bytes], timeout: float) -> PendingLoad:
        attachment = self._attach(timeout)
        request = pb.PrepareLoadRequest(
            pages=pb.PageList(fingerprint=namespace.fingerprint, hashes=join_hashes(hashes)),
            client=attachment.client,
            ttl_ms=math.ceil(min(timeout, LONGEST_TICKET) * 1000),
        )
        try:
            reply = self._connection.call(self._connection.stub.PrepareLoad, request, timeout)
        except BaseException as error:
            self._failed(attachment, error)
            attachment.done()
            raise
        pages = [attachment.view(offset, namespace.layout.page_bytes) for offset in reply.offsets]
        for page in pages:
            page.flags.writeable = False
        tiers = [TIER_NAMES[tier] or "" for tier in reply.tiers]
        return PendingLoad(pages, tiers, partial(self._finish_load, attachment, reply.ticket, timeout))

    def _finish_load(self, attachment: Attachment, ticket: int, timeout: float) -> bool:
        try:
            request = pb.CompleteLoadRequest(ticket=ticket, client=attachment.client)
            return not ticket or self._connection.call(self._connection.stub.CompleteLoad, request, timeout).valid
        except (UnavailableError, DeadlineError) as error:
            # Nobody can say whether the hold lasted: what was copied counts as missed.
            self._failed(attachment, error)
            return False
        finally:
            attachment.done()

    def _attach(self, timeout: float) -> Attachment:
        """The attachment in use, made anew where there is none; an operation of it is begun."""
        with self._lock:
            if self._closed:
                raise UnavailableError(f"the client of {self._connection.name} is closed")
            if self._attachment is not None and self._attachment.use():
                return self._attachment
            try:
                self._attachment = Attachment(self._connection, self._directory, timeout)
            except OSError as error:
                if isinstance(error, UnavailableError | DeadlineError):
                    raise
                raise ResourceError(f"{self._directory}: the arena can't be mapped: {error.strerror}") from error
            self._attachment.use()
            return self._attachment

    def _failed(self, attachment: Attachment, error: BaseException) -> None:
        """A call failed, and what it reserved is unknown: let the node take all of it back."""
        if isinstance(error, UnavailableError | DeadlineError):
            self._renew(attachment)

    def _renew(self, attachment: Attachment) -> None:
        with self._lock:
            if self._attachment is attachment:
                self._attachment = None
        attachment.retire()
