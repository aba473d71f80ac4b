"""Answers that were given to similar prompts: which of them is told, and what is learnt from those that are computed.

Prompts and outcomes lie in the store beside the answers, and in memory as far as they are asked for. The answers
themselves are read again at each hit, so that whatever removes them there ends them here, too.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.responses.embedding.failure import checked
from kvstore.responses.metrics import ResponseMetrics
from kvstore.responses.remembered import Place, Remembered
from kvstore.responses.sealing import Sealing
from kvstore.responses.semantic.beginning import beginning
from kvstore.responses.semantic.comparers import Compare
from kvstore.responses.semantic.decision import Outcome
from kvstore.responses.semantic.group import Found
from kvstore.responses.semantic.lexical import embed
from kvstore.responses.shadow_gate import ShadowGate
from kvstore.responses.similar_prompt import SimilarPrompt, text_of
from kvstore.responses.store import Label, Prompt, Store

Embed = Callable[[str], npt.NDArray[np.float32]]


@dataclass(frozen=True, slots=True)
class Similar:
    """How similar prompts are answered."""

    compare: Compare | None
    """Says whether two answers are the same; None: nothing is learnt, and nothing told."""
    bound: float = 0.02
    """On the share that is wrong among what is told to similar prompts."""
    shadow: float = 0.05
    """Share of these that is computed as well, and compared."""
    vector: Embed = embed
    """The embedding. It may block, and fail."""
    vectors: str = "lexical"
    """What it is called: prompts and outcomes of another name, or of other dimensions, are not used with it."""
    deadline: float | None = None
    """Seconds that a request waits for the embedding. None: it takes no time, and is made with the search."""
    close: Callable[[], None] = lambda: None
    """Lets go of the embedding."""


def remembered_for(how: Similar, store: Store, sealing: Sealing, now: Callable[[], float]) -> Remembered:
    """Prompts and outcomes of a store, with an embedding.

    Args:
        how: the operator's choice.
        store: where they lie.
        sealing: how they lie there.
        now: seconds since 1970.
    """
    return Remembered(store, sealing, how.vectors, beginning, now)


class Searched:
    """What is known of a prompt by its search. A thread fills it in, which may be later than the request waits."""

    def __init__(self, prompt: SimilarPrompt) -> None:
        self.prompt = prompt
        self.begun = False
        self.vector: npt.NDArray[np.float32] | None = None
        """None: not yet, or it failed."""
        self.found: Found | None = None
        """The kept prompt that is the least likely to have another answer."""


class SimilarAnswers:
    """Safe for threads.

    Args:
        metrics: where it counts.
        how: the operator's choice.
        remembered: prompts and outcomes.
        dice: gives numbers from 0 to 1.
        now: seconds since 1970.
    """

    def __init__(
        self,
        metrics: ResponseMetrics,
        how: Similar,
        remembered: Remembered,
        dice: Callable[[], float] = random.random,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._metrics = metrics
        self._how = how
        self._remembered = remembered
        self._dice = dice
        self._now = now
        self._began = now()
        self._lock = threading.Lock()
        self._dimensions: int | None = None
        """Of the embedding, once it gave one."""
        self._gate = ShadowGate(metrics, how.compare is not None, how.bound)

    @property
    def shut(self) -> bool:
        """Whether nothing is told: there is no comparer, or shadow checks found too many wrong answers."""
        return self._gate.shut

    def asked(self, prompt: SimilarPrompt) -> Searched:
        """A prompt, before its search."""
        return Searched(prompt)

    def embed(self, searched: Searched) -> None:
        """Make its embedding, if that was not tried before. It blocks.

        Raises:
            EmbeddingError: there is none.
            Exception: what else the embedding raises.
        """
        if searched.begun:
            return
        searched.begun = True
        vector = checked(self._how.vector(searched.prompt.text), self._dimensions)
        with self._lock:
            self._dimensions = self._dimensions or len(vector)
        searched.vector = checked(vector, self._dimensions)

    def search(self, searched: Searched) -> Found | None:
        """The kept prompt that is the least likely to have another answer. It blocks.

        Raises:
            StoreError: the store can't be asked.
            EmbeddingError: there is no embedding.
            Exception: what else the embedding raises.
        """
        self.embed(searched)
        if searched.vector is None:
            return None
        place = self._place(searched)
        self._count(self._remembered.read(place))
        search = self._remembered.search(place, searched.prompt.text, searched.vector)
        for guard, count in search.refusals.items():
            self._metrics.similar_refusals.labels(guard).inc(count)
        searched.found = search.found
        return search.found

    def tells(self, found: Found) -> bool:
        """Whether that prompt's answer is told."""
        return self._gate.tells(found.wrong)

    def checks(self) -> bool:
        """Whether this hit is computed as well."""
        return self._dice() < self._how.shadow

    def prompt_of(self, searched: Searched, label: Label) -> Prompt | None:
        """What is stored with an entry, so that similar prompts find it; None: it has no vector. It blocks where it was
        not searched for."""
        self.embed(searched)
        if searched.vector is None:
            return None
        return self._remembered.sealed_prompt(self._place(searched), label, searched.prompt.text, searched.vector)

    def remove(self, searched: Searched, entry: str) -> None:
        """An entry is no more."""
        self._remembered.remove(self._place(searched), entry)

    def learn(
        self, searched: Searched, found: Found, answer: dict[str, Any], kept: dict[str, Any], shadow: bool
    ) -> bool | None:
        """Compare the answer that was computed with the one that was kept. It blocks.

        Args:
            searched: what was asked.
            found: what was found for it.
            answer: what was computed, as a body.
            kept: the entry's.
            shadow: whether it was told.

        Returns:
            Whether it was right; None: nobody can tell.
        """
        said, before = text_of(answer), text_of(kept)
        right = None
        if self._how.compare is not None and said is not None and before is not None:
            right = self._how.compare(searched.prompt.text, said, before)
        word = "undecided" if right is None else "right" if right else "wrong"
        (self._metrics.similar_shadows if shadow else self._metrics.similar_outcomes).labels(word).inc()
        if right is None:
            return None
        outcome = Outcome(found.entry, found.likeness, found.similarity, right)
        now = self._now()
        if shadow:
            self._count([(right, now)])
        self._remembered.learn(self._place(searched), outcome, shadow, now)
        return right

    def _place(self, searched: Searched) -> Place:
        """Where a prompt belongs, once there was an embedding."""
        return self._remembered.place(searched.prompt, self._dimensions or 0)

    def reopen(self) -> None:
        """Tell again after checks have shut it; they are counted anew from now on."""
        with self._lock:
            self._began = self._now()
            self._gate.reopen()

    def _count(self, shadows: list[tuple[bool, float]]) -> None:
        """Checks of what was told, of this process and of others that share the store."""
        with self._lock:
            for right, at in shadows:
                if at >= self._began:
                    self._gate.count(right)
