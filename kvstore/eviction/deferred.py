"""A policy that is told later: a store is answered before the order in which its pages leave is worked out."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence

from kvstore.eviction.contract import EvictionPolicy

_MOST_PAGES = 256
"""Most pages of which a policy does not know yet: whoever passes that works it out, under the store's lock."""


class Deferred:
    """Tells another policy everything in the order in which it happened, before that one is asked anything.

    Args:
        policy: the other one.
    """

    def __init__(self, policy: EvictionPolicy) -> None:
        self._policy = policy
        self._untold: deque[tuple[int, Callable[[], None]]] = deque()
        """Of how many pages, and what tells it."""
        self._pages = 0

    def insert(self, slot: int, key: bytes, parent: int | None = None) -> None:
        """A page was published in this slot."""
        self.insert_all([(slot, key, parent)])

    def insert_all(self, pages: Sequence[tuple[int, bytes, int | None]]) -> None:
        """Pages were published, in this order: slot, key and parent of each."""

        untold = deque(pages)

        def insert() -> None:
            while untold:  # where the policy fails at one of them, those before are not told again
                self._policy.insert(*untold[0])
                untold.popleft()

        self._later(insert, len(pages))

    def use(self, slots: Sequence[int]) -> None:
        """A prefix was read."""
        self._later(lambda: self._policy.use(slots), len(slots))

    def touch(self, slots: Sequence[int]) -> None:
        """A prefix was stored, or is wanted."""
        self._later(lambda: self._policy.touch(slots), len(slots))

    def remove(self, slot: int, *, lost: bool = True) -> None:
        """The page left."""
        self._later(lambda: self._policy.remove(slot, lost=lost), 1)

    def remembers(self, key: bytes) -> bool:
        """Whether this page is known to have left, lost."""
        self.catch_up()
        return self._policy.remembers(key)

    def victims(self) -> Iterator[int]:
        """Every slot once, in the order in which they should leave."""
        self.catch_up()
        return self._policy.victims()

    def catch_up(self) -> None:
        """Tell what was not told yet. Where the policy fails at something, it is told of that again the next time."""
        while self._untold:
            pages, tell = self._untold[0]
            tell()
            self._untold.popleft()
            self._pages -= pages

    def _later(self, tell: Callable[[], None], pages: int) -> None:
        self._untold.append((pages, tell))
        self._pages += pages
        if self._pages > _MOST_PAGES:
            self.catch_up()
