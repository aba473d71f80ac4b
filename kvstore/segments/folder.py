"""The segment files of a log's folder, told apart from foreign files that only bear such a name.

An operator, a copy gone wrong or another program may leave anything there. What no log wrote under its name is left
alone, with a warning: it neither counts nor leaves, and no segment's number is made from its name.
"""

from __future__ import annotations

import errno
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


def make_folder(directory: Path) -> None:
    """Make a log's folder (0700) where it is missing, and see that this user may write there.

    Raises:
        OSError: it can't be made, is no folder, or is not for this user.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not os.access(directory, os.R_OK | os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(directory))


class Listed(NamedTuple):
    """A folder by the names in it."""

    segments: dict[int, Path]
    """Files that may be segments, by number, the oldest first."""
    foreign: list[Path]
    """Not ours, but named like a segment: folders, links, names that no log gives."""

    @property
    def last_id(self) -> int:
        """The largest number in a name; that of a foreign file counts, too, where a log may get there by counting."""
        numbers = [number for path in self.foreign if (number := segment_id(path.name)) is not None]
        return max([*self.segments, *(number for number in numbers if number <= _FURTHEST_ID)], default=0)


def list_segments(directory: Path) -> Listed:
    """The files of a folder that may be segments, and those that are only named like one.

    Raises:
        OSError: the system refuses to list it.
    """
    segments: dict[int, Path] = {}
    foreign = []
    with os.scandir(directory) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            number = segment_id(entry.name)
            if number is not None and entry.is_file(follow_symlinks=False):
                segments[number] = directory / segment_name(number)
            elif entry.name.endswith(".segment"):
                foreign.append(directory / entry.name)
    return Listed(segments, foreign)


def out_of_reach(found: Iterable[RecoveredSegment]) -> set[int]:
    """The numbers of files that can't be of this log: beyond what a log gets to, and beyond every sound segment."""
    found = list(found)
    reach = max([_FURTHEST_ID, *(each.id for each in found if each.stamp is not None)])
    return {each.id for each in found if each.id > reach}


def warn_of_foreign_files(directory: Path, foreign: Collection[Path]) -> None:
    """Say in the node's log which files are left alone, if any."""
    if foreign:
        _log.warning("%s: %s", directory, describe_foreign_files(foreign))


def describe_foreign_files(foreign: Collection[Path]) -> str:
    """One line about files that are left alone; the first few are named."""
    names = [repr(path.name) for path in sorted(foreign)]
    if len(names) > _NAMED_AT_ONCE:
        names[_NAMED_AT_ONCE:] = [f"and {len(names) - _NAMED_AT_ONCE} more"]
    return f"no segments of this log, though called like them, and left alone: {', '.join(names)}"
