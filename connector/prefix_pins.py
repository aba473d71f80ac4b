"""Prefixes that requests asked to keep: their pages are pinned at the node, in the background, once they are stored."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvstore.errors import KVStoreError, PermissionDeniedError
from kvstore.rare_lines import RareLines

if TYPE_CHECKING:
    from kvstore import Namespace

MOST_WAITING = 256
"""Prefixes that wait to be pinned; those that come on top are not."""

_logger = logging.getLogger("kvstore.connector")


class PrefixPins:
    """Pins pages in a thread of its own, which begins with the first one.

    Args:
        parts: the namespaces of a page's parts, by part and cache group: all are pinned.
    """

    def __init__(self, parts: Sequence[Sequence[Namespace]]) -> None:
        self._parts = parts
        self._waiting: queue.SimpleQueue[tuple[Sequence[Sequence[bytes]], int] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._stops = False
        self._lines = RareLines()
        self._pinned = 0

    @property
    def pinned(self) -> int:
        """Pages, or parts of pages, since the start."""
        return self._pinned

    def keep(self, hashes_by_group: Sequence[Sequence[bytes]], seconds: int) -> None:
        """Has pages pinned for so long. Waits for nobody; where too many wait already, they are not.

        Args:
            hashes_by_group: by cache group, in the order of the tokens.
            seconds: from now on.
        """
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="kvstore-pins", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # the next request tries again
                self._lines.say(_logger.warning, "a prefix could not be kept: %s", error)
                return
            self._thread = thread
        if self._waiting.qsize() < MOST_WAITING:
            self._waiting.put((hashes_by_group, seconds))
        else:
            self._lines.say(_logger.warning, "%d prefixes wait to be kept, and no more", MOST_WAITING)

    def shutdown(self) -> None:
        """Ends the thread, behind the call that is under way; what waits is not pinned."""
        self._stops = True
        self._waiting.put(None)

    def _run(self) -> None:
        while (wanted := self._waiting.get()) is not None and not self._stops:
            hashes_by_group, seconds = wanted
            for namespaces in self._parts:
                for namespace, hashes in zip(namespaces, hashes_by_group, strict=True):
                    self._pin(namespace, hashes, seconds)

    def _pin(self, namespace: Namespace, hashes: Sequence[bytes], seconds: int) -> None:
        if not hashes:
            return
        warn = _logger.warning
        try:
            pinned = namespace.pin(hashes, seconds)
        except PermissionDeniedError as error:
            self._lines.say(warn, "a request asks to keep its prefix, and this engine's token may not pin: %s", error)
        except KVStoreError as error:
            self._lines.say(warn, "a prefix could not be kept: %s", error)
        except Exception as error:  # noqa: BLE001 - it is said, and the thread goes on
            self._lines.say(_logger.exception, "a prefix could not be kept: %r", error)
        else:
            self._pinned += pinned
            if pinned < len(hashes):
                self._lines.say(
                    warn,
                    "%d of %d pages of a prefix are kept: others are not there, or pinned pages have their share of"
                    " the arena",
                    pinned,
                    len(hashes),
                )
