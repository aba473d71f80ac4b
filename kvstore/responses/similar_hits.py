"""The cache's half for similar prompts: the search before a request is computed, and what is learnt behind it.

Nothing of it can fail a request, nor hold it for longer than the deadline: comparing is done in the background.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from kvstore.responses.kept import Kept, Question, read_kept
from kvstore.responses.lookup_threads import LookupThreads
from kvstore.responses.metrics import ResponseMetrics
from kvstore.responses.sealing import Sealing
from kvstore.responses.semantic.comparers import Compare
from kvstore.responses.semantic.group import Found
from kvstore.responses.semantic.lexical import embed
from kvstore.responses.similar import Embed, SimilarAnswers
from kvstore.responses.store import Choice, Store, StoreError

_MOST_COMPARISONS = 64
"""Of answers that wait to be compared; what is beyond is not learnt from."""
_MOST_NEAREST = 1024


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


class SimilarHits:
    """For one event loop.

    Args:
        how: the operator's choice.
        store: where answers lie.
        sealing: how they lie there.
        threads: that search.
        metrics: where it counts.
    """

    def __init__(
        self, how: Similar, store: Store, sealing: Sealing, threads: LookupThreads, metrics: ResponseMetrics
    ) -> None:
        self._store = store
        self._sealing = sealing
        self._threads = threads
        self._metrics = metrics
        self._answers = SimilarAnswers(metrics, how.compare, how.bound, how.shadow, how.vector)
        self._nearest: OrderedDict[str, Found] = OrderedDict()
        """Of requests that are being computed, by the names of their entries."""
        self._comparing: set[asyncio.Future[None]] = set()
        self._comparers = ThreadPoolExecutor(1, "kvstore-responses-compare")

    async def look_up(self, question: Question, counts: Callable[[Kept], bool]) -> Kept | None:
        """What was told to a similar prompt; None: compute.

        Args:
            question: what is asked.
            counts: whether an answer may be told to it.
        """
        answers, prompt = self._answers, question.similar
        if prompt is None or self._threads.busy:
            return None

        def search() -> tuple[Found | None, Kept | None]:
            found = answers.search(prompt)
            if found is None or not answers.tells(found):
                return found, None
            kept, _ = read_kept(self._store, self._sealing, found.entry, None)
            if kept is None:
                answers.remove(prompt, found.entry)
                return None, None
            return found, replace(kept, found=found)

        began = time.monotonic()
        try:
            found, kept = await self._threads.ask(search)
        except (TimeoutError, StoreError):
            return None
        finally:
            self._metrics.similar_seconds.observe(time.monotonic() - began)
        if kept is not None:
            if counts(kept):
                return kept
            answers.remove(prompt, kept.label.entry)  # what is computed now takes its place
        elif found is not None:
            self._nearest[question.entry] = found
            if len(self._nearest) > _MOST_NEAREST:
                self._nearest.popitem(last=False)
        return None

    def checks(self, kept: Kept) -> bool:
        """Whether what was told is to be computed as well, for :meth:`check`."""
        return kept.found is not None and self._answers.checks()

    def check(self, question: Question, kept: Kept, answer: dict[str, Any] | None) -> None:
        """Compare what was told with what was computed for it, in the background; remove the entry if it was wrong.

        Args:
            question: what was asked.
            kept: what was told.
            answer: what was computed; None: it is not finished.
        """
        answers, prompt, found = self._answers, question.similar, kept.found
        if answer is None or prompt is None or found is None:
            return

        def compare() -> None:
            if answers.learn(prompt, found, answer, kept.answer, shadow=True) is False:
                answers.remove(prompt, found.entry)
                with contextlib.suppress(StoreError):
                    self._store.delete(Choice(found.entry))

        self._compare(compare)

    def learn(self, question: Question, answer: dict[str, Any]) -> None:
        """Compare a computed answer with that of the nearest prompt, in the background."""
        answers, found, prompt = self._answers, self._nearest.pop(question.entry, None), question.similar
        if found is None or prompt is None:
            return

        def compare() -> None:
            with contextlib.suppress(StoreError):
                near, _ = read_kept(self._store, self._sealing, found.entry, None)
                if near is None:
                    answers.remove(prompt, found.entry)
                else:
                    answers.learn(prompt, found, answer, near.answer, shadow=False)

        self._compare(compare)

    def stored(self, question: Question) -> None:
        """An answer to this question is in the store. It blocks."""
        if (prompt := question.similar) is not None:
            self._answers.add(prompt, question.entry)

    def close(self) -> None:
        """Wait for the comparison that has begun. It blocks."""
        self._comparers.shutdown(cancel_futures=True)

    def _compare(self, work: Callable[[], None]) -> None:
        if len(self._comparing) < _MOST_COMPARISONS:
            comparing = asyncio.get_running_loop().run_in_executor(self._comparers, work)
            self._comparing.add(comparing)
            comparing.add_done_callback(self._comparing.discard)
