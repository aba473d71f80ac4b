"""Following the other writers: what they have written, which of them are dead, and what dead ones left."""

from __future__ import annotations

import errno
import json
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from kvstore.segments import record
from kvstore.segments.record import BLOCK
from kvstore.tiers.objects import names
from kvstore.tiers.objects.bucket import Bucket, GoneError, Listed
from kvstore.tiers.objects.catalog import ObjectCatalog
from kvstore.tiers.objects.index_object import MOST_BYTES as MOST_INDEX_BYTES
from kvstore.tiers.objects.index_object import IndexContent, decode_index
from kvstore.tiers.objects.keys import PackKeys
from kvstore.tiers.objects.pack import Pack, are_sound
from kvstore.tiers.objects.planning import adoption_delay
from kvstore.tiers.objects.uses import MOST_BYTES as MOST_USE_BYTES
from kvstore.tiers.objects.uses import decode_uses
from kvstore.tiers.objects.writer import Writer

_log = logging.getLogger(__name__)
_MISSING_POLLS = 3
"""Lists may be late: so many that leave a writer out, and it is forgotten."""
_FETCHED_AT_ONCE = 64
_MOST_HEARTBEAT = 4096
"""Bytes; a larger object is none of ours."""
_MOST_TRIES = 50


@dataclass(slots=True)
class _Seen:
    """One other writer."""

    mark: str
    """Of its heartbeat."""
    content: str
    """Of it as well: the same while there is nothing new."""
    changed_at: float
    """When that was seen to change last."""
    closed: bool = False
    index_number: int = 0
    """Up to which its index objects were read."""
    behind: bool = True
    """Whether there may be more."""
    missing: int = 0
    tries: int = 0
    """How often it was tried in vain to adopt what it left."""
    left_until: float = -math.inf
    """Until when what it left is not looked at, since this node lacks its key."""


class Follower:
    """Knows the other writers. One thread at a time.

    Args:
        bucket: where they are.
        catalog: is told what they have.
        keys: of the packs.
        writer: this node's own.
        silence: seconds without a heartbeat behind which one is dead.
        clock: seconds that only grow.
    """

    def __init__(
        self,
        bucket: Bucket,
        catalog: ObjectCatalog,
        keys: PackKeys,
        writer: Writer,
        silence: float,
        clock: Callable[[], float],
    ) -> None:
        self._bucket = bucket
        self._catalog = catalog
        self._keys = keys
        self._writer = writer
        self._silence = silence
        self._clock = clock
        self._seen: dict[bytes, _Seen] = {}
        self._use_marks: dict[bytes, str] = {}

    def poll(self, *, ask_all: bool = False) -> None:
        """Look which writers there are, and read what those have told that have told anything: one request, where
        nobody has.

        Args:
            ask_all: whether to look at those as well whose heartbeats say the same as before: what they have told since
                the last one is in none of them.

        Raises:
            OSError: not everything could be read; the next call goes on.
        """
        now = self._clock()
        marks: dict[bytes, tuple[str, str, bool]] = {}
        for each in self._bucket.list(names.WRITERS):
            parsed = names.parse_heartbeat(each.path) if each.size <= _MOST_HEARTBEAT else None
            if parsed is not None and parsed[0] != self._writer.name:
                mark, content, closed = marks.get(parsed[0], ("", "", False))
                marks[parsed[0]] = mark + each.mark, f"{content}{each.path} {each.content}", closed or parsed[1]
        for writer, (mark, content, closed) in marks.items():
            seen = self._seen.setdefault(writer, _Seen(mark, content, now))
            if seen.mark != mark:
                seen.mark, seen.changed_at = mark, now
            if seen.content != content:
                seen.content, seen.behind = content, True
            seen.closed, seen.missing = closed, 0
        for writer in [writer for writer in self._seen if writer not in marks]:
            self._seen[writer].missing += 1
            if self._seen[writer].missing >= _MISSING_POLLS:
                del self._seen[writer]
        self._writer.others = len(self._seen)
        failed: OSError | None = None
        for writer, seen in self._seen.items():
            if seen.behind or ask_all:
                try:
                    self._follow(writer, seen)
                except OSError as error:
                    failed = error
        if failed is not None:
            raise failed

    def _follow(self, writer: bytes, seen: _Seen) -> None:
        """Read a writer's index objects that are new."""
        last = self._last_told(writer, closed=seen.closed)
        first = seen.index_number == 0
        behind = None if first else names.behind_index(writer, seen.index_number)
        listed = self._bucket.list(names.index_of(writer), behind)
        paths = _index_paths(listed)
        contents, all_read = self._read(paths[::-1] if first else paths)
        for content in contents:
            self._catalog.learn(content, self._keys.may_read, old=first)
        numbers = [parsed[1] for path in paths if (parsed := names.parse_index(path)) is not None]
        if all_read:
            seen.index_number = max([seen.index_number, *numbers])
            seen.behind = seen.index_number < last  # a list may be late

    def _last_told(self, writer: bytes, *, closed: bool) -> int:
        try:
            told = json.loads(self._bucket.get(names.heartbeat_path(writer, closed=closed)))
            return int(told["index"]) if isinstance(told, dict) else 0
        except GoneError:
            return 0
        except (ValueError, TypeError, KeyError):  # something else came
            return 0

    def _read(self, paths: Sequence[str]) -> tuple[list[IndexContent], bool]:
        """What index objects say, in this order, and whether all of them were there."""
        contents, all_read = [], True
        for at in range(0, len(paths), _FETCHED_AT_ONCE):
            some = paths[at : at + _FETCHED_AT_ONCE]
            jobs = self._bucket.begin([lambda path=path: self._bucket.get(path) for path in some])  # type: ignore[misc]
            for job in jobs:
                try:
                    found = decode_index(job.wait(10 * self._bucket.deadline))
                except GoneError:  # written anew, as part of a later one, since it was listed
                    all_read = False
                    continue
                if found is None:  # damaged: on its way, perhaps
                    all_read = False
                else:
                    contents.append(found)
        return contents, all_read

    # -- dead writers ------------------------------------------------------------------------------------------------

    def to_adopt(self) -> list[bytes]:
        """The writers whose packs this one is to take over now."""
        now = self._clock()
        living = [writer for writer, seen in self._seen.items() if now - seen.changed_at < self._silence]
        left = self._writer.share - self._writer.used_bytes
        chosen = []
        for writer, seen in self._seen.items():
            room = self._catalog.bytes_of_writer(writer) <= left
            delay = adoption_delay(
                writer,
                self._writer.name,
                [each for each in living if not self._seen[each].closed],
                self._silence,
                closed=seen.closed,
                room=room,
            )
            if now - seen.changed_at >= delay and now >= seen.left_until:
                chosen.append(writer)
        return chosen

    def adopt(self, writer: bytes) -> None:
        """Take over what a dead writer left: packs that are told of, as far as there is room; all else is deleted.

        Where this node lacks the key of any of them, all is left to one that has it, and looked at again later.

        Raises:
            OSError: that can't be done now; it is tried again.
        """
        seen = self._seen.get(writer)
        if seen is None:
            return
        listed = self._bucket.list(names.index_of(writer))
        paths = _index_paths(listed)
        contents, all_read = self._read(paths[::-1])
        numbers = [parsed[1] for path in paths if (parsed := names.parse_index(path)) is not None]
        complete = all_read and max(numbers, default=0) >= self._last_told(writer, closed=seen.closed)
        if not complete and seen.tries < _MOST_TRIES:
            # What is told of in what can't be read yet would look like what nobody was told of, and be deleted.
            seen.tries += 1
            raise OSError(errno.EAGAIN, "what a dead writer has told can't be read wholly yet")
        if not all(self._keys.may_read(pack) for content in contents for pack, _ in content.packs):
            seen.left_until = self._clock() + self._silence
            _log.warning(
                "objects: writer %s is gone, and has packs of a key that is not this node's: they are left to others",
                writer.hex()[:12],
            )
            return
        taken = self._writer.adopt(contents)
        named = {pack.name for content in contents for pack, _ in content.packs}
        packs = [(each, names.parse_pack(each.path)) for each in self._bucket.list(names.packs_of(writer))]
        here = [(each.path, name) for each, name in packs if name is not None and name not in taken]
        if any(name not in named and not self._catalog.knows(name) for _, name in here):
            self._ask_living()  # one of them may just have taken over the same, and have deleted what told of it
        # What nobody was told of is half of a write; what another one has taken over is known by its index.
        leaving = [path for path, name in here if name in named or not self._catalog.knows(name)]
        self._bucket.delete(leaving)
        self._writer.sweep(named - taken)
        ends = [names.heartbeat_path(writer), names.heartbeat_path(writer, closed=True), names.use_path(writer)]
        self._bucket.delete([*(each.path for each in listed), *ends])
        self._seen.pop(writer, None)
        self._writer.others = len(self._seen)
        _log.info(
            "objects: writer %s is gone: %d of its packs are this node's now, %d were deleted",
            writer.hex()[:12],
            len(taken),
            len(leaving),
        )

    def _ask_living(self) -> None:
        """Read all that those have told who live, whether or not their heartbeats say that there is more."""
        self.poll()
        now = self._clock()
        for writer, seen in self._seen.items():
            if not seen.closed and now - seen.changed_at < self._silence:
                self._follow(writer, seen)

    # -- uses and doubts ---------------------------------------------------------------------------------------------

    def read_uses(self) -> None:
        """Read what others have used.

        Raises:
            OSError: not all of it could be read.
        """
        for each in self._bucket.list(names.USES):
            writer = names.parse_use(each.path)
            if writer is None or writer == self._writer.name or self._use_marks.get(writer) == each.mark:
                continue
            if each.size > MOST_USE_BYTES:
                continue
            try:
                uses = decode_uses(self._bucket.get(each.path))
            except GoneError:
                continue
            self._use_marks[writer] = each.mark
            if uses is not None:
                self._catalog.note_uses(uses)

    def look_again(self) -> None:
        """Learn the pages of doubted packs again, from their own footers.

        Raises:
            OSError: they can't be read now.
        """
        for pack in self._catalog.to_learn_again():
            records = None
            try:
                records = self._footer(pack)
            finally:
                self._catalog.learn_again(pack.name, records)

    def _footer(self, pack: Pack) -> np.ndarray[tuple[int], np.dtype[np.void]] | None:
        try:
            trailer = record.decode_trailer(bytes(self._bucket.get_range(pack.name.path, pack.size - BLOCK, BLOCK)))
            if trailer is None or (trailer.segment, trailer.stamp) != (pack.name.number, pack.stamp):
                return None
            length = record.record_table_bytes(trailer.records)
            if not length or trailer.footer + length > pack.size:
                return None
            table = bytes(self._bucket.get_range(pack.name.path, trailer.footer, length))
        except GoneError:
            self._catalog.drop_pack(pack.name)
            return None
        if record.table_checksum(table) != trailer.checksum:
            return None
        records = np.frombuffer(table, record.RECORDS)
        return records if are_sound(pack, records) else None


def _index_paths(listed: Sequence[Listed]) -> list[str]:
    return [each.path for each in listed if names.parse_index(each.path) is not None and each.size <= MOST_INDEX_BYTES]
