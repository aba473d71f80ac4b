"""The cache's half for similar prompts: the search before a request is computed, and what is learnt behind it.

Nothing of it can fail a request, nor hold it for longer than the deadline: comparing is done in the background.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from kvstore.rare_lines import RareLines
from kvstore.responses.embedding.failure import EmbeddingError
from kvstore.responses.kept import Kept, Question, read_kept
from kvstore.responses.lookup_threads import LookupThreads
from kvstore.responses.metrics import ResponseMetrics
from kvstore.responses.sealing import Sealing
from kvstore.responses.similar import Searched, Similar, SimilarAnswers, remembered_for
from kvstore.responses.store import Choice, Label, Prompt, Store, StoreError

_MOST_COMPARISONS = 64
"""Of answers that wait to be compared; what is beyond is not learnt from."""
_MOST_SEARCHED = 1024
_MOST_GONE = 8
"""Entries that a search finds gone before it gives up: more were removed at once."""

_log = logging.getLogger("kvstore.responses")


class SimilarHits:
    """For one event loop.

    Args:
        how: the operator's choice.
        store: where answers lie.
        sealing: how they lie there.
        threads: that search.
        metrics: where it counts.
        now: seconds since 1970.
    """

    def __init__(
        self,
        how: Similar,
        store: Store,
        sealing: Sealing,
        threads: LookupThreads,
        metrics: ResponseMetrics,
        now: Callable[[], float],
    ) -> None:
        self._store = store
        self._sealing = sealing
        self._threads = threads
        self._metrics = metrics
        self._answers = SimilarAnswers(metrics, how, remembered_for(how, store, sealing, now), now=now)
        self._searched: OrderedDict[str, Searched] = OrderedDict()
        """Of requests that are being computed, by the names of their entries."""
        self._comparing: set[asyncio.Future[None]] = set()
        self._comparers = ThreadPoolExecutor(1, "kvstore-responses-compare")
        self._embedding = None if how.deadline is None else LookupThreads(how.deadline)
        self._close = how.close
        self._lines = RareLines()

    async def look_up(self, question: Question, counts: Callable[[Kept], bool]) -> Kept | None:
        """What was told to a similar prompt; None: compute.

        Args:
            question: what is asked.
            counts: whether an answer may be told to it.
        """
        if question.similar is None or self._threads.busy:
            return None
        searched = self._answers.asked(question.similar)
        self._searched[question.entry] = searched
        if len(self._searched) > _MOST_SEARCHED:
            self._searched.popitem(last=False)
        began = time.monotonic()
        waited = await self._embed(searched)
        try:
            kept = None if waited is None else await self._threads.ask(lambda: self._search(searched, counts))
        except (TimeoutError, StoreError, EmbeddingError):
            kept = None
        except Exception:  # noqa: BLE001 - whatever an embedding or a damaged row makes of it
            self._lines.say(_log.exception, "the search of a similar prompt failed; the request is computed")
            kept = None
        finally:
            self._metrics.similar_seconds.observe(time.monotonic() - began)
        if kept is not None:
            self._searched.pop(question.entry, None)
        elif self._embedding is not None:
            self._metrics.embedding_seconds.observe(time.monotonic() - began if waited is None else waited)
        return kept

    async def _embed(self, searched: Searched) -> float | None:
        """Wait for the embedding, in threads of its own: store and equal requests don't wait for a model.

        Returns:
            Seconds; None: there is none.
        """
        if self._embedding is None:
            return 0.0
        outcome = "failed"
        began = time.monotonic()
        try:
            if self._embedding.busy:
                searched.begun = True  # not in the thread that writes, either
                outcome = "skipped"
                return None
            await self._embedding.ask(lambda: self._answers.embed(searched))
            outcome = "made"
        except TimeoutError:
            outcome = "late"  # it goes on, and may be there when the answer is stored
            return None
        except EmbeddingError as error:
            outcome = error.why
            self._lines.say(_log.warning, "a prompt has no embedding: %s", error)
            return None
        except Exception:  # noqa: BLE001 - whatever an embedding makes of it
            self._lines.say(_log.exception, "a prompt has no embedding")
            return None
        finally:
            self._metrics.embeddings.labels(outcome).inc()
        return time.monotonic() - began

    def _search(self, searched: Searched, counts: Callable[[Kept], bool]) -> Kept | None:
        """In a thread."""
        answers = self._answers
        for _ in range(_MOST_GONE):
            found = answers.search(searched)
            if found is None or not answers.tells(found):
                return None
            kept, _ = read_kept(self._store, self._sealing, found.entry, None)
            if kept is not None and counts(kept):
                return replace(kept, found=found)
            answers.remove(searched, found.entry)  # what is computed now takes its place
        searched.found = None
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
            searched = answers.asked(prompt)
            if answers.learn(searched, found, answer, kept.answer, shadow=True) is False:
                answers.remove(searched, found.entry)
                with contextlib.suppress(StoreError):
                    self._store.delete(Choice(found.entry))

        self._compare(compare)

    def computed(self, question: Question) -> Searched | None:
        """What is known of a question that was computed, for :meth:`learn` and :meth:`prompt_of`; None: it is none that
        is compared with others."""
        searched = self._searched.pop(question.entry, None)
        if searched is None and question.similar is not None:
            return self._answers.asked(question.similar)
        return searched

    def learn(self, searched: Searched, answer: dict[str, Any]) -> None:
        """Compare a computed answer with that of the nearest prompt, in the background."""
        answers, found = self._answers, searched.found
        if found is None:
            return

        def compare() -> None:
            with contextlib.suppress(StoreError):
                near, _ = read_kept(self._store, self._sealing, found.entry, None)
                if near is None:
                    answers.remove(searched, found.entry)
                else:
                    answers.learn(searched, found, answer, near.answer, shadow=False)

        self._compare(compare)

    def prompt_of(self, searched: Searched, label: Label) -> Prompt | None:
        """What is stored with an entry, so that similar prompts find it; None: nothing. It blocks."""
        try:
            return self._answers.prompt_of(searched, label)
        except EmbeddingError:
            return None  # it was told where a request waited for it
        except Exception:  # noqa: BLE001 - whatever an embedding makes of it
            self._lines.say(_log.exception, "a prompt has no vector; similar ones won't find it")
            return None

    def reopen(self) -> None:
        """Tell again after checks have shut it."""
        self._answers.reopen()

    def close(self) -> None:
        """Wait for the comparison and the embeddings that have begun. It blocks."""
        self._comparers.shutdown(cancel_futures=True)
        if self._embedding is not None:
            self._embedding.close()
        self._close()

    def _compare(self, work: Callable[[], None]) -> None:
        if len(self._comparing) < _MOST_COMPARISONS:
            comparing = asyncio.get_running_loop().run_in_executor(self._comparers, work)
            self._comparing.add(comparing)
            comparing.add_done_callback(self._comparing.discard)
