"""What a request would be told, and why: for people who look into a store."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

from kvstore.responses.policy import Caller
from kvstore.responses.request import CacheableRequest
from kvstore.responses.sealing import Sealing
from kvstore.responses.semantic.group import Candidate
from kvstore.responses.semantic.guards import Likeness
from kvstore.responses.similar import Similar, remembered_for
from kvstore.responses.similar_prompt import not_compared, similar_prompt
from kvstore.responses.store import Label, Store

_MOST = 5
"""Candidates that are shown."""
_ALIKE = {
    Likeness.SAME_TEXT: "the same text, asked for in another way",
    Likeness.SAME_WORDS: "they differ in small words and order alone",
    Likeness.OTHER_WORDS: "they differ in words",
}


@dataclass(frozen=True, slots=True)
class ShownCandidate:
    """A kept prompt that is near to the one of a request."""

    entry: str
    text: str
    similarity: float
    guard: str
    """That refused it; empty: none did."""
    likeness: str
    """Of a prompt that no guard refused; empty: one did."""
    wrong: float | None
    """The probability that its answer would be wrong here; None: a guard refused it."""
    right_before: int
    """Outcomes of this entry that were right."""
    wrong_before: int
    """And those that were wrong."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """Whether a request would be told what a similar one was told."""

    told: str
    """The entry whose answer it would be; empty: none."""
    why: str
    """For people."""
    weights: str = ""
    """Which runs of instances must go on for that."""
    candidates: tuple[ShownCandidate, ...] = ()
    """The best one first, then the nearest."""


def explain_similar(
    store: Store,
    sealing: Sealing,
    how: Similar,
    now: Callable[[], float],
    request: CacheableRequest,
    caller: Caller,
) -> Explanation:
    """What a proxy with this store would find for a request that no equal one answers. It blocks.

    Args:
        store: where answers lie.
        sealing: how they lie there.
        how: as the proxy has it.
        now: seconds since 1970.
        request: that is asked.
        caller: for whom.

    Raises:
        StoreError: the store can't be asked.
        Exception: what the embedding raises.
    """
    if (words := not_compared(request)) is not None:
        return Explanation("", f"it is not compared with others: {words}")
    prompt = similar_prompt(request, caller)
    assert prompt is not None, "it is compared"
    remembered = remembered_for(how, store, sealing, now)
    vector = how.vector(prompt.text)
    place = remembered.place(prompt, len(vector))
    remembered.read(place)
    search = remembered.search(place, prompt.text, vector)
    if not search.candidates:
        embedding = how.vectors.split(" ")[0]  # of a folder, its digest follows
        return Explanation(
            "", f"no prompt is kept that has everything else in common with it, by the embedding {embedding}"
        )
    found = search.found
    order = sorted(search.candidates, key=lambda each: found is None or each.found != found)[:_MOST]
    kept = {each.entry: _asked(store, sealing, each.entry) for each in order}
    shown = tuple(_shown(each, kept[each.entry], *remembered.outcomes_of(place, each.entry)) for each in order)
    if found is None:
        return Explanation("", "guards refuse all that are near: they ask something else", candidates=shown)
    percent = f"{100 * found.wrong:.2g} %, and the bound is {100 * how.bound:g} %"
    if found.wrong > how.bound:
        return Explanation(
            "",
            f"the best one ({_ALIKE[found.likeness]}) would be wrong with a probability of {percent}",
            candidates=shown,
        )
    asked = kept[found.entry]
    if asked is None:
        return Explanation("", "the best one is gone, or can't be opened", candidates=shown)
    why = f"the best one would be wrong with a probability of {percent}"
    return Explanation(found.entry, why, asked[0].weights, shown)


def _asked(store: Store, sealing: Sealing, entry: str) -> tuple[Label, str] | None:
    """The label of an entry, and its last turn; None: it is gone, or can't be opened."""
    kept = store.get(entry)
    content = None if kept is None else sealing.open(kept.label, kept.sealed)
    if kept is None or content is None:
        return None
    canonical, *_ = json.loads(content)
    return kept.label, json.loads(canonical)[1]["messages"][-1]["content"]


def _shown(candidate: Candidate, asked: tuple[Label, str] | None, right: int, wrong: int) -> ShownCandidate:
    found = candidate.found
    return ShownCandidate(
        candidate.entry,
        "" if asked is None else asked[1],
        candidate.similarity,
        candidate.refused_by or "",
        "" if found is None else found.likeness,
        None if found is None else found.wrong,
        right,
        wrong,
    )
