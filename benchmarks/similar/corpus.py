"""Prompts by intent, and pairs of them: those of one intent are paraphrases, those of a family's others are not."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

FILES = Path(__file__).parent


@dataclass(frozen=True)
class Family:
    """Intents that are near each other and not the same; each a list of prompts that have one answer."""

    kind: str
    intents: list[list[str]]

    def paraphrases(self) -> Iterator[tuple[str, str]]:
        return itertools.chain.from_iterable(itertools.combinations(prompts, 2) for prompts in self.intents)

    def hard_negatives(self) -> Iterator[tuple[str, str]]:
        for one, other in itertools.combinations(self.intents, 2):
            yield from itertools.product(one, other)


def read_families(files: list[Path] | None = None) -> list[Family]:
    """All that files hold: families apart by empty lines.

    ``== kind | a ; b`` is followed by prompts with ``{0}`` for what tells one intent from the other (``a/b``: two of
    them, ``{0}`` and ``{1}``); ``== kind`` alone by one line for each intent, ``- prompt | prompt``.
    """
    texts = [path.read_text() for path in (sorted(FILES.glob("intents-*.txt")) if files is None else files)]
    blocks = (block.strip().splitlines() for text in texts for block in text.split("\n\n"))
    return [_family(lines) for lines in blocks if lines]


def read_pairs(file: Path) -> list[tuple[str, str, bool]]:
    """Pairs of a file with a JSON object on each line: ``{"a": "…", "b": "…", "same": true}``."""
    pairs = [json.loads(line) for line in file.read_text().splitlines() if line.strip()]
    return [(pair["a"], pair["b"], bool(pair["same"])) for pair in pairs]


def family_of(pairs: list[tuple[str, str, bool]]) -> Family:
    """Intents of pairs: prompts that are the same as another are one intent with it."""
    intent: dict[str, list[str]] = {}
    for one, other, same in pairs:
        first, second = intent.setdefault(one, [one]), intent.setdefault(other, [other])
        if same and first is not second:
            first += second
            intent |= dict.fromkeys(second, first)
    return Family("pairs", list({id(prompts): prompts for prompts in intent.values()}.values()))


def halves(families: list[Family]) -> tuple[list[Family], list[Family]]:
    """To tune on, and to try on: every second family each, so that no intent and none of its likes is in both."""
    return families[::2], families[1::2]


def _family(lines: list[str]) -> Family:
    kind, _, values = lines[0].removeprefix("== ").partition(" | ")
    if not values:
        return Family(kind, [line.removeprefix("- ").split(" | ") for line in lines[1:]])
    two = any("{1}" in line for line in lines)
    slots = [value.split("/") if two else [value] for value in values.split(" ; ")]
    return Family(kind, [[line.format(*each) for line in lines[1:]] for each in slots])
