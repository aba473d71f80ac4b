"""Telling others: the index objects of one writer, what they are to say, and which are written anew as one."""

from __future__ import annotations

import errno
import itertools
from collections.abc import Callable, Iterable, Sequence

from kvstore.tiers.objects import names
from kvstore.tiers.objects.bucket import Bucket, GoneError
from kvstore.tiers.objects.catalog import ObjectCatalog
from kvstore.tiers.objects.heartbeat import Heartbeat
from kvstore.tiers.objects.index_object import (
    PART_BYTES,
    IndexContent,
    decode_index,
    encode_index,
    folded,
    in_parts,
    index_bytes,
)
from kvstore.tiers.objects.leftovers import Leftovers
from kvstore.tiers.objects.names import PackName
from kvstore.tiers.objects.planning import to_fold

_GONE_TOLD_SECONDS = 600.0
"""For so long it stays told that a pack is gone, also where index objects are written anew: others may not have read
the old ones yet."""


class IndexWriter:
    """Whoever calls it holds the tier's writing lock.

    Args:
        bucket: that they are written to.
        catalog: knows which removals are to be told, and which packs there are.
        heartbeat: whose name they have, and which says the last one's number.
        leftovers: what may be there and nobody wants.
        clock: seconds that go on while the machine sleeps.
    """

    def __init__(
        self,
        bucket: Bucket,
        catalog: ObjectCatalog,
        heartbeat: Heartbeat,
        leftovers: Leftovers,
        clock: Callable[[], float],
    ) -> None:
        self._bucket = bucket
        self._catalog = catalog
        self._heartbeat = heartbeat
        self._leftovers = leftovers
        self._clock = clock
        self.begin()

    def begin(self) -> None:
        """Go on under another name: what was told is another's."""
        self._attempts = 0
        self._objects: dict[str, int] = {}
        self._large: dict[str, list[PackName]] = {}
        """Those that are too large to be written anew with others, and the packs that they speak of."""
        self._gone: list[PackName] = []
        """Packs that are gone, of which none says so yet."""
        self._told_gone: dict[PackName, float] = {}
        """When one said so first."""
        self.used_bytes = 0

    def add_gone(self, pack: PackName) -> None:
        """A pack is gone: that is to be told."""
        self._gone.append(pack)

    @property
    def has_news(self) -> bool:
        """Whether anything is to be told."""
        return bool(self._gone or self._catalog.untold())

    def size(self, pages: Sequence[int] = (), *, gone: int = 0, removed: int = 0) -> int:
        """Bytes of an index object of packs of so many pages, with all that is to be told besides."""
        return index_bytes(pages, gone + len(self._gone), removed + len(self._catalog.untold()))

    def tell(self, content: IndexContent) -> None:
        """Write an index object, or several where there is much, with all that is to be told besides.

        Raises:
            OSError: not all of it could be written, for all that is known.
        """
        content.removed += self._catalog.untold()
        content.gone += self._gone
        for part in in_parts(content):
            self._tell_part(part)

    def _tell_part(self, content: IndexContent) -> None:
        self._heartbeat.check()
        body = encode_index(content)
        self._attempts += 1  # one that failed may arrive all the same, and a number is read once
        number = self._attempts
        path = names.new_index_path(self._heartbeat.name, number)
        self._leftovers.expect(path, len(body))
        self._bucket.put(path, body)
        self._heartbeat.check()  # or nobody may have read it, and the packs that it names may have been swept
        self._leftovers.wanted(path)
        self._heartbeat.index_number = number
        self._objects[path] = len(body)
        self.used_bytes += len(body)
        if len(body) > PART_BYTES // 2:
            self._large[path] = [pack.name for pack, _ in content.packs] + [name for _, name in content.removed]
        self._catalog.told(content.removed)
        told, now = set(content.gone), self._clock()
        self._gone = [name for name in self._gone if name not in told]
        self._told_gone = {name: when for name, when in self._told_gone.items() if now - when < _GONE_TOLD_SECONDS}
        for name in told:
            self._told_gone.setdefault(name, now)

    def to_fold(self) -> list[str]:
        """Those that are to be written anew as one; a large one when less than half of it still matters."""
        paths = sorted(path for path in self._objects if path not in self._large)
        chosen = [paths[at] for at in to_fold([self._objects[path] for path in paths])]
        if not chosen and self._large:
            here = set(self._catalog.pack_names())
            half_gone = (
                path for path, told in self._large.items() if 2 * sum(map(here.__contains__, told)) < len(told)
            )
            chosen = list(itertools.islice(half_gone, 1))
        return chosen

    def read_folded(self, paths: Sequence[str]) -> IndexContent:
        """What matters still of all that these say.

        Raises:
            OSError: one can't be read now.
        """
        contents = []
        for path in paths:
            try:
                found = decode_index(self._bucket.get(path))
            except GoneError:  # a lifecycle rule's, perhaps
                found = IndexContent()
            if found is None:  # it may come whole the next time, and what it says must not be lost
                raise OSError(errno.EIO, "an index object came damaged")
            contents.append(found)
        lately = [name for name, when in self._told_gone.items() if self._clock() - when < _GONE_TOLD_SECONDS]
        return folded(contents, self._catalog.pack_names(own=True), self._catalog.pack_names(), lately)

    def bytes_of(self, paths: Iterable[str]) -> int:
        """What some of them take."""
        return sum(self._objects[path] for path in paths)

    def discard(self, paths: Iterable[str]) -> None:
        """What these say is told by others: nobody wants them any more."""
        for path in paths:
            self.used_bytes -= self._objects[path]
            self._leftovers.add(path, self._objects.pop(path))
            self._large.pop(path, None)
