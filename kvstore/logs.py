"""What a node's log looks like: lines for people, or one JSON object a line."""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime

from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

_REMOTE = ("grpc", "kvstore.service", "kvstore.threads")
"""Loggers that whoever reaches a port can make say something."""
_EVERY_SECONDS = 1.0


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


class OneEach(logging.Filter):
    """Of what others can cause, one line a second of each kind; the next one says how many there were between.

    A kind is a place in the code that logs, so that nobody can make up new ones.

    Args:
        clock: seconds that only grow.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._lock = threading.Lock()
        self._next: dict[tuple[str, int], float] = {}
        self._waiting: Counter[tuple[str, int]] = Counter()
        self._left_out: Counter[str] = Counter()

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a record is logged. Several handlers may ask of one record: they are told the same."""
        if not any(record.name == name or record.name.startswith(name + ".") for name in _REMOTE):
            return True
        if "said" not in record.__dict__:
            record.__dict__["said"] = self._take(record)
        return bool(record.__dict__["said"])

    def _take(self, record: logging.LogRecord) -> bool:
        kind, now = (record.pathname, record.lineno), self._clock()
        with self._lock:
            if now < self._next.get(kind, 0.0):
                self._waiting[kind] += 1
                self._left_out[record.name] += 1
                return False
            self._next[kind] = now + _EVERY_SECONDS
            more = self._waiting.pop(kind, 0)
        if more:
            record.msg, record.args = f"{record.getMessage()} (and {more} more like this, which were left out)", None
        return True

    def left_out(self) -> dict[str, int]:
        """By logger, how many lines."""
        with self._lock:
            return dict(self._left_out)


class LeftOutCollector(Collector):
    """How many lines were left out, for Prometheus."""

    def collect(self) -> Iterator[CounterMetricFamily]:
        """One counter."""
        family = CounterMetricFamily(
            "kvstore_log_lines_left_out",
            "Lines of the log beyond one a second of each kind that others can cause.",
            labels=["logger"],
        )
        for logger, count in _ONE_EACH.left_out().items():
            family.add_metric([logger], count)
        yield family


_ONE_EACH = OneEach()
"""For the whole process, whatever is reloaded."""


def leave_out_repeats(handler: logging.Handler) -> None:
    """Have a handler log of what others can cause one line a second of each kind."""
    handler.addFilter(_ONE_EACH)


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
    logging.getLogger("kvstore.threads").error("a thread ended by an error", exc_info=error)
