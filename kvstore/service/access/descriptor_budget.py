"""The process's file descriptors: its limit is raised, connections leave some for files, and running out is reported.

A node without descriptors goes on serving those that are connected. Who comes new is refused, or waits.
"""

from __future__ import annotations

import logging
import os
import resource
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from kvstore.rare_lines import RareLines

_ENOUGH = 65_536
_FOR_EACH = 1.75
"""Descriptors for each of ``connections``: one for gRPC, a half for unauthenticated ones, a quarter for bulk."""
_OTHERS = 480
"""For connections that ``connections`` does not count: web, unauthenticated bulk and local ones."""
_RESERVE = 256
"""For the node itself: files, Redis, clients of this host that map the arena, what is on its way in or out."""
_FEWEST = 16
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


def connections_within(wanted: int, files: int) -> int:
    """Most connections of a node by TCP that leave descriptors for its own work; if these are fewer, the log says so.

    Args:
        wanted: what ``connections`` says.
        files: that the node may come to have open, beside those that are.
    """
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit == resource.RLIM_INFINITY:
        return wanted
    here = sum(1 for _ in Path("/proc/self/fd").iterdir())
    fitting = max(_FEWEST, int((limit - here - files - _OTHERS - _RESERVE) / _FOR_EACH))
    if fitting >= wanted:
        return wanted
    _log.warning(
        "this process may have %d descriptors, too few for %d connections and its own files: there are %d places;"
        " raise LimitNOFILE (ulimit -n)",
        limit,
        wanted,
        fitting,
    )
    return fitting


class DescriptorBudget(Collector):
    """Checks every second whether a descriptor is left, until it is stopped; counts for Prometheus when none was."""

    def __init__(self) -> None:
        self._own = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self._exhausted = 0
        self._lines = RareLines(_SAY_SECONDS)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvstore-descriptors", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # no more threads
            os.close(self._own)
            raise

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
            self._lines.say(
                _log.error,
                "all %d descriptors of this process are in use: open connections are served, new ones are refused"
                " or wait, and no file can be opened; raise LimitNOFILE (ulimit -n), or lower `connections`",
                resource.getrlimit(resource.RLIMIT_NOFILE)[0],
                count=False,
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
