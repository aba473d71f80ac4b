"""One namespace as a client knows it, found out anew when the node came back another one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TypeVar

from kvstore.client.paths.deadline import time_left
from kvstore.client.paths.path import Control, OpenedNamespace, Path
from kvstore.client.session import Session
from kvstore.errors import (
    DeadlineError,
    LimitExceededError,
    NotAttachedError,
    UnavailableError,
    UnknownNamespaceError,
)
from kvstore.host.uninterrupted import uninterrupted
from kvstore.layout import Layout

Answer = TypeVar("Answer")
REOPENINGS = 8
"""How often one call opens a namespace again: it may be cleared once more in between."""


class Handle:
    """A namespace at the session's node. Safe for threads. It is opened when it is first used.

    Args:
        session: of the client.
        layout: of its pages.
        durability: what it is asked for with.
    """

    def __init__(self, session: Session, layout: Layout, durability: str) -> None:
        self.session = session
        self.layout = layout
        self.durability = durability
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
        self.current = self.session.open(self.layout, self.durability, deadline)

    def refresh(self, deadline: float) -> None:
        """Open it again where what is known of it is out of date."""
        opened, path = self.now(deadline)
        if path.is_stale(opened):
            with contextlib.suppress(UnavailableError, DeadlineError):
                self.open_again(deadline)

    def control(self, call: Callable[[Control, float], Answer], deadline: float) -> Answer:
        """A call that moves no pages."""
        return self._retried(lambda opened, path, left: call(self.session.control, left), deadline)

    def move(self, call: Callable[[OpenedNamespace, Path, float], Answer], deadline: float) -> Answer:
        """A call that moves pages. Behind it what is known of the namespace is made current: later, when the node may
        be gone, what is mapped stays readable."""
        answer = self._retried(call, deadline)
        self.refresh(deadline)
        return answer

    def _retried(self, call: Callable[[OpenedNamespace, Path, float], Answer], deadline: float) -> Answer:
        """A call with the time left, and again behind opening the namespace when the node came back another one:
        without the namespace, with its arena elsewhere, or with a smaller one and smaller batches."""
        for tries in range(REOPENINGS + 1):
            try:
                return call(*self.now(deadline), time_left(deadline))
            except (UnknownNamespaceError, NotAttachedError, LimitExceededError):
                if tries == REOPENINGS:
                    raise
                self.open_again(deadline)
        raise AssertionError("every try returns or raises")
