"""Standard output that can't be written: full, closed, or without a reader any more."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
from collections.abc import Iterator
from typing import Any

from kvstore.errors import ResourceError

_log = logging.getLogger("kvstore")


class _Checked(io.FileIO):
    """Its errors are the project's own, but for that of a pipe that nobody reads."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            raise
        except OSError as error:
            raise ResourceError(f"stdout can't be written: {error.strerror}") from error


@contextlib.contextmanager
def checked_stdout(*, needed: bool) -> Iterator[None]:
    """Within this, ``print`` raises the project's errors, and everything is written when it ends.

    What can't be written goes nowhere, or the interpreter would stumble over it once more as it ends.

    Args:
        needed: whether a command whose stdout is closed has nothing to do.

    Raises:
        ResourceError: stdout is closed, or can't be written.
        BrokenPipeError: its reader has gone, as ``head`` does.
    """
    given: io.TextIOWrapper | None = sys.__stdout__
    if given is None:
        _write_nowhere()  # or the next socket or file would be number 1
        if needed:
            raise ResourceError("stdout is closed")
        with open(1, "w", closefd=False) as sys.stdout:
            try:
                yield
            finally:
                sys.stdout = None  # as it was
        return
    if sys.stdout is not given:  # somebody else's, as a test's
        yield
        return
    writer = io.BufferedWriter(_Checked(given.fileno(), "w", closefd=False))
    at_once = given.line_buffering or given.write_through
    sys.stdout = io.TextIOWrapper(writer, given.encoding, "replace", line_buffering=at_once)  # names are data
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BaseException:
        try:
            sys.stdout.flush()
        except OSError:
            _write_nowhere()
        raise
    finally:
        sys.stdout = given


def print_ready(line: str) -> None:
    """Say that a server serves. It does so as well where nobody can read it: its log has the line then, and why."""
    try:
        print(line, flush=True)
    except OSError as error:
        _log.warning("%s; %s", line, error)
        _write_nowhere()


def _write_nowhere() -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    if nowhere != 1:
        os.dup2(nowhere, 1)
        os.close(nowhere)
