"""Format versions on disk: files of a newer kvstore are refused before anything is opened, so that nothing is changed.

An older format is read. A newer one may mean something else by the same bytes, so a node does not start on it.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import msgpack

from kvstore.errors import FormatError
from kvstore.namespaces.pin_table import PINS_NAME, PINS_VERSION
from kvstore.namespaces.registry import REGISTER_NAME, REGISTER_VERSION
from kvstore.segments import record
from kvstore.segments.segment import segment_id

_ADVICE = "Nothing was changed. Start that newer kvstore, or give this one another --disk"


def refuse_newer(disk: Path) -> None:
    """Look at the files of a disk tier's folder; what can't be read is left to who opens it.

    Raises:
        FormatError: a newer version wrote one of them; the message names file, version, and the newest that is read.
    """
    with contextlib.suppress(OSError, ValueError, AttributeError, RecursionError):
        register = json.loads((disk / REGISTER_NAME).read_text())
        _check(disk / REGISTER_NAME, "the register of namespaces", register.get("version"), REGISTER_VERSION)
    with contextlib.suppress(OSError, ValueError, AttributeError, msgpack.UnpackException):
        pins = msgpack.unpackb((disk / PINS_NAME).read_bytes())
        _check(disk / PINS_NAME, "the list of pins", pins.get("version"), PINS_VERSION)
    for path in sorted(disk.glob("*.segment")):
        if segment_id(path.name) is None or not path.is_file():
            continue
        with contextlib.suppress(OSError):
            with path.open("rb") as file:
                header = record.decode_segment_header(file.read(record.BLOCK))
            if header is not None:
                _check(path, "segment", header.version, record.FORMAT_VERSION)


def _check(path: Path, what: str, version: object, newest: int) -> None:
    if isinstance(version, int) and version > newest:
        raise FormatError(
            f"{path}: {what} format version {version}; this version of kvstore reads up to {newest}. {_ADVICE}"
        )
