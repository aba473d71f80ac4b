"""What may be in the bucket though nobody wants it: half of a write, what was written anew, what came too late."""

from __future__ import annotations

from collections.abc import Callable

from kvstore.tiers.objects.bucket import Bucket

_LATE_SECONDS = 300.0
"""For so long an object whose writing failed may arrive, and is deleted again."""


class Leftovers:
    """Of one process, under whatever name it had when it wrote them. For one thread at a time.

    An object counts from before it is written until it is known to be wanted, or was deleted. One whose writing failed
    may arrive behind its deletion, too: it is deleted again for a while, and counts no more.

    Args:
        bucket: that they are in.
        clock: seconds that go on while the machine sleeps.
    """

    def __init__(self, bucket: Bucket, clock: Callable[[], float]) -> None:
        self._bucket = bucket
        self._clock = clock
        self._sizes: dict[str, int] = {}
        self._unsure: set[str] = set()
        """Those of them that may arrive yet."""
        self._late: dict[str, float] = {}
        """What was deleted and may arrive, and until when it is deleted again."""
        self.used_bytes = 0

    def expect(self, path: str, size: int) -> None:
        """An object is about to be written."""
        self._unsure.add(path)
        self.add(path, size)

    def wanted(self, path: str) -> None:
        """It was written, and is none of these."""
        self._unsure.discard(path)
        self.used_bytes -= self._sizes.pop(path)

    def add(self, path: str, size: int) -> None:
        """Nobody wants an object any more."""
        self._sizes[path] = size
        self.used_bytes += size

    def delete(self, *, late: bool = False) -> None:
        """Delete them; ``late``: also once more what may have arrived since it was deleted.

        Raises:
            OSError: some may still be there.
        """
        now = self._clock()
        self._late = {path: until for path, until in self._late.items() if now < until}
        paths = [*self._sizes, *(self._late if late else ())]
        if paths:
            self._bucket.delete(paths)
            self._late |= dict.fromkeys(self._unsure, now + _LATE_SECONDS)
            self._sizes, self._unsure, self.used_bytes = {}, set(), 0
