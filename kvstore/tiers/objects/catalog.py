"""What is known of all packs and their pages, in memory. No I/O; every method holds the catalog's lock for a moment."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore.events.ring import EventRing
from kvstore.segments.index import PageIndex, Place
from kvstore.segments.record import BLOCK, FINGERPRINT_BYTES, padded_in_all
from kvstore.segments.segment import Entry
from kvstore.tiers.counters import TierCounts
from kvstore.tiers.objects.index_object import IndexContent
from kvstore.tiers.objects.names import PackName
from kvstore.tiers.objects.pack import Pack, Records
from kvstore.tiers.objects.planning import PackUse
from kvstore.tiers.objects.uses import Uses
from kvstore.tiers.quotas import Quotas
from kvstore.tiers.tier import KEY_BYTES, HeldKeys, PageWrite, TierStatistics

TIER = "objects"
_RECENT_SHARE = 2
_MOST_GONE = 1 << 16
_MOST_USES = 1 << 16
_DOUBT_SECONDS = 30.0
_LONGEST_DOUBT = 3600.0
_DROPPED_SHARE = 16
_PLACES = np.dtype([("segment", np.uint64), ("offset", np.uint64), ("length", np.uint32), ("checksum", np.uint64)])
_KEYS_AT_ONCE = 256
"""Changed under the lock, before lookups have their turn."""


@dataclass(slots=True)
class KnownPack:
    """One pack."""

    id: int
    pack: Pack
    own: bool
    """Whether it is this writer's to delete."""
    used_at: float
    removed: set[bytes] = field(default_factory=set)
    """Keys of pages that are not to be found in it any more."""
    doubts: int = 0
    """How often something else came from there than was asked for."""
    listed: bool = True
    """Whether its pages are in the index: where memory is short, those of old packs are not."""


class Asked(NamedTuple):
    """A page that is here, of a call that reads."""

    position: int
    """In the call."""
    place: Place
    pack: Pack


class ObjectCatalog:
    """The pages of one prefix. Safe for threads.

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
        self._index = PageIndex()
        self._quotas = Quotas(self._index)
        self._most_pages = most_pages
        self._clock = clock
        self._opened = clock()
        self.counts = counts or TierCounts()
        self.events = EventRing()
        self._packs: dict[int, KnownPack] = {}
        self._ids: dict[PackName, int] = {}
        self._last_id = 0
        self._gone: dict[PackName, None] = {}
        self._also: dict[bytes, dict[int, Place]] = {}
        """Keys of pages that lie in other packs as well, and where: there they are found once theirs is gone."""
        self._held: HeldKeys | None = None
        self._told_rows = 0
        """Rows below it are told to ``_held`` when they change."""
        self._untold: list[tuple[bytes, PackName]] = []
        """Pages that were removed, of which no index object says so yet."""
        self._removed_early: dict[PackName, set[bytes]] = {}
        """Removals that were told of before their packs."""
        self._doubted: dict[int, float] = {}
        """Packs whose pages are to be learnt again, and when."""
        self._uses: dict[int, set[int]] = {}
        """Pages of others' packs that were read, by pack: where they lie, in blocks."""
        self._used_namespaces: dict[bytes, float] = {}
        self._recent_bytes = limit_bytes // _RECENT_SHARE
        self._tick = self._recent_bytes
        self._pack_bytes = 0
        self._others_bytes = 0
        self.other_bytes = 0
        """What this writer takes besides its packs."""

    # -- what is known -----------------------------------------------------------------------------------------------

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Which pages are here."""
        with self._lock:
            here: list[bool] = (self._index.find(keys) >= 0).tolist()
        return here

    def keys(self, prefix: bytes) -> list[bytes]:
        """The keys of all pages that begin with ``prefix``."""
        with self._lock:
            return self._index.keys(self._index.rows_with_prefix(prefix))

    def tell_keys(self, held: HeldKeys, stop: threading.Event) -> bool:
        """See :meth:`kvstore.tiers.tier.KnownTier.tell_keys`."""
        with self._lock:
            self._held, self._told_rows = held, 0
        while not stop.is_set():
            with self._lock:
                if self._held is not held:
                    return False
                held.came(self._index.keys(self._index.rows_between(self._told_rows, self._told_rows + _KEYS_AT_ONCE)))
                self._told_rows += _KEYS_AT_ONCE
                if self._told_rows >= self._index.end_of_rows:
                    self._told_rows = sys.maxsize  # what comes into other rows from now on is told when it comes
                    return True
            time.sleep(0)  # whoever waits for the lock goes first
        return False

    def used_by(self, fingerprint: bytes) -> int:
        """Bytes of a namespace's pages."""
        with self._lock:
            return self._index.bytes_of(fingerprint)

    @property
    def used_bytes(self) -> int:
        """What this writer takes of its limit."""
        return self._pack_bytes + self.other_bytes

    @property
    def others_bytes(self) -> int:
        """Of other writers' packs, as far as known."""
        return self._others_bytes

    def statistics(self, limit_bytes: int) -> TierStatistics:
        """A frozen view of the counters."""
        with self._lock:
            return TierStatistics(
                used_bytes=self.used_bytes, limit_bytes=limit_bytes, pages=len(self._index), **self.counts.all()
            )

    def pack_names(self, *, own: bool = False) -> list[PackName]:
        """All packs, or this writer's."""
        with self._lock:
            return [each.pack.name for each in self._packs.values() if each.own or not own]

    def knows(self, name: PackName) -> bool:
        """Whether a pack is known."""
        with self._lock:
            return name in self._ids

    def bytes_of_writer(self, writer: bytes) -> int:
        """Of the packs that a writer has written, and that are not this one's."""
        with self._lock:
            packs = self._packs.values()
            return sum(each.pack.size for each in packs if each.pack.name.writer == writer and not each.own)

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
        for at in range(0, len(content.removed), _KEYS_AT_ONCE):
            with self._lock:
                for key, name in content.removed[at : at + _KEYS_AT_ONCE]:
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
            known = self._packs.get(self._ids.get(name, 0))
            if known is not None and records is not None:
                self._put(known, records, old=True)
            elif known is not None:
                self._doubt(known, self._clock())

    def to_learn_again(self) -> list[Pack]:
        """Packs of which something else came than was asked for, and that are to be looked at again now."""
        now = self._clock()
        with self._lock:
            due = [id_ for id_, when in self._doubted.items() if when <= now]
            for id_ in due:
                del self._doubted[id_]
            return [self._packs[id_].pack for id_ in due if id_ in self._packs]

    def drop_pack(self, name: PackName, *, evicted: bool = False) -> int:
        """A pack is gone. Returns how many of its pages are now nowhere."""
        with self._lock:
            return self._drop(name, evicted=evicted)

    def disown(self) -> None:
        """All packs are another's from now on."""
        with self._lock:
            for each in self._packs.values():
                if each.own:
                    self._others_bytes += each.pack.size
                each.own = False
            self._pack_bytes = self.other_bytes = 0

    def note_uses(self, uses: Uses) -> None:
        """Another writer says what it has read."""
        with self._lock:
            now = self._clock()
            for name, blocks in uses.packs.items():
                known = self._packs.get(self._ids.get(name, 0))
                if known is None or not known.own:
                    continue
                known.used_at = now
                rows = self._index.rows_in(known.id)
                offsets = np.array([place.offset for place in self._index.places(rows)], np.int64) // BLOCK
                self._index.touch(rows[np.isin(offsets, np.array(list(blocks), np.int64))], self._tick)
            for fingerprint in uses.namespaces:
                self._used_namespaces[fingerprint] = now

    def take_uses(self) -> Uses:
        """What was used here since the last call."""
        with self._lock:
            uses = {self._packs[id_].pack.name: blocks for id_, blocks in self._uses.items() if id_ in self._packs}
            self._uses = {}
            recent = self._clock() - 600.0
            namespaces = frozenset(key for key, when in self._used_namespaces.items() if when > recent)
        return Uses(namespaces, uses)

    def idle_seconds(self, fingerprint: bytes) -> float:
        """How long nobody has used a namespace here, as far as this node knows: since it was opened at most."""
        with self._lock:
            return self._clock() - self._used_namespaces.get(fingerprint, self._opened)

    # -- reading -----------------------------------------------------------------------------------------------------

    def find(self, keys: Sequence[bytes], lengths: Sequence[int], positions: Sequence[int]) -> list[Asked]:
        """Those of a call's pages that are here, with their length."""
        with self._lock:
            rows = self._index.find(keys)
            here = np.flatnonzero(rows >= 0)
            places = self._index.places(rows[here])
            found = []
            for at, place in zip(here.tolist(), places, strict=True):
                pack = self._packs[place.segment].pack
                if place.length - pack.overhead == lengths[at]:
                    found.append(Asked(positions[at], place, pack))
        return found

    def note_read(self, keys: Sequence[bytes], found: Sequence[Asked], damaged: Sequence[Asked]) -> None:
        """Pages were read, and others were not what they should be: these are forgotten, for a while at least."""
        with self._lock:
            now = self._clock()
            rows = self._index.find([keys[each.position] for each in found])
            self._index.touch(rows[rows >= 0], self._tick)
            for each in found:
                self._note_use(keys[each.position], each.place, now)
            for each in damaged:
                key = keys[each.position]
                row = self._index.find([key])
                if row[0] >= 0 and self._index.places(row)[0] == each.place:
                    self._move_or_take_out(row, [key])
                    self._doubt(self._packs[each.place.segment], now)

    def touch(self, keys: Sequence[bytes]) -> list[bool]:
        """Note that pages were used. Returns which are here."""
        with self._lock:
            rows = self._index.find(keys)
            here = rows >= 0
            self._index.touch(rows[here], self._tick)
            now = self._clock()
            for key, place in zip(
                [keys[at] for at in np.flatnonzero(here).tolist()], self._index.places(rows[here]), strict=True
            ):
                self._note_use(key, place, now)
            answers: list[bool] = here.tolist()
        return answers

    # -- writing -----------------------------------------------------------------------------------------------------

    def choose_writes(
        self, pages: Sequence[PageWrite], corrupt: set[bytes], fits: Callable[[int], bool], overhead: int
    ) -> list[PageWrite]:
        """Which pages have to be written: each once, not those that are here, not those that can't be."""
        wanted: dict[bytes, PageWrite] = {}
        keys = [page.key for page in pages]
        with self._lock:
            rows = self._index.find(keys)
            here = rows >= 0
            self._index.touch(rows[here], self._tick)
            now = self._clock()
            possible = {length: length > 0 and fits(length) for length in {len(page.payload) for page in pages}}
            for page, known in zip(pages, here.tolist(), strict=True):
                self._used_namespaces[page.key[:FINGERPRINT_BYTES]] = now
                if page.key in wanted or known:
                    continue
                if page.key in corrupt:
                    self.counts.add(corrupt=1)
                elif possible[len(page.payload)]:
                    wanted[page.key] = page
                else:
                    self.counts.add(refused=1)
            for fingerprint, some in self._quotas.limited(keys).items():
                self._refuse_surplus(fingerprint, some, wanted, overhead)
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
        """After a call that wrote: forget pages of its namespaces that are over their quotas. Returns how many."""
        left = 0
        with self._lock:
            for fingerprint, some in self._quotas.limited(keys).items():
                rows = self._index.find(some)
                leaving = self._quotas.leaving(fingerprint, rows[rows >= 0])
                left += len(leaving)
                for key in self._index.keys(leaving):
                    self._forget(key)
            self.counts.add(evicted=left)
        return left

    def publish_stored(self, pages: Iterable[PageWrite]) -> None:
        """Tell of pages that were written and are here now."""
        pages = list(pages)
        if not self.events.wanted:
            return
        with self._lock:
            rows = self._index.find([page.key for page in pages]).tolist()
            self.events.stored(
                TIER, [(page.key, page.parent) for page, row in zip(pages, rows, strict=True) if row >= 0]
            )

    def remove(self, keys: Sequence[bytes]) -> int:
        """Forget pages. Returns how many were here; :meth:`untold` has them until an index object says so."""
        wanted = list(dict.fromkeys(keys))
        count = 0
        for at in range(0, len(wanted), _KEYS_AT_ONCE):
            with self._lock:
                count += sum([self._forget(key) for key in wanted[at : at + _KEYS_AT_ONCE]])
        return count

    def untold(self) -> list[tuple[bytes, PackName]]:
        """Removed pages that are to be told of."""
        with self._lock:
            self._untold = [each for each in self._untold if each[1] in self._ids]
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
            ids = sorted(self._packs)
            live, recent = self._index.bytes_by_segment(ids, self._tick - self._recent_bytes) if ids else ([], [])
            here = dict(zip(ids, zip(live, recent, strict=True), strict=True))
            return [
                PackUse(
                    each.id,
                    each.pack.size,
                    # What is forgotten for now, since a server was ill or memory is short, may be there all the same.
                    here[each.id][0] if each.listed and each.id not in self._doubted else each.pack.size,
                    here[each.id][1],
                    each.used_at,
                )
                for each in self._packs.values()
                if each.own
            ]

    def empty_packs(self) -> list[int]:
        """Ids of this writer's packs in which no page is left that is not found elsewhere, or could be.

        A page that two writers have stored is found in the other's pack by each of them: both packs stay, or both
        writers would delete theirs.
        """
        empty = [each.id for each in self.own_packs() if not each.live_bytes]
        if not empty:
            return []
        with self._lock:
            counted_on = {id_ for ids in self._also.values() for id_ in ids}
        return [id_ for id_ in empty if id_ not in counted_on]

    def pack(self, id_: int) -> Pack | None:
        """A pack by its id."""
        with self._lock:
            known = self._packs.get(id_)
            return known.pack if known is not None else None

    def worth_carrying(self, id_: int) -> list[tuple[Place, bytes]]:
        """The pages of a pack that were read lately, the latest first, and not its only ones that could stay."""
        with self._lock:
            rows = self._index.read_since(self._index.rows_in(id_), self._tick - self._recent_bytes)
            return list(zip(self._index.places(rows), self._index.keys(rows), strict=True))

    def forked(self) -> None:
        """In a child: another thread of the parent may have had the lock."""
        self._lock = threading.Lock()
        self._index = PageIndex()
        self._held = None

    # -- the caller holds the lock -----------------------------------------------------------------------------------

    def _add(self, pack: Pack, records: Records, *, own: bool, old: bool) -> None:
        if pack.name in self._gone:
            return
        if pack.name in self._ids:
            known = self._packs[self._ids[pack.name]]
            if own and not known.own:
                known.own = True
                self._others_bytes -= pack.size
                self._pack_bytes += pack.size
            return
        self._last_id += 1
        # What was there before is learnt newest first.
        used_at = self._opened - 1e-3 * self._last_id if old else self._clock()
        known = KnownPack(self._last_id, pack, own, used_at)
        known.removed = self._removed_early.pop(pack.name, set())
        self._packs[known.id], self._ids[pack.name] = known, known.id
        if own:
            self._pack_bytes += pack.size
        else:
            self._others_bytes += pack.size
        self._put(known, records, old=old)

    def _put(self, known: KnownPack, records: Records, *, old: bool) -> None:
        joined = records["key"].tobytes()
        keys = [joined[at : at + KEY_BYTES] for at in range(0, len(joined), KEY_BYTES)]
        if len(set(keys)) < len(keys):
            return  # nobody writes that
        if len(self._index) + len(keys) > self._most_pages:
            if old:
                known.listed = False
                return
            self._make_room_in_memory(len(keys), known.id)
        rows = self._index.find(keys)
        wanted = np.ones(len(keys), np.bool_)
        for at, key in enumerate(keys):
            if key in known.removed:
                wanted[at] = False
            elif rows[at] < 0:
                self._not_also(key, known.id)
            else:
                other = self._index.places(rows[at : at + 1])[0]
                if other.segment != known.id:
                    if old:
                        each = records[at]
                        other = Place(known.id, int(each["offset"]), int(each["length"]), int(each["checksum"]))
                    self._not_also(key, known.id)
                    self._also.setdefault(key, {})[other.segment] = other
                wanted[at] = not old
        chosen = np.flatnonzero(wanted)
        some = records[chosen]
        came = self._index.put(
            [keys[at] for at in chosen.tolist()],
            np.full(len(chosen), known.id, np.uint64),
            some["offset"],
            some["length"],
            some["checksum"],
            self._tick,
        )
        if self._held is not None:
            new = (rows[chosen] < 0) & (came < self._told_rows)
            self._held.came([keys[at] for at in chosen[new].tolist()])
        now = self._clock()
        if not old:
            for fingerprint in {key[:FINGERPRINT_BYTES] for key in keys}:
                self._used_namespaces[fingerprint] = now

    def _make_room_in_memory(self, pages: int, but: int) -> None:
        """Old packs of others are forgotten first, then this writer's own pages."""
        wanted = max(pages, self._most_pages // _DROPPED_SHARE)
        for known in sorted(self._packs.values(), key=lambda each: (each.own, each.used_at, each.id)):
            if len(self._index) + wanted <= self._most_pages:
                return
            if known.id == but or not known.listed:
                continue
            rows = self._index.rows_in(known.id)
            self._take_out(rows, self._index.keys(rows))
            known.listed = False

    def _drop(self, name: PackName, *, evicted: bool = False) -> int:
        self._gone[name] = None
        if len(self._gone) > _MOST_GONE:
            del self._gone[next(iter(self._gone))]
        known = self._packs.pop(self._ids.pop(name, 0), None)
        if known is None:
            return 0
        if known.own:
            self._pack_bytes -= known.pack.size
        else:
            self._others_bytes -= known.pack.size
        rows = self._index.rows_in(known.id)
        keys = self._index.keys(rows)
        if self._also:
            for key in [key for key, places in self._also.items() if known.id in places]:
                self._not_also(key, known.id)
        left = self._move_or_take_out(rows, keys)
        self._doubted.pop(known.id, None)
        self._uses.pop(known.id, None)
        if evicted:
            self.counts.add(evicted=left)
        return left

    def _not_also(self, key: bytes, id_: int) -> None:
        places = self._also.get(key)
        if places is not None:
            places.pop(id_, None)
            if not places:
                del self._also[key]

    def _forget(self, key: bytes) -> bool:
        """A page is to be found in no pack any more."""
        row = self._index.find([key])
        ids = set(self._also.pop(key, ()))
        here = bool(row[0] >= 0)
        if here:
            ids.add(self._index.places(row)[0].segment)
            self._take_out(row, [key])
        for id_ in ids:
            if id_ in self._packs:
                self._packs[id_].removed.add(key)
                self._untold.append((key, self._packs[id_].pack.name))
        return here

    def _remove_in(self, key: bytes, name: PackName) -> None:
        """Another writer says that a page is not to be found in a pack any more."""
        known = self._packs.get(self._ids.get(name, 0))
        if known is None:
            if name not in self._gone and len(self._removed_early) < _MOST_GONE:
                self._removed_early.setdefault(name, set()).add(key)
            return
        known.removed.add(key)
        self._not_also(key, known.id)
        row = self._index.find([key])
        if row[0] >= 0 and self._index.places(row)[0].segment == known.id:
            self._move_or_take_out(row, [key])

    def _move_or_take_out(self, rows: npt.NDArray[np.int64], keys: Sequence[bytes]) -> int:
        """Pages are where they were no more: those that lie in another pack as well are found there from now on, and at
        no moment nowhere. Returns how many are nowhere now."""
        leaving = []
        for at, key in enumerate(keys):
            place = next(iter(self._also.get(key, {}).values()), None)
            if place is None:
                leaving.append(at)
                continue
            self._not_also(key, place.segment)
            one = np.array([place], _PLACES)
            some = one["segment"], one["offset"], one["length"], one["checksum"]
            self._index.put([key], *some, self._tick, rows[at : at + 1])
        self._take_out(rows[leaving], [keys[at] for at in leaving])
        return len(leaving)

    def _take_out(self, rows: npt.NDArray[np.int64], keys: Sequence[bytes]) -> None:
        if self.events.wanted:
            self.events.removed(TIER, list(keys))
        self._index.remove(rows)
        if self._held is not None:
            told = np.flatnonzero(rows < self._told_rows)
            self._held.left([keys[at] for at in told.tolist()])

    def _note_use(self, key: bytes, place: Place, now: float) -> None:
        known = self._packs.get(place.segment)
        if known is None:
            return
        known.used_at = now
        self._used_namespaces[key[:FINGERPRINT_BYTES]] = now
        if not known.own and len(self._uses) < _MOST_USES:
            self._uses.setdefault(known.id, set()).add(place.offset // BLOCK)

    def _doubt(self, known: KnownPack, now: float) -> None:
        """Something else came from a pack than was asked for: a server that is ill may get well again."""
        if known.id not in self._doubted:
            known.doubts = min(known.doubts + 1, 16)
            self._doubted[known.id] = now + min(_DOUBT_SECONDS * (1 << (known.doubts - 1)), _LONGEST_DOUBT)

    def _refuse_surplus(
        self, fingerprint: bytes, keys: Sequence[bytes], wanted: dict[bytes, PageWrite], overhead: int
    ) -> None:
        """Remove from ``wanted`` what can't fit into a namespace's quota together with what is here."""
        here = dict(zip(keys, self._index.find(keys).tolist(), strict=True))
        asked = [key for key in keys if key in wanted or here[key] >= 0]
        lengths = self._index.lengths(np.array([here[key] for key in asked], np.int64)).tolist()
        for at, key in enumerate(asked):
            if key in wanted:
                lengths[at] = len(wanted[key].payload) + overhead
        refused = asked[self._quotas.fitting(fingerprint, lengths) :]
        self.counts.add(refused=sum([wanted.pop(key, None) is not None for key in refused]))
