"""Which core runs: the native one where it was built from these sources, else Python, or what ``KVSTORE_CORE`` says.

It is chosen once, when the process starts. Everything that the native core does is done in Python without it, with the
same results.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, NamedTuple, Protocol, cast

from kvstore.core.abi import ABI
from kvstore.errors import ConfigError

VARIABLE = "KVSTORE_CORE"
"""The environment's word: ``native`` (or an error), ``python``, or nothing: native where it can be had."""
NATIVE, PYTHON = "native", "python"
Buffer = Any
"""What has the buffer protocol."""


class Core(Protocol):
    """``kvstore._core``. Every argument is checked: a wrong one is a ``ValueError``, a ``TypeError``, an
    ``OverflowError`` or a ``BufferError``, and nothing was copied."""

    ABI: int

    def find(self, headers: Buffer, geometry: bytes, namespace: int, length: int, hashes: bytes) -> bytes:
        """One byte a page: 1 where it is in the arena, else 0.

        Args:
            headers: the mapped file.
            geometry: as :func:`kvstore.arena.format.geometry` makes it.
            namespace: its number in headers.
            length: bytes of each page.
            hashes: 32 bytes a page, joined.
        """
        ...

    def search(
        self, headers: Buffer, geometry: bytes, namespace: int, length: int, hashes: bytes
    ) -> tuple[list[int], list[int]]:
        """Frames and generations of the leading pages that are in the arena."""
        ...

    def load(
        self,
        headers: Buffer,
        geometry: bytes,
        pages: Buffer,
        namespace: int,
        length: int,
        edition: int,
        hashes: bytes,
        into: Buffer | Sequence[Buffer],
    ) -> int:
        """Search for pages, copy the leading ones, check them behind the copy: how many are whole and right. The reader
        has announced itself.

        Args:
            pages: the mapped file.
            edition: of the arena, for which the namespace's number holds.
            into: one buffer of all pages, or a list or tuple of one a page.
        """
        ...

    def where(
        self,
        headers: Buffer,
        geometry: bytes,
        namespace: int,
        length: int,
        edition: int,
        hashes: bytes,
        summary: Buffer,
        buckets: int,
        word: int,
        seed: int,
    ) -> bytes:
        """One byte a page: 1 where it is in the arena, 0 where it is nowhere, 255 where only the node can tell.

        Args:
            edition: of the arena, for which the namespace's number holds.
            summary: the mapped file.
            buckets: how many it has.
            word: what the superblock says while this file counts.
            seed: of the namespace (:func:`kvstore.arena.summary.seed_of`).
        """
        ...

    def copy_slots(
        self, pages: Buffer, offsets: list[int], length: int, buffers: Buffer | Sequence[Buffer], out: bool
    ) -> None:
        """Copy buffers of ``length`` bytes into slots at these offsets of ``pages``, or out of them."""
        ...

    def copy_runs(self, targets: Buffer, sources: Buffer, run_bytes: int, regions: Buffer) -> None:
        """Copy runs between addresses (unsigned 64-bit words), all of which lie in these regions: pairs of such words,
        start and bytes."""
        ...

    def begin_changes(self, headers: Buffer, geometry: bytes, frames: list[int], owner: int) -> bytes:
        """Make the generations of slots odd, name who may write into them, and clear the words of pages that they held.

        Args:
            headers: the mapped file, writable, of which there is one writer.
            frames: the first one of each slot.
            owner: 16 bits.

        Returns:
            One byte a slot: 0: it held no page; 1: it did; 2: it did, and its word is not in its home bucket: it stays.
        """
        ...

    def publish(
        self,
        headers: Buffer,
        geometry: bytes,
        frames: list[int],
        hashes: bytes,
        checksums: list[int],
        sequence: int,
        namespace: int,
        length: int,
    ) -> bytes:
        """Write headers, make the generations even, and name the slots in their home buckets.

        Args:
            headers: as in ``begin_changes``.
            hashes: joined; of one namespace, each page of ``length`` bytes.
            checksums: 0: not made yet.
            sequence: of the first one in the order of publication; each one behind it counts as older by 1.

        Returns:
            One byte a slot: 1, or 0 where there is no room in the home bucket.
        """
        ...

    def put_tags(self, summary: Buffer, buckets: int, keys: bytes) -> int:
        """As :meth:`kvstore.arena.summary.SummaryWriter.insert`, keys of 64 bytes joined: how many buckets are full
        from now on."""
        ...

    def take_tags(self, summary: Buffer, buckets: int, keys: bytes) -> None:
        """Likewise ``remove``, behind the count of withdrawals."""
        ...

    def join(self, hashes: object) -> bytes | None:
        """The hashes of a list back to back; None where it is no list, or something in it no hash."""
        ...

    def look(self, fd: int, microseconds: int) -> bool:
        """Whether something can be received from a socket, an end or an error included; looked for without sleeping,
        for so long at most."""
        ...

    def receive(self, fd: int, into: Buffer) -> int:
        """Receive what is there: how many bytes, 0 at the end, -1 where nothing is there yet. An ``OSError`` where the
        connection broke."""
        ...

    def send(self, fd: int, data: Buffer) -> int:
        """Send what goes without waiting: how many bytes. An ``OSError`` where the connection broke."""
        ...


class Choice(NamedTuple):
    """Which core runs."""

    native: Core | None
    """None: Python."""
    reason: str
    """Why it is Python; empty: nothing is to be said."""
    wrong: bool = False
    """Whether what was asked for can't be had."""

    @property
    def name(self) -> str:
        """``native`` or ``python``."""
        return PYTHON if self.native is None else NATIVE


def choose(wanted: str, load: Callable[[], Core]) -> Choice:
    """The core that runs.

    Args:
        wanted: what ``KVSTORE_CORE`` says.
        load: imports the native one.
    """
    if wanted == PYTHON:
        return Choice(None, f"{VARIABLE} says so")
    if wanted not in ("", NATIVE):
        return Choice(None, f"{VARIABLE} must be {NATIVE}, {PYTHON} or empty, got {wanted!r}", wrong=True)
    try:
        core = load()
        found = getattr(core, "ABI", None)
    except ImportError as error:
        reason = f"kvstore._core can't be loaded, built without a C compiler perhaps ({error})"
    else:
        if found == ABI:
            return Choice(core, "")
        shown = f"{found:#x}" if isinstance(found, int) else repr(found)
        reason = f"kvstore._core was built from other sources (ABI {shown}, these have {ABI:#x}); build it again"
    if wanted == NATIVE:
        return Choice(None, f"{VARIABLE} is {NATIVE}, and {reason}", wrong=True)
    return Choice(None, reason)


def _load() -> Core:
    return cast("Core", import_module("kvstore._core"))


CHOSEN = choose(os.environ.get(VARIABLE, ""), _load)
"""For this process."""


def native() -> Core | None:
    """The native core; None where Python runs."""
    return CHOSEN.native


def check_choice() -> None:
    """Whether the core that was asked for runs.

    Raises:
        ConfigError: it doesn't; the message says why.
    """
    if CHOSEN.wrong:
        raise ConfigError(CHOSEN.reason)
