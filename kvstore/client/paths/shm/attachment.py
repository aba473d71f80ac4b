"""One client's attachment to a node's arena: its mapping, and the file lock by which the node sees that it lives."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import stat
import threading
import weakref
from io import FileIO
from pathlib import Path as FilePath

import numpy as np
import numpy.typing as npt

from kvstore.client.paths.control import Connection
from kvstore.client.paths.path import OpenedNamespace
from kvstore.client.paths.shm.first_touch import touch_ahead
from kvstore.client.paths.shm.mapped_arena import MappedArena
from kvstore.errors import InvalidRequestError, LimitExceededError, NotAttachedError, ResourceError
from kvstore.host.forking import register_forked
from kvstore.v1 import cache_pb2 as pb

Bytes = npt.NDArray[np.uint8]


class Attachment:
    """This client at one node's arena: a mapping, and the lock that says that it lives.

    Closing it lets the lock go; the node then takes back whatever was reserved. So it is closed only when nothing
    writes through it any more: behind its last operation, or, where an operation was interrupted before it could say
    that it is over, when nobody has a view of the mapping any more.

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
            self._lock = FileIO(path, "x+")
        except OSError as error:
            raise ResourceError(f"{directory}: the arena can't be attached to: {error.strerror}") from error
        self._uses = 0
        self._retired = False
        self._guard = threading.Lock()
        self._writing: dict[int, weakref.ref[object]] = {}
        """What has slots to write to, by its identity."""
        register_forked(self)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            folder = path.parent.stat()
            shared = folder.st_mode & stat.S_ISGID  # the arena is a group's: the node may be another user
            os.fchmod(self._lock.fileno(), 0o640 if shared else 0o600)
            if os.geteuid() == 0 and folder.st_uid != 0:  # an operator: the node must be able to open it
                with contextlib.suppress(PermissionError):  # a container's root may not
                    os.fchown(self._lock.fileno(), folder.st_uid, -1)
            # Mapped before the node takes this client in: a folder replaced in between makes the call fail.
            self.arena = MappedArena(directory)
            request = pb.AttachRequest(lock_name=name, name=connection.client)
            self.client = connection.call(connection.stub.Attach, request, timeout).client
            self._check_mapped(connection.name)
            self.line = self.arena.line(self.client & 0xFFFF)
        except BaseException as error:
            with contextlib.suppress(OSError):
                path.unlink()
            self._lock.close()
            if isinstance(error, InvalidRequestError) and not isinstance(error, LimitExceededError):
                # The lock file is gone, or lies where the node does not look: the arena was replaced in between.
                raise NotAttachedError(f"{connection.name} does not own {directory}: {error}") from error
            raise
        self.arena.memory.kept = self._lock
        touch_ahead(self)

    def forked(self) -> None:
        """In a child: what is reserved, held and announced here is the parent's, and so is the lock."""
        self._guard = threading.Lock()
        self._retired = True
        self._lock.close()  # it stays locked: the parent has it open

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

    @property
    def memory(self) -> Bytes:
        """The arena, writable."""
        return self.arena.pages

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

    def begun(self, writer: object) -> None:
        """``writer`` has slots, and says when it has ended."""
        self._writing[id(writer)] = weakref.ref(writer)

    def ended(self, writer: object) -> None:
        """It writes to them no more."""
        self._writing.pop(id(writer), None)

    def has_lost_slots(self) -> bool:
        """Whether somebody is gone who had slots and never ended."""
        return any(writer() is None for writer in list(self._writing.values()))

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
        if self._retired and not self._uses and not self._lock.closed:
            with contextlib.suppress(OSError):
                self._lock.truncate(1)  # says that nothing is being written any more
            fcntl.flock(self._lock, fcntl.LOCK_UN)
            self._lock.close()
