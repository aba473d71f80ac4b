"""Which namespaces a node knows: layouts, their fingerprints, and the short numbers that headers name them by."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvstore.errors import LayoutMismatchError, LimitExceededError, UnavailableError, UnknownNamespaceError
from kvstore.layout import Layout
from kvstore.small_files import SmallFiles

MOST_NAMESPACES = 1024
"""Most namespaces one node keeps."""
_LAST_NUMBER = 0xFFFF
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KnownNamespace:
    """A namespace of this node."""

    number: int
    """1 to 65535."""
    layout: Layout
    fingerprint: bytes
    durability: str = ""
    """``disk``: its pages don't leave the arena before they are on disk. See :mod:`kvstore.rules`."""


class Namespaces:
    """The register of namespaces, kept in a JSON file in each of ``directories``, the arena's folder first.

    Safe for threads; a number is never used twice.
    """

    def __init__(self, directories: Sequence[Path], small_files: SmallFiles | None = None) -> None:
        self._files = [directory / "namespaces.json" for directory in directories]
        self._small_files = small_files or SmallFiles()
        for path in self._files:
            self._small_files.know(path)
        self._lock = threading.Lock()
        self._by_fingerprint: dict[bytes, KnownNamespace] = {}
        self._by_identity: dict[bytes, KnownNamespace] = {}
        self._by_number: dict[int, KnownNamespace] = {}
        self._last = 0
        self._closed = False
        for number, layout, durability in _read(self._files[0]):
            self._add(number, layout, durability)
        self.in_headers: Mapping[int, KnownNamespace] = dict(self._by_number)
        """What the numbers in the arena's headers stand for. The registers of other folders don't say that."""
        for path in self._files[1:]:
            for _, layout, durability in _read(path):
                if layout.identity not in self._by_identity and self._last < _LAST_NUMBER:
                    self._add(self._last + 1, layout, durability)

    def __len__(self) -> int:
        return len(self._by_fingerprint)

    def known(self) -> list[KnownNamespace]:
        """Every namespace."""
        with self._lock:
            return list(self._by_fingerprint.values())

    def get(self, fingerprint: bytes) -> KnownNamespace | None:
        """The namespace with this fingerprint."""
        return self._by_fingerprint.get(fingerprint)

    def is_open(self, number: int) -> bool:
        """Whether the namespace of this number was not dropped yet."""
        return number in self._by_number

    def open(
        self, layout: Layout, durability: str = "", grant: Callable[[KnownNamespace], None] = lambda known: None
    ) -> KnownNamespace:
        """The namespace of a layout, new or known.

        Args:
            layout: of its pages.
            durability: from now on, where it is not empty.
            grant: called with one that is new, or durable from now on, before anybody can find it.

        Raises:
            LayoutMismatchError: the same name is known with another page size.
            LimitExceededError: the node keeps as many namespaces as it may.
        """
        with self._lock:
            self._check_open()
            known = self._by_identity.get(layout.identity)
            if known is None:
                if len(self) >= MOST_NAMESPACES or self._last >= _LAST_NUMBER:
                    raise LimitExceededError(f"the node keeps {len(self)} namespaces, the limit is {MOST_NAMESPACES}")
                known = self._add(self._last + 1, layout, durability, grant)
                self.save()
            elif durability not in ("", known.durability) and known.fingerprint == layout.fingerprint:
                known = self._add(known.number, layout, durability, grant)
                self.save()
        if known.fingerprint != layout.fingerprint:
            raise LayoutMismatchError(
                f"namespace {layout.name!r} exists with page_bytes {known.layout.page_bytes}, not {layout.page_bytes};"
                " a layout that differs needs another name (its `format` or `revision`), or clear the old one first"
            )
        return known

    def forget(self, known: KnownNamespace) -> None:
        """Drop a namespace. Whoever drops its pages does so behind this, when no new ones can come any more.

        Raises:
            UnknownNamespaceError: it was dropped already.
        """
        with self._lock:
            self._check_open()
            if self._by_number.pop(known.number, None) is None:
                raise UnknownNamespaceError(f"namespace {known.layout.name!r} was cleared")
            del self._by_fingerprint[known.fingerprint]
            del self._by_identity[known.layout.identity]
            self.save()

    def save(self) -> None:
        """Write the register into all of its folders.

        Called behind a takeover, not before: namespaces of other folders have numbers that the old headers don't know.
        """
        entries = [
            {
                "number": known.number,
                "layout": json.loads(known.layout.to_json()),
                "durability": known.durability,
            }
            for known in self._by_fingerprint.values()
        ]
        text = json.dumps({"version": 1, "namespaces": entries}, indent=1)
        for path in self._files:
            self._small_files.replace(path, text.encode())

    def close(self) -> None:
        """Write to the folders no more: they may be another node's from now on."""
        with self._lock:
            self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            raise UnavailableError("the node is stopping")

    def _add(
        self,
        number: int,
        layout: Layout,
        durability: str,
        grant: Callable[[KnownNamespace], None] = lambda known: None,
    ) -> KnownNamespace:
        known = KnownNamespace(number, layout, layout.fingerprint, durability)
        grant(known)
        self._by_fingerprint[known.fingerprint] = known
        self._by_identity[layout.identity] = known
        self._by_number[number] = known
        self._last = max(self._last, number)
        return known


def _read(path: Path) -> list[tuple[int, Layout, str]]:
    """The entries of a register. One that can't be read is empty: its pages are then not found."""
    try:
        entries = json.loads(path.read_text())["namespaces"]
        return _each_once(
            [
                (int(entry["number"]), Layout.from_json(json.dumps(entry["layout"])), str(entry.get("durability", "")))
                for entry in entries
            ]
        )
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError) as error:
        _log.warning("%s can't be read, its pages will not be found: %s", path, error)
        return []


def _each_once(entries: list[tuple[int, Layout, str]]) -> list[tuple[int, Layout, str]]:
    numbers = {number for number, _, _ in entries if 0 < number <= _LAST_NUMBER}
    if not len(entries) == len(numbers) == len({layout.identity for _, layout, _ in entries}):
        raise ValueError("a number or a layout is there twice, or a number is out of range")
    return entries
