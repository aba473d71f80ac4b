"""Numbers of a prompt, in digits and in words, with their units. No I/O, no model."""

from __future__ import annotations

import re
from decimal import Decimal

from kvstore.responses.semantic import vocabulary as words

_NUMBER = re.compile(r"\d+(?::\d\d)+|\d+(?:[.,]\d+)*|[½¼¾]")


def marker(kind: str, number: int) -> str:
    """A word that no language has, for something at this place.

    Args:
        kind: a letter for what it is.
        number: which of them.
    """
    return "zz" + kind + "".join("bcdfghjkmn"[int(digit)] for digit in str(number)) + "x"


def numbers_in(tokens: list[str]) -> tuple[list[str], frozenset[str], list[str]]:
    """The numbers with their units; units without one as well; and what else there is, with a marker in the place of each
    number.

    Args:
        tokens: lowered words and numbers.
    """
    numbers: list[str] = []
    units: set[str] = set()
    rest: list[str] = []
    place = 0
    while place < len(tokens):
        value, after = _number(tokens, place)
        if value is not None:
            numbers.append(value)
            rest.append(marker("n", len(numbers)))
            place = after
            while place < len(tokens) and tokens[place] in words.UNITS and len(tokens[place]) > 0:
                numbers[-1] += " " + words.UNITS[tokens[place]]
                place += 1
            continue
        token = tokens[place]
        if token in words.UNITS and (len(token) > 2 or not token.isalpha() or token in words.SHORT_UNITS):
            units.add(words.UNITS[token])
            token = words.UNITS[token]
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
