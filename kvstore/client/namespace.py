"""The public namespace: pages of one layout at one node, stored and loaded by their block hashes."""

from __future__ import annotations

import operator
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

from kvstore.client import transfers
from kvstore.client.arguments import checked_pin, checked_timeout
from kvstore.client.handle import Handle
from kvstore.client.lookups import checked_hashes, look_up
from kvstore.client.paths.buffers import Pages, page_arrays
from kvstore.client.paths.pending import PendingLoad, PendingStore
from kvstore.client.paths.results import Lookup, NamespaceStatistics, StoreResult
from kvstore.client.paths.transfer import Transfer
from kvstore.errors import InvalidRequestError, KVStoreError, UnknownNamespaceError
from kvstore.hashing import HASH_BYTES
from kvstore.host.forking import register_forked
from kvstore.limits import MOST_LOOKED_UP, MOST_LOOKUP_PAGES
from kvstore.page_codes import TIER_NAMES
from kvstore.wire.messages import join_hashes

_LETTING_GO = 1.0
"""Seconds that a call may take which ends a hold, whatever time its caller has left."""


class Namespace:
    """Pages of one layout at one node. Made by :meth:`kvstore.Client.namespace`; safe for threads.

    A page is ``layout.page_bytes`` bytes, whatever their dtype; a block hash is 32 bytes, as
    :func:`kvstore.hash_blocks` gives it. Methods raise the errors that :class:`kvstore.Client` lists, and
    :class:`kvstore.errors.InvalidRequestError` for a hash that has not 32 bytes.

    The node's hit ratio is of lookups: each page that ``lookup`` names was asked for, and found where a tier has it,
    whether or not one before it is missing. A load of pages that this client did not look up a moment before counts as
    a lookup of them. With ``counts=False`` a call counts nothing (:meth:`count_lookup`).
    """

    def __init__(self, handle: Handle) -> None:
        self.layout = handle.layout
        self.durability = handle.durability
        """What it was asked for with."""
        self.fingerprint = handle.fingerprint
        self._handle = handle
        self._moved = _MovedPages()

    def __repr__(self) -> str:
        return f"<kvstore.Namespace {self.layout.name!r}, pages of {self.layout.page_bytes} bytes>"

    @property
    def batch_pages(self) -> int:
        """Most pages that ``prepare_store`` and ``prepare_load`` take; less when the node comes back smaller."""
        return self._handle.now(self._deadline())[0].batch_pages

    def lookup(self, hashes: Sequence[bytes], *, counts: bool = True) -> Lookup:
        """Which pages are here, in whatever tier.

        Args:
            hashes: block hashes of 32 bytes, head of the prefix first, 131,072 at most.
            counts: as of :meth:`kvstore.Client.lookup`.

        Returns:
            For each page the tier that has it, and how many leading pages are here. Nothing is leased for it.

        Raises:
            LimitExceededError: more than 131,072 hashes.
        """
        return look_up(self._handle.session, [(self._handle, hashes)], self._deadline(), counts=counts)[0]

    def count_lookup(self, asked: int, found: Mapping[str, int]) -> None:
        """Count a lookup in the node's hit ratio that nothing else counts. The node is told with a later call; never
        waits, and does not say whether it was told.

        Args:
            asked: pages that were asked for, 2^24 at most.
            found: of these, by the tier that has them: ``"arena"``, ``"disk"``, ``"redis"``, ``"objects"``.

        Raises:
            InvalidRequestError: no such tier, more pages found than asked for, more asked for than that, or no whole
                numbers.
        """
        try:
            pages = operator.index(asked)
            counts = [operator.index(found.get(tier, 0)) for tier in TIER_NAMES if tier]
        except TypeError as error:
            raise InvalidRequestError(
                f"whole numbers of pages are counted, not {dict(found)} found of {asked} pages"
            ) from error
        if not 0 <= pages <= MOST_LOOKED_UP:
            raise InvalidRequestError(f"one count is of 0 to {MOST_LOOKED_UP} pages, not of {pages}")
        if not found.keys() <= set(TIER_NAMES[1:]) or min(counts) < 0 or sum(counts) > pages:
            raise InvalidRequestError(f"{dict(found)} can't be what was found of {pages} pages")
        if pages:
            self._handle.session.control.count_lookup(self.fingerprint, pages, *counts)

    def store(self, hashes: Sequence[bytes], pages: Pages, *, parent: bytes = b"") -> StoreResult:
        """Store pages that follow each other in their chain, head of the prefix first.

        Args:
            hashes: block hashes, 32 bytes each.
            pages: for each hash its payload of ``layout.page_bytes`` bytes: a list or tuple of buffers, or one
                contiguous buffer of all of them.
            parent: block hash of the page before the first one; empty: it is the head, or nobody knows. It lets tiers
                lay the pages of one prefix side by side.

        Returns:
            How many pages were stored, were here before, and were refused: these add up to ``len(hashes)``. What had
            to leave again for later pages of the same call counts as refused and, when the node is lost on the way,
            what it had not confirmed.

        Raises:
            InvalidRequestError: hashes or pages of a wrong length or number; nothing was stored.
            UnavailableError: the node could not be reached at all.
            DeadlineError: nothing was confirmed in time.
        """
        joined = join_hashes(hashes)
        arrays = page_arrays(pages, len(hashes), self.layout.page_bytes, writable=False)
        result = transfers.store(self._handle, Transfer(joined, arrays, self._deadline(), _checked_parent(parent)))
        self._moved.stored(result)
        return result

    def load(self, hashes: Sequence[bytes], into: Pages, *, counts: bool = True) -> int:
        """Load the leading pages that are here.

        Args:
            hashes: block hashes, 32 bytes each.
            into: where the payloads go: a list or tuple of writable buffers of ``layout.page_bytes`` bytes, or one
                writable contiguous buffer for all of them. Behind the pages loaded, its content is undefined.
            counts: whether pages that were not looked up before count as looked up by this.

        Returns:
            How many leading pages were loaded, whole and unchanged.

        Raises:
            InvalidRequestError: hashes or buffers of a wrong length or number.
            UnavailableError: the node could not be reached at all.
            DeadlineError: nothing was loaded in time.
        """
        joined = join_hashes(hashes)
        arrays = page_arrays(into, len(hashes), self.layout.page_bytes, writable=True)
        tiers = transfers.load(self._handle, Transfer(joined, arrays, self._deadline()))
        self._moved.loaded(tiers)
        if counts:
            self._handle.session.loaded(self.fingerprint, joined, tiers)
        return len(tiers)

    def prepare_store(self, hashes: Sequence[bytes], *, parent: bytes = b"") -> PendingStore:
        """Reserve pages that are not here, to be written in place.

        Args:
            hashes: at most ``batch_pages`` block hashes of 32 bytes.
            parent: as in :meth:`store`.

        Returns:
            A context manager with one uint8 array of shape ``(page_bytes,)`` to write for each page, or None where
            there is nothing to write. Its ``complete`` publishes them.

        Raises:
            LimitExceededError: more than ``batch_pages`` hashes.
        """
        joined = checked_hashes(hashes, self.batch_pages)
        transfer = Transfer(joined, (), self._deadline(), _checked_parent(parent))
        pending = self._handle.move(lambda opened, path: path.prepare_store(opened, transfer), transfer.deadline)
        pending.observe(self._moved.stored)
        return pending

    def prepare_load(self, hashes: Sequence[bytes], *, counts: bool = True) -> PendingLoad:
        """Promote the leading pages to the arena, and lease them to be copied from where they are.

        Args:
            hashes: at most ``batch_pages`` block hashes of 32 bytes.
            counts: as of :meth:`load`.

        Returns:
            A context manager with one read-only uint8 array of shape ``(page_bytes,)`` for each leading page that is
            here. Its ``complete`` ends the lease.

        Raises:
            LimitExceededError: more than ``batch_pages`` hashes.
        """
        transfer = Transfer(checked_hashes(hashes, self.batch_pages), (), self._deadline())
        pending = self._handle.move(lambda opened, path: path.prepare_load(opened, transfer), transfer.deadline)
        return self._begun(pending, transfer.hashes, counts=counts)

    def borrow(self, hashes: Sequence[bytes], *, counts: bool = True) -> PendingLoad:
        """As :meth:`prepare_load`, for a reader that copies at once: without a call where the pages are in the arena
        of this host. They are not leased: its copies are good if ``complete`` says so behind them. Those in lower tiers
        come by another call (``PendingLoad.more``).

        Args:
            hashes: at most ``batch_pages`` block hashes of 32 bytes.
            counts: as of :meth:`load`.

        Returns:
            As :meth:`prepare_load`.

        Raises:
            LimitExceededError: more than ``batch_pages`` hashes.
        """
        transfer = Transfer(checked_hashes(hashes, self.batch_pages), (), self._deadline())
        pending = self._handle.move(lambda opened, path: path.borrow(opened, transfer), transfer.deadline)
        return self._begun(pending, transfer.hashes, counts=counts)

    def touch(self, hashes: Sequence[bytes]) -> int:
        """Mark pages as used, so that others leave before them.

        Args:
            hashes: block hashes of 32 bytes, head of the prefix first, 131,072 at most.

        Returns:
            How many of them are in the arena.

        Raises:
            LimitExceededError: more than 131,072 hashes.
        """
        checked_hashes(hashes, MOST_LOOKUP_PAGES)
        return self._handle.control(
            lambda control, left: control.touch(self.fingerprint, hashes, left), self._deadline()
        )

    def evict(self, hashes: Sequence[bytes], *, pinned: bool = False) -> int:
        """Drop pages from every tier. What is leased leaves when the lease ends.

        Args:
            hashes: block hashes of 32 bytes, 131,072 at most.
            pinned: drop pinned pages, too, and end their pins. Otherwise they stay, in every tier; but a node of an
                older version, whose status has no ``health`` of its arena, drops them all the same.

        Returns:
            How many were somewhere, and were dropped.

        Raises:
            LimitExceededError: more than 131,072 hashes.
        """
        checked_hashes(hashes, MOST_LOOKUP_PAGES)
        return self._handle.control(
            lambda control, left: control.evict(self.fingerprint, hashes, left, pinned=pinned), self._deadline()
        )

    def prefetch(self, hashes: Sequence[bytes]) -> int:
        """Have the leading pages brought up into the node's arena, for whoever is about to load them there. Nothing of
        them comes here, and nothing holds them there; it needs no other right than a load.

        Args:
            hashes: block hashes of 32 bytes, head of the prefix first, 131,072 at most.

        Returns:
            How many leading pages were brought up, or were there: fewer than asked for from the first one that is
            nowhere, or for which there is no room. It takes half of the arena at most, as loads do, so that the last
            pages don't push the first ones out.

        Raises:
            LimitExceededError: more than 131,072 hashes.
            DeadlineError: it takes longer than the client's calls may; the node has brought some up by then.
        """
        checked_hashes(hashes, MOST_LOOKUP_PAGES)
        deadline, done, holds = self._deadline(), 0, []
        try:
            while done < len(hashes):
                batch = hashes[done : done + self.batch_pages]
                came, hold = self._promote(batch, deadline)
                holds += [hold] if hold else []
                done += came
                if came < len(batch):
                    break
        finally:
            self._let_go(holds)
        return done

    def _promote(self, batch: Sequence[bytes], deadline: float) -> tuple[int, int]:
        return self._handle.control(lambda control, left: control.promote(self.fingerprint, batch, left), deadline)

    def _let_go(self, holds: Sequence[int]) -> None:
        with suppress(KVStoreError):  # they lapse by themselves
            for hold in holds:
                self._handle.session.control.let_go(hold, _LETTING_GO)

    def pin(self, hashes: Sequence[bytes], seconds: int) -> int:
        """Promote the leading pages and keep them in the arena, whatever else wants their slots; also over a restart.

        Args:
            hashes: block hashes of 32 bytes, head of the prefix first, 131,072 at most.
            seconds: how long, from now: a whole number from 1 to 31,622,400 (366 days). A longer pin of the same page
                stays.

        Returns:
            How many leading pages are pinned: fewer than asked for when one is nowhere, or when pinned pages take a
            quarter of the arena, or of the namespace's quota there.

        Raises:
            InvalidRequestError: no such time.
            LimitExceededError: more than 131,072 hashes.
        """
        seconds = checked_pin(seconds)
        checked_hashes(hashes, MOST_LOOKUP_PAGES)
        return self._handle.control(
            lambda control, left: control.pin(self.fingerprint, hashes, seconds, left), self._deadline()
        )

    def unpin(self, hashes: Sequence[bytes]) -> int:
        """End pins.

        Args:
            hashes: block hashes of 32 bytes, 131,072 at most.

        Returns:
            How many of them were pinned.

        Raises:
            LimitExceededError: more than 131,072 hashes.
        """
        checked_hashes(hashes, MOST_LOOKUP_PAGES)
        return self._handle.control(
            lambda control, left: control.unpin(self.fingerprint, hashes, left), self._deadline()
        )

    def clear(self, timeout: float | None = None) -> int:
        """Drop the namespace with all its pages, in every tier, those that are pinned included.

        Args:
            timeout: seconds, above 0 and a day at most; None: those of the client. The node goes on with it behind
                that.

        Returns:
            How many pages these were; 0 where the namespace is not known any more.

        Raises:
            InvalidRequestError: a timeout out of its range.
            DeadlineError: it takes longer.
        """
        deadline = self._deadline() if timeout is None else time.monotonic() + checked_timeout(timeout)
        try:
            return self._handle.control(lambda control, left: control.clear(self.fingerprint, left), deadline)
        except UnknownNamespaceError:  # somebody else clears it, again and again: nothing is left to do
            return 0

    def statistics(self) -> NamespaceStatistics:
        """The pages that this object has moved so far. No call is made for it."""
        return self._moved.statistics()

    def _begun(self, pending: PendingLoad, hashes: bytes, *, counts: bool) -> PendingLoad:
        pending.observe(self._moved.loaded)
        if counts:
            # Where there may be more, the others are asked for next.
            asked = hashes[: len(pending.pages) * HASH_BYTES] if pending.more else hashes
            self._handle.session.loaded(self.fingerprint, asked, pending.tiers)
        return pending

    def _deadline(self) -> float:
        return time.monotonic() + self._handle.session.timeout


class _MovedPages:
    """Counts what one namespace's user stored and loaded. Safe for threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loaded: dict[str, int] = {}
        self._stored = self._present = self._refused = 0
        register_forked(self)

    def stored(self, result: StoreResult) -> None:
        """Count a store."""
        with self._lock:
            self._stored += result.stored
            self._present += result.present
            self._refused += result.refused

    def loaded(self, tiers: Sequence[str]) -> None:
        """Count the pages of a load, by the tiers that they came from."""
        with self._lock:
            for tier in dict.fromkeys(tiers):
                self._loaded[tier] = self._loaded.get(tier, 0) + tiers.count(tier)

    def statistics(self) -> NamespaceStatistics:
        """Everything so far."""
        with self._lock:
            return NamespaceStatistics(dict(self._loaded), self._stored, self._present, self._refused)

    def forked(self) -> None:
        """In a child: nobody who held the lock will let it go."""
        self._lock = threading.Lock()


def _checked_parent(parent: bytes) -> bytes:
    return join_hashes([parent]) if parent != b"" else b""
