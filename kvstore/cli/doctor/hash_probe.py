"""The block hashes and fingerprint that a Python computes: engines and nodes find pages only where they agree."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping

from kvstore.hashing import hash_check
from kvstore.layout import Layout

_SECONDS = 60.0
_PROGRAM = """\
from kvstore.hashing import hash_check
from kvstore.layout import Layout
print(hash_check().hex(), Layout(model="model", block_size=16, page_bytes=4096).fingerprint.hex())
"""


def hashes_of_this_process() -> tuple[bytes, ...]:
    """Block hashes, and the fingerprint of a layout."""
    return hash_check(), Layout(model="model", block_size=16, page_bytes=4096).fingerprint


def hashes_of(python: str, environment: Mapping[str, str]) -> tuple[bytes, ...]:
    """The same, computed by another process.

    Raises:
        OSError: this Python can't be started.
        SubprocessError: it ends with an error, or not at all.
        ValueError: what it prints is something else.
    """
    child = subprocess.run(  # noqa: S603 - the operator's own
        [python, "-c", _PROGRAM], env=environment, capture_output=True, text=True, timeout=_SECONDS, check=True
    )
    return tuple(map(bytes.fromhex, child.stdout.split()))
