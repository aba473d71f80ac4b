"""Shadow LRU: what least recently used would have hit, beside the learned order, which stops where it hits less.

The trial keeps the order of a cache of the same size that is run by least recently used (LRU): keys alone, and no more
than ``_MOST`` of them; of a larger cache a sample by hash, with as many places as the sample has pages (C. A.
Waldspurger, N. Park, A. Garthwaite and I. Ahmad, "Efficient MRC construction with SHARDS", FAST 2015). So it knows each
page that LRU would have had and this cache has not (a loss) and the reverse (a gain).

It also knows what is at stake: pages that left before LRU would have let them go. Each is lost if it is wanted before
then. The learned order is used while gains, less losses, less those to be expected of what is at stake, don't pass a
small part of LRU's own hits in the wrong direction. Else only pages that LRU would have dropped already leave by the
learned order, and if there are none the oldest: so nothing more is put at stake, and what was gained for it stays.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence

_MOST = 8192
"""Keys that are kept, at most."""
_PART = 0.005
"""Of LRU's hits: how many the learned order may lose."""
_FIRST = 0.2
"""And so many pages more, so that a beginning is made where LRU hits nothing."""
_RISK = 0.2
"""How many of the pages at stake are lost, before it is known."""
_DOUBT = 200.0
"""For how many pages' worth that counts."""


class ShadowLRU:
    """Gains and losses, and what is at stake."""

    def __init__(self) -> None:
        self._order: OrderedDict[int, int] = OrderedDict()
        """The keys that LRU would have, the oldest first, and when they were used last."""
        self._at_stake: set[int] = set()
        """Those of them that left."""
        self._dropped = 0
        """When the key that LRU let go last was used last."""
        self._mask = 0
        """A key that has one of these bits is not in the sample."""
        self._places = self._most = 0
        """Pages there is room for; the most since that was worked out, ``_left`` pages ago."""
        self._left = 0
        self._both = 0.0
        """Hits that LRU has too."""
        self._gains = self._losses = 0.0
        self._returned = 0.0
        """Pages that were at stake and were not wanted before LRU let them go."""

    def free_before(self) -> float:
        """Pages that were used last before then may leave by the learned order now; others by age, after those."""
        losses = self._losses
        risk = (losses + _RISK * _DOUBT) / (losses + self._returned + _DOUBT)
        spare = self._gains - losses - risk * len(self._at_stake) + _PART * (self._both + losses) + _FIRST
        return math.inf if spare > 0 else self._dropped

    def came(self, key: int, clock: int, pages: int) -> None:
        """A page was published; there are so many now."""
        self._most = max(self._most, pages)
        self._places = max(self._places, pages)
        if key & self._mask:
            return
        order = self._order
        if key in order:
            self._losses += 1
            self._at_stake.discard(key)
        order[key] = clock
        order.move_to_end(key)
        self._trim()

    def wanted(self, keys: Sequence[int]) -> None:
        """Pages that are here are wanted again."""
        mask, order = self._mask, self._order
        for key in keys:
            if not key & mask:
                if key in order:
                    self._both += 1
                else:
                    self._gains += 1

    def used(self, keys: Sequence[int], clock: int) -> None:
        """Pages that are here were used, head first."""
        mask, order = self._mask, self._order
        for key in reversed(keys):
            if not key & mask:
                order[key] = clock
                order.move_to_end(key)
        self._trim()

    def left(self, key: int, lost: bool) -> None:
        """A page left: to make room, or else (not ``lost``) since somebody wished so, which LRU would have done too."""
        self._left += lost
        if self._left > self._places:
            self._places, self._most, self._left = self._most, 0, 0
        if key & self._mask or key not in self._order:
            return
        if lost:
            self._at_stake.add(key)
        else:
            del self._order[key]

    def forget(self, keep: float) -> None:
        """Let all that was seen so far count for less."""
        self._both *= keep
        self._gains *= keep
        self._losses *= keep
        self._returned *= keep

    def _trim(self) -> None:
        order = self._order
        while len(order) > _MOST:
            self._mask = 2 * self._mask + 1
            for key in [key for key in order if key & self._mask]:
                del order[key]
                self._at_stake.discard(key)
            self.forget(0.5)
        while len(order) * (self._mask + 1) > self._places:
            key, self._dropped = order.popitem(last=False)
            if key in self._at_stake:
                self._at_stake.remove(key)
                self._returned += 1
