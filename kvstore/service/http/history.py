"""A ring of samples of a node's last hour, one every five seconds, for the console's charts."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence

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
        """One more sample, at seconds since 1970. A value that is not given is NaN."""
        row = [when, *(values.get(name, math.nan) for name in self.columns[1:])]
        with self._lock:
            self._values[self._count % len(self._values)] = row
            self._count += 1

    def since(self, when: float, columns: Collection[str]) -> dict[str, list[float | None]]:
        """By column the samples that are later than ``when``, the oldest first; None where there is no value. Besides
        the columns that are asked for, the time."""
        rows = self._rows()
        rows = rows[rows[:, 0] > when]
        return {
            name: [None if math.isnan(value) else value for value in rows[:, place].tolist()]
            for place, name in enumerate(self.columns)
            if name in columns or not place
        }

    def ends(self, seconds: float) -> tuple[dict[str, float], dict[str, float]] | None:
        """The samples at both ends of the last so many seconds, values by column: counters have grown in that time by
        what lies between them. None: there are no two."""
        rows = self._rows()
        if len(rows) < 2:
            return None
        within = np.flatnonzero(rows[:, 0] >= rows[-1, 0] - seconds)
        first = min(int(within[0]), len(rows) - 2)
        return self._by_name(rows[first]), self._by_name(rows[-1])

    def _by_name(self, row: npt.NDArray[np.float64]) -> dict[str, float]:
        return dict(zip(self.columns, row.tolist(), strict=True))

    def _rows(self) -> npt.NDArray[np.float64]:
        """The oldest first."""
        with self._lock:
            kept = min(self._count, len(self._values))
            positions = np.arange(self._count - kept, self._count) % len(self._values)
            return self._values[positions]


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
