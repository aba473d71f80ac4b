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
from functools import lru_cache

from kvstore.responses.semantic import vocabulary as words
from kvstore.responses.semantic.content import CLAUSE, Word, content_of
from kvstore.responses.semantic.phrases import AGREED, CONTRACTIONS, FRAMES, PAYLOAD, PHRASES
from kvstore.responses.semantic.quantities import marker, numbers_in
from kvstore.responses.semantic.stems import DATE_STEMS, stem
from kvstore.responses.semantic.verbs import is_passive, own_verb, tense_of

_QUOTES = str.maketrans(
    {"“": '"', "”": '"', "„": '"', "«": '"', "»": '"', "‘": "'", "’": "'", "–": "-", "—": "-", "−": "-"}
)
_QUOTED = re.compile(r"```.*?```|`[^`]+`|\"[^\"]+\"|(?<![\w])'[^']+'(?!\w)", re.DOTALL)
_IDENTIFIER = re.compile(
    r"https?://\S+|(?<![\w.+-])[\w.+-]+@[\w-]+\.[\w.]+|(?<![\w./-])(?:[\w-]+/)+[\w.-]+|\b[A-Za-z_]\w*(?:\.\w+)+|\b[A-Za-z]*_\w+|(?<![\w-])--?[a-z][\w-]+"
    r"|\b[A-Za-z]+-?\d[\w.-]*\b|\bv\d+(?:\.\d+)*\b|\b\d+(?:\.\d+){2,}\b|\b[a-z]+[A-Z]\w*\b|\b\d+[A-Za-z]+\d\w*\b"
)
_CURRENCY = re.compile(r"([$€£¥])\s?(\d[\d.,]*)")
_TOKEN = re.compile(
    r"@\w+|per-\w+|[^\W\d_]+(?:'[^\W\d_]*)?|\d+(?::\d\d)+|\d+(?:[.,]\d+)*|[%°$€£¥½¼¾]+[CcFf]?"
    r"|->|::|\?\?|[!?:]?[+*/=<>^#&|~\\]+|-(?=\s?\d)|(?<=[\dx)] )[-:](?= [\dz(])|\((?=[\d(-])|(?<=[\d)])\)|[\[\]{}]|\(\)"
)
_ACRONYM = re.compile(r"\b[A-Z]{2,5}\b")
_ORDINAL_END = re.compile(r"(\d+)(?:st|nd|rd|th)\b")
_GLUED = re.compile(
    r"(\d)-?(?=(?:years?|hours?|minutes?|days?|weeks?|months?|gb|mb|kb|tb|kg|mg|ml|km|cm|mm|lbs?|oz|am|pm|g|m|l|°c|°f)\b)",
    re.I,
)
_AFTER_GLUED = re.compile(r"(\d \w+)-(?=[a-z])", re.I)
_BLANKS = re.compile(r"\s+")
_BOUNDARY = re.compile(r"(?<![\dx)] )[,;:.?!]+(?=\s|$)")
_YEAR = re.compile(r"1\d{3}|20[012]\d")
_MARKER = re.compile(r"zz[qi]\w+x")
_WRITTEN_WITH_MARKS = frozenset(
    "DEVANAGARI BENGALI GURMUKHI GUJARATI ORIYA TAMIL TELUGU KANNADA MALAYALAM SINHALA THAI LAO TIBETAN MYANMAR KHMER"
    " ARABIC HEBREW CJK HIRAGANA KATAKANA HANGUL".split()
)
"""Scripts whose words are not told apart by letters and spaces: nothing may differ."""
_ENDS = ".,;:?!"
"""Marks that say nothing at the end of a word."""
_SENTENCE = re.compile(r"(?:^|[.!?:]\s+|\n)\s*$")


@dataclass(frozen=True, slots=True)
class Reading:
    """A prompt, taken apart."""

    language: str
    """A code, a script's name, or empty: too little to tell."""
    quoted: tuple[str, ...]
    """And what else counts letter by letter."""
    identifiers: tuple[str, ...]
    numbers: tuple[str, ...]
    """In their order, each with its unit, if it has one."""
    units: frozenset[str]
    dates: frozenset[str]
    negations: int
    negated: tuple[str, ...]
    """What negations stand before, where there are several clauses: which one they negate."""
    names: frozenset[str]
    """Stems of words that are written as names within a sentence."""
    kind: str
    """What kind of question, as ``when``, ``how`` or ``asked`` (by yes or no); empty: another."""
    heading: bool
    """Whether it is no sentence, but the words that somebody types into a search."""
    modal: str
    tense: str
    """``past``, ``future``; empty: neither, or a year tells it."""
    verb: str
    """``have``, ``be`` or ``do``, where it is a verb of its own: what has something is not that; empty: none of them."""
    persons: tuple[str, ...]
    """First and second persons in their order, but for the one who asks how."""
    owners: frozenset[str]
    """Whose things it is about, by possessive pronouns."""
    place: str
    """``here`` or ``there``; empty: neither."""
    passive: bool
    """Whether something is done to what it is about, as far as verb forms tell."""
    content: tuple[Word, ...]
    said: frozenset[str] = field(default_factory=frozenset)
    """Every word as it is written, lowered."""
    asked: tuple[str, ...] = ()
    """All that is left of the text, letter by letter and in its order, without ways to ask, marks at the ends of words
    and, in English, small words other than prepositions."""

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
    whole = text
    quoted, text = _cut(_QUOTED, text, "q")
    if (worked_on := PAYLOAD.match(text)) is not None and not _MARKER.fullmatch(worked_on["rest"].strip(" .?!")):
        quoted.append(worked_on["rest"].casefold().rstrip(" .?!"))
        text = worked_on["head"]
    for pattern, into in AGREED:
        text = pattern.sub(into, text)
    text = _ORDINAL_END.sub(r"ordinal \1", text)
    text = _CURRENCY.sub(r"\2 \1", text)
    text = _GLUED.sub(r"\1 ", text)
    text = _AFTER_GLUED.sub(r"\1 ", text)
    identifiers, text = _cut(_IDENTIFIER, text, "i")
    said = frozenset(_TOKEN.findall(text.lower()))
    language = _language(text, said)
    is_english = language in ("", "en")
    names = frozenset(stem(name) if is_english else name for name in _names(text))
    if language in _WRITTEN_WITH_MARKS:
        quoted.append(whole.casefold().rstrip(" .?!"))
    lowered = _rewritten(text.lower()) if is_english else text.lower()
    tokens = _TOKEN.findall(lowered)
    kind = _kind(lowered, tokens)
    numbers, units, rest = numbers_in(_TOKEN.findall(_BOUNDARY.sub(f" {CLAUSE} ", lowered + " .")))
    content = tuple(content_of(rest, names) if is_english else (Word(each) for each in rest if each != CLAUSE))
    modal = next((words.MODALS[token] for token in tokens if token in words.MODALS), "")
    return Reading(
        language,
        tuple(" ".join(each.strip("`'\" ").split()) for each in quoted),
        tuple(each.lower().rstrip(".,;:!?") for each in identifiers),
        tuple(numbers),
        units,
        frozenset(_dates(rest)),
        sum(token in words.NEGATIONS for token in tokens),
        _negated(tokens, content),
        names,
        kind,
        _is_heading(text, said),
        _asked_modal(kind, modal, tokens),
        "" if any(_YEAR.fullmatch(number) for number in numbers) else tense_of(tokens),
        own_verb(tokens),
        tuple(words.PERSONS[token] for token in tokens if token in words.PERSONS),
        frozenset(words.OWNERS[token] for token in tokens if token in words.OWNERS),
        _place(tokens),
        is_passive(tokens),
        content,
        said,
        _asked(lowered, is_english),
    )


def _cut(pattern: re.Pattern[str], text: str, kind: str) -> tuple[list[str], str]:
    """All that is found, and the text with a word in the place of each that says that there was something."""
    found: list[str] = []

    def mark(match: re.Match[str]) -> str:
        found.append(match[0])
        return f" {marker(kind, len(found))} "

    return found, pattern.sub(mark, text)


def _rewritten(text: str) -> str:
    for pattern, into in CONTRACTIONS:
        text = pattern.sub(into, text)
    for frame in FRAMES:
        text = _BLANKS.sub(" ", frame.sub(" ", text)).lstrip(" ,")
    for phrase, put in PHRASES:
        text = phrase.sub(put, text)
    return text.strip()


def _asked(lowered: str, is_english: bool) -> tuple[str, ...]:
    parts = lowered.split()
    if parts and parts[-1] in _ENDS:
        parts.pop()  # French sets them apart
    said = (part.rstrip(_ENDS) or part for part in parts)
    if not is_english:
        return tuple(said)
    left = (part for part in said if part in words.DIRECTIONS or part not in words.STOPWORDS)
    return tuple(words.DIRECTIONS.get(part, part) for part in left)  # using is with, into is to


def _asked_modal(kind: str, modal: str, tokens: list[str]) -> str:
    """The modal verb, where it says what is asked: how something is done is the same as how it can be."""
    if kind in ("how", "fix") or (modal == "should" and kind.startswith(("how", "when", "where"))):
        return ""
    if modal == "must" and kind in ("", "what"):
        return "should"  # what one needs to bring is what one should
    if modal == "may" and {"legal", "illegal", "legally"} & {*tokens}:
        return ""
    return modal


def _is_heading(text: str, said: frozenset[str]) -> bool:
    return len(said) > 1 and text == text.lower() and not text.endswith((".", "!")) and not said & words.SENTENCE_WORDS


def _place(tokens: list[str]) -> str:
    for token, then in itertools.pairwise(["", *tokens, ""]):
        if then == "here" or (then == "there" and token not in words.AUXILIARIES):
            return then
    return ""


def _negated(tokens: list[str], content: tuple[Word, ...]) -> tuple[str, ...]:
    """Stems behind negations, where there are several clauses; else it does not matter where they stand."""
    said: set[str] = set()
    for token in tokens:
        if token in words.CLAUSES and said & (words.FINITE | words.QUESTION_WORDS.keys() | words.KINDS):
            break
        said.add(token)
    else:
        return ()
    stems = {word.stem for word in content}
    behind = (
        next((stem(each) for each in tokens[place + 1 :] if stem(each) in stems), "")
        for place, token in enumerate(tokens)
        if token in words.NEGATIONS
    )
    return tuple(behind)


def _kind(lowered: str, tokens: list[str]) -> str:
    for token in tokens:
        if token in words.KINDS and token != "@mean":
            return "asked" if token in ("@able", "@should") else token[1:]
    for place, token in enumerate(tokens):
        if token in words.QUESTION_WORDS and not (token in words.CLAUSES and place > 1 and _begins_asking(tokens)):
            return words.QUESTION_WORDS[token][1:]
        if token in ("what", "which"):
            return "what"
        if token == "how":
            return "howis" if {*tokens[place + 1 : place + 2]} & {"is", "are", "was", "were"} else "how"
    clauses = re.split("[,:.] +", lowered)
    return "asked" if any(clause.split(" ")[0] in words.AUXILIARIES for clause in clauses) else ""


def _begins_asking(tokens: list[str]) -> bool:
    return tokens[0] in words.AUXILIARIES


def _dates(tokens: list[str]) -> Iterator[str]:
    for last, token, following in zip(["", *tokens], tokens, [*tokens[1:], ""], strict=False):
        if stem(token) not in DATE_STEMS or (token == "may" and following in words.STOPWORDS):
            continue
        if token != "am" or last.startswith("zzn"):
            yield stem(token)


def _names(text: str) -> Iterator[str]:
    """Words that are written as names, and do not begin a sentence, lowered."""
    for found in re.finditer(r"\b[A-Z][\w]*", text):
        word = found[0]
        if word == "I" or (word.isupper() and len(word) > 5):
            continue
        if not _SENTENCE.search(text[: found.start()]) or (_ACRONYM.fullmatch(word) and not text.isupper()):
            yield word.lower()


def _language(text: str, said: frozenset[str]) -> str:
    """By the script, or by which language's small words there are; empty: too few."""
    for character in text:
        if character.isalpha() and ord(character) > 0x24F:
            return unicodedata.name(character, "OTHER").split()[0]
    counts = sorted(((len(said & small), name) for name, small in words.LANGUAGES.items()), reverse=True)
    (most, name), (second, _) = counts[0], counts[1]
    return name if most >= 2 and most > second else ""
