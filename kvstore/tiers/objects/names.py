"""The names of objects below the tier's prefix. No I/O.

=====================================  =================================================================================
``packs/WRITER/NUMBER``                a pack: pages
``index/WRITER/NUMBER-RANDOM``         an index object: which packs there are, and what is in them
``writers/WRITER``                     a heartbeat; ``WRITER.closed`` once the writer has ended by itself
``uses/WRITER``                        which pages its writer has read lately
=====================================  =================================================================================

A writer is 16 random bytes, made anew by each process, so that a cloned disk or a restored machine overwrites nothing.
Packs' numbers are random as well, and an index object's name ends with random digits: not even a clone of a running
machine, which goes on as the same writer, overwrites what the other one wrote.
"""

from __future__ import annotations

import re
import secrets
from typing import NamedTuple

WRITER_BYTES = 16
PACKS, INDEX, WRITERS, USES = "packs/", "index/", "writers/", "uses/"
_CLOSED = ".closed"
_WRITER = re.compile(r"writers/([0-9a-f]{32})(\.closed)?")
_USE = re.compile(r"uses/([0-9a-f]{32})")
_INDEX_OBJECT = re.compile(r"index/([0-9a-f]{32})/([0-9a-f]{16})-[0-9a-f]{16}")
_PACK = re.compile(r"packs/([0-9a-f]{32})/([0-9a-f]{16})")


class PackName(NamedTuple):
    """Which pack."""

    writer: bytes
    """16 bytes: who wrote it; it may be another's by now."""
    number: int
    """64 random bits."""

    @property
    def path(self) -> str:
        """The object's name."""
        return f"{PACKS}{self.writer.hex()}/{self.number:016x}"


def new_writer() -> bytes:
    """A name that no other writer has."""
    return secrets.token_bytes(WRITER_BYTES)


def new_pack(writer: bytes) -> PackName:
    """A name that no other pack has."""
    return PackName(writer, secrets.randbits(64))


def packs_of(writer: bytes) -> str:
    """What the names of a writer's packs begin with."""
    return f"{PACKS}{writer.hex()}/"


def index_of(writer: bytes) -> str:
    """What the names of a writer's index objects begin with."""
    return f"{INDEX}{writer.hex()}/"


def new_index_path(writer: bytes, number: int) -> str:
    """A name for a writer's index object of this number; in order of their names they are in order of numbers."""
    return f"{index_of(writer)}{number:016x}-{secrets.token_hex(8)}"


def behind_index(writer: bytes, number: int) -> str:
    """A name between those of all index objects up to this number and those of later ones."""
    return f"{index_of(writer)}{number:016x}-g"


def heartbeat_path(writer: bytes, *, closed: bool = False) -> str:
    """The name of a writer's heartbeat."""
    return f"{WRITERS}{writer.hex()}{_CLOSED if closed else ''}"


def use_path(writer: bytes) -> str:
    """The name of a writer's use object."""
    return f"{USES}{writer.hex()}"


def parse_heartbeat(path: str) -> tuple[bytes, bool] | None:
    """Whose heartbeat it is, and whether that writer has ended by itself; None: it is something else."""
    match = _WRITER.fullmatch(path)
    return (bytes.fromhex(match[1]), bool(match[2])) if match else None


def parse_use(path: str) -> bytes | None:
    """Whose use object it is."""
    match = _USE.fullmatch(path)
    return bytes.fromhex(match[1]) if match else None


def parse_index(path: str) -> tuple[bytes, int] | None:
    """Whose index object it is, and its number."""
    match = _INDEX_OBJECT.fullmatch(path)
    return (bytes.fromhex(match[1]), int(match[2], 16)) if match else None


def parse_pack(path: str) -> PackName | None:
    """Which pack it is."""
    match = _PACK.fullmatch(path)
    return PackName(bytes.fromhex(match[1]), int(match[2], 16)) if match else None
