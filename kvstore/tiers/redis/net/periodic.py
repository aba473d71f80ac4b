"""Work that is done now and then, on a thread of its own."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

_log = logging.getLogger(__name__)


class Periodic:
    """Does some work at once, and then every so many seconds.

    Args:
        work: what it raises is logged, and it is tried again.
        seconds: of rest between two times.
        name: of the thread.
    """

    def __init__(self, work: Callable[[], None], seconds: float, name: str) -> None:
        self._work = work
        self._seconds = seconds
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Wait for what is being done, and stop."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self._work()
            except Exception:  # noqa: BLE001 - what is learnt now and then must not be forgotten for good
                _log.exception("%s: a round failed", self._thread.name)
            self._stop.wait(self._seconds)
