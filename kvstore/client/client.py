"""The public client: namespaces of pages behind one connection string."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self, TypeVar

import numpy as np
import numpy.typing as npt

from kvstore.answers import ABSENT, ARENA, EVICTED, MOST_LOOKUP_PAGES, TIER_NAMES
from kvstore.client.buffers import Pages, page_arrays
from kvstore.client.deadline import locked, time_left
from kvstore.client.path import Control, OpenedNamespace, Path
from kvstore.client.pending import PendingLoad, PendingStore
from kvstore.client.results import Lookup, NamespaceStatistics, StoreResult
from kvstore.errors import (
    DeadlineError,
    InvalidRequestError,
    KVStoreError,
    LimitExceededError,
    NotAttachedError,
    UnavailableError,
    UnknownNamespaceError,
)
from kvstore.layout import Layout
from kvstore.status import Status
from kvstore.wire import join_hashes

Bytes = npt.NDArray[np.uint8]
Answer = TypeVar("Answer")
_ARENA = TIER_NAMES[ARENA] or ""
_REOPENINGS = 8
"""How often one call opens a namespace again: it may be cleared once more in between."""


class Client:
    """A node, as :func:`kvstore.connect` gives it. Blocking, safe for threads, a context manager."""

    def __init__(self, url: str, control: Control, timeout: float, make_path: Callable[[str, float], Path]) -> None:
        self.url = url
        self.timeout = timeout
        self._control = control
        self._make_path = make_path
        self._path: Path | None = None
        self._directory = ""
        self._lock = threading.Lock()

    def namespace(self, layout: Layout, *, durability: str = "", lazy: bool = False) -> Namespace:
        """The namespace of pages with this layout, new or known.

        Args:
            layout: of its pages.
            durability: ``"disk"``: from now on stores are refused rather than that pages leave the arena before they
                are on disk. Empty: as the namespace was opened before, or as the node's configuration has it.
            lazy: open it when it is first used, not now. Its methods then raise what this one would have raised.

        Raises:
            InvalidRequestError: no such durability, or the node has no disk to keep it.
            LayoutMismatchError: the node knows the same name with another page size.
            LimitExceededError: too many namespaces, or pages larger than half of the node's arena.
            UnavailableError: the node can't be reached.
            DeadlineError: it did not answer in time.
        """
        if not isinstance(layout, Layout):
            raise InvalidRequestError(f"a namespace is opened by its Layout, got {layout!r}")
        namespace = self._make_namespace(layout, durability)
        if not lazy:
            namespace._open_again(time.monotonic() + self.timeout)  # noqa: SLF001
        return namespace

    def lookup(self, queries: Sequence[tuple[Namespace, Sequence[bytes]]]) -> list[Lookup]:
        """Look pages up in several namespaces by one call.

        Args:
            queries: namespaces of this client, each with the block hashes to look up (32 bytes each).

        Returns:
            One answer for each query.

        Raises:
            InvalidRequestError: a hash that has not 32 bytes.
            LimitExceededError: more than 131,072 pages in all.
            UnavailableError: the node can't be reached.
            DeadlineError: it did not answer in time.
        """
        joined = [join_hashes(hashes) for _, hashes in queries]
        _check_count(sum(len(hashes) for _, hashes in queries), MOST_LOOKUP_PAGES)
        deadline = time.monotonic() + self.timeout
        for _ in range(_REOPENINGS):
            try:
                answers = self._lookup(queries, joined, deadline, mapped=True)
            except (UnknownNamespaceError, NotAttachedError):
                for namespace, _ in queries:
                    namespace._open_again(deadline)  # noqa: SLF001
            else:
                for namespace, _ in queries:
                    namespace._refresh(deadline)  # noqa: SLF001
                return answers
        return self._lookup(queries, joined, deadline, mapped=False)  # others clear namespaces all the time

    def lookup_here(self, queries: Sequence[tuple[Namespace, Sequence[bytes]]]) -> list[Lookup] | None:
        """:meth:`lookup` as far as the mapping of a node on this host has the answer: no call is made, nothing waits.

        Returns:
            One answer for each query; None where only a call can tell.

        Raises:
            InvalidRequestError: a hash that has not 32 bytes.
        """
        answers = []
        for namespace, hashes in queries:
            opened = namespace._opened  # noqa: SLF001
            if opened is None:
                return None
            here, complete = opened[1].find(opened[0], join_hashes(hashes)) or (b"", False)
            if not complete:
                return None
            answers.append(Lookup.of(here))
        return answers

    def _lookup(
        self,
        queries: Sequence[tuple[Namespace, Sequence[bytes]]],
        joined: Sequence[bytes],
        deadline: float,
        *,
        mapped: bool,
    ) -> list[Lookup]:
        """One lookup: what can be told without a call (if ``mapped``), and by one call the rest."""
        answers: list[bytes] = []
        asked: list[tuple[bytes, Sequence[bytes]]] = []
        open_answers: list[int] = []
        for (namespace, hashes), keys in zip(queries, joined, strict=True):
            opened, path = namespace._now(deadline)  # noqa: SLF001
            here, complete = (path.find(opened, keys) if mapped else None) or (bytes(len(hashes)), False)
            if not complete and hashes:
                open_answers.append(len(answers))
                asked.append(
                    (namespace.fingerprint, [each for each, tier in zip(hashes, here, strict=True) if tier == ABSENT])
                )
            answers.append(here)
        if asked:
            told = self._control.lookup(asked, time_left(deadline))
            for place, rest in zip(open_answers, map(iter, told), strict=True):
                answers[place] = bytes(tier or next(rest, ABSENT) for tier in answers[place])
        return [Lookup.of(tiers) for tiers in answers]

    def flush(self) -> int:
        """Return when everything stored so far would survive a loss of power: the pages that became durable."""
        return self._control.flush(self.timeout)

    def status(self) -> Status:
        """What the node holds and has done.

        Raises:
            UnavailableError: the node can't be reached.
            DeadlineError: it did not answer in time.
        """
        return self._control.status(self.timeout)

    def explain(self, fingerprint: bytes, hashes: Sequence[bytes]) -> list[tuple[str | None, bool]]:
        """Where pages are, for people who ask why a prompt missed. It opens no namespace, and counts as no use of one.

        Args:
            fingerprint: a namespace's, as ``status`` gives it.
            hashes: block hashes, 131,072 at most.

        Returns:
            For each page its tier, or None; and whether the node remembers that it left the arena to make room.

        Raises:
            UnknownNamespaceError: the node knows no such namespace.
        """
        _check_hashes(hashes, MOST_LOOKUP_PAGES)
        tiers, why = self._control.explain(fingerprint, hashes, self.timeout)
        return [(TIER_NAMES[tier], reason == EVICTED) for tier, reason in zip(tiers, why, strict=True)]

    @property
    def arena(self) -> Bytes | None:
        """The node's arena as this process maps it, for registering it with a device; None where it can't be."""
        pages = getattr(self._path, "pages", None)
        return pages if isinstance(pages, np.ndarray) else None

    def close(self) -> None:
        """Let go of the node; calls under way fail. An embedded store ends them first, and writes back."""
        self._control.close()  # before the lock: whoever has it may be waiting for the node
        with self._lock:
            if self._path is not None:
                self._path.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _make_namespace(self, layout: Layout, durability: str) -> Namespace:
        return Namespace(self, layout, durability)

    def _open(self, layout: Layout, durability: str, deadline: float) -> tuple[OpenedNamespace, Path]:
        opened = self._control.open_namespace(layout, durability, time_left(deadline))
        with locked(self._lock, deadline):
            if self._path is None or self._directory != opened.arena_directory:
                old, self._path = self._path, self._make_path(opened.arena_directory, time_left(deadline))
                self._directory = opened.arena_directory
                if old is not None:
                    old.close()
            return opened, self._path


class Namespace:
    """Pages of one layout at one node. Made by :meth:`Client.namespace`; safe for threads."""

    def __init__(self, client: Client, layout: Layout, durability: str) -> None:
        self.layout = layout
        self.durability = durability
        """What it was asked for with."""
        self.fingerprint = layout.fingerprint
        self._client = client
        self._opened: tuple[OpenedNamespace, Path] | None = None
        self._lock = threading.Lock()
        self._loaded: dict[str, int] = {}
        self._moved = StoreResult()

    @property
    def batch_pages(self) -> int:
        """Most pages that ``prepare_store`` and ``prepare_load`` take; less when the node comes back smaller."""
        return self._now(time.monotonic() + self._client.timeout)[0].batch_pages

    def lookup(self, hashes: Sequence[bytes]) -> Lookup:
        """Which pages are here. Errors as :meth:`Client.lookup`."""
        return self._client.lookup([(self, hashes)])[0]

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
            DeadlineError: it did not answer in time.
        """
        join_hashes([*hashes, *([parent] if parent else [])])
        arrays = page_arrays(pages, len(hashes), self.layout.page_bytes, writable=False)
        deadline = time.monotonic() + self._client.timeout
        result, batches = self._store_batches(hashes, arrays, parent, deadline)
        if batches > 1 and len(hashes) <= MOST_LOOKUP_PAGES:
            result = self._settled(hashes, result, deadline)
        self._count_stored(result)
        return result

    def _store_batches(
        self, hashes: Sequence[bytes], pages: Sequence[Bytes], parent: bytes, deadline: float
    ) -> tuple[StoreResult, int]:
        """Store batch by batch, one being copied while the one before it is published. Returns also how many."""
        result = StoreResult()
        begun: deque[tuple[int, int, Callable[[], StoreResult]]] = deque()
        start = batches = 0

        def begin(opened: OpenedNamespace, path: Path, left: float) -> tuple[int, Callable[[], StoreResult]]:
            end = min(start + opened.batch_pages, len(hashes))
            previous = hashes[start - 1] if start else parent
            if end == len(hashes) and not begun:  # nothing is left to be done beside it
                stored = path.store(opened, hashes[start:end], pages[start:end], left, previous)
                return end, lambda: stored
            following = min(opened.batch_pages, len(hashes) - end)
            return end, path.begin_store(opened, hashes[start:end], pages[start:end], left, previous, following)

        failed: KVStoreError | None = None
        try:
            while begun or (start < len(hashes) and failed is None):
                try:
                    if start < len(hashes) and failed is None:
                        end, finish = self._by_path(begin, deadline)
                        begun.append((start, end, finish))
                        start = end
                        batches += 1
                    if len(begun) > 1 or start == len(hashes) or failed is not None:
                        result += self._finish_batch(hashes, pages, parent, begun.popleft(), deadline)
                except (UnavailableError, DeadlineError) as error:
                    failed = error
        finally:
            for *_, finish in begun:  # another error: what was begun ends all the same
                with contextlib.suppress(KVStoreError):
                    finish()
        confirmed = result.stored + result.present + result.refused
        if failed is not None and not confirmed:
            raise failed
        return result + StoreResult(refused=len(hashes) - confirmed), batches

    def _finish_batch(
        self,
        hashes: Sequence[bytes],
        pages: Sequence[Bytes],
        parent: bytes,
        begun: tuple[int, int, Callable[[], StoreResult]],
        deadline: float,
    ) -> StoreResult:
        """What became of a batch: its pages from one place to another, stored anew when the node came back without
        knowing the namespace or this client."""
        start, end, finish = begun
        try:
            return finish()
        except (UnknownNamespaceError, NotAttachedError):
            previous = hashes[start - 1] if start else parent
            return self._store_batches(hashes[start:end], pages[start:end], previous, deadline)[0]

    def load(self, hashes: Sequence[bytes], into: Pages) -> int:
        """Load the leading pages that are here.

        Args:
            hashes: block hashes, 32 bytes each.
            into: where the payloads go: a list or tuple of writable buffers of ``layout.page_bytes`` bytes, or one
                writable contiguous buffer for all of them. Behind the pages loaded, its content is undefined.

        Returns:
            How many leading pages were loaded, whole and unchanged.

        Raises:
            InvalidRequestError: hashes or buffers of a wrong length or number.
            UnavailableError: the node could not be reached at all.
            DeadlineError: it did not answer in time.
        """
        joined = join_hashes(hashes)
        arrays = page_arrays(into, len(hashes), self.layout.page_bytes, writable=True)
        deadline = time.monotonic() + self._client.timeout
        opened, path = self._now(deadline)
        nowhere = False
        loaded = batches = 0
        try:
            loaded, nowhere = path.load_here(opened, joined, arrays, deadline)
        except NotAttachedError:
            self._open_again(deadline)
        if loaded:
            self._count_loaded([_ARENA] * loaded)
            batches = 1
        if nowhere or loaded == len(hashes):
            return loaded

        def load(opened: OpenedNamespace, path: Path, left: float) -> tuple[list[str], bool, int]:
            end = loaded + path.load_pages(opened)
            tiers = path.load(opened, hashes[loaded:end], arrays[loaded:end], left)
            return tiers, len(tiers) == len(arrays[loaded:end]), math.ceil(len(tiers) / opened.batch_pages)

        whole = True
        while whole and loaded < len(hashes):
            try:
                tiers, whole, more = self._by_path(load, deadline)
            except (UnavailableError, DeadlineError):
                if not loaded:
                    raise
                break
            batches += more
            self._count_loaded(tiers)
            loaded += len(tiers)
        if batches > 1:
            self._want_whole(hashes[: min(loaded, MOST_LOOKUP_PAGES)], deadline)
        return loaded

    def prepare_store(self, hashes: Sequence[bytes], *, parent: bytes = b"") -> PendingStore:
        """Reserve pages that are not here, to be written in place.

        Args:
            hashes: at most ``batch_pages`` block hashes of 32 bytes.
            parent: as in :meth:`store`.

        Raises:
            InvalidRequestError: a hash that has not 32 bytes.
            LimitExceededError: more than ``batch_pages`` hashes.
            UnavailableError: the node can't be reached.
            DeadlineError: it did not answer in time.
        """
        _check_hashes(hashes, self.batch_pages)
        join_hashes([parent] if parent else [])
        deadline = time.monotonic() + self._client.timeout
        pending = self._by_path(lambda opened, path, left: path.prepare_store(opened, hashes, left, parent), deadline)
        pending.observe(self._count_stored)
        return pending

    def prepare_load(self, hashes: Sequence[bytes]) -> PendingLoad:
        """Bring the leading pages up, and hold them to be copied from where they are.

        Args:
            hashes: at most ``batch_pages`` block hashes of 32 bytes.

        Raises:
            InvalidRequestError: a hash that has not 32 bytes.
            LimitExceededError: more than ``batch_pages`` hashes.
            UnavailableError: the node can't be reached.
            DeadlineError: it did not answer in time.
        """
        _check_hashes(hashes, self.batch_pages)
        deadline = time.monotonic() + self._client.timeout
        pending = self._by_path(lambda opened, path, left: path.prepare_load(opened, hashes, left), deadline)
        pending.observe(self._count_loaded)
        return pending

    def borrow(self, hashes: Sequence[bytes]) -> PendingLoad:
        """As :meth:`prepare_load`, for a reader that copies at once: without a call where the pages are in the arena
        of this host. They are not held for it: its copies are good if ``complete`` says so behind them.

        Raises:
            Exception: as :meth:`prepare_load`.
        """
        _check_hashes(hashes, self.batch_pages)
        deadline = time.monotonic() + self._client.timeout
        pending = self._by_path(lambda opened, path, left: path.borrow(opened, hashes, left), deadline)
        pending.observe(self._count_loaded)
        return pending

    def touch(self, hashes: Sequence[bytes]) -> int:
        """Mark pages as used, head of the prefix first: 131,072 at most. Returns how many are in the arena."""
        _check_hashes(hashes, MOST_LOOKUP_PAGES)
        return self._controlled(lambda control, left: control.touch(self.fingerprint, hashes, left))

    def evict(self, hashes: Sequence[bytes]) -> int:
        """Drop pages from every tier: 131,072 at most. Returns how many were somewhere."""
        _check_hashes(hashes, MOST_LOOKUP_PAGES)
        return self._controlled(lambda control, left: control.evict(self.fingerprint, hashes, left))

    def pin(self, hashes: Sequence[bytes], seconds: int) -> int:
        """Bring the leading pages up and keep them in the arena, whatever else wants their room; also over a restart.

        Args:
            hashes: block hashes, head of the prefix first: 131,072 at most.
            seconds: how long, from now; a longer pin of the same page stays.

        Returns:
            How many leading pages are pinned: fewer than asked for when one is nowhere, or when pinned pages take a
            quarter of the arena.

        Raises:
            InvalidRequestError: a time that is not above 0 and at most 366 days.
        """
        _check_hashes(hashes, MOST_LOOKUP_PAGES)
        return self._controlled(lambda control, left: control.pin(self.fingerprint, hashes, seconds, left))

    def unpin(self, hashes: Sequence[bytes]) -> int:
        """End pins: of 131,072 pages at most. Returns how many there were."""
        _check_hashes(hashes, MOST_LOOKUP_PAGES)
        return self._controlled(lambda control, left: control.unpin(self.fingerprint, hashes, left))

    def clear(self) -> int:
        """Drop the namespace with all its pages. Returns how many these were."""
        try:
            return self._controlled(lambda control, left: control.clear(self.fingerprint, left))
        except UnknownNamespaceError:  # somebody else clears it, again and again: nothing is left to do
            return 0

    def statistics(self) -> NamespaceStatistics:
        """What this object has moved so far."""
        with self._lock:
            moved = self._moved
            return NamespaceStatistics(dict(self._loaded), moved.stored, moved.present, moved.refused)

    def _controlled(self, call: Callable[[Control, float], Answer]) -> Answer:
        """A call that moves no pages."""
        deadline = time.monotonic() + self._client.timeout
        return self._retried(lambda opened, path, left: call(self._client._control, left), deadline)  # noqa: SLF001

    def _retried(self, call: Callable[[OpenedNamespace, Path, float], Answer], deadline: float) -> Answer:
        """A call with the time left, and again behind opening the namespace when the node came back another one:
        without the namespace, with its arena elsewhere, or with a smaller one and smaller batches."""
        for tries in range(_REOPENINGS + 1):
            try:
                return call(*self._now(deadline), time_left(deadline))
            except (UnknownNamespaceError, NotAttachedError, LimitExceededError):
                if tries == _REOPENINGS:
                    raise
                self._open_again(deadline)
        raise AssertionError("every try returns or raises")

    def _by_path(self, call: Callable[[OpenedNamespace, Path, float], Answer], deadline: float) -> Answer:
        """A call that moves pages. Behind it what is known of the namespace is made current: later, when the node may
        be gone, what is mapped stays readable."""
        answer = self._retried(call, deadline)
        self._refresh(deadline)
        return answer

    def _refresh(self, deadline: float) -> None:
        """Open it again where what is known of it is out of date."""
        opened, path = self._now(deadline)
        if path.is_stale(opened):
            with contextlib.suppress(UnavailableError, DeadlineError):
                self._open_again(deadline)

    def _now(self, deadline: float) -> tuple[OpenedNamespace, Path]:
        """What is known of it, which is asked for at the first use."""
        opened = self._opened
        if opened is None:
            self._open_again(deadline)
            opened = self._opened
            assert opened is not None
        return opened

    def _open_again(self, deadline: float) -> None:
        self._opened = self._client._open(self.layout, self.durability, deadline)  # noqa: SLF001

    def _settled(self, hashes: Sequence[bytes], result: StoreResult, deadline: float) -> StoreResult:
        """The result of several batches: later ones may have pushed out what earlier ones had stored."""
        control = self._client._control  # noqa: SLF001
        asked = [(self.fingerprint, hashes)]
        try:
            if self._touch_whole(hashes, deadline) == len(hashes):
                return result
            # Not by the public method, which has a timeout of its own: this one's deadline holds for all of it.
            tiers = self._retried(lambda opened, path, left: control.lookup(asked, left)[0], deadline)
            here = len(hashes) - tiers.count(ABSENT)
        except (UnavailableError, DeadlineError):
            return result  # as it was confirmed batch by batch
        left = max(0, result.stored + result.present - here)
        from_stored = min(left, result.stored)
        return StoreResult(result.stored - from_stored, result.present - (left - from_stored), result.refused + left)

    def _want_whole(self, hashes: Sequence[bytes], deadline: float) -> None:
        """As ``_touch_whole``, without a call where there is a way."""
        opened, path = self._now(deadline)
        if not path.note_wanted(opened, join_hashes(hashes)):
            with contextlib.suppress(UnavailableError, DeadlineError):
                self._touch_whole(hashes, deadline)

    def _touch_whole(self, hashes: Sequence[bytes], deadline: float) -> int:
        """Use a prefix of several batches once more, as a whole: its head must not count as older than its tail."""
        control = self._client._control  # noqa: SLF001
        return self._retried(lambda opened, path, left: control.touch(self.fingerprint, hashes, left), deadline)

    def _count_stored(self, result: StoreResult) -> None:
        with self._lock:
            self._moved += result

    def _count_loaded(self, tiers: Sequence[str]) -> None:
        with self._lock:
            for tier in set(tiers):
                self._loaded[tier] = self._loaded.get(tier, 0) + tiers.count(tier)


def _check_hashes(hashes: Sequence[bytes], limit: int) -> None:
    join_hashes(hashes)
    _check_count(len(hashes), limit)


def _check_count(pages: int, limit: int) -> None:
    if pages > limit:
        raise LimitExceededError(f"{pages} pages in one call, the limit is {limit}")
