"""Which files of a folder are the segments of its log, and which only bear such a name.

An operator, a copy gone wrong or another program may leave anything there. What no log wrote under its name is left
alone, and said so: it neither counts nor leaves, and no segment's number is made from its name.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import NamedTuple

from kvstore.segments.recovery import RecoveredSegment
from kvstore.segments.segment import segment_id, segment_name

LAST_ID = (1 << 64) - 1
"""The last number that a name and a header can say."""
_FURTHEST_ID = (1 << 63) - 1
"""No log gets here by counting. A number beyond is believed where the file itself says it, or a later one does."""
_NAMED_AT_ONCE = 8
_log = logging.getLogger(__name__)


class Listed(NamedTuple):
    """A folder by the names in it."""

    segments: dict[int, Path]
    """Files that may be segments, by number, the oldest first."""
    strangers: list[Path]
    """What else ends like a segment: folders, links, names that are not a log's."""

    @property
    def last_id(self) -> int:
        """The largest number that something is called by; a stranger's counts, too, where a log may come by it."""
        numbers = [number for path in self.strangers if (number := segment_id(path.name)) is not None]
        return max([*self.segments, *(number for number in numbers if number <= _FURTHEST_ID)], default=0)


def list_segments(directory: Path) -> Listed:
    """The files of a folder that may be segments, and what else is called like one.

    Raises:
        OSError: the system refuses to list it.
    """
    segments: dict[int, Path] = {}
    strangers = []
    with os.scandir(directory) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            number = segment_id(entry.name)
            if number is not None and entry.is_file(follow_symlinks=False):
                segments[number] = directory / segment_name(number)
            elif entry.name.endswith(".segment"):
                strangers.append(directory / entry.name)
    return Listed(segments, strangers)


def out_of_reach(found: Iterable[RecoveredSegment]) -> set[int]:
    """The numbers of files that can't be of this log: beyond what a log gets to, and beyond every sound segment."""
    found = list(found)
    reach = max([_FURTHEST_ID, *(each.id for each in found if each.stamp is not None)])
    return {each.id for each in found if each.id > reach}


def warn_of_strangers(directory: Path, strangers: Collection[Path]) -> None:
    """Say in the log what is left alone."""
    if strangers:
        _log.warning("%s: %s", directory, words_for(strangers))


def words_for(strangers: Collection[Path]) -> str:
    """What is to be said of them; a few are named."""
    names = [repr(path.name) for path in sorted(strangers)]
    if len(names) > _NAMED_AT_ONCE:
        names[_NAMED_AT_ONCE:] = [f"and {len(names) - _NAMED_AT_ONCE} more"]
    return f"no segments of this log, though called like them, and left alone: {', '.join(names)}"
