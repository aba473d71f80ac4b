"""Whether prompts are the same but for words that say little, or one is as people type into a search. No I/O."""

from __future__ import annotations

from dataclasses import replace

from kvstore.responses.semantic import vocabulary as words
from kvstore.responses.semantic.order import is_heading_of, is_told_alike
from kvstore.responses.semantic.reading import Reading

_FEWEST = 2
"""Words of content that must be left."""
_ASKED_IN_HEADINGS = ("how", "what", "who", "when", "where", "why", "asked", "fix")
_MODALS_OF_HEADINGS = ("", "may", "should")


def is_nearly_alike(left: Reading, right: Reading) -> bool:
    """Whether what is left without light words is the same.

    Args:
        left: one of them.
        right: the other.
    """
    one, other = _without_light_words(left), _without_light_words(right)
    if sorted(one.stems) != sorted(other.stems) or len(one.stems) < _FEWEST:
        return False
    if one.heading == other.heading:
        return is_told_alike(one, other)
    heading, sentence = (one, other) if one.heading else (other, one)
    return (
        (not heading.kind or heading.kind == sentence.kind)
        and sentence.kind.startswith(_ASKED_IN_HEADINGS)
        and is_heading_of(heading, sentence)
    )


def _without_light_words(reading: Reading) -> Reading:
    return replace(reading, content=tuple(word for word in reading.content if word.stem not in words.LIGHT))
