"""Writing: packs, the index objects that tell of them, and packs that leave for others. For one thread at a time."""

from __future__ import annotations

import errno
import itertools
import logging
import time
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from kvstore.rare_lines import RareLines
from kvstore.segments.batching import leading_within
from kvstore.segments.cipher import TAG_BYTES
from kvstore.segments.index import Place
from kvstore.segments.segment import Entry
from kvstore.tiers.objects import names
from kvstore.tiers.objects.bucket import Bucket, GoneError
from kvstore.tiers.objects.budget import DayBudget
from kvstore.tiers.objects.catalog import Asked, ObjectCatalog
from kvstore.tiers.objects.index_object import (
    PART_BYTES,
    IndexContent,
    decode_index,
    encode_index,
    folded,
    in_parts,
    index_bytes,
)
from kvstore.tiers.objects.keys import PackKeys
from kvstore.tiers.objects.names import PackName
from kvstore.tiers.objects.pack import encode_pack, pack_bytes
from kvstore.tiers.objects.planning import order_of_leaving, own_share, pack_bytes_for, plan_packs, to_fold
from kvstore.tiers.objects.reader import Reader
from kvstore.tiers.tier import PageBytes

_log = logging.getLogger(__name__)
_CARRY_SHARE = 4
"""At most this part of a leaving pack is written again."""
_HEARTBEAT_BYTES = 64
_GONE_TOLD_SECONDS = 600.0
"""For so long it stays told that a pack is gone, also where index objects are written anew: others may not have read
the old ones yet."""


class Writer:
    """One writer: its name, its packs and its index objects. Whoever calls it holds the tier's writing lock.

    Args:
        bucket: that it writes to.
        catalog: what is known.
        keys: what packs are encrypted with.
        reader: reads what is carried on.
        limit_bytes: most bytes that it may take, everything that it writes included.
        prefix_limit: of all writers together; 0: none.
        silence: seconds without a heartbeat behind which others take over what it has.
        clock: seconds that go on while the machine sleeps.
    """

    def __init__(
        self,
        bucket: Bucket,
        catalog: ObjectCatalog,
        keys: PackKeys,
        reader: Reader,
        *,
        limit_bytes: int,
        prefix_limit: int,
        write_limit: int,
        silence: float,
        clock: Callable[[], float],
    ) -> None:
        self._bucket = bucket
        self._catalog = catalog
        self._keys = keys
        self._reader = reader
        self.limit_bytes = limit_bytes
        self.prefix_limit = prefix_limit
        self.budget = DayBudget(write_limit)
        self._silence = silence
        self._clock = clock
        self._lines = RareLines()
        self.others = 0
        """How many other writers there are."""
        self._garbage: dict[str, int] = {}
        """What may be there and nobody wants: it counts until it is deleted, also under another name."""
        self._begin()

    def _begin(self) -> None:
        self.name = names.new_writer()
        self.index_number = self._index_attempts = 0
        self._index_objects: dict[str, int] = {}
        self._large: dict[str, list[PackName]] = {}
        """Index objects that are too large to be written anew with others, and the packs that they speak of."""
        self._left: list[PackName] = []
        """Packs that are gone, of which no index object says so yet."""
        self._told_gone: dict[PackName, float] = {}
        """When an index object said so first."""
        self._beat_at = -1e18
        self._use_bytes = 0
        self._count()

    # -- what it is --------------------------------------------------------------------------------------------------

    @property
    def share(self) -> int:
        """How many bytes it may take now."""
        return own_share(self.limit_bytes, self.prefix_limit, self._catalog.others_bytes, self.others + 1)

    @property
    def pack_bytes(self) -> int:
        """How large a pack becomes."""
        return pack_bytes_for(self.limit_bytes)

    def fits(self, length: int) -> bool:
        """Whether a page of this length could be written at all."""
        return pack_bytes([length], self._overhead) + index_bytes([1]) + 2 * _HEARTBEAT_BYTES <= self.limit_bytes

    @property
    def lapsed(self) -> bool:
        """Whether it was halted for so long that others may have taken over what it has."""
        return self._has_lapsed(self._clock())

    def _has_lapsed(self, now: float) -> bool:
        return self._beat_at > 0 and now - self._beat_at > self._silence / 2

    def beat(self) -> None:
        """Say that it lives, unless it was halted for long: then others may have said otherwise. Needs no lock.

        Raises:
            OSError: that can't be said now.
        """
        began, name = self._clock(), self.name
        if self._has_lapsed(began):
            return
        self._bucket.put(names.heartbeat_path(name), self._heartbeat(), quick=True)
        if self.name == name:
            self._beat_at = began  # and no later: it may have been halted since

    def renew(self) -> None:
        """Begin to say that it lives. One that was halted for long goes on under another name.

        Raises:
            OSError: that can't be said now.
        """
        if self.lapsed:
            _log.warning("objects: no heartbeat could be written for long; this node's packs are others' from now on")
            self._catalog.disown()
            self._begin()
        began = self._clock()
        self._bucket.put(names.heartbeat_path(self.name), self._heartbeat(), quick=True)
        self._beat_at = began
        self._count()

    def _check_alive(self) -> None:
        if self.lapsed:
            raise OSError(errno.ESTALE, "this writer was halted for long: what it has may be others' by now")

    @property
    def announced(self) -> bool:
        """Whether it has a heartbeat."""
        return self._beat_at > 0

    def announce(self) -> None:
        """Have a heartbeat that is not too old: nobody would ever find, or delete, what a writer without one has.

        Raises:
            OSError: that can't be said now.
        """
        if not self.announced or self.lapsed:
            self.renew()

    def _heartbeat(self) -> bytes:
        return b'{"index": %d}\n' % self.index_number

    def put_uses(self, body: bytes) -> None:
        """Write the use object, in the place of the one before.

        Raises:
            OSError: it could not be written.
        """
        self.announce()
        more = len(body) - self._use_bytes
        if more > 0:
            self._make_room(more)
            self._use_bytes = len(body)
            self._count()
        self._bucket.put(names.use_path(self.name), body, quick=True)
        self._use_bytes = len(body)
        self._count()

    # -- writing -----------------------------------------------------------------------------------------------------

    def write(self, entries: Sequence[Entry]) -> set[bytes]:
        """Write pages, in order, in packs. What can't be written is counted as refused.

        Returns:
            The keys of those that were.
        """
        written: set[bytes] = set()
        for run in plan_packs([entry.length for entry in entries], self.pack_bytes, self._overhead):
            some = entries[run.start : run.stop]
            try:
                self._write_pack(some)
            except OSError as error:
                self._lines.say(_log.warning, "objects: %d pages not written: %s", len(some), error.strerror or error)
                self._catalog.counts.add(refused=len(some), errors=error.errno == errno.EIO)
            else:
                written.update(entry.key for entry in some)
        return written

    def _write_pack(self, entries: Sequence[Entry], *, carried: bool = False, gone: Sequence[PackName] = ()) -> None:
        if not carried:
            if not self._bucket.may_write:
                raise OSError(errno.EAGAIN, "writes keep failing, and are left alone for a while")
            self.announce()
            self.drop_garbage()
        size = pack_bytes([entry.length for entry in entries], self._overhead)
        telling = self._telling([len(entries)], gone=len(gone))
        if not self.budget.take(size + telling):
            raise OSError(errno.EDQUOT, "the day's bytes are written")
        try:
            if not carried:
                self._make_room(size + telling)
            pack, records, body = encode_pack(names.new_pack(self.name), entries, self._keys.writing)
            self._garbage[pack.name.path] = size
            self._count()
            self._bucket.put(pack.name.path, body)
            del body
            self.tell(IndexContent([(pack, records)], list(gone)))
        except OSError:
            self.budget.give_back(size + telling)
            raise
        del self._garbage[pack.name.path]
        self._count()
        self._catalog.note_written(pack, entries, records, carried=carried)

    def tell(self, content: IndexContent) -> None:
        """Write an index object, or several where there is much, with all that is to be told besides.

        Raises:
            OSError: not all of it could be written, for all that is known.
        """
        content.removed += self._catalog.untold()
        content.gone += self._left
        for part in in_parts(content):
            self._tell_part(part)

    def _tell_part(self, content: IndexContent) -> None:
        self._check_alive()
        body = encode_index(content)
        self._index_attempts += 1  # one that failed may arrive all the same, and a number is read once
        number = self._index_attempts
        path = names.new_index_path(self.name, number)
        self._garbage[path] = len(body)
        self._count()
        self._bucket.put(path, body)
        self._check_alive()  # or nobody may have read it, and the packs that it names may have been swept
        del self._garbage[path]
        self.index_number = number
        self._index_objects[path] = len(body)
        if len(body) > PART_BYTES // 2:
            self._large[path] = [pack.name for pack, _ in content.packs] + [name for _, name in content.removed]
        self._catalog.told(content.removed)
        told, now = set(content.gone), self._clock()
        self._left = [name for name in self._left if name not in told]
        self._told_gone = {name: when for name, when in self._told_gone.items() if now - when < _GONE_TOLD_SECONDS}
        for name in told:
            self._told_gone.setdefault(name, now)
        self._count()

    def _telling(self, pages: Sequence[int], *, gone: int = 0, removed: int = 0) -> int:
        """Bytes of an index object of packs of so many pages, with all that is to be told besides."""
        return index_bytes(pages, gone + len(self._left), removed + len(self._catalog.untold()))

    def tell_pending(self) -> None:
        """Tell what is to be told, if anything is, and write many small index objects anew as one.

        Raises:
            OSError: that can't be done now.
        """
        if (self._left or self._catalog.untold()) and self._beat_at > 0:
            self._make_room(self._telling([]))
            self.tell(IndexContent())
        self.fold()

    def fold(self) -> None:
        """Write some of the index objects anew as one; a large one when less than half of it still matters.

        Raises:
            OSError: that can't be done now.
        """
        paths = sorted(path for path in self._index_objects if path not in self._large)
        chosen = [paths[at] for at in to_fold([self._index_objects[path] for path in paths])]
        if not chosen and self._large:
            here = set(self._catalog.pack_names())
            half_gone = (
                path for path, told in self._large.items() if 2 * sum(map(here.__contains__, told)) < len(told)
            )
            chosen = list(itertools.islice(half_gone, 1))
        if not chosen:
            return
        contents = []
        for path in chosen:
            try:
                found = decode_index(self._bucket.get(path))
            except GoneError:  # a lifecycle rule's, perhaps
                found = IndexContent()
            if found is None:  # it may come whole the next time, and what it says must not be lost
                raise OSError(errno.EIO, "an index object came damaged")
            contents.append(found)
        lately = [name for name, when in self._told_gone.items() if self._clock() - when < _GONE_TOLD_SECONDS]
        content = folded(contents, self._catalog.pack_names(own=True), self._catalog.pack_names(), lately)
        self._make_room(sum(self._index_objects[path] for path in chosen))
        self.tell(content)
        for path in chosen:
            self._garbage[path] = self._index_objects.pop(path)
            self._large.pop(path, None)
        self.drop_garbage()

    def adopt(self, contents: Sequence[IndexContent]) -> set[PackName]:
        """Take over packs of a writer that is dead, as many as there is room for.

        Args:
            contents: its index objects, the newest first.

        Returns:
            The packs that are this writer's now.

        Raises:
            OSError: that can't be done now.
        """
        self.announce()
        gone = {name for content in contents for name in content.gone}
        content = IndexContent(removed=[each for some in contents for each in some.removed])
        left = self.share - self._catalog.used_bytes - self._telling([], removed=len(content.removed))
        # Those of an earlier try whose end failed are this writer's already.
        taken = {pack.name for some in contents for pack, _ in some.packs} & set(self._catalog.pack_names(own=True))
        for pack, records in (each for some in contents for each in some.packs):
            cost = pack.size + index_bytes([len(records)])
            if pack.name not in gone and pack.name not in taken and self._keys.may_read(pack) and cost <= left:
                left -= cost
                taken.add(pack.name)
                content.packs.append((pack, records))
        for part in in_parts(content) if content else ():
            self.tell(IndexContent(list(part.packs), [], list(part.removed)))
            self._catalog.learn(part, self._keys.may_read, own=True, old=True)  # also if the next one can't be told
        return taken

    # -- leaving -----------------------------------------------------------------------------------------------------

    def shrink(self) -> None:
        """Let packs leave until this writer takes no more than it may.

        Raises:
            OSError: some can't be deleted now.
        """
        if self._catalog.used_bytes > self.share:
            self._make_room(0)

    def sweep(self, left: Iterable[PackName]) -> None:
        """Packs of a dead writer are deleted: others are told so."""
        for name in left:
            self._left.append(name)
            self._catalog.drop_pack(name)

    def drop_empty(self) -> None:
        """Delete packs in which no page is left.

        Raises:
            OSError: some can't be deleted now.
        """
        for id_ in self._catalog.empty_packs():
            self._delete(id_, evicted=False)

    def drop_garbage(self) -> None:
        """Delete what may be there and nobody wants.

        Raises:
            OSError: some of it may still be there.
        """
        if self._garbage:
            paths = list(self._garbage)
            self._bucket.delete(paths)
            for path in paths:
                self._garbage.pop(path, None)
            self._count()

    def close(self) -> None:
        """Say that it has ended by itself; what it has is for whoever wants it.

        Raises:
            OSError: that can't be said now: it is found silent later.
        """
        if self._beat_at > 0 and not self.lapsed:
            self._bucket.put(names.heartbeat_path(self.name, closed=True), self._heartbeat(), quick=True)
            self._bucket.delete([names.heartbeat_path(self.name), names.use_path(self.name)])

    def _make_room(self, size: int) -> None:
        """Let packs leave until so many bytes more fit.

        First with a quarter of a pack to spare, into which what is worth it can be written before its pack goes.
        """
        # What leaves is to be told as well, and index objects are written anew now and then, before the old ones go.
        folding = sum(self._index_objects.values())
        spare = min(folding, self.limit_bytes // 8) + self.pack_bytes // _CARRY_SHARE
        while self._catalog.used_bytes + size + spare > self.share:
            order = order_of_leaving(self._catalog.own_packs())
            if not order:
                if self._catalog.used_bytes + size <= self.share:
                    return
                raise OSError(errno.ENOSPC, "no pack can leave")
            size += index_bytes([], 1)
            self._carry(order[0])
            self._delete(order[0], evicted=True)

    def _carry(self, id_: int) -> None:
        """Write again what of a leaving pack was read lately, where there is room for that."""
        pack = self._catalog.pack(id_)
        pages = self._catalog.worth_carrying(id_)
        if pack is None or not pages:
            return
        share = leading_within([place.length for place, _ in pages], pack.size // _CARRY_SHARE)
        entries = self._read_back(pages[:share])
        if not entries:
            return
        size = pack_bytes([entry.length for entry in entries], self._overhead) + self._telling([len(entries)], gone=1)
        if self._catalog.used_bytes + size > self.limit_bytes:
            return
        try:
            self._write_pack(entries, carried=True, gone=[pack.name])
        except OSError as error:
            if error.errno != errno.EDQUOT:
                raise

    def _read_back(self, pages: Sequence[tuple[Place, bytes]]) -> list[Entry]:
        asked: list[Asked] = []
        keys: list[bytes] = []
        into: list[PageBytes] = []
        for place, key in pages:
            pack = self._catalog.pack(place.segment)
            if pack is not None:
                asked.append(Asked(len(keys), place, pack))
                keys.append(key)
                into.append(np.empty(place.length - pack.overhead, np.uint8))
        fetched = self._reader.fetch(keys, asked, into, time.monotonic() + self._bucket.deadline)
        sums = {each.position: checksum for each, checksum in fetched.found}
        return [Entry(keys[at], sums[at], into[at]) for at in sorted(sums)]

    def _delete(self, id_: int, *, evicted: bool) -> None:
        pack = self._catalog.pack(id_)
        if pack is None:
            return
        self._check_alive()
        self._bucket.delete([pack.name.path])
        self._left.append(pack.name)
        self._catalog.drop_pack(pack.name, evicted=evicted)

    @property
    def _overhead(self) -> int:
        return TAG_BYTES if self._keys.writing is not None else 0

    def _count(self) -> None:
        beats = 2 * _HEARTBEAT_BYTES if self._beat_at > 0 else 0
        self._catalog.other_bytes = (
            sum(self._index_objects.values()) + sum(self._garbage.values()) + beats + self._use_bytes
        )
