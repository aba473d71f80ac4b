"""Stored prompts of one context, and which of them is the nearest to another. No I/O; safe for one thread at a time."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstore.responses.semantic.decision import Experience
from kvstore.responses.semantic.guards import Guard, Likeness, compare
from kvstore.responses.semantic.reading import Reading, read_prompt

MOST_PROMPTS = 2048
"""Of a group; the oldest goes for one more."""
_COMPARED = 16
"""Nearest prompts that guards look at."""


@dataclass(frozen=True, slots=True)
class Found:
    """The stored prompt whose answer would be told, if any is."""

    entry: str
    similarity: float
    likeness: Likeness
    wrong: float
    """The probability that its answer would be wrong here."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A stored prompt that is near."""

    entry: str
    similarity: float
    refused_by: Guard | None
    """None: guards let it through."""
    found: Found | None
    """Of one that guards let through."""


@dataclass(frozen=True, slots=True)
class Search:
    """What a search among the prompts of a group gave."""

    found: Found | None
    candidates: tuple[Candidate, ...] = ()
    """The nearest first."""

    @property
    def refusals(self) -> Counter[Guard]:
        """Of near prompts, by guard."""
        return Counter(each.refused_by for each in self.candidates if each.refused_by is not None)


class Group:
    """Prompts of which the last user turn alone differs, by the name of the entry with their answer."""

    def __init__(self) -> None:
        self._readings: dict[str, Reading] = {}
        self._rows: dict[str, int] = {}
        self._names: list[str | None] = []
        self._vectors = np.zeros((0, 0), np.float32)

    def __len__(self) -> int:
        return len(self._readings)

    @property
    def bytes(self) -> int:
        """That its vectors take."""
        return self._vectors.nbytes

    def add(self, entry: str, prompt: str, vector: npt.NDArray[np.float32]) -> None:
        """One more, or an entry's new prompt.

        Args:
            entry: its name.
            prompt: as the user wrote it.
            vector: [dimensions], of any length but 0; one of other dimensions than those that are here is left out.
        """
        length = float(np.linalg.norm(vector))
        if not length or (self._readings and len(vector) != self._vectors.shape[1]):
            return
        self.remove(entry)
        if len(self._readings) == MOST_PROMPTS:
            self.remove(next(iter(self._readings)))
        if self._vectors.shape[1] != len(vector):
            self._vectors, self._names = np.zeros((0, len(vector)), np.float32), []
        row = self._names.index(None) if None in self._names else len(self._names)
        if row == len(self._vectors):
            grown = np.zeros((max(8, 2 * row), len(vector)), np.float32)
            grown[:row] = self._vectors
            self._names += [None] * (len(grown) - row)
            self._vectors = grown
        self._vectors[row] = vector / np.float32(length)
        self._names[row] = entry
        self._rows[entry] = row
        self._readings[entry] = read_prompt(prompt)

    def remove(self, entry: str) -> None:
        """Take one out, if it is there."""
        if self._readings.pop(entry, None) is not None:
            row = self._rows.pop(entry)
            self._names[row] = None
            self._vectors[row] = 0

    def search(self, prompt: str, vector: npt.NDArray[np.float32], experience: Experience) -> Search:
        """The entry that is the least likely to be wrong for a prompt, of those that guards let through.

        Args:
            prompt: as the user wrote it.
            vector: [dimensions], of any length.
            experience: of the caller.
        """
        length = float(np.linalg.norm(vector))
        if not self._readings or not length or len(vector) != self._vectors.shape[1]:
            return Search(None)
        similarities = self._vectors @ (vector / np.float32(length))
        reading = read_prompt(prompt)
        candidates: list[Candidate] = []
        for row in np.argsort(-similarities)[:_COMPARED]:
            entry = self._names[row]
            if entry is None:
                continue
            similarity = min(1.0, float(similarities[row]))
            compared = compare(reading, self._readings[entry])
            found = None
            if compared.refused_by is None:
                wrong = experience.wrong(entry, compared.likeness, similarity)
                found = Found(entry, similarity, compared.likeness, wrong)
            candidates.append(Candidate(entry, similarity, compared.refused_by, found))
        let_through = [each.found for each in candidates if each.found is not None]
        return Search(min(let_through, key=_order, default=None), tuple(candidates))


def _order(found: Found) -> tuple[float, bool, float]:
    return found.wrong, found.likeness is Likeness.OTHER_WORDS, -found.similarity
