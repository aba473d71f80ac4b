"""Prompts and outcomes of a store in memory, as far as they are asked for: what came meanwhile is read before each
search, so that several proxies on one store know the same.
"""

from __future__ import annotations

import json
import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import astuple, dataclass, field
from functools import cache

import numpy as np
import numpy.typing as npt

from kvstore.responses.names import key_digest
from kvstore.responses.sealing import Sealing
from kvstore.responses.semantic.decision import Experience, Outcome
from kvstore.responses.semantic.group import Group, Search
from kvstore.responses.semantic.guards import Likeness
from kvstore.responses.similar_prompt import SimilarPrompt
from kvstore.responses.store import MOST_OUTCOMES, Label, Learner, Prompt, Seen, Store, StoreError

OUTCOME_SECONDS = 30 * 86400.0
"""After which what was learnt ends."""
_MOST_GROUPS = 256
_MOST_VECTOR_BYTES = 256 << 20
"""Of all groups in memory; the one that was not asked for the longest goes first."""
_MOST_LEARNERS = 256
_LENGTH_BYTES = 4
_NOTHING = Seen()


@dataclass(frozen=True, slots=True)
class Place:
    """Where a prompt belongs."""

    group: str
    """Those of which the last user turn alone differs."""
    learner: Learner


@dataclass(slots=True)
class _Known:
    """A group, as far as it was read."""

    group: Group = field(default_factory=Group)
    ends: dict[str, float] = field(default_factory=dict)
    """When its entries end, in seconds since 1970, as they came."""
    seen: Seen = _NOTHING
    lock: threading.Lock = field(default_factory=threading.Lock)
    reading: threading.Lock = field(default_factory=threading.Lock)
    """Held by who reads what came meanwhile, which takes a while for a large group."""


@dataclass(slots=True)
class _Learnt:
    """What a caller's prompts taught, as far as it was read."""

    experience: Experience
    seen: Seen = _NOTHING
    count: int = 0
    told: dict[str, float] = field(default_factory=dict)
    """Of others: until when their checks were told of. What is read again is not told again."""
    lock: threading.Lock = field(default_factory=threading.Lock)


class Remembered:
    """Safe for threads.

    Args:
        store: where they lie.
        sealing: how they lie there.
        vectors: the name of the embedding.
        beginning: outcomes that every caller begins with.
        now: seconds since 1970.
    """

    def __init__(
        self,
        store: Store,
        sealing: Sealing,
        vectors: str,
        beginning: Callable[[], Iterable[Outcome]],
        now: Callable[[], float],
    ) -> None:
        self._store = store
        self._sealing = sealing
        self._vectors = vectors
        self._beginning = cache(lambda: tuple(beginning()))
        self._now = now
        self._by = secrets.token_hex(4)
        """Tells its own outcomes from those of others."""
        self._lock = threading.Lock()
        self._known: OrderedDict[str, _Known] = OrderedDict()
        self._learnt: OrderedDict[str, _Learnt] = OrderedDict()

    def place(self, prompt: SimilarPrompt, dimensions: int) -> Place:
        """Where it belongs, by its embedding's name and dimensions among others: nothing is shared with other ones."""
        caller = prompt.caller
        vectors, scope = f"{self._vectors} {dimensions}".encode(), [part.encode() for part in caller.scope]
        key = "" if caller.tenant else key_digest(self._sealing, caller.key)
        return Place(
            self._sealing.name("group", [vectors, prompt.context.encode()]),
            Learner(self._sealing.name("learner", [vectors, *scope]), caller.tenant, key),
        )

    def read(self, place: Place) -> list[tuple[bool, float]]:
        """Read what came meanwhile. It blocks, but not while another thread reads the same group: then that does it.

        Returns:
            Checks by others of answers that were told: whether they were right, and when that was, in seconds since
            1970.

        Raises:
            StoreError: the store can't be asked.
        """
        known, learnt = self._of(place)
        if not known.reading.acquire(blocking=False):
            return []
        try:
            return self._read(place, known, learnt)
        finally:
            known.reading.release()

    def _read(self, place: Place, known: _Known, learnt: _Learnt) -> list[tuple[bool, float]]:
        shadows: list[tuple[bool, float]] = []
        more = True
        while more:
            prompts_seen, outcomes_seen = known.seen, learnt.seen
            news = self._store.news(place.group, prompts_seen, place.learner.name, outcomes_seen)
            more = news.more
            with known.lock:
                self._take_prompts(place, known, news.prompts, news.prompts_seen)
            with learnt.lock:
                if learnt.seen == outcomes_seen:  # else another thread read them, for another group
                    shadows += self._take_outcomes(place, learnt, news.outcomes, news.outcomes_seen)
                else:
                    more = True
        self._bound_memory(place.group)
        return shadows

    def search(self, place: Place, text: str, vector: npt.NDArray[np.float32]) -> Search:
        """The prompt of the group that is the least likely to have another answer, of what was read.

        Args:
            place: where the prompt belongs.
            text: of the prompt.
            vector: [dimensions], its embedding.
        """
        known, learnt = self._of(place)
        with known.lock, learnt.lock:
            now = self._now()
            while known.ends and (first := next(iter(known.ends.items())))[1] <= now:
                _remove(known, first[0])
            return known.group.search(text, vector, learnt.experience)

    def outcomes_of(self, place: Place, entry: str) -> tuple[int, int]:
        """How many outcomes of an entry were right, and how many wrong, of what was read."""
        _, learnt = self._of(place)
        with learnt.lock:
            return learnt.experience.of(entry)

    def sealed_prompt(self, place: Place, label: Label, text: str, vector: npt.NDArray[np.float32]) -> Prompt:
        """What is stored with an entry.

        Args:
            place: where the prompt belongs.
            label: of the entry.
            text: of the prompt.
            vector: [dimensions], its embedding.
        """
        written = text.encode(errors="surrogatepass")
        content = len(written).to_bytes(_LENGTH_BYTES, "little") + written + vector.astype("<f4").tobytes()
        return Prompt(place.group, self._sealing.seal_for((place.group, *astuple(label)), content))

    def remove(self, place: Place, entry: str) -> None:
        """Let go of a prompt whose entry is no more."""
        known, _ = self._of(place)
        with known.lock:
            _remove(known, entry)

    def learn(self, place: Place, outcome: Outcome, shadow: bool, now: float) -> None:
        """Store an outcome, to be read by the next search of whoever shares the store. If that fails, it is known here
        alone. It blocks.

        Args:
            place: where the prompt belongs.
            outcome: what was found.
            shadow: whether the answer had been told.
            now: seconds since 1970.
        """
        content = json.dumps(
            [outcome.entry, outcome.likeness, outcome.similarity, outcome.right, shadow, now, self._by]
        ).encode()
        learner = place.learner
        with suppress(StoreError):
            if self._store.learn(learner, self._sealing.seal_for(astuple(learner), content), now + OUTCOME_SECONDS):
                return
        _, learnt = self._of(place)
        with learnt.lock:
            learnt.experience.add(outcome)

    def _of(self, place: Place) -> tuple[_Known, _Learnt]:
        with self._lock:
            known = self._known.setdefault(place.group, _Known())
            self._known.move_to_end(place.group)
            if place.learner.name not in self._learnt:
                self._learnt[place.learner.name] = _Learnt(Experience(self._beginning()))
                if len(self._learnt) > _MOST_LEARNERS:
                    self._learnt.popitem(last=False)
            self._learnt.move_to_end(place.learner.name)
            return known, self._learnt[place.learner.name]

    def _bound_memory(self, kept: str) -> None:
        with self._lock:
            size = sum(known.group.bytes for known in self._known.values())
            while (len(self._known) > _MOST_GROUPS or size > _MOST_VECTOR_BYTES) and next(iter(self._known)) != kept:
                size -= self._known.popitem(last=False)[1].group.bytes

    def _take_prompts(self, place: Place, known: _Known, prompts: Iterable[tuple[Label, bytes]], seen: Seen) -> None:
        if seen.epoch != known.seen.epoch:
            known.group, known.ends = Group(), {}
        known.seen = seen
        for label, sealed in prompts:
            content = self._sealing.open_for((place.group, *astuple(label)), sealed)
            if (read := _read_prompt(content)) is not None:
                _remove(known, label.entry)
                known.group.add(label.entry, *read)
                known.ends[label.entry] = label.expires_at

    def _take_outcomes(
        self, place: Place, learnt: _Learnt, outcomes: Iterable[bytes], seen: Seen
    ) -> list[tuple[bool, float]]:
        if seen.epoch != learnt.seen.epoch:
            learnt.experience, learnt.count = Experience(self._beginning()), 0
        learnt.seen = seen
        shadows = []
        for sealed in outcomes:
            if (read := _read_outcome(self._sealing.open_for(astuple(place.learner), sealed))) is not None:
                outcome, shadow, at, by = read
                learnt.experience.add(outcome)
                learnt.count += 1
                if shadow and by != self._by and at > learnt.told.get(by, 0.0):
                    learnt.told[by] = at
                    shadows.append((outcome.right, at))
        if learnt.count > 2 * MOST_OUTCOMES:  # the store has the newest of these
            learnt.seen = Seen()
        return shadows


def _remove(known: _Known, entry: str) -> None:
    known.group.remove(entry)
    known.ends.pop(entry, None)


def _read_prompt(content: bytes | None) -> tuple[str, npt.NDArray[np.float32]] | None:
    """A text and its vector; None: it is damaged, or of another key."""
    if content is None or len(content) < _LENGTH_BYTES:
        return None
    end = _LENGTH_BYTES + int.from_bytes(content[:_LENGTH_BYTES], "little")
    if len(content) <= end or (len(content) - end) % 4:
        return None
    return content[_LENGTH_BYTES:end].decode(errors="surrogatepass"), np.frombuffer(content[end:], "<f4")


def _read_outcome(content: bytes | None) -> tuple[Outcome, bool, float, str] | None:
    """An outcome, whether the answer had been told, when, and who found out; None: it is damaged, or of another key."""
    try:
        entry, likeness, similarity, right, shadow, at, by = json.loads(content or b"")
        return Outcome(entry, Likeness(likeness), similarity, right), shadow, at, by
    except (ValueError, TypeError):
        return None
