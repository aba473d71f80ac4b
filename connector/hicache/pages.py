"""The three calls of a HiCache backend that carry pages: which are there, load them, store them.

Each comes on a thread of the engine's own, and the engine's flush waits for these threads for ten seconds: no call
takes longer than :data:`CALL_SECONDS` twice. Whatever fails is a miss, or a page that was not stored, never an error.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from kvstore import Client, Namespace, PendingLoad
from kvstore.connector.health import NodeHealth
from kvstore.connector.hicache.found_pages import FoundPages, FoundPart
from kvstore.connector.hicache.host_pages import Bytes, HostPages
from kvstore.connector.hicache.transfer_rates import TransferRates
from kvstore.errors import KVStoreError

CALL_SECONDS = 3.0
"""Seconds that one call to a node may take (the client's timeout), after which no further one is begun, and for which
what was found is held."""
READ_PAGES = 128
"""Pages that the engine reads at once: what was found is held in parts of as many."""
HELD_SHARE = 8
"""What an engine holds at most is one part in so many of the arena."""

_logger = logging.getLogger("kvstore.connector")
Answer = TypeVar("Answer")


class HiCachePages:
    """The pages of one rank's host pool, at one node. Safe for threads.

    Until :meth:`open` nobody knows what the pages mean: everything is a miss.

    Args:
        client: of the node; its timeout is :data:`CALL_SECONDS`. It is closed by :meth:`close`.
        holders: how many ranks on this host share what may be held.
        clock: seconds, monotonic.
        weights: what the engine calls the weights that it has now. Once it is something else than at first, everything
            is a miss, and nothing is stored: the pages' name says what the weights were.
    """

    def __init__(
        self,
        client: Client,
        *,
        holders: int = 1,
        clock: Callable[[], float] = time.monotonic,
        weights: Callable[[], str] = str,
    ) -> None:
        self._client = client
        self._weights = weights
        self._first_weights = weights()
        self._has_other_weights = False
        self._holders = holders
        self._clock = clock
        self._namespace: Namespace | None = None
        self._found = FoundPages(clock)
        self._lookup_health = NodeHealth("looking up", clock)
        self._load_health = NodeHealth("loading pages", clock)
        self._store_health = NodeHealth("storing pages", clock)
        self._closed = threading.Event()
        self.rates = TransferRates()

    def open(self, namespace: Namespace) -> None:
        """From now on pages are these. To be called once."""
        self._namespace = namespace

    @property
    def is_open(self) -> bool:
        """Whether anything can be found."""
        return self._namespace is not None

    def exists(self, hashes: Sequence[bytes]) -> int:
        """How many leading pages are there. Those in the arena are held for :data:`CALL_SECONDS`.

        Args:
            hashes: 32 bytes each, head of the prefix first.
        """
        namespace = self._usable()
        if namespace is None or not hashes:
            return 0

        def look() -> int:
            lookup = namespace.lookup(hashes)
            in_arena = next((place for place, tier in enumerate(lookup.tiers) if tier != "arena"), lookup.prefix)
            self._hold(namespace, hashes[:in_arena])
            return lookup.prefix

        return self._asked(self._lookup_health, look, 0)

    def load(self, hashes: Sequence[bytes], into: HostPages) -> int:
        """Copy the leading pages that are there. Nothing is written when this has returned.

        Args:
            hashes: as in :meth:`exists`.
            into: as many pages of the pool. Behind the pages loaded, their content is undefined.

        Returns:
            How many leading pages were loaded, whole and unchanged.
        """
        namespace = self._usable()
        if namespace is None or not hashes:
            return 0
        begin = self._clock()
        loaded = 0

        def load_all() -> int:
            nonlocal loaded
            while loaded < len(hashes):
                part = self._found.take(hashes[loaded:])
                if part is None:
                    break
                held = part.lease.pages[: len(hashes) - loaded]
                good = self._copy(part.lease, held, into, loaded)
                loaded += good
                if good < len(held):
                    break  # the lease was lost: they are asked for anew
            while loaded < len(hashes) and self._clock() - begin < CALL_SECONDS:
                with namespace.borrow(hashes[loaded : loaded + namespace.batch_pages], counts=False) as lent:
                    good = self._copy(lent, lent.pages, into, loaded)
                    loaded += good
                    if not good or good < len(lent.pages):
                        break
            return loaded

        self._asked(self._load_health, load_all, 0)
        self.rates.loaded(loaded, loaded * into.page_bytes, self._clock() - begin)
        return loaded

    def store(self, hashes: Sequence[bytes], pages: HostPages, parent: bytes = b"") -> list[bool]:
        """Store the pages that are not there. Nothing is read when this has returned.

        Args:
            hashes: as in :meth:`exists`.
            pages: as many of the pool.
            parent: the page before the first one; empty: nobody knows.

        Returns:
            For each page whether it is there now, whoever stored it.
        """
        namespace = self._usable()
        there = [False] * len(hashes)
        if namespace is None or not hashes:
            return there
        begin = self._clock()
        written = 0

        def store_missing() -> None:
            nonlocal written
            there[:] = namespace.lookup(hashes, counts=False).present
            missing = [place for place, present in enumerate(there) if not present]
            while missing and self._clock() - begin < CALL_SECONDS:
                batch, missing = missing[: namespace.batch_pages], missing[namespace.batch_pages :]
                wanted = [hashes[place] for place in batch]
                before = hashes[batch[0] - 1] if batch[0] else parent
                with namespace.prepare_store(wanted, parent=before) as pending:
                    to_write = [
                        (place, page) for place, page in zip(batch, pending.pages, strict=True) if page is not None
                    ]
                    if to_write:
                        pages.gather([place for place, _ in to_write], [page for _, page in to_write])
                    result = pending.complete()
                written += result.stored
                if not result.refused:
                    for place in batch:
                        there[place] = True
                    continue
                for place, present in zip(batch, namespace.lookup(wanted, counts=False).present, strict=True):
                    there[place] = present
                break  # the node is full: those behind would be of no use

        self._asked(self._store_health, store_missing, None)
        self.rates.stored(written, written * pages.page_bytes, self._clock() - begin)
        return there

    def clear(self) -> int:
        """Drop all pages of the namespace, in every tier. Returns how many these were; 0 where that failed."""
        namespace = self._namespace
        return 0 if namespace is None else self._asked(self._store_health, namespace.clear, 0)

    def close(self) -> None:
        """Let go of the node, and of what is held. Calls under way fail. A second call changes nothing."""
        if not self._closed.is_set():
            self._closed.set()
            self._client.close()

    def _usable(self) -> Namespace | None:
        """Where the pages of this engine's weights are; None: that is not known, or no more."""
        if not self._has_other_weights and (weights := self._weights()) != self._first_weights:
            self._has_other_weights = True
            _logger.warning(
                "kvstore finds and stores nothing any more: the engine's weights are %r now, those of its pages are %r;"
                " restart it with the new ones",
                weights,
                self._first_weights,
            )
        return None if self._has_other_weights else self._namespace

    def _hold(self, namespace: Namespace, hashes: Sequence[bytes]) -> None:
        """Lease pages in the arena of this host, as far as the engine's share goes."""
        arena = self._client.arena
        if arena is None:  # a lease would bring their bytes here
            return
        page_bytes = namespace.layout.page_bytes
        begin = self._clock()
        room = (arena.size // HELD_SHARE // self._holders - self._found.held_bytes) // page_bytes
        step = min(READ_PAGES, namespace.batch_pages)
        for start in range(0, min(len(hashes), room), step):
            if self._clock() - begin > CALL_SECONDS / 2:
                break
            wanted = hashes[start : min(start + step, room)]
            until = self._clock() + CALL_SECONDS
            lease = namespace.prepare_load(wanted, counts=False)
            if not lease.pages:
                lease.complete()
                break
            held = tuple(wanted[: len(lease.pages)])
            self._found.add(FoundPart(held, lease, len(held) * page_bytes, until))
        # What is late has ended at the node. A node that hangs would take its time to say so, part by part.
        while self._clock() - begin < CALL_SECONDS / 2 and (part := self._found.take_late()) is not None:
            part.lease.complete()

    def _copy(self, lent: PendingLoad, pages: Sequence[Bytes], into: HostPages, first: int) -> int:
        """Copy what is lent, and return how many leading pages stayed as they were meanwhile."""
        if pages:
            into.scatter(pages, range(first, first + len(pages)))
        return min(lent.complete(), len(pages))

    def _asked(self, health: NodeHealth, call: Callable[[], Answer], otherwise: Answer) -> Answer:
        """What a call answers, or something else where it can't be asked."""
        if self._closed.is_set() or not health.available():
            return otherwise
        try:
            answer = call()
        except KVStoreError as error:
            health.failed(error)
        except Exception as error:
            _logger.exception("kvstore failed where it should not; the engine computes instead")
            health.failed(error)
        else:
            health.succeeded()
            return answer
        return otherwise
