"""What is asked of the cache, and what it has: a question, an answer that was given before, and how one is read."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from kvstore.responses.answer import as_body, as_events
from kvstore.responses.policy import CacheControl, Caller
from kvstore.responses.request import CacheableRequest
from kvstore.responses.sealing import Sealing
from kvstore.responses.semantic.group import Found
from kvstore.responses.similar_prompt import SimilarPrompt, similar_prompt
from kvstore.responses.store import Label, Store

MOST_ANSWER_BYTES = 4 << 20
"""Longest answer that is kept."""


@dataclass(frozen=True, slots=True)
class Question:
    """A request that may be looked up and kept."""

    entry: str
    """The name of its answer."""
    request: CacheableRequest
    caller: Caller
    control: CacheControl

    @property
    def similar(self) -> SimilarPrompt | None:
        """What is compared with other prompts; None: nothing may be."""
        return similar_prompt(self.request, self.caller)


@dataclass(frozen=True, slots=True)
class Kept:
    """An answer that was given before, or just now by an equal request."""

    label: Label
    answer: dict[str, Any]
    """As a body that is no stream."""
    seconds: float
    """That it took."""
    found: Found | None = None
    """Of one that was given to a similar prompt; None: to an equal one."""

    def told(self, question: Question) -> bytes | None:
        """As the question wants it; None: it can't be told in that form."""
        if question.request.stream:
            return as_events(self.answer, question.request.chat, question.request.with_usage)
        return as_body(self.answer, question.request.chat)

    def age(self, now: float) -> int:
        """In whole seconds."""
        return max(0, int(now - self.label.stored_at))

    def young_enough(self, question: Question, now: float) -> bool:
        """Whether the question's ``max-age`` allows it."""
        limit = question.control.max_age
        return limit is None or self.age(now) <= limit


def read_kept(store: Store, sealing: Sealing, name: str, canonical: str | None) -> tuple[Kept | None, str]:
    """What lies under a name, and how that went: ``hit``, ``miss``, ``unreadable``. It blocks.

    Args:
        store: where it lies.
        sealing: how it lies there.
        name: of the entry.
        canonical: the request that it must answer; None: whatever it answers.

    Raises:
        StoreError: the store can't be asked.
    """
    entry = store.get(name)
    if entry is None:
        return None, "miss"
    content = sealing.open(entry.label, entry.sealed)
    try:
        asked, answer, seconds = json.loads(content or b"")
    except (ValueError, TypeError, RecursionError):
        return None, "unreadable"
    if canonical is not None and asked != canonical:
        return None, "unreadable"
    return Kept(entry.label, answer, seconds), "hit"


def sealed_content(question: Question, answer: dict[str, Any], seconds: float) -> bytes:
    """What :func:`read_kept` reads, to be sealed."""
    return json.dumps([question.request.canonical.decode(), answer, seconds]).encode()
