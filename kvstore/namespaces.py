"""Which namespaces a node knows: layouts, their fingerprints, and the short numbers that headers name them by."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvstore.errors import LayoutMismatchError, LimitExceededError
from kvstore.layout import Layout

MOST_NAMESPACES = 1024
"""Most namespaces one node keeps."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KnownNamespace:
    """A namespace of this node."""

    number: int
    """1 to 65535."""
    layout: Layout
    fingerprint: bytes


class Namespaces:
    """The register of namespaces, kept in a JSON file in each of ``directories`` (the first one's numbers hold).

    Not safe for threads.
    """

    def __init__(self, directories: Sequence[Path]) -> None:
        self._files = [directory / "namespaces.json" for directory in directories]
        self._by_fingerprint: dict[bytes, KnownNamespace] = {}
        self._by_identity: dict[bytes, KnownNamespace] = {}
        self._last = 0
        for place, path in enumerate(self._files):
            for number, layout in _read(path):
                if layout.fingerprint not in self._by_fingerprint:
                    self._add(number if place == 0 else self._last + 1, layout)
        self.by_number = {known.number: known for known in self._by_fingerprint.values()}

    def __len__(self) -> int:
        return len(self._by_fingerprint)

    def known(self) -> list[KnownNamespace]:
        """Every namespace."""
        return list(self._by_fingerprint.values())

    def get(self, fingerprint: bytes) -> KnownNamespace | None:
        """The namespace with this fingerprint."""
        return self._by_fingerprint.get(fingerprint)

    def open(self, layout: Layout) -> KnownNamespace:
        """The namespace of a layout, new or known.

        Raises:
            LayoutMismatchError: the same name is known with another page size.
            LimitExceededError: the node keeps as many namespaces as it may.
        """
        known = self._by_fingerprint.get(layout.fingerprint)
        if known is not None:
            return known
        other = self._by_identity.get(layout.identity)
        if other is not None:
            raise LayoutMismatchError(
                f"namespace {layout.name!r} exists with page_bytes {other.layout.page_bytes}, not {layout.page_bytes};"
                " a layout that differs needs another name (its `format` or `revision`), or clear the old one first"
            )
        if len(self) >= MOST_NAMESPACES or self._last >= 0xFFFF:
            raise LimitExceededError(f"the node keeps {len(self)} namespaces, the limit is {MOST_NAMESPACES}")
        known = self._add(self._last + 1, layout)
        self.by_number[known.number] = known
        self._write()
        return known

    def forget(self, known: KnownNamespace) -> None:
        """Drop a namespace that has no pages any more."""
        del self._by_fingerprint[known.fingerprint]
        del self._by_identity[known.layout.identity]
        del self.by_number[known.number]
        self._write()

    def _add(self, number: int, layout: Layout) -> KnownNamespace:
        known = KnownNamespace(number, layout, layout.fingerprint)
        self._by_fingerprint[known.fingerprint] = known
        self._by_identity[layout.identity] = known
        self._last = max(self._last, number)
        return known

    def _write(self) -> None:
        entries = [
            {"number": known.number, "layout": json.loads(known.layout.to_json())}
            for known in self._by_fingerprint.values()
        ]
        text = json.dumps({"version": 1, "namespaces": entries}, indent=1)
        for path in self._files:
            fresh = path.with_suffix(".new")
            try:
                fresh.write_text(text)
                fresh.chmod(0o600)
                with fresh.open() as file:
                    os.fsync(file.fileno())
                fresh.replace(path)
            except OSError as error:
                _log.warning("%s can't be written, pages of new namespaces are lost at a restart: %s", path, error)


def _read(path: Path) -> list[tuple[int, Layout]]:
    """The entries of a register. One that can't be read is empty: its pages are then not found."""
    try:
        entries = json.loads(path.read_text())["namespaces"]
        return [(int(entry["number"]), Layout.from_json(json.dumps(entry["layout"]))) for entry in entries]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError) as error:
        _log.warning("%s can't be read, its pages will not be found: %s", path, error)
        return []
