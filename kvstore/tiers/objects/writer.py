"""Writing: packs, the index objects that tell of them, and packs that leave for others. For one thread at a time."""

from __future__ import annotations

import errno
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
from kvstore.tiers.objects.bucket import Bucket
from kvstore.tiers.objects.budget import DayBudget
from kvstore.tiers.objects.catalog import Asked, ObjectCatalog
from kvstore.tiers.objects.heartbeat import LEAST_BYTES, Heartbeat
from kvstore.tiers.objects.index_object import IndexContent, in_parts, index_bytes
from kvstore.tiers.objects.index_writer import IndexWriter
from kvstore.tiers.objects.keys import PackKeys
from kvstore.tiers.objects.leftovers import Leftovers
from kvstore.tiers.objects.names import PackName
from kvstore.tiers.objects.pack import encode_pack, pack_bytes
from kvstore.tiers.objects.planning import order_of_leaving, own_share, pack_bytes_for, plan_packs
from kvstore.tiers.objects.reader import Reader
from kvstore.tiers.tier import PageBytes

_log = logging.getLogger(__name__)
_CARRY_SHARE = 4
"""At most this part of a leaving pack is written again."""


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
        self._lines = RareLines()
        self.others = 0
        """How many other writers there are."""
        self.heartbeat = Heartbeat(bucket, silence, clock)
        self._leftovers = Leftovers(bucket, clock)
        self._index = IndexWriter(bucket, catalog, self.heartbeat, self._leftovers, clock)
        self._use_bytes = 0

    # -- what it is --------------------------------------------------------------------------------------------------

    @property
    def name(self) -> bytes:
        """The writer's."""
        return self.heartbeat.name

    @property
    def used_bytes(self) -> int:
        """What it takes of its limit."""
        besides = self.heartbeat.used_bytes + self._use_bytes
        return self._catalog.own_bytes + self._index.used_bytes + self._leftovers.used_bytes + besides

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
        return pack_bytes([length], self._overhead) + index_bytes([1]) + LEAST_BYTES <= self.limit_bytes

    def announce(self) -> None:
        """Have a heartbeat that is not too old: nobody would ever find, or delete, what a writer without one has. One
        that was halted for long goes on under another name.

        Raises:
            OSError: that can't be said now.
        """
        if self.heartbeat.lapsed:
            _log.warning("objects: no heartbeat could be written for long; this node's packs are others' from now on")
            self._catalog.disown()
            self.heartbeat.begin()
            self._index.begin()
            self._use_bytes = 0
        if not self.heartbeat.announced:
            self.heartbeat.beat()

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
        self._bucket.put(names.use_path(self.name), body, quick=True)
        self._use_bytes = len(body)

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
            self._leftovers.delete()
        size = pack_bytes([entry.length for entry in entries], self._overhead)
        telling = self._index.size([len(entries)], gone=len(gone))
        if not self.budget.take(size + telling):
            raise OSError(errno.EDQUOT, "the day's bytes are written")
        try:
            if not carried:
                self._make_room(size + telling)
            pack, records, body = encode_pack(names.new_pack(self.name), entries, self._keys.writing)
            self._leftovers.expect(pack.name.path, size)
            self._bucket.put(pack.name.path, body)
            del body
            self._index.tell(IndexContent([(pack, records)], list(gone)))
        except OSError:
            self.budget.give_back(size + telling)
            raise
        self._leftovers.wanted(pack.name.path)
        self._catalog.note_written(pack, entries, records, carried=carried)

    def tell_pending(self) -> None:
        """Tell what is to be told, if anything is, and write many small index objects anew as one.

        Raises:
            OSError: that can't be done now.
        """
        if self._index.has_news and self.heartbeat.announced:
            self._make_room(self._index.size())
            self._index.tell(IndexContent())
        self.fold()

    def fold(self) -> None:
        """Write some of the index objects anew as one.

        Raises:
            OSError: that can't be done now.
        """
        paths = self._index.to_fold()
        if paths:
            content = self._index.read_folded(paths)
            self._make_room(self._index.bytes_of(paths))
            self._index.tell(content)
            self._index.discard(paths)
            self._leftovers.delete()

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
        left = self.share - self.used_bytes - self._index.size(removed=len(content.removed))
        # Those of an earlier try whose end failed are this writer's already.
        taken = {pack.name for some in contents for pack, _ in some.packs} & set(self._catalog.pack_names(own=True))
        for pack, records in (each for some in contents for each in some.packs):
            cost = pack.size + index_bytes([len(records)])
            if pack.name not in gone and pack.name not in taken and self._keys.may_read(pack) and cost <= left:
                left -= cost
                taken.add(pack.name)
                content.packs.append((pack, records))
        for part in in_parts(content) if content else ():
            self._index.tell(IndexContent(list(part.packs), [], list(part.removed)))
            self._catalog.learn(part, self._keys.may_read, own=True, old=True)  # also if the next one can't be told
        return taken

    # -- leaving -----------------------------------------------------------------------------------------------------

    def shrink(self) -> None:
        """Let packs leave until this writer takes no more than it may.

        Raises:
            OSError: some can't be deleted now.
        """
        if self.used_bytes > self.share:
            self._make_room(0)

    def sweep(self, left: Iterable[PackName]) -> None:
        """Packs of a dead writer are deleted: others are told so."""
        for name in left:
            self._index.add_gone(name)
            self._catalog.drop_pack(name)

    def drop_empty(self) -> None:
        """Delete packs in which no page is left.

        Raises:
            OSError: some can't be deleted now.
        """
        for id_ in self._catalog.empty_packs():
            self._delete(id_, evicted=False)

    def drop_leftovers(self) -> None:
        """Delete what may be there and nobody wants, also what came since it was deleted.

        Raises:
            OSError: some of it may still be there.
        """
        self._leftovers.delete(late=True)

    def _make_room(self, size: int) -> None:
        """Let packs leave until so many bytes more fit.

        First with a quarter of a pack to spare, into which what is worth it can be written before its pack goes.
        """
        # What leaves is to be told as well, and index objects are written anew now and then, before the old ones go.
        folding = self._index.used_bytes
        spare = min(folding, self.limit_bytes // 8) + self.pack_bytes // _CARRY_SHARE
        while self.used_bytes + size + spare > self.share:
            order = order_of_leaving(self._catalog.own_packs())
            if not order:
                if self.used_bytes + size <= self.share:
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
        size = pack_bytes([entry.length for entry in entries], self._overhead) + self._index.size(
            [len(entries)], gone=1
        )
        if self.used_bytes + size > self.limit_bytes:
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
        self.heartbeat.check()
        self._bucket.delete([pack.name.path])
        self._index.add_gone(pack.name)
        self._catalog.drop_pack(pack.name, evicted=evicted)

    @property
    def _overhead(self) -> int:
        return TAG_BYTES if self._keys.writing is not None else 0
