"""The public client: namespaces of pages behind one connection string."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path as FilePath
from types import TracebackType
from typing import Self, TypeVar

import numpy as np
import numpy.typing as npt

from kvstore.answers import MOST_LOOKUP_PAGES
from kvstore.client.buffers import Pages, page_arrays
from kvstore.client.control import Connection, RemoteControl
from kvstore.client.embedded import EmbeddedStore
from kvstore.client.path import Control, OpenedNamespace, Path
from kvstore.client.pending import PendingLoad, PendingStore
from kvstore.client.results import Lookup, NamespaceStatistics, StoreResult
from kvstore.client.shared import SharedPath
from kvstore.client.stream import StreamPath
from kvstore.client.url import parse_url
from kvstore.config import NodeConfig
from kvstore.errors import (
    DeadlineError,
    InvalidRequestError,
    LimitExceededError,
    ResourceError,
    UnavailableError,
    UnknownNamespaceError,
)
from kvstore.layout import Layout
from kvstore.status import Status
from kvstore.wire import join_hashes

Bytes = npt.NDArray[np.uint8]
Answer = TypeVar("Answer")
_log = logging.getLogger(__name__)


def connect(url: str, *, timeout: float = 5.0) -> Client:
    """A client of the node at ``url``.

    ``unix:///run/kvstore.sock`` is a node on this host, whose arena is mapped; ``kv://host:port`` one elsewhere;
    ``embedded:///folder?arena=256MiB&disk_limit=4GiB`` a store inside this process.

    A node need not run yet: it is connected to by the first call, and again whenever it comes back.

    Args:
        url: where the pages are.
        timeout: seconds that any one method may take before it raises :class:`DeadlineError`.

    Raises:
        InvalidRequestError: not such a URL, or a timeout that is not above 0.
        InUseError: an embedded folder that another process has open.
        ResourceError: an embedded folder that can't be used.
    """
    if not timeout > 0:
        raise InvalidRequestError(f"timeout must be above 0 seconds, got {timeout}")
    where = parse_url(url)
    if isinstance(where, NodeConfig):
        store = EmbeddedStore(where)
        return Client(url, store, timeout, lambda directory, left: store)
    connection = Connection(where.target, url)
    control = RemoteControl(connection)

    def make_path(directory: str, left: float) -> Path:
        if where.local:
            try:
                return SharedPath(connection, FilePath(directory), left)
            except ResourceError as error:
                _log.warning("pages go through the socket instead of shared memory: %s", error)
        return StreamPath(connection)

    return Client(url, control, timeout, make_path)


class Client:
    """A node, as :func:`connect` gives it. Blocking, safe for threads, a context manager."""

    def __init__(self, url: str, control: Control, timeout: float, make_path: Callable[[str, float], Path]) -> None:
        self.url = url
        self.timeout = timeout
        self._control = control
        self._make_path = make_path
        self._path: Path | None = None
        self._lock = threading.Lock()

    def namespace(self, layout: Layout) -> Namespace:
        """The namespace of pages with this layout, new or known.

        Raises:
            LayoutMismatchError: the node knows the same name with another page size.
            LimitExceededError: too many namespaces, or pages larger than the node's arena.
            UnavailableError: the node can't be reached.
            DeadlineError: it did not answer in time.
        """
        opened, path = self._open(layout, time.monotonic() + self.timeout)
        return Namespace(self, opened, path)

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
        pages = 0
        for _, hashes in queries:
            join_hashes(hashes)
            pages += len(hashes)
        if pages > MOST_LOOKUP_PAGES:
            raise LimitExceededError(f"a lookup of {pages} pages, the limit is {MOST_LOOKUP_PAGES}")
        deadline = time.monotonic() + self.timeout

        def ask() -> list[bytes]:
            asked = [(namespace.fingerprint, hashes) for namespace, hashes in queries]
            return self._control.lookup(asked, time_left(deadline))

        try:
            answers = ask()
        except UnknownNamespaceError:
            for namespace, _ in queries:
                self._open(namespace.layout, deadline)
            answers = ask()
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

    @property
    def arena(self) -> Bytes | None:
        """The node's arena as this process maps it, for registering it with a device; None where it can't be."""
        pages = getattr(self._path, "pages", None)
        return pages if isinstance(pages, np.ndarray) else None

    def close(self) -> None:
        """Let go of the node. An embedded store is written back first."""
        with self._lock:
            path, self._path = self._path, None
        if path is not None:
            path.close()
        self._control.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open(self, layout: Layout, deadline: float) -> tuple[OpenedNamespace, Path]:
        opened = self._control.open_namespace(layout, time_left(deadline))
        with self._lock:
            if self._path is None:
                self._path = self._make_path(opened.arena_directory, time_left(deadline))
            return opened, self._path


class Namespace:
    """Pages of one layout at one node. Made by :meth:`Client.namespace`; safe for threads."""

    def __init__(self, client: Client, opened: OpenedNamespace, path: Path) -> None:
        self.layout = opened.layout
        self.fingerprint = opened.fingerprint
        self.batch_pages = opened.batch_pages
        """Most pages that ``prepare_store`` and ``prepare_load`` take."""
        self._client = client
        self._opened = opened
        self._path = path
        self._lock = threading.Lock()
        self._loaded: dict[str, int] = {}
        self._moved = StoreResult()

    def lookup(self, hashes: Sequence[bytes]) -> Lookup:
        """Which pages are here. Errors as :meth:`Client.lookup`."""
        return self._client.lookup([(self, hashes)])[0]

    def store(self, hashes: Sequence[bytes], pages: Pages) -> StoreResult:
        """Store pages, head of the prefix first.

        Args:
            hashes: block hashes, 32 bytes each.
            pages: for each hash its payload of ``layout.page_bytes`` bytes: a list or tuple of buffers, or one
                contiguous buffer of all of them.

        Returns:
            How many pages were stored, were here before, and were refused: these add up to ``len(hashes)``. When the
            node is lost on the way, what it had not confirmed counts as refused.

        Raises:
            InvalidRequestError: hashes or pages of a wrong length or number; nothing was stored.
            UnavailableError: the node could not be reached at all.
            DeadlineError: it did not answer in time.
        """
        join_hashes(hashes)
        arrays = page_arrays(pages, len(hashes), self.layout.page_bytes, writable=False)
        deadline = time.monotonic() + self._client.timeout
        result = StoreResult()
        for start in range(0, len(hashes), self.batch_pages):
            end = start + self.batch_pages
            store = partial(self._path.store, self._opened, hashes[start:end], arrays[start:end])
            try:
                result += self._retried(store, deadline)
            except (UnavailableError, DeadlineError):
                if not start:
                    raise
                result += StoreResult(refused=len(hashes) - start)
                break
        self._count_stored(result)
        return result

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
        join_hashes(hashes)
        arrays = page_arrays(into, len(hashes), self.layout.page_bytes, writable=True)
        deadline = time.monotonic() + self._client.timeout
        loaded = 0
        for start in range(0, len(hashes), self.batch_pages):
            end = start + self.batch_pages
            load = partial(self._path.load, self._opened, hashes[start:end], arrays[start:end])
            try:
                tiers = self._retried(load, deadline)
            except (UnavailableError, DeadlineError):
                if not start:
                    raise
                break
            self._count_loaded(tiers)
            loaded += len(tiers)
            if len(tiers) < len(arrays[start:end]):
                break
        return loaded

    def prepare_store(self, hashes: Sequence[bytes]) -> PendingStore:
        """Reserve pages that are not here, to be written in place.

        Args:
            hashes: at most ``batch_pages`` block hashes of 32 bytes.

        Raises:
            InvalidRequestError: a hash that has not 32 bytes.
            LimitExceededError: more than ``batch_pages`` hashes.
            UnavailableError: the node can't be reached.
            DeadlineError: it did not answer in time.
        """
        self._check_batch(hashes)
        deadline = time.monotonic() + self._client.timeout
        pending = self._retried(partial(self._path.prepare_store, self._opened, hashes), deadline)
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
        self._check_batch(hashes)
        deadline = time.monotonic() + self._client.timeout
        pending = self._retried(partial(self._path.prepare_load, self._opened, hashes), deadline)
        pending.observe(self._count_loaded)
        return pending

    def touch(self, hashes: Sequence[bytes]) -> int:
        """Mark pages as used, head of the prefix first. Returns how many are in the arena."""
        join_hashes(hashes)
        return self._client._control.touch(self.fingerprint, hashes, self._client.timeout)  # noqa: SLF001

    def evict(self, hashes: Sequence[bytes]) -> int:
        """Drop pages from every tier. Returns how many were somewhere."""
        join_hashes(hashes)
        return self._client._control.evict(self.fingerprint, hashes, self._client.timeout)  # noqa: SLF001

    def clear(self) -> int:
        """Drop the namespace with all its pages. Returns how many these were."""
        return self._client._control.clear(self.fingerprint, self._client.timeout)  # noqa: SLF001

    def statistics(self) -> NamespaceStatistics:
        """What this object has moved so far."""
        with self._lock:
            moved = self._moved
            return NamespaceStatistics(dict(self._loaded), moved.stored, moved.present, moved.refused)

    def _check_batch(self, hashes: Sequence[bytes]) -> None:
        join_hashes(hashes)
        if len(hashes) > self.batch_pages:
            raise LimitExceededError(f"{len(hashes)} pages in one batch, the limit is {self.batch_pages}")

    def _retried(self, call: Callable[[float], Answer], deadline: float) -> Answer:
        """A call with the time left; when the node forgot the namespace, once more behind opening it."""
        try:
            return call(time_left(deadline))
        except UnknownNamespaceError:
            self._client._open(self.layout, deadline)  # noqa: SLF001
            return call(time_left(deadline))

    def _count_stored(self, result: StoreResult) -> None:
        with self._lock:
            self._moved += result

    def _count_loaded(self, tiers: Sequence[str]) -> None:
        with self._lock:
            for tier in tiers:
                self._loaded[tier] = self._loaded.get(tier, 0) + 1


def time_left(deadline: float) -> float:
    """Seconds until ``deadline`` (on the clock of ``time.monotonic``).

    Raises:
        DeadlineError: it has passed.
    """
    left = deadline - time.monotonic()
    if left <= 0:
        raise DeadlineError("the deadline passed before the work was done")
    return left
