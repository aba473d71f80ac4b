"""A writer's name, and the heartbeat by which others know that it lives."""

from __future__ import annotations

import errno
from collections.abc import Callable

from kvstore.tiers.objects import names
from kvstore.tiers.objects.bucket import Bucket

_BYTES = 64
LEAST_BYTES = 2 * _BYTES
"""That a writer takes for it at most: there may be two while it ends."""


class Heartbeat:
    """Of one process. Whoever calls it holds the tier's writing lock, but for :meth:`beat` and what only asks.

    Args:
        bucket: that it is written to.
        silence: seconds without one behind which others take over what its writer has.
        clock: seconds that go on while the machine sleeps.
    """

    def __init__(self, bucket: Bucket, silence: float, clock: Callable[[], float]) -> None:
        self._bucket = bucket
        self._silence = silence
        self._clock = clock
        self.begin()

    def begin(self) -> None:
        """Have another name, of which nobody knows yet."""
        self.name = names.new_writer()
        self.index_number = 0
        """Of the last index object, which a heartbeat says."""
        self._beat_at = -1e18

    @property
    def announced(self) -> bool:
        """Whether there is one."""
        return self._beat_at > 0

    @property
    def used_bytes(self) -> int:
        """What it counts for."""
        return LEAST_BYTES if self.announced else 0

    @property
    def lapsed(self) -> bool:
        """Whether this process was halted for so long that others may have taken over what it has."""
        return self._has_lapsed(self._clock())

    def check(self) -> None:
        """Go on only while nobody can have taken over what there is.

        Raises:
            OSError: somebody may have.
        """
        if self.lapsed:
            raise OSError(errno.ESTALE, "this writer was halted for long: what it has may be others' by now")

    def beat(self) -> None:
        """Say that it lives, unless it was halted for long: then others may have said otherwise. Needs no lock.

        Raises:
            OSError: that can't be said now.
        """
        began, name = self._clock(), self.name
        if self._has_lapsed(began):
            return
        self._bucket.put(names.heartbeat_path(name), self._body(), quick=True)
        if self.name == name:
            self._beat_at = began  # and no later: it may have been halted since

    def end(self) -> None:
        """Say that this writer has ended by itself; what it has is for whoever wants it.

        Raises:
            OSError: that can't be said now: it is found silent later.
        """
        if self.announced and not self.lapsed:
            self._bucket.put(names.heartbeat_path(self.name, closed=True), self._body(), quick=True)
            self._bucket.delete([names.heartbeat_path(self.name), names.use_path(self.name)])

    def _has_lapsed(self, now: float) -> bool:
        return self._beat_at > 0 and now - self._beat_at > self._silence / 2

    def _body(self) -> bytes:
        return b'{"index": %d}\n' % self.index_number
