"""The two contracts of a client: a path moves pages between it and a store, control makes the calls that move none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvstore.client.paths.pending import PendingLoad, PendingStore
from kvstore.client.paths.results import StoreResult
from kvstore.client.paths.transfer import Transfer
from kvstore.layout import Layout
from kvstore.status import Status


@dataclass(frozen=True, slots=True)
class OpenedNamespace:
    """A namespace as the store knows it."""

    layout: Layout
    fingerprint: bytes
    batch_pages: int
    """Most pages a call of a path may name."""
    arena_directory: str
    """The folder of the arena on the node's host."""
    number: int = 0
    """What headers in the arena call this namespace."""
    edition: int = 0
    """The arena's edition for which that holds; 0: pages are found by calls only."""


class Path(Protocol):
    """Moves pages, at most ``batch_pages`` a call but for ``load`` and ``load_here``. Safe for threads.

    Those with a body are what a path may do without. Every method that may call the node gives up at the transfer's
    deadline with a :class:`DeadlineError`, and raises :class:`UnavailableError` when the node is lost.
    """

    def find(self, namespace: OpenedNamespace, hashes: bytes) -> bytes | None:
        """What can be said without a call of pages whose joined hashes these are: one byte a page, ``ARENA``,
        ``ABSENT`` (it is nowhere) or ``UNTOLD`` (:mod:`kvstore.page_codes`). None: nothing can be said."""
        return None

    def ask_where(self, queries: Sequence[tuple[bytes, bytes]], deadline: float) -> list[bytes] | None:
        """:meth:`Control.lookup` of joined hashes by a shorter way. None: this path has none."""
        return None

    def is_stale(self, namespace: OpenedNamespace) -> bool:
        """Whether the namespace should be opened again before more is done without a call."""
        return False

    def load_pages(self, namespace: OpenedNamespace) -> int:
        """Most pages of one ``load``."""
        return namespace.batch_pages

    def load_here(self, namespace: OpenedNamespace, transfer: Transfer) -> tuple[int, bool]:
        """Load what can be loaded without a call, of any number of pages.

        Returns:
            How many leading pages, and whether the next one is nowhere.

        Raises:
            NotAttachedError: what is known of the namespace is out of date.
        """
        return 0, False

    def touch_later(self, namespace: OpenedNamespace, hashes: bytes) -> bool:
        """Mark pages as used a moment from now, without a call. False: this path can't, or not so many."""
        return False

    def borrow(self, namespace: OpenedNamespace, transfer: Transfer) -> PendingLoad:
        """``prepare_load`` for a reader that copies at once: where it can, without a lease and without a call."""
        return self.prepare_load(namespace, transfer)

    def prepare_store(self, namespace: OpenedNamespace, transfer: Transfer) -> PendingStore:
        """Reserve pages for writing. Completing the store may then take as long again as was left of the deadline."""
        ...

    def prepare_load(self, namespace: OpenedNamespace, transfer: Transfer) -> PendingLoad:
        """Lease the leading pages for reading."""
        ...

    def store(self, namespace: OpenedNamespace, transfer: Transfer) -> StoreResult:
        """Store whole pages."""
        ...

    def begin_store(
        self, namespace: OpenedNamespace, transfer: Transfer, following: int = 0
    ) -> Callable[[], StoreResult]:
        """``store`` that may return before its end. What it returns waits for the rest, raises the errors of that, and
        says what became of the pages; it is called once, and until it returns the transfer's pages stay as they are.
        ``following``: how many pages the caller stores next, in this namespace."""
        stored = self.store(namespace, transfer)
        return lambda: stored

    def load(self, namespace: OpenedNamespace, transfer: Transfer) -> list[str]:
        """Load the leading pages, at most ``load_pages``. Returns the tier that each came from; its length is how many
        were loaded."""
        ...

    def close(self) -> None:
        """Let go of everything."""
        ...


class Control(Protocol):
    """The calls that move no pages. Each takes ``timeout``, the seconds after which it gives up; errors as a path's."""

    @property
    def answered(self) -> bool:
        """Whether the store has answered a call; one inside this process needs none."""
        ...

    def open_namespace(self, layout: Layout, durability: str, label: str, timeout: float) -> OpenedNamespace:
        """Name the layout of this client's pages, and what people call its model."""
        ...

    def lookup(self, queries: Sequence[tuple[bytes, Sequence[bytes]]], timeout: float) -> list[bytes]:
        """For each (fingerprint, hashes) one byte a page: see :class:`kvstore.page_codes.PageTier`."""
        ...

    def count_lookup(self, fingerprint: bytes, asked: int, arena: int, disk: int, redis: int, objects: int = 0) -> None:
        """Count a lookup: how many pages it asked for, and how many each tier had. The store is told at once, or a
        moment later without a wait. Never raises; what can't be told is lost."""
        ...

    def explain(self, fingerprint: bytes, hashes: Sequence[bytes], timeout: float) -> tuple[bytes, bytes]:
        """One byte a page, twice: as :meth:`lookup` says it; and a :class:`kvstore.page_codes.Explanation`."""
        ...

    def touch(self, fingerprint: bytes, hashes: Sequence[bytes], timeout: float) -> int:
        """Mark pages as used."""
        ...

    def evict(self, fingerprint: bytes, hashes: Sequence[bytes], timeout: float, *, pinned: bool) -> int:
        """Drop pages from every tier; those that are pinned only if that is said."""
        ...

    def promote(self, fingerprint: bytes, hashes: Sequence[bytes], timeout: float) -> tuple[int, int]:
        """Bring the leading pages, a batch at most, up into the arena, and hold them there for ``timeout`` at most.
        Returns how many came, or were there, and the hold; 0: there is none."""
        ...

    def let_go(self, hold: int, timeout: float) -> None:
        """End a hold."""
        ...

    def pin(self, fingerprint: bytes, hashes: Sequence[bytes], seconds: int, timeout: float) -> int:
        """Keep the leading pages in the arena. Returns how many."""
        ...

    def unpin(self, fingerprint: bytes, hashes: Sequence[bytes], timeout: float) -> int:
        """End that. Returns how many pages were pinned."""
        ...

    def clear(self, fingerprint: bytes, timeout: float) -> int:
        """Drop a namespace with all its pages."""
        ...

    def flush(self, timeout: float) -> int:
        """Return when everything stored is durable."""
        ...

    def status(self, timeout: float) -> Status:
        """What the node says of itself."""
        ...

    def close(self) -> None:
        """Let go of everything."""
        ...
