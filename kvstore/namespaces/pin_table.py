"""The pin table: which pages an operator wants in the arena, and until when.

A hold is short, for a copy; a pin is long, a policy. It is kept by key: a page that left by somebody's wish and comes
again is pinned again. Pins are written down beside the arena's files or the disk tier's, so that they survive the node.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgpack

from kvstore.hashing import HASH_BYTES
from kvstore.host.atomic_files import AtomicFiles
from kvstore.limits import LONGEST_PIN
from kvstore.tiers.tier import KEY_BYTES

MOST_PINNED_PAGES = 1 << 17
PINS_NAME, PINS_VERSION = "pins", 1
"""The file, and the newest format that is read."""
PINNED_SHARE = 4
"""Pinned pages take at most this part of the arena, and of a namespace's quota."""
_log = logging.getLogger(__name__)


class PinTable:
    """The table, and the file that it is kept in. The store's lock guards all methods but ``save``.

    When a pin ends is said on a clock that only grows: one that is set by days must not end them all. In the file, it
    is seconds since 1970, for a node that starts later.

    Args:
        path: of the file.
        now: on that clock.
        ahead: by how much seconds since 1970 are ahead of it.
        limit_frames: most frames that pinned pages may take.
        small_files: replaces the file.
    """

    def __init__(
        self, path: Path, now: float, ahead: float, limit_frames: int, small_files: AtomicFiles | None = None
    ) -> None:
        self._path = path
        self._small_files = small_files or AtomicFiles()
        self._small_files.know(path)
        self._limit_frames = limit_frames
        self._until: dict[bytes, tuple[float, int]] = {}
        self._frames = 0
        self._pages_of: Counter[bytes] = Counter()
        self._next_end = float("inf")
        for end, frames, keys in _read(path):
            if end - ahead > now:
                self.add(keys, end - ahead, frames)

    def __contains__(self, key: object) -> bool:
        return key in self._until

    def __len__(self) -> int:
        return len(self._until)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._until)

    def pages_of(self, fingerprint: bytes) -> int:
        """Pinned pages of one namespace."""
        return self._pages_of[fingerprint]

    def add(self, keys: Sequence[bytes], until: float, frames: int, most_pages: int = MOST_PINNED_PAGES) -> int:
        """Pin leading pages, as many as the limits allow; one that is pinned stays so until the later end.

        Args:
            keys: page keys, head of the prefix first.
            until: on the clock that only grows.
            frames: of each page.
            most_pages: of this namespace.

        Returns:
            How many leading pages are pinned now.
        """
        for done, key in enumerate(keys):
            known = self._until.get(key)
            if known is None:
                full = len(self) >= MOST_PINNED_PAGES or self._pages_of[key[:-HASH_BYTES]] >= most_pages
                if full or self._frames + frames > self._limit_frames:
                    return done
                self._frames += frames
                self._pages_of[key[:-HASH_BYTES]] += 1
            self._until[key] = max(until, known[0] if known else 0.0), frames
            self._next_end = min(self._next_end, until)
        return len(keys)

    def remove(self, keys: Sequence[bytes], until: float = float("inf")) -> list[bytes]:
        """End pins that end before ``until`` anyway. Returns those that there were."""
        ended = [key for key in dict.fromkeys(keys) if key in self._until and self._until[key][0] <= until]
        for key in ended:
            self._frames -= self._until.pop(key)[1]
            self._pages_of[key[:-HASH_BYTES]] -= 1
        self._pages_of += Counter()  # drops those at zero
        return ended

    def overdue(self, now: float) -> list[bytes]:
        """The pins whose time is over: told once, to be removed."""
        if now < self._next_end:
            return []
        overdue = [key for key, (end, _) in self._until.items() if end <= now]
        self._next_end = min((end for end, _ in self._until.values() if end > now), default=float("inf"))
        return overdue

    def keys(self, prefix: bytes) -> list[bytes]:
        """The pinned keys that begin with ``prefix``, a namespace's fingerprint."""
        return [key for key in self._until if key.startswith(prefix)]

    def copy(self) -> dict[bytes, tuple[float, int]]:
        """The table: key → (end, frames)."""
        return dict(self._until)

    def save(self, table: Mapping[bytes, tuple[float, int]], ahead: float) -> None:
        """Write down what :meth:`copy` gave; ``ahead`` as at the start."""
        groups: dict[tuple[float, int], list[bytes]] = {}
        for key, group in table.items():
            groups.setdefault(group, []).append(key)
        pins = [[end + ahead, frames, keys] for (end, frames), keys in groups.items()]
        packed: bytes = msgpack.packb({"version": PINS_VERSION, "pins": pins})
        self._small_files.replace(self._path, packed)


def _read(path: Path) -> list[tuple[float, int, list[bytes]]]:
    """The pins in a file, without what of it can't be read. A file that can't be read has none."""
    try:
        found: Any = msgpack.unpackb(path.read_bytes())
        records = list(found["pins"])
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError, msgpack.UnpackException) as error:
        _log.warning("%s can't be read, its pins are gone: %s", path, error)
        return []
    pins = [pin for record in records if (pin := _pin(record)) is not None]
    if len(pins) < len(records):
        _log.warning(
            "%d of %d records of %s can't be read, their pins are gone", len(records) - len(pins), len(records), path
        )
    return pins


def _pin(record: Any) -> tuple[float, int, list[bytes]] | None:
    """One record: when these pins end, frames of each page, keys."""
    try:
        end, frames, keys = record
    except (TypeError, ValueError):
        return None
    sound = (
        isinstance(end, (int, float))
        and isinstance(frames, int)
        and frames >= 1
        and isinstance(keys, list)
        and all(isinstance(key, bytes) and len(key) == KEY_BYTES for key in keys)
    )
    return (min(end, time.time() + LONGEST_PIN), frames, keys) if sound else None
