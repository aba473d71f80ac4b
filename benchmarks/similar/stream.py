"""A stream of requests through the product's decision: what hits, what of it is wrong, beside a fixed threshold."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
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
    """Counts of requests, of prompts, and of intents."""

    paraphrases: int = 0
    """Requests that were not asked before in these words, and whose intent was."""
    hits: int = 0
    right: int = 0
    asked_prompts: set[str] = field(default_factory=set)
    """Of those requests."""
    right_prompts: set[str] = field(default_factory=set)
    hit_intents: set[int] = field(default_factory=set)
    wrong_intents: set[int] = field(default_factory=set)
    wrong: list[tuple[str, str]] = field(default_factory=list)
    """What was asked, and what was asked when the answer was computed that it was told."""

    def paraphrase(self, prompt: str) -> None:
        self.paraphrases += 1
        self.asked_prompts.add(prompt)

    def hit(self, asked: int, prompt: str, told: int, told_prompt: str) -> None:
        self.hits += 1
        self.hit_intents.add(asked)
        if asked == told:
            self.right += 1
            self.right_prompts.add(prompt)
        else:
            self.wrong_intents.add(asked)
            self.wrong.append((prompt, told_prompt))

    @property
    def share_of_paraphrases(self) -> float:
        """Of different prompts, each once, however often it was asked."""
        return len(self.right_prompts) / len(self.asked_prompts) if self.asked_prompts else 0.0

    @property
    def wrong_at_most(self) -> float:
        """The upper end of the exact two-sided 95 % interval of false hits, each intent once."""
        return upper_end(len(self.wrong_intents), len(self.hit_intents), 0.975)

    def __str__(self) -> str:
        return (
            f"{self.share_of_paraphrases:6.1%} of {len(self.asked_prompts)} paraphrases hit;"
            f" {self.hits - self.right} of {self.hits} hits wrong; {len(self.wrong_intents)} of"
            f" {len(self.hit_intents)} intents, at most {self.wrong_at_most:.2%}"
        )


@dataclass
class Alone:
    """Counts of pairs."""

    same: int = 0
    other: int = 0
    right: int = 0
    wrong: int = 0

    def __str__(self) -> str:
        return (
            f"{self.right / max(1, self.same):6.1%} of {self.same} pairs that are the same hit;"
            f" {self.wrong} of {self.other} that are not"
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
        if intent in seen:
            result.paraphrase(prompt)
        hit = found is not None and found.wrong <= bound
        if found is not None and hit:
            result.hit(intent, prompt, kept[found.entry], found.entry)
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
        if intent in kept.values():
            result.paraphrase(prompt)
        if vectors:
            similarities = np.asarray(vectors) @ vector
            best = int(similarities.argmax())
            if similarities[best] >= threshold:
                told = list(kept)[best]
                result.hit(intent, prompt, kept[told], told)
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


def alone(pairs: Iterable[tuple[str, str, bool]], embed: Embed, experience: Experience, bound: float) -> Alone:
    """Each pair by itself: what the second prompt is told where the first alone is kept, and nothing is learnt.

    Args:
        pairs: two prompts, and whether they have one answer.
        embed: the embedder.
        experience: what is known.
        bound: of false hits.
    """
    result = Alone()
    for kept, asked, same in pairs:
        group = Group()
        group.add(kept, kept, embed(kept))
        found = group.search(asked, embed(asked), experience).found
        hit = found is not None and found.wrong <= bound
        result.same += same
        result.other += not same
        result.right += hit and same
        result.wrong += hit and not same
    return result
