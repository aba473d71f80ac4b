"""Promotion: pages of lower tiers are read into the arena; decided under the store's lock, read outside of it.

A page is read by one call at a time; others that want it wait for that one. Every call publishes what it read before it
waits for anybody, so calls that want each other's pages don't wait forever.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Hashable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field

from kvstore.arena.arena import Arena
from kvstore.arena.format import FRAME_BYTES, frames_for
from kvstore.catalog.slot_state import Slot
from kvstore.fairness import Shares
from kvstore.namespaces.registry import KnownNamespace
from kvstore.page_codes import PageTier
from kvstore.store.leases import NODE
from kvstore.store.residency import Residency
from kvstore.tiers.lower_tiers import LowerTiers
from kvstore.tiers.tier import READER, Tier

MOST_RUNS = 64
"""Most calls that read from lower tiers or wait for one that does; half of them for one engine. What is in the arena is
answered while a disk hangs, too."""


@dataclass(slots=True, eq=False)
class _Coming:
    """One page that is being promoted."""

    slot: Slot
    done: threading.Event = field(default_factory=threading.Event)


@dataclass(slots=True, eq=False)
class Run:
    """The leading pages of one ``prepare_load``, each held, on its way, or missing."""

    who: tuple[int, str]
    """Whose call it is, of those who share the lower tiers: an owner, and the tenant where clients are one owner."""
    keys: list[bytes]
    tiers: bytearray
    """The :class:`PageTier` where each page was."""
    slots: list[Slot | None]
    """Held slots; None: not here, at least not yet."""
    page_frames: int
    """Of each of its pages."""
    own: dict[int, _Coming] = field(default_factory=dict)
    """Place in the run → page that this call reads."""
    awaited: dict[int, _Coming] = field(default_factory=dict)
    """Place in the run → page that a call (another one, or this one for an earlier place) reads."""
    counted: bool = False
    """Whether this call is one of ``MOST_RUNS``."""
    ended: int = 0
    """How many pages this call has read, or tried to."""
    told: int = 0
    """How many leading pages were handed out: their holds are somebody else's to end."""
    cut: bool = False
    """Whether its owner may hold no more: nothing behind ``told`` is handed out."""

    @property
    def held_frames(self) -> int:
        """Frames of the pages that are held for it, and were not handed out."""
        return sum(slot is not None for slot in self.slots[self.told :]) * self.page_frames


class Promotions:
    """The pages on their way into one arena. The store's lock guards all methods but ``read`` and ``wait``."""

    def __init__(self, arena: Arena, residency: Residency, lower_tiers: LowerTiers) -> None:
        self._arena = arena
        self._residency = residency
        self._catalog = residency.catalog
        self._slots = residency.slots
        self._tiers = lower_tiers.own
        self._shared: dict[int, Tier] = {}
        """The tiers that nodes share, by what lookups call them, fastest first."""
        if lower_tiers.shared is not None:
            self._shared[PageTier.REDIS] = lower_tiers.shared
        if lower_tiers.objects is not None:
            self._shared[PageTier.OBJECTS] = lower_tiers.objects
        self._times = lower_tiers.times
        self._readers = [ThreadPoolExecutor(MOST_RUNS, "kvstore-shared-read") for _ in self._shared]
        self._coming: dict[bytes, _Coming] = {}
        self.reserved = 0
        """Slots that threads of this process may be reading into."""
        self._frames = Shares(arena.arena_bytes // FRAME_BYTES)
        """Of pages on their way: half of the arena for one engine alone."""
        self._runs = Shares(MOST_RUNS)
        self._under_way: set[Run] = set()

    def begin(self, owner: int, known: KnownNamespace, keys: list[bytes], lower: bytes) -> Run:
        """Hold what is in the arena, and reserve slots for what must be promoted, up to the first page that is nowhere,
        or that is not within the owner's share.

        Args:
            owner: who asks. Clients that don't share the arena are one owner, and share by tenant.
            known: the namespace.
            keys: of the pages, head of the prefix first.
            lower: one byte a page, in which lower tier it was a moment ago.
        """
        tenant = known.layout.tenant if owner == NODE else ""
        run = Run((owner, tenant), keys, bytearray(), [], frames_for(known.layout.page_bytes))
        arena = PageTier.ARENA
        for slot, tier in zip(self._catalog.find_all(keys).tolist(), lower, strict=False):
            if slot < 0 and not tier:
                break
            run.slots.append(slot if slot >= 0 else None)
            run.tiers.append(arena if slot >= 0 else tier)
        self._catalog.hold(slot for slot in run.slots if slot is not None)
        self._under_way.add(run)
        try:
            # Only now that the whole run is held: making room must not push out what comes further on in it.
            self._begin_missing(run, known)
        except BaseException:
            self.publish(run, list(run.own), {})
            self.give_up(run)
            raise
        return run

    def _begin_missing(self, run: Run, known: KnownNamespace) -> None:
        """Reserve slots for what the arena lacks, or find out who reads it already."""
        for place, held in enumerate(run.slots):
            if held is not None:
                continue
            if not run.counted and not self._runs.may_take(run.who):
                break
            key = run.keys[place]
            if key in self._coming:
                run.awaited[place] = self._coming[key]
            else:
                may_come = self._may_come(run.who, known)
                slot = self._reserve(known, run.keys, place, run.tiers[place]) if may_come else None
                if slot is None:
                    break
                run.own[place] = self._coming[key] = _Coming(slot)
                self.reserved += 1
                self._frames.take(run.who, self._slots.frames[slot])
            if not run.counted:
                run.counted = True
                self._runs.take(run.who)

    def _reserve(self, known: KnownNamespace, keys: Sequence[bytes], place: int, tier: int) -> Slot | None:
        parent = keys[place - 1] if place else b""
        return self._residency.reserve(keys[place], known, NODE, parent, clean=tier not in self._shared)

    def _may_come(self, who: Hashable, known: KnownNamespace) -> bool:
        frames = frames_for(known.layout.page_bytes)
        on_their_way = self._frames.taken + frames
        # A disk that hangs must not take all of the arena, however many wait for it.
        return 4 * on_their_way <= 3 * self._frames.limit and self._frames.may_take(who, frames)

    def read(self, run: Run, places: Sequence[int]) -> dict[int, int]:
        """Fill the reserved slots of these places, from the node's own tiers and the shared ones at once.

        Returns:
            The checksum of each place that could be read.
        """
        own = [place for place in places if run.tiers[place] not in self._shared]
        if not self._shared:
            return self._read_own(run, own)
        reading = []
        for (code, tier), readers in zip(self._shared.items(), self._readers, strict=True):
            some = [place for place in places if run.tiers[place] == code]
            if some:
                reading.append(readers.submit(self._read, tier, run, some))
        try:
            sums = self._read_own(run, own) if own else {}
        finally:
            wait(reading)  # they write into this run's slots
        for each in reading:
            sums |= each.result()
        for code, tier in self._shared.items():
            # Damaged or gone where it was: a slower tier may have it.
            lost = [place for place in places if place not in sums and run.tiers[place] < code]
            if lost and code == PageTier.OBJECTS:  # which knows that without asking
                there = tier.contains([run.keys[place] for place in lost])
                lost = [place for place, here in zip(lost, there, strict=True) if here]
            if lost:
                found = self._read(tier, run, lost)
                for place in found:
                    run.tiers[place] = code
                sums |= found
        return sums

    def _read_own(self, run: Run, places: Sequence[int]) -> dict[int, int]:
        sums: dict[int, int] = {}
        for tier in self._tiers:
            missing = [place for place in places if place not in sums]
            if not missing:
                break
            sums |= self._read(tier, run, missing)
        return sums

    def _read(self, tier: Tier, run: Run, places: Sequence[int]) -> dict[int, int]:
        views = [self._residency.view(run.own[place].slot) for place in places]
        reader = READER.set(run.who)
        try:
            with self._times.measured(tier.name, "read"):
                checksums = tier.read([run.keys[place] for place in places], views)
        finally:
            READER.reset(reader)
        return {place: checksum for place, checksum in zip(places, checksums, strict=True) if checksum is not None}

    def close(self) -> None:
        """Stop the threads that read from the shared tiers."""
        for readers in self._readers:
            readers.shutdown()

    def publish(self, run: Run, places: Sequence[int], sums: dict[int, int]) -> None:
        """End the reading of these places: publish and hold what was read, unless it was dropped meanwhile."""
        came: list[int] = []
        ended = {place: run.own.pop(place) for place in places}
        run.ended += len(ended)
        self.reserved -= len(ended)
        self._frames.give_back(run.who, sum(self._slots.frames[coming.slot] for coming in ended.values()))
        for place, coming in ended.items():
            if place in sums and self._coming.get(run.keys[place]) is coming:
                came.append(place)
            else:
                self._residency.free_written(coming.slot)
        # What came from other nodes goes to this node's own tiers as well: it is wanted here.
        for places, dirty in (
            ([place for place in came if run.tiers[place] not in self._shared], False),
            ([place for place in came if run.tiers[place] in self._shared], bool(self._tiers)),
        ):
            slots = [ended[place].slot for place in places]
            self._residency.publish(slots, [sums[place] for place in places], [dirty] * len(slots))
        for place, coming in ended.items():
            key = run.keys[place]
            run.slots[place] = resident = self._catalog.find(key)
            if resident is not None:
                self._catalog.hold([resident])
            if self._coming.get(key) is coming:
                del self._coming[key]
            coming.done.set()

    def wait(self, run: Run, deadline: float) -> None:
        """Wait for the pages that other calls read. This call's own must be published before."""
        for coming in run.awaited.values():
            coming.done.wait(max(0.0, deadline - time.monotonic()))

    def leading(self, run: Run, most: int) -> list[Slot]:
        """Hand out the leading pages that are here by now, held, and were not handed out before: ``most`` of them, and
        where there are more, none later."""
        behind = run.slots[run.told :] if not run.cut else []
        here = behind[: behind.index(None)] if None in behind else behind
        run.cut = run.cut or len(here) > most
        here = here[:most]
        run.told += len(here)
        return [slot for slot in here if slot is not None]

    def end(self, run: Run, most: int) -> list[Slot]:
        """Hand out the last of the leading pages that are here now, ``most`` of them; all that is held beyond is let
        go."""
        for place in run.awaited:
            if run.slots[place] is None:
                run.slots[place] = found = self._catalog.find(run.keys[place])
                if found is not None:
                    self._catalog.hold([found])
        last = self.leading(run, most)
        self.give_up(run)
        self._catalog.use([slot for slot in run.slots if slot is not None and self._slots.is_resident(slot)])
        return last

    def give_up(self, run: Run) -> None:
        """End the holds of what was not handed out."""
        if run.counted:
            self._runs.give_back(run.who)
        run.counted = False
        self._catalog.release(slot for slot in run.slots[run.told :] if slot is not None)
        del run.slots[run.told :]
        self._under_way.discard(run)

    def frames_under_way(self, owner: int, tenant: str | None = None) -> int:
        """Frames that an owner's calls hold and have not handed out yet; those of one tenant's calls alone."""
        mine = (run for run in self._under_way if run.who[0] == owner and tenant in (None, run.who[1]))
        return sum(run.held_frames for run in mine)

    def drop(self, keys: Iterable[bytes]) -> None:
        """Somebody drops these pages from every tier: those on their way are not published when they arrive."""
        for key in keys:
            self._coming.pop(key, None)
