"""Small files in the folders of arena and tiers: replaced as a whole, within the limit of the tier they lie beside.

A disk may hang. So a thread of its own writes, the newest content of each file wins, and nobody waits for it for long.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path

from kvstore.host.forking import register_forked

PATIENCE_SECONDS = 1.0
"""How long who changes a file waits until it is written; later, it is written later."""
_log = logging.getLogger(__name__)


class AtomicFiles:
    """Replaces files atomically. Safe for threads.

    Args:
        counted: the folder whose files count against a limit; None: none does.
        reserve: told how many bytes these files take or are about to take; frees them before it returns.
    """

    def __init__(self, counted: Path | None = None, reserve: Callable[[int], None] = lambda size: None) -> None:
        self._counted = counted
        self._reserve = reserve
        self._changed = threading.Condition()
        self._wanted: dict[Path, bytes] = {}
        """Newest contents that are not written yet."""
        self._writing: Path | None = None
        self._running = False
        self._closed = False
        self._sizes: dict[Path, int] = {}
        register_forked(self)

    def forked(self) -> None:
        """In a child: the files are the parent's."""
        self._changed = threading.Condition()
        self._closed = True

    def know(self, path: Path) -> None:
        """Count a file that may be there from before. To be called before any is replaced."""
        if path.parent == self._counted and path.exists():
            self._sizes[path] = _whole_blocks(path.stat().st_size)
            self._reserve(sum(self._sizes.values()))

    def replace(self, path: Path, content: bytes) -> None:
        """Write a file (0600) that survives a loss of power, in place of the one that is there.

        Returns when that is done or ``PATIENCE_SECONDS`` are over. A failure is logged, and the old file stays.
        """
        with self._changed:
            if self._closed:
                return
            self._wanted[path] = content
            if not self._running:
                try:
                    threading.Thread(target=self._run, name="kvstore-small-files", daemon=True).start()
                except RuntimeError as error:
                    _log.warning("%s is written with the next change: %s", path, error)
                    return
                self._running = True
            self._changed.wait_for(lambda: path not in self._wanted and self._writing != path, PATIENCE_SECONDS)

    def close(self) -> None:
        """Write no more behind what is being written: the folders may be another process's."""
        with self._changed:
            self._closed = True
            self._wanted.clear()
            self._changed.wait_for(lambda: self._writing is None, PATIENCE_SECONDS)

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._wanted:
                    self._running = False
                    return
                path, content = self._wanted.popitem()
                self._writing = path
            try:
                self._write(path, content)
            except OSError as error:
                _log.warning("%s can't be written, what is new in it would be lost in a restart: %s", path, error)
            except Exception:  # noqa: BLE001 - the next file may be written
                _log.exception("%s can't be written, what is new in it would be lost in a restart", path)
            finally:
                with self._changed:
                    self._writing = None
                    self._changed.notify_all()

    def _write(self, path: Path, content: bytes) -> None:
        if path.parent != self._counted:
            _replace(path, content)
            return
        new = _whole_blocks(len(content))
        self._reserve(sum(self._sizes.values()) + new)  # for a moment both are there
        try:
            _replace(path, content)
            self._sizes[path] = new
        finally:
            self._reserve(sum(self._sizes.values()))


def _replace(path: Path, content: bytes) -> None:
    fresh = path.with_suffix(".new")
    fresh.unlink(missing_ok=True)  # what a crash left, or a link to something else
    try:
        with open(fresh, "xb", opener=_private) as file:
            os.fchmod(file.fileno(), 0o600)  # whatever the umask
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
    except OSError:
        fresh.unlink(missing_ok=True)
        raise


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _whole_blocks(size: int) -> int:
    return -(-size // 4096) * 4096
