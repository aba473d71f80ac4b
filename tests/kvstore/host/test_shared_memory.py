"""Too large an arena is refused before anything is allocated, with both numbers."""

import os
from pathlib import Path

import pytest

from kvstore.errors import ResourceError
from kvstore.host import shared_memory
from kvstore.host.shared_memory import check_space

MIB = 1 << 20


def space(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(
        os, "statvfs", lambda path: os.statvfs_result((4096, 4096, 0, 0, size // 4096, 0, 0, 0, 0, 255))
    )


def limited(monkeypatch: pytest.MonkeyPatch, limit: int | None) -> None:
    monkeypatch.setattr(shared_memory, "memory_limit", lambda membership: (limit, Path("/cg/memory.max")))


def test_a_full_file_system_is_named_with_both_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    limited(monkeypatch, None)
    space(monkeypatch, 3 * MIB)
    check_space(Path("/dev/shm/x"), 3 * MIB)
    with pytest.raises(
        ResourceError,
        match=r"/dev/shm/x: the arena needs 4 MiB, only 3 MiB are free there; make it smaller \(--arena\)",
    ):
        check_space(Path("/dev/shm/x"), 4 * MIB)
    check_space(Path("/dev/shm/x"), 4 * MIB, reusable=MIB)


def test_a_memory_limit_is_named_with_both_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    space(monkeypatch, 64 * MIB)
    limited(monkeypatch, 2 * MIB)
    check_space(Path("/dev/shm/x"), 2 * MIB)
    with pytest.raises(
        ResourceError, match=r"the arena needs 3 MiB, this process's memory limit is 2 MiB \(/cg/memory.max\)"
    ):
        check_space(Path("/dev/shm/x"), 3 * MIB)
