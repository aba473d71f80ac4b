"""What a prompt says, as far as :mod:`kvstore.responses.semantic.guards` compare it. No I/O, no model.

A prompt is taken apart once: what is quoted, identifiers, numbers with their units, negations, names, the kind of
question, and the words that are left, in their order, each with the preposition before it.
"""

from __future__ import annotations

import itertools
import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass, field
from decimal import Decimal
from functools import lru_cache

from kvstore.responses.semantic import vocabulary as words
from kvstore.responses.semantic.verbs import is_passive, is_perfect, own_verb

_QUOTES = str.maketrans(
    {"“": '"', "”": '"', "„": '"', "«": '"', "»": '"', "‘": "'", "’": "'", "–": "-", "—": "-", "−": "-"}
)
_QUOTED = re.compile(r"```.*?```|`[^`]+`|\"[^\"]+\"|(?<![\w])'[^']+'(?!\w)", re.DOTALL)
_IDENTIFIER = re.compile(
    r"https?://\S+|[\w.+-]+@[\w-]+\.[\w.]+|(?<![\w.])(?:[\w-]+/)+[\w.-]+|[A-Za-z_]\w*(?:\.\w+)+|[A-Za-z]*_\w+|(?<![\w-])--?[a-z][\w-]+"
    r"|\b[A-Za-z]+-?\d[\w.-]*\b|\bv\d+(?:\.\d+)*\b|\b\d+(?:\.\d+){2,}\b|\b[a-z]+[A-Z]\w*\b|\b\d+[A-Za-z]+\d\w*\b"
)
_CURRENCY = re.compile(r"([$€£¥])\s?(\d[\d.,]*)")
_NUMBER = re.compile(r"\d+(?::\d\d)+|\d+(?:[.,]\d+)*|[½¼¾]")
_TOKEN = re.compile(
    r"@\w+|per-\w+|[^\W\d_]+(?:'[^\W\d_]+)?|\d+(?::\d\d)+|\d+(?:[.,]\d+)*|[%°$€£¥½¼¾]+[CcFf]?|[+*/=<>^#]+|-(?=\s?\d)"
)
_ACRONYM = re.compile(r"\b[A-Z]{2,5}\b")
_ORDINAL_END = re.compile(r"(\d+)(?:st|nd|rd|th)\b")
_GLUED = re.compile(
    r"(\d)-?(?=(?:years?|hours?|minutes?|days?|weeks?|months?|gb|mb|kb|tb|kg|mg|ml|km|cm|mm|lbs?|oz|am|pm|g|m|l|°c|°f)\b)",
    re.I,
)
_AFTER_GLUED = re.compile(r"(\d \w+)-(?=[a-z])", re.I)
_BLANKS = re.compile(r"\s+")
_SENTENCE = re.compile(r"(?:^|[.!?:]\s+|\n)\s*$")


@dataclass(frozen=True, slots=True)
class Word:
    """A word of the content."""

    stem: str
    before: str = ""
    """The preposition that points to it, of :data:`vocabulary.DIRECTIONS`; empty: none."""


@dataclass(frozen=True, slots=True)
class Reading:
    """A prompt, taken apart."""

    language: str
    """A code, a script's name, or empty: too little to tell."""
    quoted: tuple[str, ...]
    identifiers: tuple[str, ...]
    numbers: tuple[str, ...]
    """In their order, each with its unit, if it has one."""
    units: frozenset[str]
    dates: frozenset[str]
    negations: int
    names: frozenset[str]
    """Stems of words that are written as names within a sentence."""
    kind: str
    """What kind of question, as ``when``, ``how`` or ``asked`` (by yes or no); empty: another."""
    modal: str
    tense: str
    """``past``, ``future``; empty: neither."""
    verb: str
    """``have`` or ``be``, where it is a verb of its own: what has something is not that; empty: neither."""
    persons: tuple[str, ...]
    """First and second persons in their order, but for the one who asks how."""
    owners: frozenset[str]
    """Whose things it is about, by possessive pronouns."""
    passive: bool
    """Whether something is done to what it is about, as far as verb forms tell."""
    owning: frozenset[str]
    """Stems of words in the genitive."""
    content: tuple[Word, ...]
    said: frozenset[str] = field(default_factory=frozenset)
    """Every word as it is written, lowered."""

    @property
    def stems(self) -> tuple[str, ...]:
        """Of the content, in its order."""
        return tuple(word.stem for word in self.content)


@lru_cache(1024)
def read_prompt(text: str) -> Reading:
    """Take a prompt apart.

    Args:
        text: as the user wrote it.
    """
    text = unicodedata.normalize("NFKC", text.translate(_QUOTES)).strip()
    text = text.translate(_QUOTES)
    quoted, text = _cut(_QUOTED, text, "q")
    for pattern, into in words.AGREED:
        text = pattern.sub(into, text)
    text = _ORDINAL_END.sub(r"ordinal \1", text)
    text = _CURRENCY.sub(r"\2 \1", text)
    text = _GLUED.sub(r"\1 ", text)
    text = _AFTER_GLUED.sub(r"\1 ", text)
    identifiers, text = _cut(_IDENTIFIER, text, "i")
    names = frozenset(_names(text))
    said = frozenset(_TOKEN.findall(text.lower()))
    lowered = _rewritten(text.lower())
    tokens = _TOKEN.findall(lowered)
    kind, modal, tense = _kind(lowered, tokens), "", ""
    for token in tokens:
        modal = modal or words.MODALS.get(token, "")
        past = token in words.PAST or token in words.PAST_FORMS
        tense = tense or ("past" if past else "future" if token in words.FUTURE else "")
    tense = tense or ("past" if is_perfect(tokens) else "")
    numbers, units, rest = _numbers(tokens)
    content = tuple(_content(rest, names))
    return Reading(
        _language(text, said),
        tuple(" ".join(each.strip("`'\" ").split()) for each in quoted),
        tuple(each.lower().rstrip(".,;:!?") for each in identifiers),
        tuple(numbers),
        units,
        frozenset(_dates(rest)),
        sum(token in words.NEGATIONS for token in tokens),
        names,
        kind,
        _asked_modal(kind, modal),
        tense,
        own_verb(tokens),
        tuple(words.PERSONS[token] for token in tokens if token in words.PERSONS),
        frozenset(words.OWNERS[token] for token in tokens if token in words.OWNERS),
        is_passive(tokens),
        frozenset(stem(token) for token in tokens if token.endswith(("'s", "'"))),
        content,
        said,
    )


def stem(word: str) -> str:
    """A word without the ending that says whether it is many, doing or done, and for all that mean the same the same."""
    word = words.SYNONYMS.get(word, word)
    word = word.removesuffix("'s").removesuffix("'")
    base = words.SYNONYMS.get(word, word)
    found = _base(base)
    return words.SYNONYMS.get(found, found)


_IRREGULAR = {
    "children": "child", "men": "man", "women": "woman", "people": "person", "feet": "ft", "teeth": "tooth", "mice": "mouse",
    "bought": "buy", "sold": "sell", "made": "make", "went": "go", "written": "write", "wrote": "write", "taken": "take",
    "took": "take", "given": "give", "gave": "give", "paid": "pay", "found": "find", "lost": "lose", "kept": "keep",
    "won": "win", "built": "build", "sent": "send", "spoken": "speak", "spoke": "speak", "began": "begin", "begun": "begin",
    "born": "born", "ate": "eat", "eaten": "eat", "drunk": "drink", "drove": "drive", "driven": "drive", "chosen": "choose",
    "wives": "wife", "lives": "life", "knives": "knife", "leaves": "leave", "differ": "difference", "differs": "difference",
    "signed": "sign", "meaning": "mean", "news": "news", "paris": "paris", "definition": "mean", "define": "mean",
}  # fmt: skip
_NO_PLURAL = ("ss", "us", "is", "as", "os", "news")


def _base(word: str) -> str:
    if word in _IRREGULAR:
        return _IRREGULAR[word]
    if len(word) > 4 and word.endswith("ies"):
        return word[:-3] + "y"
    if len(word) > 4 and word.endswith(("ches", "shes", "sses", "xes", "zes", "oes")):
        return word[:-2]
    if len(word) > 3 and word.endswith("s") and not word.endswith(_NO_PLURAL):
        word = word[:-1]
    for ending in ("ing", "ed"):
        if word.endswith(ending) and len(word) - len(ending) >= 3:
            short = word[: -len(ending)]
            if not re.search("[aeiouy]", short):
                break
            if len(short) > 3 and short[-1] == short[-2] and short[-1] not in "lsz":
                short = short[:-1]
            return short
    return word[:-1] if len(word) > 3 and word.endswith("e") else word


_DATES = frozenset(stem(word) for word in words.DATES)
_OPPOSITES = frozenset(
    frozenset((stem(left), stem(right))) for left, right in words.OPPOSITES if stem(left) != stem(right)
)


def are_opposites(left: str, right: str) -> bool:
    """Whether two stems mean the contrary of each other: by a list, or by a prefix that negates."""
    if frozenset((left, right)) in _OPPOSITES:
        return True
    short, long = sorted((left, right), key=len)
    return len(short) > 2 and any(
        long == prefix + short
        for prefix in (
            "un",
            "in",
            "im",
            "ir",
            "il",
            "dis",
            "de",
            "non",
            "anti",
            "mis",
            "sub",
            "super",
            "pre",
            "post",
            "re",
            "out",
            "under",
            "over",
        )
    )


def _cut(pattern: re.Pattern[str], text: str, kind: str) -> tuple[list[str], str]:
    """All that is found, and the text with a word in the place of each that says that there was something."""
    found: list[str] = []

    def mark(match: re.Match[str]) -> str:
        found.append(match[0])
        return f" {_marker(kind, len(found))} "

    return found, pattern.sub(mark, text)


def _marker(kind: str, number: int) -> str:
    """A word that no language has, for something at this place."""
    return "zz" + kind + "".join("bcdfghjkmn"[int(digit)] for digit in str(number)) + "x"


def _rewritten(text: str) -> str:
    for pattern, into in words.CONTRACTIONS:
        text = pattern.sub(into, text)
    for frame in words.FRAMES:
        text = _BLANKS.sub(" ", frame.sub(" ", text)).lstrip(" ,")
    for phrase, put in words.PHRASES:
        text = phrase.sub(put, text)
    return text.strip()


def _asked_modal(kind: str, modal: str) -> str:
    """The modal verb, where it says what is asked: how something is done is the same as how it can be."""
    if kind == "how" or (modal == "should" and kind.startswith(("how", "when", "where"))):
        return ""
    return modal


def _kind(lowered: str, tokens: list[str]) -> str:
    for token in tokens:
        if token in words.KINDS:
            return "" if token == "@how" else "asked" if token in ("@able", "@should") else token[1:]
        if token in words.QUESTION_WORDS:
            return words.QUESTION_WORDS[token][1:]
        if token in ("what", "which"):
            return ""
    clauses = re.split("[,:.] +", lowered)
    return "asked" if any(clause.split(" ")[0] in words.AUXILIARIES for clause in clauses) else ""


def _numbers(tokens: list[str]) -> tuple[list[str], frozenset[str], list[str]]:
    """The numbers with their units; units without one as well; and what else there is."""
    numbers: list[str] = []
    units: set[str] = set()
    rest: list[str] = []
    place = 0
    while place < len(tokens):
        value, after = _number(tokens, place)
        if value is not None:
            numbers.append(value)
            rest.append(_marker("n", len(numbers)))
            place = after
            while place < len(tokens) and tokens[place] in words.UNITS and len(tokens[place]) > 0:
                numbers[-1] += " " + words.UNITS[tokens[place]]
                place += 1
            continue
        token = tokens[place]
        if token in words.UNITS and (len(token) > 2 or not token.isalpha()):
            units.add(words.UNITS[token])
        rest.append(token)
        place += 1
    return numbers, frozenset(units), rest


def _number(tokens: list[str], place: int) -> tuple[str | None, int]:
    """The number that begins at a place, and where it ends; None: there is none."""
    token = tokens[place]
    if token == "ordinal":
        return (f"#{tokens[place + 1]}", place + 2) if place + 1 < len(tokens) else (None, place)
    if _NUMBER.fullmatch(token):
        written = (
            token.replace(",", "") if re.fullmatch(r"\d{1,3}(,\d{3})+(\.\d+)?", token) else token.replace(",", ".")
        )
        scale = words.SCALES.get(tokens[place + 1]) if place + 1 < len(tokens) else None
        if scale and ":" not in written:
            return _shown(Decimal(written) * scale), place + 2
        if ":" in written or written.count(".") > 1:
            return written, place + 1
        return ("½¼¾".find(written) >= 0 and written) or _shown(Decimal(written)), place + 1
    if (token in words.ORDINALS and token != "second") or (token == "second" and not _is_time(tokens, place)):
        return f"#{words.ORDINALS[token]}", place + 1
    if token == "one" and not (place + 1 < len(tokens) and tokens[place + 1] in words.SCALES):
        return None, place
    if token not in words.NUMBERS and token not in words.SCALES:
        return None, place
    total, part = 0, 0
    while place < len(tokens):
        token = tokens[place]
        if token in words.NUMBERS:
            part += words.NUMBERS[token]
        elif token in words.SCALES:
            part = max(part, 1) * words.SCALES[token]
            if words.SCALES[token] > 100:
                total, part = total + part, 0
        elif not (token == "and" and place + 1 < len(tokens) and part and tokens[place + 1] in words.NUMBERS):
            break
        place += 1
    return _shown(Decimal(total + part)), place


def _is_time(tokens: list[str], place: int) -> bool:
    return place > 0 and tokens[place - 1] in ("per", "a", "one", "in") and place + 1 == len(tokens)


def _shown(value: Decimal) -> str:
    """All of its digits: order 1234567 is not order 1234568. ``5.0`` is ``5``."""
    text = f"{value:f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _dates(tokens: list[str]) -> Iterator[str]:
    for token, following in itertools.zip_longest(tokens, tokens[1:], fillvalue=""):
        if stem(token) in _DATES and not (token == "may" and following in words.STOPWORDS):
            yield stem(token)


def _content(tokens: list[str], names: frozenset[str]) -> Iterator[Word]:
    """The words that are left, each with the preposition that points to it."""
    before, last = "", ""
    for token in tokens:
        if token in words.DIRECTIONS:
            if token == "to" and (last in words.BEFORE_A_VERB or last.startswith("@") or not last):
                before = ""
            else:
                before = words.DIRECTIONS[token]
            last = token
            continue
        found = stem(token)
        last = token
        if token in words.NEGATIONS:
            continue
        if token == "and":
            continue
        if (
            (token in words.STOPWORDS and token != "or" and found not in names)
            or token in words.KINDS
            or (token in words.UNITS and len(token) < 3 and not token.isalpha())
        ):
            continue
        yield Word(found, before)
        before = ""


def _names(text: str) -> Iterator[str]:
    """Words that are written as names, and do not begin a sentence."""
    for found in re.finditer(r"\b[A-Z][\w]*", text):
        word = found[0]
        if word == "I" or (word.isupper() and len(word) > 5):
            continue
        if not _SENTENCE.search(text[: found.start()]) or (_ACRONYM.fullmatch(word) and not text.isupper()):
            yield stem(word.lower())


def _language(text: str, said: frozenset[str]) -> str:
    """By the script, or by which language's small words there are; empty: too few."""
    for character in text:
        if character.isalpha() and ord(character) > 0x24F:
            return unicodedata.name(character, "OTHER").split()[0]
    counts = sorted(((len(said & small), name) for name, small in words.LANGUAGES.items()), reverse=True)
    (most, name), (second, _) = counts[0], counts[1]
    return name if most >= 2 and most > second else ""
