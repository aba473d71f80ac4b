"""The public client: one node, or one embedded store, behind a connection string."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

from kvstore.client.arguments import checked_fingerprint, checked_pairs, checked_text, checked_timeout
from kvstore.client.handle import Handle, Session
from kvstore.client.lookups import Queries, checked_hashes, look_here, look_up
from kvstore.client.namespace import Namespace
from kvstore.client.paths.path import Control, Path
from kvstore.client.paths.results import Lookup
from kvstore.errors import InvalidRequestError
from kvstore.labels import checked_label
from kvstore.layout import Layout
from kvstore.limits import MOST_LOOKUP_PAGES
from kvstore.page_codes import TIER_NAMES, Explanation
from kvstore.status import Status

Bytes = npt.NDArray[np.uint8]


class Client:
    """A node, or an embedded store, as :func:`kvstore.connect` gives it. Blocking, safe for threads, a context manager.

    A node that is lost or restarted is found again by the next call. Every method that asks it raises

    * :class:`kvstore.errors.UnavailableError` when it can't be reached, or this client is closed;
    * :class:`kvstore.errors.DeadlineError` when it did not answer within :attr:`timeout`;
    * :class:`kvstore.errors.UnauthenticatedError` or :class:`kvstore.errors.PermissionDeniedError` when it does not
      know this client's token, or does not allow the call.
    """

    def __init__(self, url: str, control: Control, timeout: float, make_path: Callable[[str, float], Path]) -> None:
        self.url = url
        self._session = Session(control, timeout, make_path)

    @property
    def timeout(self) -> float:
        """Seconds that any one method may take: above 0, and a day at most. Setting anything else raises
        :class:`kvstore.errors.InvalidRequestError`."""
        return self._session.timeout

    @timeout.setter
    def timeout(self, seconds: float) -> None:
        self._session.timeout = checked_timeout(seconds)

    def __repr__(self) -> str:
        # What a URL has behind its ? may be a password.
        return f"<kvstore.Client of {self.url.partition('?')[0]}>"

    @property
    def answered(self) -> bool:
        """Whether the node has answered this client yet. A client is made without asking it."""
        return self._session.control.answered

    def namespace(self, layout: Layout, *, durability: str = "", label: str = "", lazy: bool = False) -> Namespace:
        """The namespace of pages with this layout, new or known.

        Args:
            layout: of its pages.
            durability: ``"disk"``: from now on stores are refused rather than that pages leave the arena before they
                are on disk. Empty: as the namespace was opened before, or as the node's configuration has it.
            label: what people call the model where the layout names it otherwise, as by a fingerprint: 256 printable
                characters at most. It is no part of what makes pages interchangeable: ``kvstore status`` lists it, and
                ``[[namespace]]`` rules match it. Empty: nothing new.
            lazy: open it when it is first used, not now. Its methods then raise what this one would have raised.

        Raises:
            InvalidRequestError: no such durability, no such label, or the node has no disk to keep it.
            LayoutMismatchError: the node knows the same name with another page size.
            LimitExceededError: too many namespaces, or pages larger than half of the node's arena.
        """
        if not isinstance(layout, Layout):
            raise InvalidRequestError(f"a namespace is opened by its Layout, got {layout!r}")
        handle = Handle(self._session, layout, checked_text("durability", durability), checked_label(label))
        if not lazy:
            handle.open_again(self._deadline())
        return self._make_namespace(handle)

    def lookup(self, queries: Sequence[tuple[Namespace, Sequence[bytes]]], *, counts: bool = True) -> list[Lookup]:
        """Look pages up in several namespaces by one call.

        Args:
            queries: pairs of a namespace of this client and the block hashes to look up (32 bytes each).
            counts: whether the node's hit ratio has these pages; False: who asks counts them, or nobody does
                (:meth:`Namespace.count_lookup`).

        Returns:
            One answer for each query, in their order.

        Raises:
            InvalidRequestError: a query that is no such pair, or a hash that has not 32 bytes.
            LimitExceededError: more than 131,072 pages in all.
        """
        return look_up(self._session, _by_handle(queries), self._deadline(), counts=counts)

    def lookup_here(
        self, queries: Sequence[tuple[Namespace, Sequence[bytes]]], *, counts: bool = True
    ) -> list[Lookup] | None:
        """:meth:`lookup` as far as the mapped arena of a node on this host has the answer: no call, and no wait. What
        only a call can tell is not counted.

        Args:
            queries: as of :meth:`lookup`.
            counts: as of :meth:`lookup`.

        Returns:
            One answer for each query, in their order, or None where only a call can tell.

        Raises:
            InvalidRequestError: as of :meth:`lookup`.
        """
        return look_here(self._session, _by_handle(queries), counts=counts)

    def flush(self) -> int:
        """Return when everything stored so far would survive a loss of power.

        Returns:
            How many pages became durable by it. 0 where there is no disk.

        Raises:
            DeadlineError: it takes longer than :attr:`timeout`.
        """
        return self._session.control.flush(self.timeout)

    def status(self) -> Status:
        """What the node holds and has done: its tiers and namespaces in bytes and pages, and what it has counted since
        it started. A tenant's token is shown its own part."""
        return self._session.control.status(self.timeout)

    def explain(self, fingerprint: bytes, hashes: Sequence[bytes]) -> list[tuple[str | None, bool]]:
        """Where pages are, for people who ask why a prompt missed. It opens no namespace, and counts as no use of one.

        Args:
            fingerprint: a namespace's 32 bytes, as :meth:`status` gives it.
            hashes: block hashes of 32 bytes, 131,072 at most.

        Returns:
            For each page its tier (``"arena"``, ``"disk"``, ``"redis"``, ``"objects"`` or None), and whether the node
            remembers that it left the arena to make room.

        Raises:
            InvalidRequestError: a fingerprint or a hash that has not 32 bytes.
            LimitExceededError: more than 131,072 pages.
            UnknownNamespaceError: the node knows no such namespace.
        """
        checked_fingerprint(fingerprint)
        checked_hashes(hashes, MOST_LOOKUP_PAGES)
        tiers, why = self._session.control.explain(fingerprint, hashes, self.timeout)
        evicted = Explanation.EVICTED
        return [(TIER_NAMES[tier], reason == evicted) for tier, reason in zip(tiers, why, strict=True)]

    @property
    def arena(self) -> Bytes | None:
        """The arena as this process maps it: one uint8 array of all its bytes.

        None where it is not mapped: the node is on another host, its arena can't be mapped, or no namespace was opened
        yet.
        """
        units = self.arena_units
        return None if units is None else units.reshape(-1)

    @property
    def arena_units(self) -> Bytes | None:
        """:attr:`arena` with a row for each unit, ``(units, unit bytes)``, for registering it with a device in several
        parts: between two units lies the end of a slab of small pages, and of most large ones."""
        units = getattr(self._session.path, "units", None)
        return units if isinstance(units, np.ndarray) else None

    def close(self) -> None:
        """Let go of the node; calls under way fail. First it is told what was looked up and used since it was told
        last, for a second at most. An embedded store ends calls first, writes back, and takes its arena out of shared
        memory.

        Raises:
            ResourceError: an embedded store could not write everything back; then its arena stays.
        """
        self._session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _make_namespace(self, handle: Handle) -> Namespace:
        return Namespace(handle)

    def _deadline(self) -> float:
        return time.monotonic() + self.timeout


def _by_handle(queries: Sequence[tuple[Namespace, Sequence[bytes]]]) -> Queries:
    return [(namespace._handle, hashes) for namespace, hashes in checked_pairs(queries, Namespace)]  # noqa: SLF001
