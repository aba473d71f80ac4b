"""The write budget: most bytes that are written a day, since flash wears out. It outlives restarts and crashes."""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from kvstore.rare_lines import RareLines
from kvstore.segments.blockfile import Patience
from kvstore.segments.record import BLOCK
from kvstore.units import format_size

FILE_NAME = "writes"
FILE_BYTES = 2 * BLOCK
"""What the file counts against the disk limit: itself, and the next one while that takes its place."""
_SECONDS_A_DAY = 86_400
_STEPS = 64
_log = logging.getLogger(__name__)
_LINE = re.compile(rb"day (\d{1,9}) bytes (\d{1,18})\n")


class WriteBudget:
    """At most so many bytes a day (UTC). One thread at a time.

    The file says how many bytes may have been written, and is written ahead of them: a sixty-fourth of the limit at a
    time. After a crash, up to that much counts as written though it is not; never the other way round. A limit of 0 is
    none, and needs no file.
    """

    def __init__(
        self,
        directory: Path,
        limit_bytes: int,
        patience: Patience | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.limit_bytes = limit_bytes
        self._path = directory / FILE_NAME
        self._patience = patience
        self._now = now
        self._day, self._written = self._read()
        self._granted = self._written
        self._told = (0, 0)
        """On which day it was last said that which limit is reached."""
        self._told_at = 0.0
        self._lines = RareLines()

    @property
    def file_bytes(self) -> int:
        """What the file counts against the disk limit."""
        return FILE_BYTES if self.limit_bytes or self._path.exists() else 0

    def take(self, size: int, *, must: bool = False) -> bool:
        """Ask for bytes to be written.

        Args:
            size: how many.
            must: they are written in any case, and only counted: without its tombstones a log would be wrong.

        Returns:
            Whether they may be written today; when not, nothing is counted.
        """
        if not self.limit_bytes:
            return True
        self._turn_of_the_day()
        total = self._written + size
        if total > self.limit_bytes and not must:
            self._tell()
            return False
        if total > self._granted:
            grant = max(total, min(total + self.limit_bytes // _STEPS, self.limit_bytes))
            try:
                self._write(grant)
            except IsADirectoryError as error:  # there for as long as somebody leaves it there, and no disk that fails
                self._lines.say(
                    _log.warning, "%s: what is written today is not kept over a restart: %s", self._path, error
                )
            except OSError as error:
                if not must:
                    self._lines.say(
                        _log.warning, "%s can't be written, and so no pages go to disk: %s", self._path, error
                    )
                    return False
            self._granted = grant
        self._written = total
        return True

    @property
    def spent_since(self) -> float:
        """Since when pages are refused for it: seconds since 1970. 0: they are not. Safe for any thread."""
        return self._told_at if self._told == (self._today(), self.limit_bytes) else 0.0

    def close(self) -> None:
        """Write down what was really written."""
        if self.limit_bytes and self._granted != self._written:
            with suppress(OSError):
                self._write(self._written)

    def _tell(self) -> None:
        """Once a day: it holds until the day is over, and writers try again and again."""
        if self._told != (self._day, self.limit_bytes):
            self._told_at = self._now()
            self._told = (self._day, self.limit_bytes)
            _log.warning(
                "%s: %s were written today, the limit is %s: no more pages go there before 00:00 UTC",
                self._path.parent,
                format_size(self._written),
                format_size(self.limit_bytes),
            )

    def _turn_of_the_day(self) -> None:
        today = self._today()
        # A clock that is set back by hours must not give the day twice; one that was years ahead must not stop writing.
        if today > self._day or today < self._day - 1:
            self._day, self._written, self._granted = today, 0, 0

    def _today(self) -> int:
        return int(self._now() // _SECONDS_A_DAY)

    def _read(self) -> tuple[int, int]:
        try:
            match = _LINE.fullmatch(self._path.read_bytes())
        except OSError:
            match = None
        return (int(match[1]), int(match[2])) if match else (self._today(), 0)

    def _write(self, granted: int) -> None:
        """Put the file's new contents in its place, durably."""
        line = b"day %d bytes %d\n" % (self._day, granted)

        def write() -> None:
            new = self._path.with_suffix(".new")
            new.unlink(missing_ok=True)  # what a crash left, or a link to something else
            fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                os.write(fd, line)
                os.fdatasync(fd)
            finally:
                os.close(fd)
            new.replace(self._path)

        if self._patience is None:
            write()
        else:
            self._patience.run(write)
