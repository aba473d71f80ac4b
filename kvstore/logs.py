"""Limits what others can write into a node's log: one line a second of each kind, the rest is counted.

Whoever reaches a port can make gRPC's library, the service and threads that end by an error log as often as they like.
A filter on each of the process's handlers leaves such lines out, for the log on stderr as for the console's errors.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

THREADS = "kvstore.threads"
"""The logger of threads that end by an error."""
_LIMITED = ("grpc", "kvstore.service", THREADS)
"""Loggers that are limited, with all below them; ``grpc`` is that of gRPC's library."""
_EVERY_SECONDS = 1.0


class RepeatFilter(logging.Filter):
    """Lets through, of limited loggers, one line a second of each kind; it says how many were left out before it.

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
        if not any(record.name == name or record.name.startswith(name + ".") for name in _LIMITED):
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
        for logger, count in _REPEATS.left_out().items():
            family.add_metric([logger], count)
        yield family


_REPEATS = RepeatFilter()
"""For the whole process, whatever is reloaded."""


def leave_out_repeats(handler: logging.Handler) -> None:
    """Limit what a handler logs of what others can cause."""
    handler.addFilter(_REPEATS)
