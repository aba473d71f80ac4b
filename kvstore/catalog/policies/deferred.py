"""Deferred updates of a policy: a store is answered before the order in which its pages leave is worked out."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from kvstore.catalog.policies.policy import EvictionPolicy, Prospect

_MOST_PAGES = 256
"""Most pages of which a policy does not know yet: whoever passes that works it out, under the store's lock."""
_log = logging.getLogger(__name__)


class Deferred:
    """Tells another policy everything in the order in which it happened, before that one is asked anything.

    What the policy fails at it is not told again: the rest goes on. A page of which it may not know then leaves first,
    and one that it may still have, though it left, is proposed no more. So whatever a policy fails at, every page can
    leave.

    Args:
        policy: the other one.
    """

    def __init__(self, policy: EvictionPolicy) -> None:
        self._policy = policy
        self._untold: deque[tuple[int, Callable[[], None]]] = deque()
        """Of how many pages, and what tells it."""
        self._pages = 0
        self._astray: dict[int, bool] = {}
        """Slots that the policy failed to take in or to let go, and whether there is a page in them."""
        self._failed = False

    def insert(self, slot: int, key: bytes, parent: int | None = None) -> None:
        """A page was published in this slot."""
        self.insert_all([(slot, key, parent)])

    def insert_all(self, pages: Sequence[tuple[int, bytes, int | None]]) -> None:
        """Pages were published, in this order: slot, key and parent of each."""
        self._later(lambda: self._insert_all(pages), len(pages))

    def use(self, slots: Sequence[int]) -> None:
        """A prefix was read."""
        self._later(lambda: self._policy.use(slots), len(slots))

    def touch(self, slots: Sequence[int]) -> None:
        """A prefix was stored, or is wanted."""
        self._later(lambda: self._policy.touch(slots), len(slots))

    def remove(self, slot: int, *, lost: bool = True) -> None:
        """The page left."""
        self.remove_all((slot,), lost=lost)

    def remove_all(self, slots: Sequence[int], *, lost: bool = True) -> None:
        """Pages left, in this order."""
        self._later(lambda: self._remove_all(slots, lost=lost), len(slots))

    def remembers(self, key: bytes) -> bool:
        """Whether this page is known to have left, lost."""
        self.catch_up()
        return self._policy.remembers(key)

    def prospect(self, slot: int) -> Prospect | None:
        """What is expected of a page."""
        self.catch_up()
        return self._policy.prospect(slot)

    def victims(self) -> Iterator[int]:
        """Every slot once, in the order in which they should leave."""
        self.catch_up()
        return self._with_astray() if self._astray else self._policy.victims()

    def catch_up(self) -> None:
        """Tell what was not told yet."""
        while self._untold:
            pages, tell = self._untold[0]
            try:
                tell()
            except Exception:  # noqa: BLE001 - whatever it is, it is logged, and the policy is told the rest
                self._log_failure()
            self._untold.popleft()  # only now: whoever was interrupted tells it again
            self._pages -= pages

    def _later(self, tell: Callable[[], None], pages: int) -> None:
        self._untold.append((pages, tell))
        self._pages += pages
        if self._pages > _MOST_PAGES:
            self.catch_up()

    def _insert_all(self, pages: Sequence[tuple[int, bytes, int | None]]) -> None:
        for slot, key, parent in pages:
            try:
                self._policy.insert(slot, key, parent)
            except Exception:  # noqa: BLE001 - as above
                self._astray[slot] = True
                self._log_failure()
            else:
                if self._astray:
                    self._astray.pop(slot, None)

    def _remove_all(self, slots: Sequence[int], *, lost: bool) -> None:
        for slot in slots:
            try:
                self._policy.remove(slot, lost=lost)
            except Exception:  # noqa: BLE001 - as above
                self._astray[slot] = False
                self._log_failure()
            else:
                if self._astray:
                    self._astray.pop(slot, None)

    def _with_astray(self) -> Iterator[int]:
        yield from [slot for slot, is_here in self._astray.items() if is_here]
        for slot in self._policy.victims():
            if slot not in self._astray:
                yield slot

    def _log_failure(self) -> None:
        """Once: the store's lock is held, and what fails for good fails at every page."""
        if not self._failed:
            self._failed = True
            _log.exception("an order of eviction goes on without what its policy failed at, this time and any other")
