"""What verbs of a prompt tell, as far as their forms do. No I/O, no model."""

from __future__ import annotations

import itertools

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


def is_perfect(tokens: list[str]) -> bool:
    """Whether a form of "have" has a participle within the next words."""
    return any(token in ("has", "have") and _has_participle(tokens, place) for place, token in enumerate(tokens))


def _has_participle(tokens: list[str], place: int) -> bool:
    return any(each.endswith("ed") or each in _PARTICIPLES or each == "been" for each in tokens[place + 1 : place + 4])


def own_verb(tokens: list[str]) -> str:
    """``have`` or ``be``, where it is a verb of its own: what has something is not that; empty: neither."""
    pairs = list(itertools.pairwise([*tokens, ""]))
    for place, (token, then) in enumerate(pairs):
        if token in ("has", "have", "had", "having") and then != "to" and not _has_participle(tokens, place):
            return "have"
    for token, then in pairs:
        if token in ("is", "are", "was", "were") and then != "there":
            return "be"
    return ""
