"""The log of ``kvstore serve``, on stderr: lines of text, or one JSON object a line."""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import threading
from datetime import UTC, datetime
from types import TracebackType

from kvstore.logs import THREADS, leave_out_repeats

_log = logging.getLogger("kvstore.serve")


class JsonFormatter(logging.Formatter):
    """A JSON object a line: ``time`` (RFC 3339, UTC), ``level``, ``logger``, ``thread``, ``message``, ``exception``."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as one line."""
        try:
            message = record.getMessage()
        except Exception:  # noqa: BLE001 - a mistake where it is logged; logging would print a traceback beside the log
            message = f"{record.msg} {record.args!r}"
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "thread": record.threadName,
            "message": message,
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def log_to_stderr(level: str, form: str) -> None:
    """Let this process log to stderr, from ``level`` on (``info``), as ``text`` or ``json``. The last call counts."""
    handler = logging.StreamHandler(sys.stderr)
    leave_out_repeats(handler)
    threading.excepthook = _log_uncaught
    handler.setFormatter(
        JsonFormatter() if form == "json" else logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    )
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


def log_the_rest() -> None:
    """Let the log have what Python would print on stderr beside it: errors that end the process, or that nobody can
    catch, and warnings.

    What gRPC's core says is left out by GRPC_VERBOSITY. What ends a process at once stays as it is: a fatal error of
    the interpreter, or a failed check in a library's C code.
    """
    sys.excepthook = _log_end
    sys.unraisablehook = _log_unraisable
    logging.captureWarnings(capture=True)


def say(form: str, level: int, text: str) -> None:
    """Say what the command itself does, on stderr: a line of the log if that is ``json``, else for whoever watches."""
    if form == "json":
        _log.log(level, "%s", text)
        return
    with contextlib.suppress(OSError):  # the terminal may be gone
        print(f"kvstore: {text}", file=sys.stderr, flush=True)


def _log_end(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
        return
    _log.critical("the process ends by an error: %s", error, exc_info=(kind, error, trace))


def _log_unraisable(what: sys.UnraisableHookArgs) -> None:
    error = what.exc_value or what.exc_type()
    _log.error("%s: %r", what.err_msg or "ignored", what.object, exc_info=(what.exc_type, error, what.exc_traceback))


def _log_uncaught(what: threading.ExceptHookArgs) -> None:
    """A thread's end by an error is a line of the log as any other, not a traceback beside it."""
    error = (what.exc_type, what.exc_value or what.exc_type(), what.exc_traceback)
    logging.getLogger(THREADS).error("a thread ended by an error", exc_info=error)
