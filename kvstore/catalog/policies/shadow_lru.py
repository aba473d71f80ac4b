"""Shadow LRU: what least recently used would have hit, beside the learned order, which stops where it hits less.

It has the order of a cache of the same size that is run by least recently used (LRU): keys alone, and no more than
``_MOST`` of them; of a larger cache a sample by hash, with as many places as the sample has pages (C. A. Waldspurger,
N. Park, A. Garthwaite and I. Ahmad, "Efficient MRC construction with SHARDS", FAST 2015). So it knows each page that is
wanted and that LRU would have had and this cache has not (a loss), and the reverse (a gain).

It also knows what is at stake: pages that left before LRU would have let them go. Each is lost if it is wanted before
then, and all pages of a prompt are wanted at once: in a cache with room for a few prompts the first loss would be too
large. So as many of them count as lost as of LRU's own pages are wanted before it lets them go.

While losses, with those, exceed gains by more than a small part of LRU's own hits and of a full cache, only pages that
LRU would no longer have leave by the learned order; if there are none, the oldest.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

_MOST = 8192
"""Keys that are kept, at most."""
_PART = 0.005
"""Of LRU's hits: how many the learned order may lose."""
_LESSON = 0.05
"""Of the cache's pages: as many more, which is what it costs to learn a workload."""
_DOUBT = 200.0
"""So many of LRU's pages are taken to be wanted, beside those of which it is known."""
_MOST_GAINS = 0.05
"""Of LRU's hits: gains beyond that make up for no losses later, when the workload may be another one."""
_HALF_LIFE = 1 << 17
"""References, at least, until what was seen counts half; a larger cache forgets more slowly."""


class ShadowLRU:
    """Gains and losses."""

    def __init__(self) -> None:
        self._order: OrderedDict[int, int] = OrderedDict()
        """The keys that LRU would have, the oldest first, and when they were used last."""
        self.horizon = 0
        """LRU has no page any more that was used last before then, or then."""
        self._mask = 0
        """A key that has one of these bits is not in the sample."""
        self._places = self._most = 0
        """Pages there is room for; the most since that was worked out, ``_left`` pages ago."""
        self._left = 0
        self._at_stake: set[int] = set()
        """Keys that LRU would have, of pages that left."""
        self._lru_hits = 0.0
        self._losses = 0.0
        """Less gains."""
        self._let_go = 0.0
        """Pages that LRU let go."""

    @property
    def hits_more(self) -> bool:
        """Whether LRU does, or is to be expected to."""
        wanted = self._lru_hits + _DOUBT
        risk = wanted / (wanted + self._let_go)
        expected = self._losses + risk * len(self._at_stake)
        return expected > _PART * self._lru_hits + _LESSON * self._places / (self._mask + 1)

    def came(self, key: int, pages: int) -> None:
        """A page was published; there are so many now."""
        self._most = max(self._most, pages)
        self._places = max(self._places, pages)
        if not key & self._mask and key in self._order:
            self._losses += 1
            self._lru_hits += 1
            self._at_stake.discard(key)

    def wanted(self, keys: Sequence[int]) -> None:
        """Pages that are here are wanted again."""
        mask, order = self._mask, self._order
        for key in keys:
            if not key & mask:
                if key in order:
                    self._lru_hits += 1
                else:
                    self._losses -= 1
        keep: float = 0.5 ** (len(keys) / max(_HALF_LIFE, 16 * self._places))
        self._lru_hits *= keep
        self._let_go *= keep
        self._losses = max(self._losses * keep, -_MOST_GAINS * self._lru_hits)

    def used(self, keys: Sequence[int], clock: int) -> None:
        """Pages that are here were used, head first."""
        mask, order = self._mask, self._order
        for key in reversed(keys):
            if not key & mask:
                order[key] = clock
                order.move_to_end(key)
        while len(order) > _MOST:
            self._mask = 2 * self._mask + 1
            for key in [key for key in order if key & self._mask]:
                del order[key]
                self._at_stake.discard(key)
            self._lru_hits /= 2
            self._losses /= 2
            self._let_go /= 2
        while len(order) * (self._mask + 1) > self._places:
            key, self.horizon = order.popitem(last=False)
            self._let_go += 1
            self._at_stake.discard(key)

    def left(self, key: int, *, lost: bool) -> None:
        """A page left: to make room, or else since somebody wished so, which LRU would have done, too."""
        self._left += lost
        if self._left > self._places:
            self._places, self._most, self._left = self._most, 0, 0
        if key not in self._order:
            return
        if lost:
            self._at_stake.add(key)
        else:
            del self._order[key]
