"""Stores and loads in two calls: pages reserved and being written, or leased and being read."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

from kvstore.client.paths.results import StoreResult
from kvstore.errors import UnavailableError
from kvstore.page_codes import StoreOutcome

Bytes = npt.NDArray[np.uint8]


class PendingStore:
    """Pages that are reserved for this client to write. Leaving its context gives up what was not completed.

    Attributes:
        pages: for each hash a uint8 array of shape ``(page_bytes,)`` to fill (on the same host straight in the node's
            arena; what is in it before is undefined), or None where there is nothing to write: the page is here
            already, or was refused.
    """

    def __init__(self, pages: Sequence[Bytes | None], outcomes: bytes, finish: Callable[[bool], StoreResult]) -> None:
        self.pages = list(pages)
        self._before = StoreResult(
            present=outcomes.count(StoreOutcome.PRESENT), refused=outcomes.count(StoreOutcome.REFUSED)
        )
        self._finish: Callable[[bool], StoreResult] | None = finish
        self._observer: Callable[[StoreResult], None] = lambda result: None
        self._process = os.getpid()

    def __repr__(self) -> str:
        to_write = sum(page is not None for page in self.pages)
        state = "completed" if self._finish is None else "open"
        return f"<kvstore.PendingStore of {len(self.pages)} pages, {to_write} to write; {state}>"

    def observe(self, observer: Callable[[StoreResult], None]) -> None:
        """Tell ``observer`` what became of the pages when they are completed."""
        self._observer = observer

    @property
    def refused(self) -> int:
        """For how many of the pages the node had no room."""
        return self._before.refused

    def complete(self) -> StoreResult:
        """Publish what was written: every page that is not None in ``pages``. To be called once.

        Raises:
            UnavailableError: the node was lost; whether the pages are there is unknown. Or this is a forked child, and
                the store its parent's: nothing is done.
            DeadlineError: likewise.
        """
        finish, self._finish = self._finish, None
        if finish is None:
            raise RuntimeError("this store is completed already")
        if os.getpid() != self._process:
            raise UnavailableError(f"this store was begun by process {self._process}, from which this one was forked")
        result = self._before + finish(True)
        self._observer(result)
        return result

    def abort(self) -> None:
        """Give the pages up. The arrays must not be written any more."""
        finish, self._finish = self._finish, None
        if finish is not None and os.getpid() == self._process:
            finish(False)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()


class PendingLoad:
    """The leading pages of a prefix, leased to this client to copy. Leaving its context ends the lease.

    Attributes:
        pages: one read-only uint8 array of shape ``(page_bytes,)`` for each leading page that is here.
        tiers: where each one was when it was asked for: ``"arena"``, ``"disk"``, ``"redis"`` or ``"objects"``.
        more: whether pages behind these may be there as well, in a lower tier: whoever wants them asks for them behind
            the copies of these.
    """

    def __init__(
        self, pages: Sequence[Bytes], tiers: Sequence[str], finish: Callable[[], int], *, more: bool = False
    ) -> None:
        self.pages = list(pages)
        self.more = more
        self.tiers = list(tiers)
        self._finish: Callable[[], int] | None = finish
        """Ends the lease, and says how many leading pages had stayed; more than there are: all."""
        self._observer: Callable[[Sequence[str]], None] = lambda tiers: None
        self._process = os.getpid()

    def __repr__(self) -> str:
        state = "completed" if self._finish is None else "open"
        return f"<kvstore.PendingLoad of {len(self.pages)} leading pages; {state}>"

    def observe(self, observer: Callable[[Sequence[str]], None]) -> None:
        """Tell ``observer`` the tiers of the pages that were good when they are completed."""
        self._observer = observer

    def complete(self) -> int:
        """End the lease behind the last copy.

        Returns:
            How many leading pages had stayed as they were until now. Copies of pages beyond are to be thrown away. In a
            forked child 0: the lease is its parent's.
        """
        finish, self._finish = self._finish, None
        if finish is None or os.getpid() != self._process:
            return 0
        good = min(finish(), len(self.pages))
        if good:
            self._observer(self.tiers[:good])
        return good

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.complete()
