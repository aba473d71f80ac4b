"""What verbs of a prompt tell, as far as their forms do. No I/O, no model."""

from __future__ import annotations

import itertools

from kvstore.responses.semantic import vocabulary as words

_DO = frozenset(["do", "does", "did", "doing", "done"])
_LASTING = frozenset(["take", "happen", "cost", "last", "need", "work", "mean"])
_BE = frozenset(["is", "are", "am", "was", "were", "be", "been", "being", "get", "gets", "got"])
_PARTICIPLES = frozenset(
    [
        "bought",
        "sold",
        "made",
        "written",
        "taken",
        "given",
        "paid",
        "found",
        "lost",
        "kept",
        "won",
        "built",
        "sent",
        "spoken",
        "begun",
        "eaten",
        "drunk",
        "driven",
        "chosen",
        "done",
        "seen",
        "known",
        "held",
        "told",
        "thought",
        "caught",
        "brought",
        "taught",
        "grown",
        "drawn",
        "shown",
        "worn",
        "torn",
        "broken",
        "stolen",
        "hidden",
        "bitten",
        "beaten",
        "cut",
        "put",
        "set",
        "hit",
        "read",
        "spent",
        "left",
        "felt",
        "met",
        "led",
        "run",
        "come",
        "become",
        "born",
    ]
)


def is_passive(tokens: list[str]) -> bool:
    """Whether a form of "be" has a participle within the next words."""
    return any(
        token in _BE and any(each.endswith("ed") or each in _PARTICIPLES for each in tokens[place + 1 : place + 6])
        for place, token in enumerate(tokens)
    )


def tense_of(tokens: list[str]) -> str:
    """``past``, ``future``; empty: neither."""
    for token in tokens:
        if token in words.PAST or token in words.PAST_FORMS:
            return "past"
        if token == "will" and not _is_of_now(tokens):
            return "future"
    if any(token in ("has", "have") and _has_participle(tokens, place) for place, token in enumerate(tokens)):
        return "past"
    asks = any(token in words.QUESTION_WORDS or token in ("what", "which") or token[:1] == "@" for token in tokens)
    if asks and "@how" not in tokens and not words.FINITE & {*tokens}:
        return (
            "past"
            if any(len(token) > 4 and (token.endswith("ed") or token in _PARTICIPLES) for token in tokens)
            else ""
        )
    return ""


def _is_of_now(tokens: list[str]) -> bool:
    """Whether what will be is what is always so: what will happen if, or what won't work."""
    return "not" in tokens or ("be" not in tokens and bool(_LASTING & {*tokens}))


def _has_participle(tokens: list[str], place: int) -> bool:
    return any(each.endswith("ed") or each in _PARTICIPLES or each == "been" for each in tokens[place + 1 : place + 4])


def own_verb(tokens: list[str]) -> str:
    """``have``, ``be`` or ``do``, where it is a verb of its own: what has something is not that; empty: none of them."""
    for place, token in enumerate(tokens):
        if token in _DO and ("@how" in tokens[:place] or words.FINITE & {*tokens[:place]} or place + 1 == len(tokens)):
            return "do"
    pairs = list(itertools.pairwise([*tokens, ""]))
    for place, (token, then) in enumerate(pairs):
        if token in ("has", "have", "had", "having") and then != "to" and not _has_participle(tokens, place):
            return "have"
    for token, then in pairs:
        if token in ("is", "are", "was", "were") and then != "there":
            return "be"
    return ""
