"""What is known of all packs and their pages, in memory. No I/O; every method holds the catalog's lock for a moment."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from kvstore.events.ring import EventRing
from kvstore.segments.index import Place
from kvstore.segments.record import BLOCK, padded_in_all
from kvstore.segments.segment import Entry
from kvstore.tiers.counters import TierCounts
from kvstore.tiers.objects.index_object import IndexContent
from kvstore.tiers.objects.known_packs import KnownPacks
from kvstore.tiers.objects.names import PackName
from kvstore.tiers.objects.pack import Pack, Records
from kvstore.tiers.objects.pages import KEYS_AT_ONCE, TIER, PackPages
from kvstore.tiers.objects.planning import PackUse
from kvstore.tiers.objects.use_log import UseLog
from kvstore.tiers.objects.uses import Uses
from kvstore.tiers.quotas import Quotas
from kvstore.tiers.tier import HeldKeys, PageWrite, TierStatistics

_RECENT_SHARE = 2


class Asked(NamedTuple):
    """A page that is here, of a call that reads."""

    position: int
    """In the call."""
    place: Place
    pack: Pack


class ObjectCatalog:
    """The packs and the pages of one prefix. Safe for threads.

    Args:
        limit_bytes: of this writer.
        most_pages: that are remembered.
        counts: of the tier.
        clock: seconds that only grow.
    """

    def __init__(
        self,
        limit_bytes: int,
        most_pages: int,
        counts: TierCounts | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._lock = threading.Lock()
        self._packs = KnownPacks()
        self._pages = PackPages(self._packs, most_pages, self._lock)
        self._quotas = Quotas(self._pages.index)
        self.use_log = UseLog(clock)
        """Has a lock of its own."""
        self._clock = clock
        self._opened = clock()
        self.counts = counts or TierCounts()
        self._untold: list[tuple[bytes, PackName]] = []
        """Pages that were removed, of which no index object says so yet."""
        self._recent_bytes = limit_bytes // _RECENT_SHARE
        self._tick = self._recent_bytes

    # -- what is known -----------------------------------------------------------------------------------------------

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Which pages are here."""
        with self._lock:
            here: list[bool] = (self._pages.index.find(keys) >= 0).tolist()
        return here

    def keys(self, prefix: bytes) -> list[bytes]:
        """The keys of all pages that begin with ``prefix``."""
        with self._lock:
            return self._pages.index.keys(self._pages.index.rows_with_prefix(prefix))

    def tell_keys(self, held: HeldKeys, stop: threading.Event) -> bool:
        """See :meth:`kvstore.tiers.tier.KnownTier.tell_keys`."""
        return self._pages.told.tell(self._pages.index, held, stop)

    def tell(self, events: EventRing) -> None:
        """Add to ``events`` from now on which pages come and go here."""
        self._pages.events = events

    def used_by(self, fingerprint: bytes) -> int:
        """Bytes of a namespace's pages."""
        with self._lock:
            return self._pages.index.bytes_of(fingerprint)

    @property
    def own_bytes(self) -> int:
        """Of this writer's packs."""
        return self._packs.own_bytes

    @property
    def others_bytes(self) -> int:
        """Of other writers' packs, as far as known."""
        return self._packs.others_bytes

    def statistics(self, used_bytes: int, limit_bytes: int) -> TierStatistics:
        """A frozen view of the counters."""
        with self._lock:
            return TierStatistics(
                used_bytes=used_bytes, limit_bytes=limit_bytes, pages=len(self._pages.index), **self.counts.all()
            )

    def pack_names(self, *, own: bool = False) -> list[PackName]:
        """All packs, or this writer's."""
        with self._lock:
            return self._packs.names(own=own)

    def knows(self, name: PackName) -> bool:
        """Whether a pack is known."""
        with self._lock:
            return name in self._packs

    def bytes_of_writer(self, writer: bytes) -> int:
        """Of the packs that a writer has written, and that are not this one's."""
        with self._lock:
            return sum(each.pack.size for each in self._packs if each.pack.name.writer == writer and not each.own)

    def set_limit(self, limit_bytes: int) -> None:
        """The writer's limit has changed."""
        with self._lock:
            self._recent_bytes = limit_bytes // _RECENT_SHARE

    def set_quota(self, fingerprint: bytes, limit_bytes: int) -> None:
        """See :class:`~kvstore.tiers.quotas.Quotas`."""
        with self._lock:
            self._quotas.set(fingerprint, limit_bytes)

    # -- learning ----------------------------------------------------------------------------------------------------

    def learn(
        self, content: IndexContent, may_read: Callable[[Pack], bool], *, own: bool = False, old: bool = False
    ) -> None:
        """Take in what an index object says.

        Args:
            content: that.
            may_read: whether a pack is one of ours.
            own: whether its packs are this writer's from now on.
            old: whether newer ones were taken in before: what those say wins, also where memory is short.
        """
        for at in range(0, len(content.removed), KEYS_AT_ONCE):
            with self._lock:
                for key, name in content.removed[at : at + KEYS_AT_ONCE]:
                    self._remove_in(key, name)
        gone = set(content.gone)
        for pack, records in content.packs:
            if pack.name not in gone and may_read(pack):
                with self._lock:
                    self._add(pack, records, own=own, old=old)
        for name in content.gone:
            with self._lock:
                self._drop(name)

    def learn_again(self, name: PackName, records: Records | None) -> None:
        """A pack's own footer was read, since its pages were doubted: those that are known nowhere come back. None: it
        can't be read, or is damaged as well, and is looked at again later."""
        with self._lock:
            known = self._packs.named(name)
            if known is not None and records is not None:
                self._pages.put(known, records, self._tick, old=True)
            elif known is not None:
                self._packs.doubt(known, self._clock())

    def to_learn_again(self) -> list[Pack]:
        """Packs of which something else came than was asked for, and that are to be looked at again now."""
        with self._lock:
            return self._packs.take_doubted(self._clock())

    def drop_pack(self, name: PackName, *, evicted: bool = False) -> int:
        """A pack is gone. Returns how many of its pages are now nowhere."""
        with self._lock:
            return self._drop(name, evicted=evicted)

    def disown(self) -> None:
        """All packs are another's from now on."""
        with self._lock:
            self._packs.disown()

    def note_uses(self, uses: Uses) -> None:
        """Another writer says what it has read."""
        with self._lock:
            now, index = self._clock(), self._pages.index
            for name, blocks in uses.packs.items():
                known = self._packs.named(name)
                if known is None or not known.own:
                    continue
                known.used_at = now
                rows = index.rows_in(known.id)
                offsets = np.array([place.offset for place in index.places(rows)], np.int64) // BLOCK
                index.touch(rows[np.isin(offsets, np.array(list(blocks), np.int64))], self._tick)
            self.use_log.note_namespaces(uses.namespaces)

    # -- reading -----------------------------------------------------------------------------------------------------

    def find(self, keys: Sequence[bytes], lengths: Sequence[int], positions: Sequence[int]) -> list[Asked]:
        """Those of a call's pages that are here, with their length."""
        with self._lock:
            rows = self._pages.index.find(keys)
            here = np.flatnonzero(rows >= 0)
            places = self._pages.index.places(rows[here])
            found = []
            for at, place in zip(here.tolist(), places, strict=True):
                pack = self._packs[place.segment].pack
                if place.length - pack.overhead == lengths[at]:
                    found.append(Asked(positions[at], place, pack))
        return found

    def note_read(self, keys: Sequence[bytes], found: Sequence[Asked], damaged: Sequence[Asked]) -> None:
        """Pages were read, and others were not what they should be: these are forgotten, for a while at least."""
        with self._lock:
            index = self._pages.index
            read = [keys[each.position] for each in found]
            rows = index.find(read)
            index.touch(rows[rows >= 0], self._tick)
            self._note_use(read, [each.place for each in found])
            for each in damaged:
                key = keys[each.position]
                row = index.find([key])
                if row[0] >= 0 and index.places(row)[0] == each.place:
                    self._pages.move_or_take_out(row, [key], self._tick)
                    self._packs.doubt(self._packs[each.place.segment], self._clock())

    def touch(self, keys: Sequence[bytes]) -> list[bool]:
        """Note that pages were used. Returns which are here."""
        with self._lock:
            rows = self._pages.index.find(keys)
            here = np.flatnonzero(rows >= 0)
            self._pages.index.touch(rows[here], self._tick)
            self._note_use([keys[at] for at in here.tolist()], self._pages.index.places(rows[here]))
        return [row >= 0 for row in rows.tolist()]

    # -- writing -----------------------------------------------------------------------------------------------------

    def choose_writes(
        self, pages: Sequence[PageWrite], corrupt: set[bytes], fits: Callable[[int], bool], overhead: int
    ) -> list[PageWrite]:
        """Which pages have to be written: each once, not those that are here, not those that can't be."""
        wanted: dict[bytes, PageWrite] = {}
        keys = [page.key for page in pages]
        with self._lock:
            rows = self._pages.index.find(keys)
            here = rows >= 0
            self._pages.index.touch(rows[here], self._tick)
            self.use_log.note_namespaces(keys)
            possible = {length: length > 0 and fits(length) for length in {len(page.payload) for page in pages}}
            for page, known in zip(pages, here.tolist(), strict=True):
                if page.key in wanted or known:
                    continue
                if page.key in corrupt:
                    self.counts.add(corrupt=1)
                elif possible[len(page.payload)]:
                    wanted[page.key] = page
                else:
                    self.counts.add(refused=1)
            refused = self._quotas.refused(keys, {key: len(page.payload) + overhead for key, page in wanted.items()})
            for key in refused:
                del wanted[key]
            self.counts.add(refused=len(refused))
        return list(wanted.values())

    def note_written(self, pack: Pack, entries: Sequence[Entry], records: Records, *, carried: bool) -> None:
        """A pack of this writer's was written, and an index object that says so."""
        with self._lock:
            if carried:
                self.counts.add(carried=len(entries))
            else:
                self._tick += padded_in_all(records["length"].tolist())
                self.counts.add(stored=len(entries), written_bytes=sum(entry.length for entry in entries))
            self._add(pack, records, own=True, old=False)

    def enforce_quotas(self, keys: Sequence[bytes]) -> int:
        """After a call that wrote these: forget pages of its namespaces over their quotas. Returns how many."""
        with self._lock:
            leaving = self._pages.index.keys(self._quotas.leaving(keys))
            for key in leaving:
                self._forget(key)
            self.counts.add(evicted=len(leaving))
        return len(leaving)

    def publish_stored(self, pages: Iterable[PageWrite]) -> None:
        """Tell of pages that were written and are here now."""
        events, pages = self._pages.events, list(pages)
        if not events.wanted:
            return
        with self._lock:
            rows = self._pages.index.find([page.key for page in pages]).tolist()
            events.stored(TIER, [(page.key, page.parent) for page, row in zip(pages, rows, strict=True) if row >= 0])

    def remove(self, keys: Sequence[bytes]) -> int:
        """Forget pages. Returns how many were here; :meth:`untold` has them until an index object says so."""
        wanted = list(dict.fromkeys(keys))
        count = 0
        for at in range(0, len(wanted), KEYS_AT_ONCE):
            with self._lock:
                count += sum([self._forget(key) for key in wanted[at : at + KEYS_AT_ONCE]])
        return count

    def untold(self) -> list[tuple[bytes, PackName]]:
        """Removed pages that are to be told of."""
        with self._lock:
            self._untold = [each for each in self._untold if each[1] in self._packs]
            return list(self._untold)

    def told(self, removed: Sequence[tuple[bytes, PackName]]) -> None:
        """An index object says so now."""
        with self._lock:
            done = set(removed)
            self._untold = [each for each in self._untold if each not in done]

    # -- packs that leave --------------------------------------------------------------------------------------------

    def own_packs(self) -> list[PackUse]:
        """This writer's packs, and what counts for whether they leave."""
        with self._lock:
            return self._pages.own_packs(self._tick - self._recent_bytes)

    def empty_packs(self) -> list[int]:
        """See :meth:`PackPages.empty_packs`."""
        with self._lock:
            return self._pages.empty_packs()

    def pack(self, id_: int) -> Pack | None:
        """A pack by its id."""
        with self._lock:
            known = self._packs.get(id_)
            return known.pack if known is not None else None

    def worth_carrying(self, id_: int) -> list[tuple[Place, bytes]]:
        """The pages of a pack that were read lately, the latest first, and not its only ones that could stay."""
        with self._lock:
            index = self._pages.index
            rows = index.read_since(index.rows_in(id_), self._tick - self._recent_bytes)
            return list(zip(index.places(rows), index.keys(rows), strict=True))

    def forked(self) -> None:
        """In a child: another thread of the parent may have had the lock."""
        self._lock = threading.Lock()
        self._pages.forked(self._lock)

    # -- the caller holds the lock -----------------------------------------------------------------------------------

    def _add(self, pack: Pack, records: Records, *, own: bool, old: bool) -> None:
        # What was there before is learnt newest first.
        used_at = self._opened - 1e-3 * self._packs.count if old else self._clock()
        known = self._packs.add(pack, own=own, used_at=used_at)
        if known is None:
            return
        keys = self._pages.put(known, records, self._tick, old=old)
        if not old:
            self.use_log.note_namespaces(keys)

    def _drop(self, name: PackName, *, evicted: bool = False) -> int:
        known = self._packs.drop(name)
        if known is None:
            return 0
        left = self._pages.drop(known, self._tick)
        if evicted:
            self.counts.add(evicted=left)
        return left

    def _forget(self, key: bytes) -> bool:
        """A page is to be found in no pack any more."""
        here, ids = self._pages.forget(key)
        for id_ in ids:
            known = self._packs.get(id_)
            if known is not None:
                known.removed.add(key)
                self._untold.append((key, known.pack.name))
        return here

    def _remove_in(self, key: bytes, name: PackName) -> None:
        """Another writer says that a page is not to be found in a pack any more."""
        known = self._packs.named(name)
        if known is None:
            self._packs.remove_early(key, name)
        else:
            known.removed.add(key)
            self._pages.forget_in(key, known, self._tick)

    def _note_use(self, keys: Sequence[bytes], places: Sequence[Place]) -> None:
        now = self._clock()
        self.use_log.note_namespaces(keys)
        read = [(known, place) for place in places if (known := self._packs.get(place.segment)) is not None]
        for known, _ in read:
            known.used_at = now
        self.use_log.note_reads((known.pack.name, place.offset) for known, place in read if not known.own)
