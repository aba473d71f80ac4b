"""A client's name: what people read of it in a node's status, as ``vLLM 0.32.0 worker rank 0`` or ``python 4242``."""

from __future__ import annotations

import os
import sys
from pathlib import PurePath

from kvstore.errors import InvalidRequestError

MOST_NAME = 128
"""Most characters of a client's name."""


def checked_name(name: str) -> str:
    """A name that a user gives a client.

    Raises:
        InvalidRequestError: it is no text that can be sent (UTF-8), or longer than ``MOST_NAME`` characters.
    """
    if not isinstance(name, str):
        raise InvalidRequestError(f"a client's name is text, got {name!r}")
    if len(name) > MOST_NAME:
        raise InvalidRequestError(
            f"a client's name has {MOST_NAME} characters at most, {name[:20]!r}... has {len(name)}"
        )
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(f"a client's name is text that has a form in UTF-8, got {name!r}") from error
    return name


def name_of_process() -> str:
    """The name of a client that was given none: this program's, and its process id."""
    program = PurePath((getattr(sys, "argv", None) or [""])[0])
    name = program.parent.name if program.name == "__main__.py" else program.name
    if not name or name.startswith("-"):  # python -c, or no program at all
        name = "python"
    name = name.encode("utf-8", "backslashreplace").decode()  # a file's name is bytes, of whatever encoding
    return f"{name[: MOST_NAME - 20]} {os.getpid()}"


def shown_name(name: str) -> str:
    """A name as a node keeps it, whoever sent it: cut to ``MOST_NAME`` characters, and control characters escaped."""
    escaped = (each if each.isprintable() else each.encode("unicode_escape").decode() for each in name[:MOST_NAME])
    return "".join(escaped)
