"""A client's session with a node, and a handle on each of its namespaces: opened again when the node was restarted."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from kvstore.client.paths.deadline import locked, time_left
from kvstore.client.paths.path import Control, OpenedNamespace, Path
from kvstore.client.recent_lookups import RecentLookups
from kvstore.errors import (
    DeadlineError,
    LimitExceededError,
    NotAttachedError,
    UnavailableError,
    UnknownNamespaceError,
)
from kvstore.hashing import HASH_BYTES
from kvstore.host.cutting import check_going, seconds_given
from kvstore.host.forking import register_forked
from kvstore.host.uninterrupted import uninterrupted
from kvstore.layout import Layout
from kvstore.page_codes import TIER_NAMES, PageTier

Answer = TypeVar("Answer")
_ARENA = int(PageTier.ARENA)
_LOWER = tuple(map(int, (PageTier.DISK, PageTier.REDIS, PageTier.OBJECTS)))
_LOWER_NAMES = tuple(TIER_NAMES[tier] or "" for tier in _LOWER)
_NONE = (0,) * len(_LOWER)
REOPENINGS = 8
"""How often one call opens a namespace again: it may be cleared once more in between."""


class Session:
    """One client at one node: what all its namespaces share. Safe for threads.

    ``timeout`` is the seconds that any one method of the client may take; ``make_path`` gets the arena's folder and the
    seconds that making a path may take.
    """

    def __init__(self, control: Control, timeout: float, make_path: Callable[[str, float], Path]) -> None:
        self.control = control
        self._timeout = timeout
        self.path: Path | None = None
        """How pages move now; None before a namespace was opened."""
        self.directory = ""
        """The folder of the arena that it was made for."""
        self._make_path = make_path
        self._recent = RecentLookups()
        self._lock = threading.Lock()
        register_forked(self)

    @property
    def timeout(self) -> float:
        """Seconds that a method may take which is called here and now."""
        return seconds_given(self._timeout)

    @timeout.setter
    def timeout(self, seconds: float) -> None:
        self._timeout = seconds

    def forked(self) -> None:
        """In a child: no other thread is at work here any more."""
        self._lock = threading.Lock()
        self._recent = RecentLookups()

    def looked_up(self, fingerprint: bytes, hashes: bytes, tiers: bytes) -> None:
        """Count a lookup of pages whose joined hashes these are; ``tiers`` has one byte for each."""
        if tiers:
            self._recent.note(fingerprint, hashes)
            asked, arena = len(tiers), tiers.count(_ARENA)
            elsewhere = _NONE if arena == asked else tuple(map(tiers.count, _LOWER))
            self.control.count_lookup(fingerprint, asked, arena, *elsewhere)

    def loaded(self, fingerprint: bytes, hashes: bytes, tiers: Sequence[str]) -> None:
        """Count a load as a lookup of its pages, as far as they were not looked up before: of those with these joined
        hashes, the leading ones came from ``tiers``."""
        known = self._recent.load(fingerprint, hashes)
        asked = len(hashes) // HASH_BYTES - known
        if asked:
            came = tiers[known:] if known else tiers
            arena = came.count("arena")
            elsewhere = _NONE if arena == len(came) else tuple(map(came.count, _LOWER_NAMES))
            self.control.count_lookup(fingerprint, asked, arena, *elsewhere)

    def open(self, layout: Layout, durability: str, label: str, deadline: float) -> tuple[OpenedNamespace, Path]:
        """Open a namespace at the node, which may have come back with its arena elsewhere: then by another path.

        Raises:
            Exception: as :meth:`kvstore.Client.namespace`.
        """
        opened = self.control.open_namespace(layout, durability, label, time_left(deadline))
        with locked(self._lock, deadline):
            if self.path is None or self.directory != opened.arena_directory:
                old, self.path = self.path, self._make_path(opened.arena_directory, time_left(deadline))
                self.directory = opened.arena_directory
                if old is not None:
                    old.close()
            return opened, self.path

    @uninterrupted
    def close(self) -> None:
        """Let go of the node; calls under way fail. An embedded store ends them first, and writes back."""
        self.control.close()  # before the lock: whoever has it may be waiting for the node
        with self._lock:
            if self.path is not None:
                self.path.close()


class Handle:
    """A namespace at the session's node. Safe for threads. It is opened when it is first used."""

    def __init__(self, session: Session, layout: Layout, durability: str, label: str) -> None:
        self.session = session
        self.layout = layout
        self.durability = durability
        self.label = label
        self.fingerprint = layout.fingerprint
        self.current: tuple[OpenedNamespace, Path] | None = None
        """What is known of it, and how its pages move; None before it was opened."""

    def now(self, deadline: float) -> tuple[OpenedNamespace, Path]:
        """What is known of it, which is asked for at the first use."""
        current = self.current
        if current is None:
            self.open_again(deadline)
            current = self.current
            assert current is not None
        return current

    @uninterrupted
    def open_again(self, deadline: float) -> None:
        """Ask the node."""
        self.current = self.session.open(self.layout, self.durability, self.label, deadline)

    def refresh(self, deadline: float) -> None:
        """Open it again where what is known of it is out of date."""
        opened, path = self.now(deadline)
        if path.is_stale(opened):
            with contextlib.suppress(UnavailableError, DeadlineError):
                self.open_again(deadline)

    def control(self, call: Callable[[Control, float], Answer], deadline: float) -> Answer:
        """A call that moves no pages, given the seconds that it may take."""
        return self._retried(lambda opened, path: call(self.session.control, time_left(deadline)), deadline)

    def move(self, call: Callable[[OpenedNamespace, Path], Answer], deadline: float) -> Answer:
        """A call that moves pages. Behind it what is known of the namespace is made current: later, when the node may
        be gone, what is mapped stays readable."""
        answer = self._retried(call, deadline)
        self.refresh(deadline)
        return answer

    def _retried(self, call: Callable[[OpenedNamespace, Path], Answer], deadline: float) -> Answer:
        """A call, and again behind opening the namespace when the node came back another one: without the namespace,
        with its arena elsewhere, or with a smaller one and smaller batches."""
        for tries in range(REOPENINGS + 1):
            try:
                opened, path = self.now(deadline)
                time_left(deadline)  # nothing is begun behind the deadline
                check_going()
                return call(opened, path)
            except (UnknownNamespaceError, NotAttachedError, LimitExceededError):
                if tries == REOPENINGS:
                    raise
                self.open_again(deadline)
        raise AssertionError("every try returns or raises")
