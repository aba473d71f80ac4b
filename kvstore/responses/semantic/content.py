"""The words of a prompt that say what it is about. No I/O, no model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvstore.responses.semantic import vocabulary as words
from kvstore.responses.semantic.stems import stem

CLAUSE = "zzbx"
"""Stands where a clause ends."""


@dataclass(frozen=True, slots=True)
class Word:
    """A word of the content."""

    stem: str
    before: str = ""
    """The preposition that points to it, of :data:`vocabulary.DIRECTIONS`; ``'s``: it is a genitive; empty: none."""
    begins: bool = False
    """Whether it begins a clause behind another."""


def content_of(tokens: list[str], names: frozenset[str]) -> Iterator[Word]:
    """The words of content, each with the preposition that points to it.

    Args:
        tokens: lowered words, with markers for numbers, and :data:`CLAUSE` where a clause ends.
        names: stems of words that are written as names.
    """
    before, last, begins = "", "", False
    owners = _genitives(tokens, names)
    for place, token in enumerate(tokens):
        found = stem(token)
        if token == CLAUSE:
            if before and last in words.DIRECTIONS and last != "to":
                yield Word("~" + before)  # what something is for is not what it is
            begins, before = True, ""
        elif token in words.DIRECTIONS and found not in names:
            belongs = token == "to" and (last in words.BEFORE_A_VERB or last.startswith("@") or not last)
            before = "" if belongs else words.DIRECTIONS[token]
        elif not _is_small(token, found, names):
            if place in owners:  # what is in front points to what is owned
                yield Word(found, owners[place], begins)
            else:
                yield Word(found, before, begins)
                before = ""
            begins = False
        last = token


def _is_small(token: str, found: str, names: frozenset[str]) -> bool:
    return (
        (token in words.STOPWORDS and token != "or" and found not in names)
        or token in words.NEGATIONS
        or token == "and"
        or token in words.KINDS
        or (token in words.UNITS and len(token) < 3 and not token.isalpha())
    )


def _genitives(tokens: list[str], names: frozenset[str]) -> dict[int, str]:
    """Places of words that say whose something is, as "male giraffe's": the first of them has ``'s``."""
    places: dict[int, str] = {}
    for end, token in enumerate(tokens):
        if not token.endswith(("'s", "'")):
            continue
        start = end
        while (
            start
            and start - 1 not in places
            and not (
                _is_small(tokens[start - 1], stem(tokens[start - 1]), names)
                or tokens[start - 1] in words.DIRECTIONS
                or tokens[start - 1] == CLAUSE
            )
        ):
            start -= 1
        places |= dict.fromkeys(range(start, end + 1), "") | {start: "'s"}
    return places
