"""A ring of samples of a node's last hour, one every five seconds, for the console's charts."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

STEP_SECONDS = 5.0
SAMPLES = 720
"""An hour of them."""
_log = logging.getLogger(__name__)


class History:
    """The latest ``samples`` samples, each of one value for every column. Safe for threads."""

    def __init__(self, columns: Sequence[str], samples: int = SAMPLES) -> None:
        self.columns = ("time", *columns)
        self._lock = threading.Lock()
        self._values: npt.NDArray[np.float64] = np.zeros((samples, len(self.columns)))
        self._count = 0

    def add(self, when: float, values: Mapping[str, float]) -> None:
        """One more sample, at seconds since 1970. A value that is not given is 0."""
        row = [when, *(values.get(name, 0.0) for name in self.columns[1:])]
        with self._lock:
            self._values[self._count % len(self._values)] = row
            self._count += 1

    def since(self, when: float) -> dict[str, list[float]]:
        """By column the samples that are later than ``when``, the oldest first."""
        with self._lock:
            kept = min(self._count, len(self._values))
            positions = np.arange(self._count - kept, self._count) % len(self._values)
            rows = self._values[positions]
        rows = rows[rows[:, 0] > when]
        return {name: rows[:, column].tolist() for column, name in enumerate(self.columns)}


class Sampler:
    """A thread that adds ``values()`` to a history every ``step`` seconds until it is stopped."""

    def __init__(self, history: History, values: Callable[[], Mapping[str, float]], step: float = STEP_SECONDS) -> None:
        self._history = history
        self._values = values
        self._step = step
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvstore-history", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            try:
                self._history.add(time.time(), self._values())
            except Exception:  # noqa: BLE001 - the next sample may be had
                _log.exception("a sample of the console's history is missing")
            if self._stopping.wait(self._step):
                return
