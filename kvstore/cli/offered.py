"""What a shell offers that only a node knows: its namespaces, for the word at the cursor of a command line.

The scripts of ``kvstore completion`` call it, as ``kvstore _namespaces LINE BREAKS``. Where no node answers, it says
nothing, and waits no longer than a third of a second.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvstore.cli.connect import connect_to_node
from kvstore.cli.namespace_choice import NAMESPACE, short_names
from kvstore.errors import KVStoreError

_SECONDS = 0.3
_BARE = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-./:=@%+,")
"""What needs no quoting in any shell; beside it, whatever is not ASCII."""


@dataclass(frozen=True, slots=True)
class Word:
    """A word of a command line that may not be complete."""

    raw: str
    """As it is written."""
    text: str
    """As the command gets it."""
    quote: str
    """The quotation mark that is open at its end; empty: none is."""


def offer(line: str, breaks: str, awaits: Callable[[Sequence[str]], str | None]) -> list[str]:
    """What the last word of a line may become.

    Args:
        line: the command line up to the cursor.
        breaks: characters at which the shell divides words for completion (bash's ``COMP_WORDBREAKS``): only what comes
            behind the last of them is replaced by what is offered. A space: nothing is quoted, and nothing divided.
        awaits: what comes behind some words of ``kvstore``, by the name that its help has for it.
    """
    words = split_line(line)
    if awaits([each.text for each in words[1:-1]]) != NAMESPACE:
        return []
    names = [each for each in names_at(_url(words[:-1])) if each.startswith(words[-1].text)]
    if breaks == " ":
        return names
    return [_written(each, words[-1], breaks) for each in names]


def names_at(url: str | None) -> list[str]:
    """The shortest names of a node's namespaces, and labels that one alone has; none where it does not answer."""
    try:
        with connect_to_node(url, _SECONDS) as client:
            known = client.status().namespaces
            labels = Counter(label for each in known for label in each.labels)
            alone = [label for label, count in labels.items() if count == 1]
            names = {*short_names([each.name for each in known]), *alone}
    except KVStoreError:
        return []
    return sorted(each for each in names if each.isprintable())  # what else is in them is not for a terminal


def split_line(line: str) -> list[Word]:
    """The words of a command line as a shell takes them; the last one is that at the cursor, and may be empty."""
    words: list[Word] = []
    raw = text = quote = ""
    escaped = False
    for each in line:
        if not (quote or escaped) and each.isspace():
            if raw:
                words.append(Word(raw, text, ""))
            raw = text = ""
            continue
        raw += each
        if escaped:
            text, escaped = text + each, False
        elif each == "\\" and quote != "'":
            escaped = True
        elif quote:
            quote, text = ("", text) if each == quote else (quote, text + each)
        elif each in "'\"":
            quote = each
        else:
            text += each
    return [*words, Word(raw, text, quote)]


def _written(name: str, word: Word, breaks: str) -> str:
    """A name as it continues a word in bash, which puts it in the place of what stands behind the last break."""
    if word.quote == "'":
        return name.replace("'", "'\\''")
    if word.quote:
        return "".join(f"\\{each}" if each in '"\\$`' else each for each in name)
    quoted = "".join(each if each in _BARE or not each.isascii() else f"\\{each}" for each in name)
    bare_breaks = {each for each in breaks if each in _BARE}
    kept = max((at for at, each in enumerate(word.raw, 1) if each in bare_breaks), default=0)
    return quoted[kept:] if quoted.startswith(word.raw[:kept]) else quoted


def _url(words: Sequence[Word]) -> str | None:
    texts = [each.text for each in words]
    for at, text in enumerate(texts):
        if text == "--url" and at + 1 < len(texts):
            return texts[at + 1]
        if text.startswith("--url="):
            return text.partition("=")[2]
    return None
