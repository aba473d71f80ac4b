"""Preallocation: slots are reserved before it is known what goes into them, so that a store starts copying at once.

Each large store asks for as many slots again before its first copy, and has the answer before its own end; where it is
one batch of several, that is what the next one needs. The next store of that namespace takes them, and names its pages
when it publishes them. What is not used for a second goes back, so a client that does not store keeps no slots.

For a guess no page leaves, until it has come true: to one that stores as many pages again and again, each within a
second of the one before, the next store is as good as said, and pages leave for it while this one is copied.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from typing import Any, NamedTuple

from kvstore.client.paths.path import OpenedNamespace
from kvstore.client.paths.shm.attachment import Attachment
from kvstore.client.paths.shm.connection import (
    LocalConnection,
    LocalConnectionPool,
    Packed,
    call,
    ignore_answer,
)
from kvstore.errors import DeadlineError, KVStoreError, UnavailableError
from kvstore.host.forking import register_forked, renewed
from kvstore.host.uninterrupted import uninterrupted
from kvstore.limits import LONGEST_LEASE
from kvstore.v1 import cache_pb2 as pb

LEAST_BYTES = 1 << 20
"""Smaller stores ask for none: that would cost more than it saves."""
_RESERVATIONS = 2
"""Of each namespace."""
_ARENA_SHARE = 16
"""One reservation that is a guess takes at most this part of the arena."""
_STREAM_STORES = 3
"""So many stores alike, each soon behind the one before, and the next one is expected."""
_STREAM_ARENA_SHARE = 32
"""Pages leave for one that is expected if it takes at most this part of the arena."""
_IDLE_SECONDS = 1.0
_LOOK_SECONDS = 0.25
_TIMEOUT = 5.0
_log = logging.getLogger(__name__)


class PreallocatedSlots(NamedTuple):
    """A reservation whose pages are not named yet."""

    attachment: Attachment
    ticket: int
    edition: int
    """The arena's: another node does not know the ticket."""
    offsets: list[int]
    made: float
    """On the clock of ``time.monotonic``, before the node made it."""


class _Asked(NamedTuple):
    """A reservation whose answer is to come."""

    fingerprint: bytes
    attachment: Attachment
    made: float


class _Stream(NamedTuple):
    """Stores of one namespace that were alike."""

    pages: int
    stores: int
    last: float


class Preallocation:
    """The slots that one client has before it knows their pages. Safe for threads."""

    def __init__(self, connections: LocalConnectionPool) -> None:
        self._connections = connections
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._slots: dict[bytes, list[PreallocatedSlots]] = {}
        self._coming: list[_Asked] = []
        self._streams: dict[bytes, _Stream] = {}
        self._thread: threading.Thread | None = None
        self._asked: tuple[tuple[bytes, int, int, bool], Packed] | None = None
        """What was asked for last, and the request: the next store mostly asks for the same."""
        register_forked(self)

    def forked(self) -> None:
        """In a child: the slots are its parent's, which may publish other pages in them."""
        self._lock = threading.Lock()
        self._closed = renewed(self._closed)
        self._slots.clear()
        self._coming.clear()
        self._streams.clear()
        self._asked = None
        self._thread = None

    def take(self, attachment: Attachment, namespace: OpenedNamespace, pages: int) -> PreallocatedSlots | None:
        """A reservation for at least so many pages; the caller has begun an operation of the attachment, and ends the
        reservation by a call."""
        oldest = time.monotonic() - LONGEST_LEASE / 2
        with self._lock:
            slots = self._slots.get(namespace.fingerprint, [])
            for place, each in enumerate(slots):
                same = each.attachment is attachment and each.edition == namespace.edition
                if same and len(each.offsets) >= pages and each.made > oldest:
                    return slots.pop(place)
        return None

    def ask(
        self,
        connection: LocalConnection,
        attachment: Attachment,
        namespace: OpenedNamespace,
        pages: int,
        following: int,
    ) -> list[Packed]:
        """A store of so many pages is under way: what asks for the slots of the next one, unless there are some. To be
        posted in any case. ``following``: how many pages will certainly be stored behind it; 0: nobody knows. Other
        pages may leave for these, and for a store that is expected, not for a guess.
        """
        size = pages * namespace.layout.page_bytes
        guessed = size >= LEAST_BYTES and size * _ARENA_SHARE <= attachment.arena.pages.size
        if not connection.pipelined or not (following or guessed):
            return []
        fingerprint = namespace.fingerprint
        coming = _Asked(fingerprint, attachment, time.monotonic())
        with self._lock:
            expected = self._expects(fingerprint, pages, coming.made)
            evict = following > 0 or (expected and size * _STREAM_ARENA_SHARE <= attachment.arena.pages.size)
            there = len(self._slots.get(fingerprint, ())) + sum(
                each.fingerprint == fingerprint for each in self._coming
            )
            if self._closed.is_set() or there >= _RESERVATIONS:
                return []
            self._coming.append(coming)

        def came(answer: Any) -> None:
            self._came(answer, coming, namespace.edition)

        if self._thread is None:
            self._start()
        asked = fingerprint, attachment.client, following or pages, evict
        before = self._asked
        if before is None or before[0] != asked:
            request = pb.PrepareStoreRequest(
                pages=pb.PageList(fingerprint=fingerprint),
                client=attachment.client,
                ttl_ms=math.ceil(LONGEST_LEASE * 1000),
                ahead=following or pages,
                ahead_evict=evict,
            )
            before = self._asked = (
                asked,
                connection.pack(request, ignore_answer),
            )  # what is kept must not keep an arena mapped
        return [before[1]._replace(answered=came)]

    def close(self) -> None:
        """Reserve no more. What is reserved goes back when the client detaches."""
        self._closed.set()
        with self._lock:
            self._slots.clear()

    def _expects(self, fingerprint: bytes, pages: int, now: float) -> bool:
        """Whether a store of so many pages is one of many alike, this one counted; the caller has the lock."""
        before = self._streams.get(fingerprint)
        goes_on = before is not None and before.pages == pages and now - before.last < _IDLE_SECONDS
        stream = _Stream(pages, before.stores + 1 if before is not None and goes_on else 1, now)
        self._streams[fingerprint] = stream
        return stream.stores >= _STREAM_STORES

    def _came(self, answer: Any, asked: _Asked, edition: int) -> None:
        with self._lock:
            if asked in self._coming:
                self._coming.remove(asked)
            if isinstance(answer, pb.PrepareStoreReply) and answer.ticket and not self._closed.is_set():
                slots = PreallocatedSlots(asked.attachment, answer.ticket, edition, list(answer.offsets), asked.made)
                self._slots.setdefault(asked.fingerprint, []).append(slots)
        if answer is None:
            asked.attachment.retire()  # what the node reserved is unknown: it takes all of it back

    def _start(self) -> None:
        with self._lock:
            if self._thread is None and not self._closed.is_set():
                self._thread = threading.Thread(target=self._run, name="kvstore-preallocation", daemon=True)
                try:
                    uninterrupted(self._thread.start)()
                except RuntimeError:  # no more threads: the next store asks for one again
                    self._thread = None

    def _run(self) -> None:
        while not self._closed.wait(_LOOK_SECONDS):
            try:
                if not self._give_back_idle():
                    return
            except Exception:  # noqa: BLE001 - or slots would stay reserved as long as this client lives
                _log.exception("unused slots can't be given back; this is tried again")

    def _give_back_idle(self) -> bool:
        """Give back what is not used. False: there is nothing more to look after, and the thread ends."""
        self._connections.settle_idle(time.monotonic() + _TIMEOUT)
        with self._lock:
            now = time.monotonic()
            lost = [each for each in self._coming if each.made < now - LONGEST_LEASE]
            self._coming = [each for each in self._coming if each not in lost]
            used = now - _IDLE_SECONDS
            leaving = [each for slots in self._slots.values() for each in slots if each.made < used]
            kept = {key: [each for each in slots if each.made >= used] for key, slots in self._slots.items()}
            self._slots = {key: slots for key, slots in kept.items() if slots}
            self._streams = {key: stream for key, stream in self._streams.items() if stream.last >= used}
            if not leaving and not self._slots and not self._coming and not lost:
                self._thread = None
                return False
        for asked in lost:  # by an operation that was interrupted, with its connection
            asked.attachment.retire()
        for slots in leaving:
            self._give_back(slots)
        return True

    def _give_back(self, slots: PreallocatedSlots) -> None:
        if not slots.attachment.use():
            return  # the node took them back with everything else
        deadline = time.monotonic() + _TIMEOUT
        try:
            request = pb.CompleteStoreRequest(ticket=slots.ticket, publish=False, client=slots.attachment.client)
            with self._connections.lent(deadline) as connection:
                counts = call(connection, request, deadline)
            if not counts.refused:
                slots.attachment.retire()  # an earlier node gave them: this one keeps them until the client is gone
        except (UnavailableError, DeadlineError):
            slots.attachment.retire()
        except KVStoreError:
            pass  # the node does not know this client any more, and so not its slots
        except Exception:  # noqa: BLE001 - the others go back all the same
            _log.exception("%d slots can't be given back", len(slots.offsets))
            slots.attachment.retire()
        finally:
            slots.attachment.done()
