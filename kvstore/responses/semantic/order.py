"""Whether the same words stand for the same in another order. No I/O, no model."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence

from kvstore.responses.semantic import vocabulary as words
from kvstore.responses.semantic.content import Word
from kvstore.responses.semantic.reading import Reading
from kvstore.responses.semantic.stems import DATE_STEMS

_MOST_MOVED = 1
"""Phrases that may stand elsewhere: two may have changed their places."""
_LONGEST = 60
"""Words of content of a prompt in which phrases are looked for."""
_ALIKE = (
    frozenset(("of", "in", "on", "'s")),
    frozenset(("", "of", "in", "on")),
    frozenset(("", "for")),
    frozenset(("", "of", "on", "about")),
    frozenset(("", "between")),
)
"""Prepositions that people exchange for each other, or leave out in a heading."""
_ALIKE_IN_TIME = frozenset(("", "in", "on", "for", "of", "'s"))


def is_told_alike(left: Reading, right: Reading) -> bool:
    """Whether prompts of the same words of content say the same with them: in one order and voice; or with a phrase of
    them elsewhere, which begins with a preposition, or with the other voice.

    Args:
        left: one of them.
        right: the other.
    """
    other_voice = left.passive != right.passive
    if not _point_alike(left.content, right.content, other_voice):
        return False
    if left.stems == right.stems:
        return not other_voice and _agents(left) == _agents(right) and _stand_alike(left.content, right.content)
    if len(left.content) > _LONGEST:
        return False
    verb = (
        {left.stems[0], right.stems[0]} if "how" in (left.kind, right.kind) and left.heading != right.heading else set()
    )
    if other_voice:
        return _same_in_other_voice(left, right) if left.passive else _same_in_other_voice(right, left)
    if _agents(left) != _agents(right):
        return False
    if sorted(_clauses(left)) == sorted(_clauses(right)):
        return True
    return _is_moved(left.content, right.content, verb, _held(left, right), _MOST_MOVED)


def is_heading_of(heading: Reading, sentence: Reading) -> bool:
    """Whether a heading says what a sentence does: phrases may stand anywhere, and may have lost their prepositions.

    Args:
        heading: as people type it into a search.
        sentence: with the same words of content.
    """
    if len(heading.units) > 1 and heading.stems != sentence.stems:
        return False  # how many acres a hectare has is not how many hectares an acre has
    there = {word.stem: word.before for word in sentence.content}
    if len(there) < len(sentence.content):
        return False  # which of two?
    given = {word.stem: word.before for word in heading.content if word.before}
    if any(
        before != there[stem] and not (there[stem] and _are_alike(before, there[stem], stem))
        for stem, before in given.items()
    ):
        return False
    pointing = [before for before in there.values() if before in words.POINTING]
    if pointing not in ([], ["from"], ["to"]) and not words.POINTING & {*given.values()}:
        return False  # from where, and to where?
    return all(_found(phrase, list(heading.stems)) is not None for phrase in _phrases(sentence))


def _phrases(sentence: Reading) -> Iterator[list[str]]:
    """What keeps its order: each phrase behind a preposition, and what is left."""
    phrase: list[str] = []
    for word in sentence.content:
        if (word.before or word.begins or word.stem in words.EVALUATING) and phrase:
            yield phrase
            phrase = []
        phrase.append(word.stem)
        if word.stem in words.EVALUATING:
            yield phrase
            phrase = []
    if phrase:
        yield phrase


def _held(left: Reading, right: Reading) -> set[str]:
    """Stems that begin no phrase that may stand elsewhere."""
    owners = [{word.stem for word in each.content if word.before == "'s"} for each in (left, right)]
    held = (owners[0] & owners[1]) - DATE_STEMS  # what belongs to whom
    held |= {stem for stem, count in Counter(left.stems).items() if count > 1}  # which of them?
    if (
        left.kind == "asked" and left.verb == right.verb == "be"
    ):  # whether Monday is a holiday is not whether one is on it
        pointed = [{word.stem for word in each.content if word.before} for each in (left, right)]
        held |= pointed[0] ^ pointed[1]
    return held


def _point_alike(left: Sequence[Word], right: Sequence[Word], other_voice: bool) -> bool:
    """Whether prepositions point to the same words: a battery for a new phone is not a new battery for a phone."""
    gone: set[str] = set()
    come: set[str] = set()
    for stem in {word.stem for word in left}:
        ones = sorted(word.before for word in left if word.stem == stem)
        others = sorted(word.before for word in right if word.stem == stem)
        for one, other in zip(ones, others, strict=True):
            if one == other:
                continue
            if not _are_alike(one, other, stem) and not (other_voice and "by" in (one, other)):
                return False
            if not one:
                come.add(_class_of(other))
            elif not other:
                gone.add(_class_of(one))
    return not gone & come


def _stand_alike(left: Sequence[Word], right: Sequence[Word]) -> bool:
    """Whether the same words in the same order are pointed to alike."""
    return all(
        one.before == other.before or _are_alike(one.before, other.before, one.stem)
        for one, other in zip(left, right, strict=True)
    )


def _are_alike(one: str, other: str, stem: str) -> bool:
    if stem in DATE_STEMS and {one, other} <= _ALIKE_IN_TIME:
        return True
    return any({one, other} <= alike for alike in _ALIKE)


def _class_of(preposition: str) -> str:
    return "of" if preposition in _ALIKE[0] else preposition


def _agents(reading: Reading) -> set[str]:
    return {word.stem for word in reading.content if word.before == "by"}


def _same_in_other_voice(passive: Reading, active: Reading) -> bool:
    """Who does it stands behind ``by``, or nowhere; in the other voice, right in front of what is done."""
    one, other = list(passive.stems), list(active.stems)
    place = next((place for place, word in enumerate(passive.content) if word.before == "by"), None)
    if place is None:
        return _is_one_run_moved(one, other)
    for end in range(place + 1, len(one) + 1):
        agent_does = [*one[place:end], one[place - 1]]
        start = _found(agent_does, other)
        if start is not None:
            mine, theirs = one[:place] + one[end:], other[:start] + other[start + end - place :]
            if mine == theirs or _is_one_run_moved(mine, theirs):
                return True
    return False


def _clauses(reading: Reading) -> Iterator[tuple[str, ...]]:
    borders = [place for place, word in enumerate(reading.content) if word.begins and place]
    for start, end in itertools.pairwise([0, *borders, len(reading.content)]):
        yield reading.stems[start:end]


def _found(run: list[str], stems: list[str]) -> int | None:
    return next((start for start in range(len(stems)) if stems[start : start + len(run)] == run), None)


def _is_one_run_moved(one: list[str], other: list[str]) -> bool:
    start = 0
    while start < len(one) and one[start] == other[start]:
        start += 1
    end = len(one)
    while end > start and one[end - 1] == other[end - 1]:
        end -= 1
    one, other = one[start:end], other[start:end]
    return any(one[cut:] + one[:cut] == other for cut in range(1, len(one)))


def _is_moved(left: Sequence[Word], right: Sequence[Word], verb: set[str], held: set[str], most: int) -> bool:
    if [word.stem for word in left] == [word.stem for word in right]:
        return _stand_alike(left, right)
    if most == 0:
        return False
    for one, other in ((left, right), (right, left)):
        stems = [word.stem for word in other]
        for start, end in _movable(one, verb, held):
            place = _found([word.stem for word in one[start:end]], stems)
            if place is not None and _stand_alike(one[start : start + 1], other[place : place + 1]):
                rest, others = [*one[:start], *one[end:]], [*other[:place], *other[place + end - start :]]
                if _is_moved(rest, others, set(), held, most - 1):
                    return True
    return False


def _movable(content: Sequence[Word], verb: set[str], held: set[str]) -> Iterator[tuple[int, int]]:
    """Where phrases that may stand elsewhere begin and end: behind a preposition; and what is said of
    something, or of how it is done."""
    for start, word in enumerate(content):
        if word.before and word.stem not in held:
            yield from ((start, end) for end in range(_end_of_phrase(content, start), start, -1))
        elif (
            word.stem in words.EVALUATING
            or word.stem in verb
            or (word.stem.endswith("ly") and word.stem not in words.SCOPES)
        ):
            yield start, start + 1


def _end_of_phrase(content: Sequence[Word], start: int) -> int:
    end = start + 1
    while end < len(content) and not content[end].before and not content[end].begins:
        end += 1
    return end
