"""The log of ``kvstore serve``, on stderr: lines of text, or one JSON object a line."""

from __future__ import annotations

import json
import logging
import sys
import threading
from datetime import UTC, datetime

from kvstore.logs import THREADS, leave_out_repeats


class JsonFormatter(logging.Formatter):
    """A JSON object a line: ``time`` (RFC 3339, UTC), ``level``, ``logger``, ``thread``, ``message``, ``exception``."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as one line."""
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "thread": record.threadName,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def log_to_stderr(level: str, form: str) -> None:
    """Let this process log to stderr, from ``level`` on (``info``), as ``text`` or ``json``. The last call counts."""
    handler = logging.StreamHandler(sys.stderr)
    leave_out_repeats(handler)
    threading.excepthook = _log_uncaught
    handler.setFormatter(
        JsonFormatter() if form == "json" else logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    )
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


def _log_uncaught(what: threading.ExceptHookArgs) -> None:
    """A thread's end by an error is a line of the log as any other, not a traceback beside it."""
    error = (what.exc_type, what.exc_value or what.exc_type(), what.exc_traceback)
    logging.getLogger(THREADS).error("a thread ended by an error", exc_info=error)
