"""Labels: what people call a namespace's model, as the name of its folder; they say nothing about what its bytes mean.

The same weights may lie under several names. A namespace keeps the label that it was given first, by which it is
called, and beside it those that it was opened with last.
"""

from __future__ import annotations

from kvstore.errors import InvalidRequestError

MOST_LABEL = 256
"""Most characters of a label."""
MOST_LABELS = 8
"""Most labels of one namespace."""


def checked_label(label: str) -> str:
    """A label that somebody gives a namespace; empty: none.

    Raises:
        InvalidRequestError: it is no text, longer than ``MOST_LABEL`` characters, or has some that can't be printed.
    """
    if not isinstance(label, str):
        raise InvalidRequestError(f"a namespace's label is text, got {label!r}")
    if len(label) > MOST_LABEL:
        raise InvalidRequestError(
            f"a namespace's label has {MOST_LABEL} characters at most, {label[:20]!r}... has {len(label)}"
        )
    if not label.isprintable():
        raise InvalidRequestError(f"a namespace's label has printable characters only, got {label!r}")
    return label


def label_of(text: str) -> str:
    """The label that any text makes: what can't be printed is escaped, and the end is cut off what is too long."""
    escaped = (each if each.isprintable() else each.encode("unicode_escape").decode() for each in text[:MOST_LABEL])
    return "".join(escaped)[:MOST_LABEL]


def with_label(labels: tuple[str, ...], label: str) -> tuple[str, ...]:
    """A namespace's labels once it is opened with this one: the first stays the first, the others stand behind it, last
    used first, as many as there may be."""
    if not label or label in labels[:1]:
        return labels
    others = (label, *(each for each in labels[1:] if each != label))
    return (*labels[:1], *others)[:MOST_LABELS]
