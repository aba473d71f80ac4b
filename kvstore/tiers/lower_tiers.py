"""The lower tiers asked as one: the node's own below the arena (disk), and those that nodes share (Redis, objects)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvstore.page_codes import PageTier
from kvstore.tiers.latencies import TierLatencies
from kvstore.tiers.tier import ClaimedTier, KnownTier, ObjectStorage, OwnTier, SharedTier, Tier


class LowerTiers:
    """This node's own tiers and those that it shares.

    Args:
        own: of this node alone, fastest first.
        shared: the tier that several nodes share (Redis).
        objects: the one that outlives all of them, in object storage. Its ``contains`` answers from memory.
    """

    def __init__(
        self, own: Sequence[OwnTier], shared: ClaimedTier | None, objects: ObjectStorage | None = None
    ) -> None:
        self.own = tuple(own)
        self.times = TierLatencies()
        self.shared = shared
        self.objects = objects

    def all_shared(self) -> tuple[SharedTier, ...]:
        """The tiers that nodes share, fastest first."""
        return tuple(tier for tier in (self.shared, self.objects) if tier is not None)

    def known(self) -> tuple[KnownTier, ...]:
        """The tiers of whose pages this node knows from memory."""
        return self.own if self.objects is None else (*self.own, self.objects)

    def all(self) -> tuple[Tier, ...]:
        """Every tier, the shared ones last."""
        return (*self.own, *self.all_shared())

    def find_own(self, keys: Sequence[bytes]) -> bytes:
        """For each key ``PageTier.DISK`` where a tier of this node has it, else ``PageTier.ABSENT``. No I/O."""
        found = bytearray(len(keys))
        disk = PageTier.DISK
        for tier in self.own:
            for place, here in enumerate(tier.contains(keys)):
                if here:
                    found[place] = disk
        return bytes(found)

    def find(
        self, asked: Sequence[Sequence[bytes]], in_arena: Callable[[Sequence[bytes]], Sequence[bool]]
    ) -> list[bytes]:
        """For each list of keys, where each page is. The shared tier is asked once, for all that is nowhere faster, and
        may block until its deadline; the object tier knows what is left of them.

        Args:
            asked: lists of keys.
            in_arena: which pages the arena has: the shared tier isn't asked for them. Not called where there is none.
        """
        answers = [bytearray(self.find_own(keys)) for keys in asked]
        if self.shared is not None:
            nowhere = [
                (answer, place, key)
                for keys, answer in zip(asked, answers, strict=True)
                for place, (key, here) in enumerate(zip(keys, in_arena(keys), strict=True))
                if not answer[place] and not here
            ]
            if len(asked) > 1:  # heads first, whichever list: the tier may not get to the end in time
                nowhere.sort(key=_place)
            there = self._look_up(self.shared, [key for _, _, key in nowhere]) if nowhere else []
            redis = PageTier.REDIS
            for (answer, place, _), here in zip(nowhere, there, strict=True):
                if here:
                    answer[place] = redis
        if self.objects is not None:
            stored = PageTier.OBJECTS
            for keys, answer in zip(asked, answers, strict=True):
                places = [place for place, tier in enumerate(answer) if not tier]
                there = self.objects.contains([keys[place] for place in places])
                for place, here in zip(places, there, strict=True):
                    if here:
                        answer[place] = stored
        return list(map(bytes, answers))

    def _look_up(self, shared: Tier, keys: Sequence[bytes]) -> list[bool]:
        with self.times.measured(shared.name, "lookup"):
            return shared.contains(keys)


LOOKS = 3
"""Most looks for a page that leaves the arena meanwhile."""


def left_meanwhile(before: Sequence[bool], now: Sequence[bool], lower: bytes) -> bool:
    """Whether a page is found nowhere though it was in the arena a moment ago: it may have been written to a lower tier
    behind the look there.

    Args:
        before: which pages the arena had before the lower tiers were asked.
        now: which it has behind that.
        lower: one byte a page, where the lower tiers had it.
    """
    return any(was and not here and not tier for was, here, tier in zip(before, now, lower, strict=True))


def _place(missing: tuple[bytearray, int, bytes]) -> int:
    return missing[1]
