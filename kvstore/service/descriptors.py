"""Descriptors of this process: as many as it may have, and a word in log and metrics when none is left.

A node without descriptors goes on serving those that are connected. Who comes new is refused, or waits.
"""

from __future__ import annotations

import logging
import os
import resource
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

_ENOUGH = 65_536
_LOOK_SECONDS = 1.0
_SAY_SECONDS = 60.0
_log = logging.getLogger(__name__)


def raise_limit() -> None:
    """Let this process have as many descriptors as it may give itself, 65,536 at most.

    The soft limit is often 1,024, for the sake of programs that use ``select``; neither a node nor a proxy does.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _ENOUGH if hard == resource.RLIM_INFINITY else min(hard, _ENOUGH)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class Descriptors(Collector):
    """Looks every second whether one is left, until it is stopped; for Prometheus, how often none was."""

    def __init__(self) -> None:
        self._own = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self._exhausted = 0
        self._said = float("-inf")
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvstore-descriptors", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Look no more."""
        self._stopping.set()
        self._thread.join()
        os.close(self._own)

    def look(self) -> None:
        """Count it, and say it once a minute, if none is left."""
        try:
            os.close(os.dup(self._own))
        except OSError:
            self._exhausted += 1
            if time.monotonic() - self._said > _SAY_SECONDS:
                self._said = time.monotonic()
                _log.error(
                    "all %d descriptors of this process are in use: open connections are served, new ones are refused"
                    " or wait, and no file can be opened; raise LimitNOFILE (ulimit -n), or lower `connections`",
                    resource.getrlimit(resource.RLIMIT_NOFILE)[0],
                )

    def collect(self) -> Iterator[CounterMetricFamily]:
        """One counter."""
        yield CounterMetricFamily(
            "kvstore_descriptors_exhausted",
            "Looks, one a second, that found all of the process's descriptors in use.",
            self._exhausted,
        )

    def _run(self) -> None:
        while not self._stopping.wait(_LOOK_SECONDS):
            self.look()
