"""Reading epochs: which clients read the arena without a call, and since when, so that no page is replaced under them.

This is epoch-based reclamation. Each client has one *line*, a cache line of the file ``readers``, as each of LMDB's
readers has a slot in its reader table. The node's *epoch* counts pages that left. A reader announces the epoch that it
sees before it looks into the index, and takes that back behind its last copy. A page that left at epoch ``e`` left the
index before the epoch moved on; so who announces a later one can't find it, and the node lends its slot to a writer
only when no line says ``e`` or less.

For that each side must see the other: the reader announces, then looks; the node clears the index, then looks at the
lines. On x86-64 a store may be seen later than loads behind it, unless a locked instruction comes between. Taking or
releasing a lock is one, in every CPython: that is what the empty lock blocks here are for.

The node does not wait for a reader that is dead, or past the deadline that it announced. Such a reader may wake up and
go on copying: the slot's generation tells it that what it has is worth nothing.
"""

from __future__ import annotations

import platform
import threading
import time

from kvstore.arena.clients import MOST_CLIENTS, Clients
from kvstore.host.forking import register_forked

LINE_WORDS = 8
LINE_BYTES = 8 * LINE_WORDS
"""A line: one cache line. Its first word is the epoch, 0 for none; its second the deadline, in nanoseconds on the
clock of ``time.monotonic_ns``."""
READERS_BYTES = MOST_CLIENTS * LINE_BYTES
LONGEST_READ = 60.0
"""Longest time in seconds that a reader may announce. A line that says more is nonsense, and not waited for."""
CAN_READ = platform.machine() in ("x86_64", "AMD64")
"""Whether this machine keeps the order of stores, and of loads. Elsewhere pages are held by calls."""

LAST_EPOCH = (1 << 64) - 1

_LOOK_SECONDS = 0.0002


class ReaderEpochs:
    """The node's side: whether any client still reads what left the arena.

    ``lines`` are those of all clients, as unsigned 64-bit words; a client's is its number modulo ``MOST_CLIENTS``.
    """

    def __init__(self, lines: memoryview, clients: Clients) -> None:
        self._lines = lines
        self._clients = clients
        self._fence = threading.Lock()

    def welcome(self, number: int) -> None:
        """A client has come that does not know its number yet: its line may say what an earlier one announced."""
        self._lines[number % MOST_CLIENTS * LINE_WORDS] = 0

    def passed(self, epoch: int) -> bool:
        """Whether nobody reads what left at this epoch or before."""
        with self._fence:
            pass
        return not any(self._reads(number, epoch) for number in self._clients.numbers())

    def wait(self, epoch: int, seconds: float) -> bool:
        """Wait until ``passed``. False: not within ``seconds``."""
        end = time.monotonic() + seconds
        while not self.passed(epoch):
            if time.monotonic() >= end:
                return False
            time.sleep(_LOOK_SECONDS)
        return True

    def _reads(self, number: int, epoch: int) -> bool:
        word = number % MOST_CLIENTS * LINE_WORDS
        if not 0 < self._lines[word] <= epoch:
            return False
        left = self._lines[word + 1] - time.monotonic_ns()
        return 0 < left <= LONGEST_READ * 1e9 and self._clients.lives(number)


class ReadingLine:
    """The client's side: its own line. Safe for threads: with several reads under way it says the oldest one's epoch.

    ``epoch`` is the word with the node's epoch.
    """

    def __init__(self, line: memoryview, epoch: memoryview) -> None:
        self._line = line
        self._epoch = epoch
        self._lock = threading.Lock()
        self._reads: dict[int, tuple[int, int]] = {}
        self._last = 0
        register_forked(self)

    def forked(self) -> None:
        """In a child: nobody who held the lock will let it go. The line is its parent's, and not mapped any more."""
        self._lock = threading.Lock()

    def begin(self, deadline: float) -> int:
        """Announce a read. From now on what is found stays as it is, until ``end`` or the deadline.

        Args:
            deadline: on the clock of ``time.monotonic``; at most ``LONGEST_READ`` seconds away.

        Returns:
            What to end it by.
        """
        with self._lock:
            self._last += 1
            epoch, until = self._epoch[0], int(deadline * 1e9)
            self._reads[self._last] = epoch, until
            if len(self._reads) == 1:
                self._line[1] = until
                self._line[0] = epoch
            else:
                self._announce()
            return self._last

    def end(self, read: int) -> None:
        """The last copy is done."""
        with self._lock:
            self._reads.pop(read, None)
            if self._reads:
                self._announce()
            else:
                self._line[0] = 0

    def _announce(self) -> None:
        """Of the reads in time the earliest epoch and the last deadline. Others are forgotten: one that was interrupted
        before it could end would count for ever."""
        now = time.monotonic_ns()
        self._reads = {number: read for number, read in self._reads.items() if read[1] > now}
        timely = self._reads.values()
        if timely:
            self._line[1] = max(deadline for _, deadline in timely)
        self._line[0] = min((epoch for epoch, _ in timely), default=0)
