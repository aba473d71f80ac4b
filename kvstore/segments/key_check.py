"""Whether a segment can be read with the key that is given: found out at opening, before anything is changed.

A segment's header says by which key it was written. Where the header is damaged, a page is tried.
"""

from __future__ import annotations

import hmac
import os
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from kvstore.errors import ConfigError
from kvstore.segments import record
from kvstore.segments.cipher import TAG_BYTES, Cipher
from kvstore.segments.recovery import RecoveredSegment

_PAGES_TRIED = 8


def check_key(path: Path, found: RecoveredSegment, cipher: Cipher | None) -> None:
    """Refuse a key that a segment's pages are not encrypted with.

    Args:
        path: the segment's file.
        found: what it holds.
        cipher: of the key that is given, if one is.

    Raises:
        ConfigError: they are encrypted with another key, or with one and none is given.
        OSError: the system refuses to read it.
    """
    table = np.frombuffer(found.table, record.RECORDS)
    encrypted = table[table["codec"] == record.AES_GCM]
    if found.key_check is None and not len(encrypted):
        return
    if cipher is None:
        raise ConfigError(
            f"{path} is encrypted: give the key that it was written with (disk_key_file). Nothing was changed"
        )
    if not _is_of(path, found, encrypted, cipher):
        raise ConfigError(f"{path} is encrypted with another key. Nothing was changed")


def _is_of(path: Path, found: RecoveredSegment, encrypted: npt.NDArray[np.void], cipher: Cipher) -> bool:
    if found.stamp is None:
        return True
    if found.key_check is not None:
        return hmac.compare_digest(found.key_check, cipher.check_value(found.id, found.stamp))
    segment = cipher.for_segment(found.id, found.stamp)
    smallest = np.argsort(encrypted["length"], kind="stable")[:_PAGES_TRIED]
    with path.open("rb") as file:
        for page in encrypted[smallest]:
            offset, length = int(page["offset"]), int(page["length"])
            stored = np.frombuffer(os.pread(file.fileno(), length, offset), np.uint8)
            if len(stored) == length and xxhash.xxh3_64_intdigest(stored.data) == int(page["checksum"]):
                into = np.empty(length - TAG_BYTES, np.uint8)
                return segment.decrypt(offset, page["key"].tobytes(), stored, into)
    return True  # there is no sound page that could tell, and none that could be lost
