"""Lookup counts of the scheduler half: how many pages requests asked for and found, each request once."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvstore import Namespace
    from kvstore.connector.lookups import Tiers

REMEMBERED = 1 << 16
"""Most requests that are known to be counted. Beyond it the oldest goes: engines may ask and never come back."""
_ARRIVING = "arena"
"""Where pages come that a prefill instance is still storing."""


class LookupCounts:
    """Counts a request at its first final answer, and has the node told whose namespaces were asked; not again when it
    asks later, also behind a preemption. Belongs to the scheduler's thread, but for :meth:`asked` and :meth:`found`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counted: dict[str, None] = {}
        self._asked = 0
        self._found: Counter[str] = Counter()

    def is_counted(self, request_id: str) -> bool:
        """Whether it had its first answer."""
        return request_id in self._counted

    def count(
        self,
        request_id: str,
        ranks: Sequence[Sequence[Namespace]],
        asked: Sequence[int],
        present: Sequence[Sequence[bool]],
        tiers: Tiers,
    ) -> None:
        """The answer to a request that was not counted yet. Everything is by cache group.

        Args:
            request_id: whose it is.
            ranks: the namespaces that were asked; of each rank, since a page is there when all of its parts are.
            asked: pages behind those that the engine has itself; 0: the group is not counted.
            present: of these, which are there, or are arriving; shorter, or empty, where nobody can tell.
            tiers: where they are, as far as that is known.
        """
        self._counted[request_id] = None
        if len(self._counted) > REMEMBERED:
            del self._counted[next(iter(self._counted))]
        for group, pages in enumerate(asked):
            if not pages:
                continue
            where = tiers[group] if tiers else ()
            known = (*where, *(None,) * (len(present[group]) - len(where)))
            found = Counter(tier or _ARRIVING for here, tier in zip(present[group], known, strict=False) if here)
            for namespaces in ranks:
                namespaces[group].count_lookup(pages, found)
            with self._lock:
                self._asked += pages * len(ranks)
                for tier, count in found.items():
                    self._found[tier] += count * len(ranks)

    def forget(self, request_id: str) -> None:
        """The request is over."""
        self._counted.pop(request_id, None)

    @property
    def asked(self) -> int:
        """Pages, or parts of pages, since the start."""
        return self._asked

    @property
    def found(self) -> dict[str, int]:
        """Of these, by tier."""
        with self._lock:
            return dict(self._found)
