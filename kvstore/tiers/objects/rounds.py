"""What an object tier does every few seconds: look at the others, say that it lives, keep house, exchange uses."""

from __future__ import annotations

import logging
import threading
import time

from kvstore.host.forking import renewed
from kvstore.rare_lines import RareLines
from kvstore.segments.io_threads import IoThreads, LateError
from kvstore.tiers.objects.bucket import Bucket
from kvstore.tiers.objects.follower import Follower
from kvstore.tiers.objects.use_log import UseLog
from kvstore.tiers.objects.uses import encode_uses
from kvstore.tiers.objects.writer import Writer

_USE_ROUNDS = 10
_log = logging.getLogger(__name__)


class Rounds:
    """A thread of its own, and looks at the others for whoever waits for one.

    Args:
        bucket: that it asks.
        writer: this node's own.
        follower: knows the others.
        use_log: what is to be told of uses.
        writing: held over each change of what the writer has.
        interval: seconds between two rounds.
    """

    def __init__(
        self,
        bucket: Bucket,
        writer: Writer,
        follower: Follower,
        use_log: UseLog,
        writing: threading.Lock,
        interval: float,
    ) -> None:
        self._bucket = bucket
        self._writer = writer
        self._follower = follower
        self._use_log = use_log
        self._writing = writing
        self._interval = interval
        self._polling = threading.Lock()
        """Held while it is looked what others have told; taken before, or without, the other one."""
        self._refreshing = IoThreads(1, name="kvstore-objects-refresh")
        """Looks for those who wait for it: none of the threads that read, which would wait for one another."""
        self._refreshed_at = 0.0
        self._count = 0
        self._stop = threading.Event()
        self._ready = threading.Event()
        self._lines = RareLines()
        self._thread = threading.Thread(target=self._run, name="kvstore-objects-follow", daemon=True)

    def start(self, seconds: float) -> bool:
        """Begin. Returns whether the first round was done within ``seconds``."""
        self._thread.start()
        return self._ready.wait(seconds)

    def stop(self, seconds: float) -> None:
        """End, once what goes on is done; it is waited for so long."""
        self._stop.set()
        self._thread.join(seconds)
        self._refreshing.close()

    def forked(self) -> None:
        """In a child: the thread is the parent's."""
        self._polling = threading.Lock()
        self._stop = renewed(self._stop)

    def refresh(self, end: float) -> bool:
        """Look now what others have told, until ``end`` (``time.monotonic``). Returns whether that was done."""
        began = time.monotonic()

        def poll() -> None:
            with self._polling:
                if self._refreshed_at < began:
                    started = time.monotonic()
                    self._follower.poll(ask_all=True)
                    self._refreshed_at = started

        try:
            job = self._refreshing.submit(poll)
        except OSError:
            return False
        try:
            job.wait(end - time.monotonic())
        except LateError:  # it may have waited for another look: that says nothing of the server
            job.give_up()
            return False
        except OSError:
            return False
        return True

    def _run(self) -> None:
        while not self._stop.is_set():
            for work in (self._poll, self._beat, self.keep_house):
                try:
                    work()
                except OSError as error:
                    self._lines.say(_log.warning, "objects: %s", error.strerror or error)
                except Exception:  # noqa: BLE001 - whatever it is, the next round may go well
                    self._lines.say(_log.exception, "objects: a round failed; it is tried again")
            self._ready.set()
            self._count += 1
            self._stop.wait(self._interval)

    def _poll(self) -> None:
        with self._polling:
            if self._bucket.may_read:
                self._follower.poll()

    def _beat(self) -> None:
        heartbeat = self._writer.heartbeat
        if not heartbeat.announced:
            return
        if heartbeat.lapsed:
            with self._writing:
                self._writer.announce()
        else:
            heartbeat.beat()  # also while a large pack is being written

    def keep_house(self) -> None:
        """Delete what nobody wants, tell what is to be told, adopt what dead writers left, look again at doubted packs.

        Raises:
            OSError: not all of it can be done now; the next round goes on.
        """
        with self._writing:
            if self._stop.is_set() or self._bucket.resting:
                return
            self._writer.drop_leftovers()
            self._writer.tell_pending()
            self._writer.drop_empty()
            self._writer.shrink()
        with self._polling:
            for writer in self._follower.to_adopt():
                self._beat()  # or many of them would make this one fall silent
                with self._writing:
                    if self._stop.is_set():
                        return
                    try:
                        self._follower.adopt(writer)
                    except OSError as error:  # the next round tries again; the rest of this one is not held up
                        self._lines.say(_log.warning, "objects: adopting: %s", error.strerror or error)
            self._follower.look_again()
            if self._count % _USE_ROUNDS == _USE_ROUNDS - 1:
                self.exchange_uses()

    def exchange_uses(self) -> None:
        """Read what others have used, and say what was used here.

        Raises:
            OSError: one of them can't be done now.
        """
        self._follower.read_uses()
        uses = self._use_log.take()
        if not uses.namespaces and not uses.packs:
            return
        try:
            with self._writing:
                self._writer.put_uses(encode_uses(uses))
        except OSError:
            self._use_log.untold()
            raise
        self._use_log.told()
