"""The latest warnings and errors of the log, for the console."""

from __future__ import annotations

import logging
from collections import deque
from typing import NamedTuple

from kvstore.logs import leave_out_repeats

MOST_ERRORS = 100
_MOST_CHARACTERS = 500


class LoggedError(NamedTuple):
    """One of them."""

    time: float
    """Seconds since 1970."""
    level: str
    logger: str
    message: str
    """Cut where it is long."""


class RecentErrors(logging.Handler):
    """Remembers the latest ones that this process logged as kvstore."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._latest: deque[LoggedError] = deque(maxlen=MOST_ERRORS)
        leave_out_repeats(self)
        logging.getLogger("kvstore").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Remember one."""
        message = record.getMessage()
        if record.exc_info and record.exc_info[1] is not None:
            message += f": {record.exc_info[1]!r}"
        self._latest.append(
            LoggedError(record.created, record.levelname.lower(), record.name, message[:_MOST_CHARACTERS])
        )

    def latest(self) -> list[LoggedError]:
        """The newest first."""
        return list(self._latest)[::-1]

    def close(self) -> None:
        """Remember no more."""
        logging.getLogger("kvstore").removeHandler(self)
        super().close()
