"""What a store of answers does. Its calls block: they are made by threads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from kvstore.errors import UnavailableError


class StoreError(UnavailableError):
    """The store can't be asked, or does not answer. The request is computed."""


@dataclass(frozen=True, slots=True)
class Label:
    """What is known of an entry without opening it."""

    entry: str
    """Its name, 64 hexadecimal digits: from the request, and from who may have the answer."""
    tenant: str
    """Empty: of a key without one."""
    key: str
    """A digest of the API key by which it was made."""
    model: str
    weights: str
    """Which runs of which instances made it, separated by commas. It is used while all of them go on."""
    stored_at: float
    """Seconds since 1970."""
    expires_at: float
    """Seconds since 1970."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A label, and the sealed request and answer."""

    label: Label
    sealed: bytes

    @property
    def size(self) -> int:
        """Bytes that count against the limit."""
        return len(self.sealed)


@dataclass(frozen=True, slots=True)
class Limits:
    """What a store holds at most; room is made by removing what ends first."""

    entries: int = 100_000
    bytes: int = 1 << 30
    """Of sealed requests and answers."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What a store holds now."""

    entries: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Choice:
    """Which entries: those that agree with everything that is given. Nothing given: all of them."""

    entry: str | None = None
    tenant: str | None = None
    key: str | None = None
    """A digest, as in :class:`Label`."""
    model: str | None = None

    def takes(self, label: Label) -> bool:
        """Whether an entry is one of these."""
        return all(
            wanted is None or wanted == getattr(label, name)
            for name, wanted in ((name, getattr(self, name)) for name in ("entry", "tenant", "key", "model"))
        )


class Store(Protocol):
    """Safe for threads. Every method raises :class:`StoreError` when the store can't be asked."""

    def get(self, entry: str) -> Entry | None:
        """What lies under a name, and has not ended."""

    def put(self, entry: Entry) -> bool:
        """Keep it, in the place of an earlier one, and make room for it. False: it is larger than all the room."""

    def labels(self) -> Iterator[Label]:
        """Of every entry, in no order that is promised. Entries that come or go meanwhile may be among them."""

    def delete(self, choice: Choice) -> int:
        """Remove entries; every process that shares the store finds them gone. Returns how many."""

    def usage(self) -> Usage:
        """What is in it."""

    def close(self) -> None:
        """Let go of files and connections."""
