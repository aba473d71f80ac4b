"""A stream of requests through the product's decision: what hits, what of it is wrong, beside a fixed threshold."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from corpus import Family

from kvstore.responses.semantic.decision import Experience, Outcome
from kvstore.responses.semantic.group import Group
from kvstore.responses.semantic.interval import upper_end

Embed = Callable[[str], npt.NDArray[np.float32]]


@dataclass
class Result:
    """Counts of requests, and of intents."""

    paraphrases: int = 0
    """Requests that were not asked before in these words, and whose intent was."""
    hits: int = 0
    right: int = 0
    hit_intents: set[int] = field(default_factory=set)
    wrong_intents: set[int] = field(default_factory=set)

    def hit(self, asked: int, told: int) -> None:
        self.hits += 1
        self.right += asked == told
        self.hit_intents.add(asked)
        if asked != told:
            self.wrong_intents.add(asked)

    @property
    def share_of_paraphrases(self) -> float:
        return self.right / self.paraphrases if self.paraphrases else 0.0

    @property
    def wrong_at_most(self) -> float:
        """The upper end of the exact two-sided 95 % interval of false hits, each intent once."""
        return upper_end(len(self.wrong_intents), len(self.hit_intents), 0.975)

    def __str__(self) -> str:
        return (
            f"{self.share_of_paraphrases:6.1%} of {self.paraphrases} paraphrases hit; {self.hits - self.right} of"
            f" {self.hits} hits wrong; {len(self.wrong_intents)} of {len(self.hit_intents)} intents,"
            f" at most {self.wrong_at_most:.2%}"
        )


def requests_of(families: list[Family], count: int, seed: int) -> list[tuple[int, str]]:
    """Intents by number, each with one of its prompts, drawn alike."""
    intents = [prompts for family in families for prompts in family.intents]
    dice = random.Random(seed)
    drawn = (dice.randrange(len(intents)) for _ in range(count))
    return [(intent, dice.choice(intents[intent])) for intent in drawn]


def by_entry(
    requests: list[tuple[int, str]],
    embed: Embed,
    experience: Experience,
    bound: float,
    seed: int,
    shadow: float = 0.05,
    told: Callable[[Outcome], None] = lambda outcome: None,
) -> Result:
    """Every request as a proxy has it: told again, or computed, compared and learnt.

    Args:
        requests: see :func:`requests_of`.
        embed: the embedder.
        experience: what is known; it learns.
        bound: of false hits; below 0 nothing is hit.
        seed: of the shadow checks' dice.
        shadow: share of hits that is computed, too.
        told: every outcome.
    """
    dice, result, group = random.Random(seed), Result(), Group()
    kept: dict[str, int] = {}
    seen: set[int] = set()
    for intent, prompt in requests:
        if prompt in kept:
            continue  # equal: the exact layer answers
        vector = embed(prompt)
        found = group.search(prompt, vector, experience).found
        result.paraphrases += intent in seen
        hit = found is not None and found.wrong <= bound
        if found is not None and hit:
            result.hit(intent, kept[found.entry])
        if found is not None and (not hit or dice.random() < shadow):
            outcome = Outcome(found.entry, found.likeness, found.similarity, kept[found.entry] == intent)
            experience.add(outcome)
            told(outcome)
            if hit and not outcome.right:
                group.remove(found.entry)
        if not hit:
            group.add(prompt, prompt, vector)
            kept[prompt] = intent
            seen.add(intent)
    return result


def by_threshold(requests: list[tuple[int, str]], embed: Embed, threshold: float) -> Result:
    """Every request from the most similar one before it, where that is as similar as this."""
    result = Result()
    kept: dict[str, int] = {}
    vectors: list[npt.NDArray[np.float32]] = []
    for intent, prompt in requests:
        if prompt in kept:
            continue
        vector = embed(prompt)
        result.paraphrases += intent in kept.values()
        if vectors:
            similarities = np.asarray(vectors) @ vector
            best = int(similarities.argmax())
            if similarities[best] >= threshold:
                result.hit(intent, list(kept.values())[best])
                continue
        kept[prompt] = intent
        vectors.append(vector)
    return result


def best_threshold(requests: list[tuple[int, str]], embed: Embed, bound: float) -> float:
    """The lowest fixed threshold that would have kept the bound, by the intents of these requests; above 1: none."""
    for threshold in np.arange(0.5, 1.001, 0.01):
        result = by_threshold(requests, embed, float(threshold))
        if result.hits and len(result.wrong_intents) <= bound * len(result.hit_intents):
            return float(threshold)
    return 1.01
