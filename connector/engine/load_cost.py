"""The cost of loading: whether pages are loaded or computed, by how fast either was lately on this machine."""

from __future__ import annotations

import statistics
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence

SAMPLES = 16
"""Timings of each kind that count: the latest."""

ENOUGH = 8
"""With fewer it is not known how fast something is, and pages are loaded, which makes it known."""

LIFETIME = 60.0
"""Seconds after which a timing counts no longer: what was slow is tried again."""

TIMED_TOKENS = 64
"""Fewest tokens of a step that tells how fast prefill is."""

NEGLIGIBLE = 0.020
"""Seconds that loading may take longer than computing: timings of a busy machine say no more."""


class LoadCost:
    """How long a page of each tier, and a token of prefill, took lately."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._timings: dict[str, deque[tuple[float, float]]] = {}
        self._step = 0
        self._steps: dict[int, tuple[float, int]] = {}  # when they began, and their tokens
        self._step_over = 0.0

    def note_load(self, tier: str, pages: int, seconds: float) -> None:
        """So many pages of one tier were loaded together."""
        self._note("tier " + tier, seconds / pages)

    def note_prefill(self, tokens: int, seconds: float) -> None:
        """A step computed so many tokens. Decoding counts with it: that makes prefill look slower than it is."""
        self._note("prefill", seconds / tokens)

    def begin_step(self, tokens: int) -> int:
        """A step is planned that computes so many tokens. Returns its number; 0: it is too small to tell anything."""
        if tokens < TIMED_TOKENS:
            return 0
        self._step += 1
        self._steps[self._step] = self._clock(), tokens
        return self._step

    def end_step(self, step: int) -> None:
        """A step is over. One that was queued behind another one began when that one ended."""
        if step in self._steps:
            now = self._clock()
            began, tokens = self._steps.pop(step)
            self.note_prefill(tokens, now - max(began, self._step_over))
            self._step_over = now
            self._steps = {later: timed for later, timed in self._steps.items() if later > step}

    def page(self, tier: str) -> float | None:
        """Seconds for a page of this tier; None: not known."""
        return self._median("tier " + tier)

    @property
    def token(self) -> float | None:
        """Seconds of prefill for a token; None: not known."""
        return self._median("prefill")

    def pages_worth_loading(self, tiers: Sequence[str], page_tokens: int) -> int:
        """How many leading pages to load, the rest being computed.

        Args:
            tiers: of the pages that could be loaded, in the order of the tokens.
            page_tokens: tokens a page.

        Returns:
            So many that the first token comes soonest; all of them where one of the speeds is not known.
        """
        token = self.token
        pages = {tier: self.page(tier) for tier in set(tiers)}
        if token is None or None in pages.values():
            return len(tiers)
        best, best_gain, gain = 0, 0.0, NEGLIGIBLE
        for count, tier in enumerate(tiers, 1):
            gain += page_tokens * token - (pages[tier] or 0.0)
            if gain >= best_gain:
                best, best_gain = count, gain
        return best

    def gain(self, tiers: Sequence[str], page_tokens: int) -> float:
        """Seconds that loading these pages saves; 0 where one of the speeds is not known."""
        token, gain = self.token, 0.0
        for tier, count in Counter(tiers).items():
            page = self.page(tier)
            if token is None or page is None:
                return 0.0
            gain += count * (page_tokens * token - page)
        return max(0.0, gain)

    def _note(self, what: str, seconds: float) -> None:
        self._timings.setdefault(what, deque(maxlen=SAMPLES)).append((self._clock(), seconds))

    def _median(self, what: str) -> float | None:
        oldest = self._clock() - LIFETIME
        timings = [seconds for at, seconds in self._timings.get(what, ()) if at >= oldest]
        return statistics.median(timings) if len(timings) >= ENOUGH else None
