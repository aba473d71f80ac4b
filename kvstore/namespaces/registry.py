"""The register of namespaces: which a node knows, their layouts, and the short numbers that headers name them by."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from kvstore.errors import LayoutMismatchError, LimitExceededError, UnavailableError, UnknownNamespaceError
from kvstore.host.atomic_files import AtomicFiles
from kvstore.labels import MOST_LABELS, checked_label, with_label
from kvstore.layout import Layout

MOST_NAMESPACES = 1024
"""Most namespaces one node keeps."""
REGISTER_NAME, REGISTER_VERSION = "namespaces.json", 1
"""The register's file in a folder, and the newest format that is read; what a version adds keeps the older keys."""
_NAMESPACES_SHARE = 4
"""One tenant has at most one in so many of the namespaces that there may be: the rest is left to others."""
MOST_OPENED = 4096
"""Most new namespaces that one tenant opens while a node runs: the numbers of those that went are not used again."""
_LAST_NUMBER = 0xFFFF
_LONGEST_SECONDS = 1e11
"""Some thousand years: no time that was measured."""
_log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class KnownNamespace:
    """A namespace of this node."""

    number: int
    """1 to 65535."""
    layout: Layout
    fingerprint: bytes
    durability: str = ""
    """``disk``: its pages don't leave the arena before they are on disk. See :mod:`kvstore.config.rules`."""
    created: float = field(default=0.0, compare=False)
    """When it was opened first: seconds since 1970."""
    labels: tuple[str, ...] = field(default=(), compare=False)
    """What it was opened under: see :func:`kvstore.labels.with_label`."""

    @property
    def name(self) -> str:
        """What people read: the layout's name, with its first label in the model's place."""
        return self.layout.named(self.labels[0]) if self.labels else self.layout.name


@dataclass(frozen=True, slots=True, eq=False)
class Leaving:
    """A namespace that is being dropped: written down before its first page goes, until the tiers are clear of it, or
    somebody opens it again."""

    fingerprint: bytes
    name: str
    shared: bool
    """Whether it leaves the shared tier as well."""


class _Entry(NamedTuple):
    """What a register says of one namespace."""

    number: int
    layout: Layout
    durability: str
    created: float
    idle: float
    """How long nobody had used it when this was written, in seconds."""
    labels: tuple[str, ...]


class _Register(NamedTuple):
    """What is in one file."""

    entries: list[_Entry]
    leaving: list[Leaving]


class NamespaceRegistry:
    """The register of namespaces, kept in a JSON file in each of ``directories``, the arena's folder first.

    Safe for threads; a number is never used twice.
    """

    def __init__(self, directories: Sequence[Path], small_files: AtomicFiles | None = None) -> None:
        self._files = [directory / REGISTER_NAME for directory in directories]
        self._small_files = small_files or AtomicFiles()
        for path in self._files:
            self._small_files.know(path)
        self._lock = threading.Lock()
        self._by_fingerprint: dict[bytes, KnownNamespace] = {}
        self._by_identity: dict[bytes, KnownNamespace] = {}
        self._by_number: dict[int, KnownNamespace] = {}
        self._used: dict[int, float] = {}
        """Number → when it was used last, on a clock that runs while a node does: one that was set wrong, or a machine
        that was off, makes nothing old."""
        self._leaving: dict[bytes, Leaving] = {}
        self._opened: Counter[str] = Counter()
        """By tenant, how many new ones since the start."""
        self._limited_without = False
        """Whether a tenant has asked since the start for one whose layout names none: their share counts then."""
        self._closed = False
        first = _read(self._files[0])
        for entry in first.entries:
            self._restore(entry.number, entry)
        self._restore_leaving(first.leaving)
        self.in_headers: Mapping[int, KnownNamespace] = dict(self._by_number)
        """What the numbers in the arena's headers stand for. The registers of other folders don't say that."""
        self._free = _without(self._by_number)
        """Numbers for those that come, each given once."""
        for path in self._files[1:]:  # written later than the first
            other = _read(path)
            entries = [entry for entry in other.entries if entry.layout.fingerprint not in self._leaving]
            for entry in entries:
                if entry.layout.identity not in self._by_identity:
                    for number in islice(self._free, 1):  # or none is left
                        self._restore(number, entry)
            self._restore_leaving(other.leaving)
        for path in self._files:
            self._small_files.know(_damaged(path))

    def __len__(self) -> int:
        return len(self._by_fingerprint)

    def known(self) -> list[KnownNamespace]:
        """Every namespace. Waits for nobody: the caller may have the store's lock, which opening one takes in its own,
        and a namespace that is being opened may wait for a disk."""
        return list(self._by_fingerprint.values())

    def get(self, fingerprint: bytes) -> KnownNamespace | None:
        """The namespace with this fingerprint."""
        return self._by_fingerprint.get(fingerprint)

    def apply_to_all(self, apply_rules: Callable[[KnownNamespace], None]) -> None:
        """Call ``apply_rules`` with every namespace: none of them is dropped, and none is opened, while it is. To one
        that is opened from now on, the rules of now were applied."""
        with self._lock:  # who opens one now may have read the rules before they changed: behind that
            pass
        for known in self.known():
            with self._lock:
                if (current := self._by_number.get(known.number)) is not None:
                    apply_rules(current)

    def note_use(self, known: KnownNamespace) -> None:
        """Somebody uses it now."""
        self._used[known.number] = time.monotonic()

    def idle_seconds(self, known: KnownNamespace) -> float:
        """How long nobody has used a namespace; time in which the node did not run is left out."""
        return max(0.0, time.monotonic() - self._used.get(known.number, time.monotonic()))

    def is_open(self, number: int) -> bool:
        """Whether the namespace of this number was not dropped yet."""
        return number in self._by_number

    def open(
        self,
        layout: Layout,
        durability: str = "",
        apply_rules: Callable[[KnownNamespace], None] = lambda known: None,
        *,
        label: str = "",
        of_tenant: bool = False,
    ) -> KnownNamespace:
        """The namespace of a layout, new or known. One that was being dropped is not any more, from the same writing of
        the register on: what is stored now must not leave with what was there before.

        Args:
            layout: of its pages.
            durability: from now on, where it is not empty.
            apply_rules: called with one that is new, or durable from now on, or has another label from now on, before
                anybody can find it.
            label: what the caller calls its model; empty: nothing.
            of_tenant: whether a tenant asks, whose share of the namespaces is limited also where layouts name none.

        Raises:
            LayoutMismatchError: the same name is known with another page size.
            LimitExceededError: the node keeps as many namespaces as it may.
        """
        with self._lock:
            self._check_open()
            known = self._by_identity.get(layout.identity)
            if known is None:
                if len(self) >= MOST_NAMESPACES:
                    raise LimitExceededError(f"the node keeps {len(self)} namespaces, the limit is {MOST_NAMESPACES}")
                if layout.tenant or of_tenant:
                    self._check_tenant(layout.tenant)
                known = self._add(
                    KnownNamespace(
                        self._take_number(),
                        layout,
                        layout.fingerprint,
                        durability,
                        time.time(),
                        with_label((), label),
                    ),
                    apply_rules,
                )
                self._leaving.pop(known.fingerprint, None)
                self._save()
            elif known.fingerprint == layout.fingerprint:
                before = known
                labels = with_label(known.labels, label)
                known = replace(known, durability=durability or known.durability, labels=labels)
                if known != before or set(labels) != set(before.labels):
                    self._add(known, apply_rules)
                    self._save()
                elif labels != before.labels:  # another one was used last: not worth a file
                    self._add(known)
            self.note_use(known)
        if known.fingerprint != layout.fingerprint:
            raise LayoutMismatchError(
                f"namespace {known.name!r} exists with page_bytes {known.layout.page_bytes}, not {layout.page_bytes};"
                " a layout that differs needs another name (its `format` or `revision`), or clear the old one first"
            )
        return known

    def _take_number(self) -> int:
        for number in self._free:
            return number
        raise LimitExceededError(
            f"the node has opened {_LAST_NUMBER} namespaces since it started, the limit: a restart lets it go on"
        )

    def _check_tenant(self, tenant: str) -> None:
        """Count a new namespace of a tenant.

        Raises:
            LimitExceededError: it is one too many.
        """
        self._limited_without |= not tenant
        whose = f"tenant {tenant!r} has" if tenant else "layouts without a tenant have"
        most = MOST_NAMESPACES // _NAMESPACES_SHARE
        kept = sum(known.layout.tenant == tenant for known in self._by_fingerprint.values())
        if kept >= most:
            raise LimitExceededError(f"{whose} {kept} namespaces, the limit is {most}: clear some")
        if self._opened[tenant] >= MOST_OPENED:
            raise LimitExceededError(f"{whose} opened {MOST_OPENED} new namespaces, the limit")
        self._opened[tenant] += 1

    def is_crowded(self, tenant: str) -> bool:
        """Whether there are three quarters of the namespaces that there may be: in all, or of one tenant. Those
        without a tenant have a tenant's share once a tenant has asked for one of them."""
        limited = bool(tenant) or self._limited_without
        own = sum(known.layout.tenant == tenant for known in self.known()) if limited else 0
        return 4 * len(self) >= 3 * MOST_NAMESPACES or 4 * own >= 3 * (MOST_NAMESPACES // _NAMESPACES_SHARE)

    def leaving(self) -> list[Leaving]:
        """What is being dropped: at the start, what an earlier node did not come to the end of."""
        with self._lock:
            return list(self._leaving.values())

    def forget(self, known: KnownNamespace, *, shared: bool = False) -> Leaving:
        """Drop a namespace. Whoever drops its pages does so behind this, when no new ones can come any more, and says
        :meth:`has_left` in the end: a node that is killed before that leaves the rest to the next one.

        Args:
            known: the namespace.
            shared: whether it leaves the shared tier as well.

        Raises:
            UnknownNamespaceError: it was dropped already.
        """
        with self._lock:
            self._check_open()
            if self._by_number.pop(known.number, None) is None:
                raise UnknownNamespaceError(f"namespace {known.name!r} was cleared")
            del self._by_fingerprint[known.fingerprint]
            del self._by_identity[known.layout.identity]
            self._used.pop(known.number, None)
            leaving = Leaving(known.fingerprint, known.name, shared)
            self._leaving[known.fingerprint] = leaving
            self._save()
        return leaving

    def has_left(self, leaving: Leaving) -> None:
        """No tier has pages from before it was dropped."""
        with self._lock:
            if not self._closed and self._leaving.get(leaving.fingerprint) is leaving:  # it may leave once more
                del self._leaving[leaving.fingerprint]
                self._save()

    def save(self) -> None:
        """Write the register into all of its folders, unless it is closed.

        Called behind a takeover, not before: namespaces of other folders have numbers that the old headers don't know.
        """
        with self._lock:
            if not self._closed:
                self._save()

    def _save(self) -> None:
        entries = [
            {
                "number": known.number,
                "layout": json.loads(known.layout.to_json()),
                "durability": known.durability,
                "created": round(known.created, 1),
                "idle": round(self.idle_seconds(known), 1),
            }
            | ({"labels": list(known.labels)} if known.labels else {})
            for known in self._by_fingerprint.values()
        ]
        leaving = [
            {"fingerprint": each.fingerprint.hex(), "name": each.name, "shared": each.shared}
            for each in self._leaving.values()
        ]
        text = json.dumps({"version": REGISTER_VERSION, "namespaces": entries, "leaving": leaving}, indent=1)
        for path in self._files:
            self._small_files.replace(path, text.encode())

    def close(self) -> None:
        """Write to the folders no more: they may be another node's from now on. The caller may have the store's lock,
        so this waits for nobody either; what is being saved now ends with the small files."""
        self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            raise UnavailableError("the node is stopping")

    def _restore_leaving(self, leaving: Sequence[Leaving]) -> None:
        for each in leaving:
            if each.fingerprint not in self._by_fingerprint:  # or it was opened again
                self._leaving.setdefault(each.fingerprint, each)

    def _restore(self, number: int, entry: _Entry) -> None:
        known = self._add(
            KnownNamespace(
                number, entry.layout, entry.layout.fingerprint, entry.durability, entry.created, entry.labels
            )
        )
        self._used[known.number] = time.monotonic() - entry.idle

    def _add(
        self, known: KnownNamespace, apply_rules: Callable[[KnownNamespace], None] = lambda known: None
    ) -> KnownNamespace:
        apply_rules(known)
        self._by_fingerprint[known.fingerprint] = known
        self._by_identity[known.layout.identity] = known
        self._by_number[known.number] = known
        return known


def _without(taken: Collection[int]) -> Iterator[int]:
    """The numbers that are not taken, each once: those behind the last one first, which nobody knows from before."""
    before = set(taken)
    last = max(before, default=0)
    return chain(range(last + 1, _LAST_NUMBER + 1), (number for number in range(1, last) if number not in before))


def _read(path: Path) -> _Register:
    """A register, without what of it can't be read: those pages are not found. The file as it was is kept then."""
    try:
        register = json.loads(path.read_text())
        entries, damage = _each_readable(register["namespaces"], _entry)
        leaving, more = _each_readable(register.get("leaving", []), _leaving)
    except FileNotFoundError:
        return _Register([], [])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        _keep_damaged(path)
        _log.warning("%s can't be read, its pages will not be found: %s", path, error)
        return _Register([], [])
    once = _only_once(entries)
    damage += more + ["a number or a layout is there twice, or a number is out of range"] * (len(entries) - len(once))
    if damage:
        _keep_damaged(path)
        _log.warning(
            "%d records of %s can't be read, their pages will not be found, those of %d others will: %s",
            len(damage),
            path,
            len(once),
            damage[0],
        )
    return _Register(once, leaving)


def _each_readable(records: Any, read: Callable[[Any], T]) -> tuple[list[T], list[str]]:
    """What can be read of these, and why the others can't."""
    if not isinstance(records, list):
        return [], ["no list of records"]
    readable: list[T] = []
    damage: list[str] = []
    for record in records:
        try:
            readable.append(read(record))
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            damage.append(f"{type(error).__name__}: {error}")
    return readable, damage


def _entry(record: Any) -> _Entry:
    return _Entry(
        int(record["number"]),
        Layout.from_json(json.dumps(record["layout"])),
        str(record.get("durability", "")),
        _duration_or(record.get("created"), time.time()),  # an older version did not write these down
        _duration_or(record.get("idle"), 0.0),
        _labels(record.get("labels")),
    )


def _labels(value: Any) -> tuple[str, ...]:
    """Labels in a register: pages must not be lost for what can't be one."""
    readable, _ = _each_readable(value, checked_label)
    return tuple(dict.fromkeys(filter(None, readable)))[:MOST_LABELS]


def _duration_or(value: Any, otherwise: float) -> float:
    """A time in a register: pages must not be lost for one that can't be."""
    return float(value) if isinstance(value, (int, float)) and 0 <= value <= _LONGEST_SECONDS else otherwise


def _leaving(record: Any) -> Leaving:
    fingerprint = bytes.fromhex(record["fingerprint"])
    if len(fingerprint) != 32:  # a shorter one would be a prefix of others' pages
        raise ValueError(f"{record['fingerprint']!r} is no fingerprint")
    return Leaving(fingerprint, str(record["name"]), bool(record["shared"]))


def _only_once(entries: list[_Entry]) -> list[_Entry]:
    """Those that share neither number nor layout with another: which of two is right, nobody can tell."""
    numbers = Counter(entry.number for entry in entries)
    layouts = Counter(entry.layout.identity for entry in entries)
    return [
        entry
        for entry in entries
        if 0 < entry.number <= _LAST_NUMBER and numbers[entry.number] == layouts[entry.layout.identity] == 1
    ]


def _keep_damaged(path: Path) -> None:
    """Give a register another name beside its own, under which it stays when it is replaced."""
    kept = _damaged(path)
    try:
        kept.unlink(missing_ok=True)
        kept.hardlink_to(path)
    except OSError as error:
        _log.warning("%s can't be kept as %s: %s", path, kept.name, error)


def _damaged(path: Path) -> Path:
    return path.with_name(path.name + ".damaged")
