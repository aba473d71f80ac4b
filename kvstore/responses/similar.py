"""Answers that were given to similar prompts: which of them is told, and what is learnt from those that are computed.

What it knows lies in memory: prompts since the start of the process, and outcomes. The answers themselves are in the
store, and are read again at each hit, so that whatever removes them there ends them here, too.
"""

from __future__ import annotations

import json
import random
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.responses.metrics import ResponseMetrics
from kvstore.responses.policy import Caller
from kvstore.responses.request import CacheableRequest
from kvstore.responses.semantic.comparers import Compare
from kvstore.responses.semantic.decision import Experience, Outcome
from kvstore.responses.semantic.group import Found, Group
from kvstore.responses.semantic.lexical import embed
from kvstore.responses.semantic.tuned import tuned_outcomes
from kvstore.responses.shadow_gate import ShadowGate

MOST_PROMPT = 4000
"""Characters of a prompt that is compared."""
_MOST_GROUPS = 256
_MOST_CALLERS = 256
_NOT_WITH = ("tools", "tool_choice", "logprobs", "top_logprobs")

Embed = Callable[[str], npt.NDArray[np.float32]]


@dataclass(frozen=True, slots=True)
class SimilarPrompt:
    """The last user turn of a request, and all of the rest."""

    caller: tuple[str, ...]
    context: str
    """Equal for requests in which the last user turn alone differs."""
    text: str


def similar_prompt(request: CacheableRequest, caller: Caller) -> SimilarPrompt | None:
    """What may be answered from a similar request; None: this one may not, since it is no chat that ends with a user's
    text, or has tools, pictures, log-probabilities or several choices."""
    if not request.chat:
        return None
    path, said = json.loads(request.canonical)
    messages = said["messages"]
    if any(said.get(name) for name in _NOT_WITH) or said.get("n") not in (None, 1):
        return None
    if not isinstance(messages, list) or not all(_is_text(message) for message in messages):
        return None
    last = messages[-1]
    if last["role"] != "user" or set(last) != {"role", "content"} or not 0 < len(last["content"]) <= MOST_PROMPT:
        return None
    said["messages"] = messages[:-1]
    return SimilarPrompt(caller.scope, json.dumps([path, said, caller.scope]), last["content"])


def _is_text(message: Any) -> bool:
    return (
        isinstance(message, dict) and isinstance(message.get("content"), str) and isinstance(message.get("role"), str)
    )


class SimilarAnswers:
    """Safe for threads.

    Args:
        metrics: where it counts.
        compare: says whether two answers are the same; None: nothing is learnt, and nothing is ever told.
        bound: on the share of wrong answers among those told to similar prompts, from 0 to 1.
        shadow: share of hits that is computed as well, and compared.
        vector: the embedding.
        dice: gives numbers from 0 to 1.
    """

    def __init__(
        self,
        metrics: ResponseMetrics,
        compare: Compare | None,
        bound: float = 0.02,
        shadow: float = 0.05,
        vector: Embed = embed,
        dice: Callable[[], float] = random.random,
    ) -> None:
        self._metrics = metrics
        self._compare = compare
        self._shadow = shadow
        self._vector = vector
        self._dice = dice
        self._lock = threading.Lock()
        self._groups: OrderedDict[str, Group] = OrderedDict()
        self._experience: OrderedDict[tuple[str, ...], Experience] = OrderedDict()
        self._gate = ShadowGate(metrics, compare is not None, bound)

    @property
    def shut(self) -> bool:
        """Whether nothing is told: there is no comparer, or shadow checks found too many wrong answers."""
        return self._gate.shut

    def search(self, prompt: SimilarPrompt) -> Found | None:
        """The kept prompt that is the least likely to have another answer."""
        vector = self._vector(prompt.text)
        with self._lock:
            group = self._groups.get(prompt.context)
            if group is None:
                return None
            self._groups.move_to_end(prompt.context)
            search = group.search(prompt.text, vector, self._of(prompt.caller))
        for guard, count in search.refusals.items():
            self._metrics.similar_refusals.labels(guard).inc(count)
        return search.found

    def tells(self, found: Found) -> bool:
        """Whether that prompt's answer is told."""
        return self._gate.tells(found.wrong)

    def checks(self) -> bool:
        """Whether this hit is computed as well."""
        return self._dice() < self._shadow

    def add(self, prompt: SimilarPrompt, entry: str) -> None:
        """An answer to this prompt is being kept."""
        vector = self._vector(prompt.text)
        with self._lock:
            group = self._groups.setdefault(prompt.context, Group())
            self._groups.move_to_end(prompt.context)
            group.add(entry, prompt.text, vector)
            if len(self._groups) > _MOST_GROUPS:
                self._groups.popitem(last=False)

    def remove(self, prompt: SimilarPrompt, entry: str) -> None:
        """An entry is no more."""
        with self._lock:
            if (group := self._groups.get(prompt.context)) is not None:
                group.remove(entry)

    def learn(
        self, prompt: SimilarPrompt, found: Found, answer: dict[str, Any], kept: dict[str, Any], shadow: bool
    ) -> bool | None:
        """Compare the answer that was computed with the one that was kept.

        Args:
            prompt: what was asked.
            found: what was found for it.
            answer: what was computed, as a body.
            kept: the entry's.
            shadow: whether it was told.

        Returns:
            Whether it was right; None: nobody can tell.
        """
        said, before = text_of(answer), text_of(kept)
        right = None
        if self._compare is not None and said is not None and before is not None:
            right = self._compare(prompt.text, said, before)
        word = "undecided" if right is None else "right" if right else "wrong"
        (self._metrics.similar_shadows if shadow else self._metrics.similar_outcomes).labels(word).inc()
        if right is None:
            return None
        with self._lock:
            self._of(prompt.caller).add(Outcome(found.entry, found.likeness, found.similarity, right))
            if shadow:
                self._gate.count(right)
        return right

    def _of(self, caller: tuple[str, ...]) -> Experience:
        if caller not in self._experience:
            self._experience[caller] = Experience(tuned_outcomes() if self._vector is embed else ())
            if len(self._experience) > _MOST_CALLERS:
                self._experience.popitem(last=False)
        self._experience.move_to_end(caller)
        return self._experience[caller]


def text_of(answer: dict[str, Any]) -> str | None:
    """What a chat's only choice says; None: something else."""
    try:
        (choice,) = answer["choices"]
        content = choice["message"]["content"]
    except (LookupError, TypeError, ValueError):
        return None
    return content if isinstance(content, str) else None
