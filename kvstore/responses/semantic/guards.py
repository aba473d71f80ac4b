"""Whether two prompts may have one answer, as far as that can be told without a model. No I/O.

Guards refuse pairs that embeddings take for alike: another number, a negation, another name, the same words the other
way round. What they don't refuse, they sort: pairs of one text that is asked for in another way, pairs that say the
same in other small words, and pairs that differ in a word of content. All but the first kind hit only where outcomes
prove it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum

from kvstore.responses.semantic import vocabulary as words
from kvstore.responses.semantic.content import Word
from kvstore.responses.semantic.nearly import is_nearly_alike
from kvstore.responses.semantic.order import is_told_alike
from kvstore.responses.semantic.reading import Reading
from kvstore.responses.semantic.stems import are_opposites


class Guard(StrEnum):
    """Why a pair is refused."""

    LANGUAGES = "languages"
    NUMBERS = "numbers"
    UNITS = "units"
    DATES = "dates"
    IDENTIFIERS = "identifiers"
    QUOTED = "quoted"
    NEGATIONS = "negations"
    OPPOSITES = "opposites"
    DIRECTIONS = "directions"
    NAMES = "names"
    QUESTIONS = "questions"
    SCOPES = "scopes"


class Likeness(StrEnum):
    """Of a pair that is not refused."""

    SAME_TEXT = "same_text"
    """All of it is the same in the same order, but for ways to ask ("how do I", "tell me how to") and for small words
    that agree."""
    SAME_WORDS = "same_words"
    """Its content is the same: other small words, another order that changes nothing, synonyms, what people type into a
    search."""
    OTHER_WORDS = "other_words"
    """There is a word of content in one that is not in the other."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Of two prompts: refused by a guard, or alike in some way."""

    refused_by: Guard | None
    likeness: Likeness = Likeness.OTHER_WORDS


def compare(left: Reading, right: Reading) -> Comparison:
    """What guards say of two prompts, in either order.

    Args:
        left: one of them.
        right: the other.
    """
    if (guard := _refusing(left, right)) is not None:
        return Comparison(guard)
    if not (left.stems or left.numbers or left.quoted or left.identifiers):
        return Comparison(None)
    small_words_agree = (
        (len({*left.stems}) > 1 or not _small_words_apart(left, right))
        and left.negated == right.negated
        and _modals_agree(left, right)
        and left.tense == right.tense
        and _verbs_agree(left, right)
        and _persons_agree(left, right)
        and _owners_agree(left, right)
    )
    same = (
        small_words_agree
        and _kinds_agree(left, right)
        and ((sorted(left.stems) == sorted(right.stems) and is_told_alike(left, right)) or is_nearly_alike(left, right))
    ) or (left.heading != right.heading and _agree_with_heading(left, right) and is_nearly_alike(left, right))
    if same and left.asked == right.asked and left.heading == right.heading:
        return Comparison(None, Likeness.SAME_TEXT)
    return Comparison(None, Likeness.SAME_WORDS if same else Likeness.OTHER_WORDS)


def _refusing(left: Reading, right: Reading) -> Guard | None:
    if left.language and right.language and left.language != right.language:
        return Guard.LANGUAGES
    for guard, one, other in (
        (Guard.QUOTED, left.quoted, right.quoted),
        (Guard.IDENTIFIERS, left.identifiers, right.identifiers),
        (Guard.NUMBERS, left.numbers, right.numbers),
        (Guard.UNITS, left.units, right.units),
        (Guard.DATES, left.dates, right.dates),
        (Guard.NEGATIONS, left.negations, right.negations),
    ):
        if one != other:
            return guard
    only_left, only_right = _only(left.stems, right.stems), _only(right.stems, left.stems)
    if any(are_opposites(one, other) for one in only_left for other in only_right):
        return Guard.OPPOSITES
    if _scopes(left) != _scopes(right):
        return Guard.SCOPES
    if left.kind != right.kind and not {left.kind, right.kind} & {"", "what"} and not _ask_when(left, right):
        return Guard.QUESTIONS
    if _names_only(left, right) or _names_only(right, left):
        return Guard.NAMES
    if _points_elsewhere(left.content, right.content) or (left.place and right.place and left.place != right.place):
        return Guard.DIRECTIONS
    return None


def _only(these: tuple[str, ...], those: tuple[str, ...]) -> list[str]:
    return list((Counter(these) - Counter(those)).elements())


def _names_only(one: Reading, other: Reading) -> bool:
    """Whether one names what the other does not say at all."""
    return bool(one.names - set(other.stems) - other.said)


def _scopes(reading: Reading) -> Counter[str]:
    """Of how many something is asked: only these, all, one or the other."""
    return Counter(stem for stem in reading.stems if stem in words.SCOPES)


def _persons_agree(left: Reading, right: Reading) -> bool:
    """Whether it is about the one who asks or the one who is asked in both, in the same places."""
    one, other = left.persons, right.persons
    if len({*one, *other}) < 2 and left.kind != "how":
        return True
    if left.kind != "how" and (not one or not other):
        return True
    return [each for place, each in enumerate(one) if one[place - 1 : place] != (each,)] == [
        each for place, each in enumerate(other) if other[place - 1 : place] != (each,)
    ]


def _kinds_agree(left: Reading, right: Reading) -> bool:
    """A heading or a request may ask what something is, or how it is done."""
    if left.kind == right.kind:
        return True
    kinds = {left.kind, right.kind}
    if kinds == {"", "how"}:
        asked = left if left.kind == "" else right
        return asked.stems[:1] != () and asked.stems[0] not in words.WRITTEN_FOR_ONE
    return kinds == {"", "what"} or _ask_when(left, right)


def _ask_when(left: Reading, right: Reading) -> bool:
    return "when" in (left.kind, right.kind) and left.kind.startswith("when") and right.kind.startswith("when")


def _modals_agree(left: Reading, right: Reading) -> bool:
    """Whether you ship is whether you can."""
    if left.modal == right.modal:
        return True
    return {left.modal, right.modal} == {"", "may"} and any(
        each.kind == "asked" and {*each.persons} == {"2"} for each in (left, right)
    )


def _small_words_apart(left: Reading, right: Reading) -> set[str]:
    """What one has and the other has not of small words that ask nothing: there they may be what is asked about."""
    return {each for each in left.said ^ right.said if each in words.STOPWORDS or "'" in each} - words.ASKING


def _agree_with_heading(left: Reading, right: Reading) -> bool:
    """A heading has no verbs, and says neither who asks nor whose it is."""
    if left.negated != right.negated or not {left.modal, right.modal} <= {"", "may", "should"}:
        return False
    told_otherwise = left.kind == right.kind or any(number.startswith("#") for number in left.numbers)
    if left.tense != right.tense and not told_otherwise:
        return False
    return len({*left.persons, *right.persons}) < 2  # I or you


def _verbs_agree(left: Reading, right: Reading) -> bool:
    """What something does, what it has and what it is are three questions."""
    both = {left.verb, right.verb}
    return len(both) == 1 or ("do" not in both and both != {"have", "be"})


def _owners_agree(left: Reading, right: Reading) -> bool:
    """How one resets one's password, one resets a password; but my password is not what a password is."""
    if left.owners == right.owners:
        return True
    asks_what_is = not left.kind.startswith(("how", "asked", "fix", "why")) and "be" in (left.verb, right.verb)
    return not asks_what_is and (not left.owners or not right.owners)


def _points_elsewhere(left: tuple[Word, ...], right: tuple[Word, ...]) -> bool:
    """Whether a word of both is pointed to in another way, or two have changed their places."""
    in_left = {word.stem: word.before for word in left}
    in_right = {word.stem: word.before for word in right}
    common = [stem for stem in in_left if stem in in_right]
    for stem in common:
        one, other = in_left[stem], in_right[stem]
        if one != other and one in words.POINTING and other in words.POINTING:
            return True
    moved = [stem for stem in common if in_left[stem] != in_right[stem]]
    order = list(in_right)
    return any(
        in_left[one] == in_right[other] and in_left[other] == in_right[one] and order.index(one) > order.index(other)
        for place, one in enumerate(moved)
        for other in moved[place + 1 :]
    )
