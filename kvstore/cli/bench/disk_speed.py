"""Measures how fast the disk tier writes pages and reads them cold, beside plain O_DIRECT I/O in the same run."""

from __future__ import annotations

import errno
import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from kvstore.cli.bench.timing import seconds_of
from kvstore.errors import ConfigError, ResourceError
from kvstore.segments.aligned import aligned_empty
from kvstore.tiers.disk import DiskTier
from kvstore.tiers.tier import FINGERPRINT_BYTES, KEY_BYTES, PageBytes, PageWrite

PIECE_BYTES = 2 << 20
"""What one plain call moves."""
WRITE_BYTES = 8 << 20
"""What a node writes in one call."""
LOAD_BYTES = 16 << 20
"""What a node loads in one call."""
PREFIX_PAGES = 512
_RANDOM_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Speed:
    """Medians over rounds; a ratio is the plain I/O's time over the tier's."""

    page_bytes: int
    bytes: int
    plain_write_gbps: float
    write_gbps: float
    write_of_plain: float
    plain_read_gbps: float
    load_gbps: float
    load_of_plain: float
    prefix_gbps: float
    prefix_of_plain: float


def measure_speed(
    folder: Path, page_bytes: int, size: int, rounds: int, progress: Callable[[int], None] = lambda steps: None
) -> Speed:
    """Write and read the same bytes plainly and through a tier, in turns.

    Args:
        folder: an empty one.
        page_bytes: size of a page.
        size: bytes a round, a multiple of ``PIECE_BYTES``.
        rounds: how many.
        progress: told of each round.

    Raises:
        ConfigError: the file system has no O_DIRECT.
        ResourceError: the tier did not take or did not find a page.
        OSError: the system refuses plain I/O.
    """
    data, into = aligned_empty(size), aligned_empty(size)
    random = np.frombuffer(np.random.default_rng(0).bytes(min(size, _RANDOM_BYTES)), np.uint8)
    for at in range(0, size, len(random)):
        data[at : at + len(random)] = random[: size - at]
    into[:] = 0  # memory that nobody wrote to yet is slow
    pages = _pages(data, page_bytes)
    keys = [page.key for page in pages]
    arrays = [into[at : at + page_bytes] for at in range(0, size, page_bytes)]
    times: dict[str, list[float]] = {}

    def step(name: str, call: Callable[[], object]) -> None:
        times.setdefault(name, []).append(seconds_of(call))

    for turn in range(rounds):
        plain, directory = folder / "plain", folder / f"tier-{turn}"
        tier = DiskTier(directory, 2 * size)
        try:

            def load(name: str, count: int, tier: DiskTier = tier) -> Callable[[], None]:
                return lambda: step(
                    name, lambda: _by(count, len(keys), lambda part: tier.read(keys[part], arrays[part]))
                )

            writes: list[Callable[[], None]] = [
                lambda plain=plain: step("plain write", lambda: plain_write(plain, data)),  # type: ignore[misc]
                lambda tier=tier: step(  # type: ignore[misc]
                    "write",
                    lambda: _by(max(1, WRITE_BYTES // page_bytes), len(keys), lambda part: tier.write(pages[part])),
                ),
            ]
            for each in _in_turn(writes, turn):
                each()
            reads = [
                lambda plain=plain: step("plain read", lambda: plain_read(plain, into)),  # type: ignore[misc]
                load("load", max(1, LOAD_BYTES // page_bytes)),
                load("prefix", PREFIX_PAGES),
            ]
            for each in _in_turn(reads, turn):
                into[:] = 0
                each()
                if not np.array_equal(into, data):
                    raise ResourceError(f"{directory}: not every page came back: {tier.statistics()}")
        finally:
            tier.close()
        for path in [plain, *directory.iterdir()]:
            path.unlink()
        progress(1)

    def gbps(name: str) -> float:
        return size / statistics.median(times[name]) / 1e9

    def ratio(name: str, plain: str) -> float:
        return statistics.median(a / b for a, b in zip(times[plain], times[name], strict=True))

    return Speed(
        page_bytes,
        size,
        gbps("plain write"),
        gbps("write"),
        ratio("write", "plain write"),
        gbps("plain read"),
        gbps("load"),
        ratio("load", "plain read"),
        gbps("prefix"),
        ratio("prefix", "plain read"),
    )


def plain_write(path: Path, data: PageBytes) -> None:
    """Write a file, past the page cache, piece by piece."""
    fd = _open_direct(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        for at in range(0, len(data), PIECE_BYTES):
            os.pwrite(fd, data[at : at + PIECE_BYTES].data, at)
    finally:
        os.close(fd)


def plain_read(path: Path, into: PageBytes) -> None:
    """Read a file, past the page cache, piece by piece."""
    fd = _open_direct(path, os.O_RDONLY)
    try:
        for at in range(0, len(into), PIECE_BYTES):
            os.preadv(fd, [into[at : at + PIECE_BYTES].data], at)
    finally:
        os.close(fd)


def _open_direct(path: Path, flags: int) -> int:
    try:
        return os.open(path, flags | os.O_DIRECT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        raise ConfigError(f"{path.parent} has no O_DIRECT, which the tier is measured against: --directory") from error


def _pages(data: PageBytes, page_bytes: int) -> list[PageWrite]:
    """Pages of one namespace over all of the data."""
    fingerprint = os.urandom(FINGERPRINT_BYTES)
    views = [data[at : at + page_bytes] for at in range(0, len(data), page_bytes)]
    return [
        PageWrite(fingerprint + os.urandom(KEY_BYTES - FINGERPRINT_BYTES), xxhash.xxh3_64_intdigest(view.data), view)
        for view in views
    ]


def _by(count: int, total: int, call: Callable[[slice], object]) -> None:
    for at in range(0, total, count):
        call(slice(at, at + count))


def _in_turn(steps: Sequence[Callable[[], None]], turn: int) -> Sequence[Callable[[], None]]:
    """What came first in one round comes last in the next."""
    return steps[:: 1 if turn % 2 else -1]
