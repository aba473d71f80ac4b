"""What a store of answers does. Its calls block: they are made by threads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from kvstore.errors import UnavailableError

NEWS_AT_ONCE = 128
"""Prompts and outcomes that a store gives at once, of each."""
MOST_OUTCOMES = 4096
"""Of a learner; the oldest one goes for one more."""


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
class Prompt:
    """How an entry is found by similar prompts."""

    group: str
    """The name of those of which the last user turn alone differs."""
    sealed: bytes
    """Its last user turn, and the vector of that."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A label, the sealed request and answer, and the prompt, which goes with them."""

    label: Label
    sealed: bytes
    prompt: Prompt | None = None
    """None: similar prompts don't find it."""

    @property
    def size(self) -> int:
        """Bytes that count against the limit."""
        return len(self.sealed) + (0 if self.prompt is None else len(self.prompt.sealed))


@dataclass(frozen=True, slots=True)
class Limits:
    """What a store holds at most; room is made by removing what ends first."""

    entries: int = 100_000
    bytes: int = 1 << 30
    """Of sealed requests, answers, prompts and outcomes."""

    @property
    def outcome_bytes(self) -> int:
        """Of these, what outcomes may take: the oldest go."""
        return self.bytes // 8


@dataclass(frozen=True, slots=True)
class Usage:
    """What a store holds now."""

    entries: int
    bytes: int
    prompts: int = 0
    """Entries that similar prompts may find."""
    outcomes: int = 0


@dataclass(frozen=True, slots=True)
class Learner:
    """Whose outcomes count together."""

    name: str
    """64 hexadecimal digits: from who shares answers, and from the embedding."""
    tenant: str
    """Empty: of a key without one."""
    key: str
    """A digest of the API key of one without a tenant."""


@dataclass(frozen=True, slots=True)
class Seen:
    """Up to where somebody has read prompts, or outcomes. The default: nothing yet."""

    epoch: str = ""
    """Another one where some were deleted since, or the store is another one: what was read before does not count."""
    number: int = 0
    """Rises with each of them."""


@dataclass(frozen=True, slots=True)
class News:
    """What came since somebody read the last time, in the order in which it came; with another epoch than before, all
    of it, from the beginning."""

    prompts: tuple[tuple[Label, bytes], ...]
    """Sealed, with the labels of their entries."""
    prompts_seen: Seen
    outcomes: tuple[bytes, ...]
    """Sealed."""
    outcomes_seen: Seen
    more: bool
    """Whether something is left to be read."""


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

    def takes_learner(self, learner: Learner) -> bool:
        """Whether what a caller's prompts taught is one of these. It is of no entry and no model alone."""
        return (
            self.entry is None
            and self.model is None
            and self.tenant in (None, learner.tenant)
            and self.key in (None, learner.key)
        )


class Store(Protocol):
    """Safe for threads. Every method raises :class:`StoreError` when the store can't be asked."""

    def get(self, entry: str) -> Entry | None:
        """What lies under a name, and has not ended."""

    def put(self, entry: Entry) -> bool:
        """Keep it, in the place of an earlier one, and make room for it. False: it is larger than all the room."""

    def news(self, group: str, prompts: Seen, learner: str, outcomes: Seen) -> News:
        """Prompts of a group and outcomes of a learner that came since."""

    def learn(self, learner: Learner, sealed: bytes, expires_at: float) -> bool:
        """Keep an outcome. False: it is larger than the room for them."""

    def labels(self) -> Iterator[Label]:
        """Of every entry, in no order that is promised. Entries that come or go meanwhile may be among them."""

    def groups(self) -> dict[str, str]:
        """The group of each entry that has a prompt, by its name."""

    def delete(self, choice: Choice) -> int:
        """Remove entries, with their prompts, and what the chosen callers' prompts taught; every process that shares
        the store finds them gone. Returns how many entries."""

    def usage(self) -> Usage:
        """What is in it."""

    def close(self) -> None:
        """Let go of files and connections."""
