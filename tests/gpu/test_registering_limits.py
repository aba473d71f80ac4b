"""What a machine that refuses to register memory is told to change."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from kvstore.gpu import registering_limits
from kvstore.gpu.registering_limits import limits

MIB, GIB = 1 << 20, 1 << 30


def limited(monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, memory: int | None) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: {resource.RLIMIT_MEMLOCK: (soft, hard)}[which])
    monkeypatch.setattr(registering_limits, "memory_limit", lambda text: (memory, Path("/cg/memory.max")))


def test_each_limit_that_is_too_low_is_named_with_what_raises_it(monkeypatch: pytest.MonkeyPatch) -> None:
    limited(monkeypatch, 8 * MIB, 16 * GIB, 32 * GIB)

    assert limits(64 * GIB) == (
        "this process asks for 64.0 GiB, and RLIMIT_MEMLOCK lets it lock 8.0 MiB (soft; hard: 16.0 GiB):"
        " `ulimit -l unlimited`, LimitMEMLOCK=infinity, or `docker run --ulimit memlock=-1`; and its memory limit is"
        " 32.0 GiB (/cg/memory.max): raise it (MemoryMax, `docker run --memory`)"
    )
    assert limits(16 * GIB).endswith("`docker run --ulimit memlock=-1`")


def test_where_no_limit_is_too_low_the_kernels_log_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    limited(monkeypatch, resource.RLIM_INFINITY, resource.RLIM_INFINITY, None)

    assert limits(64 * GIB) == (
        "no limit of this process is below the 64.0 GiB that it asks for (RLIMIT_MEMLOCK: unlimited; memory limit:"
        " none); the kernel's log (dmesg) may say more"
    )


def test_this_machine_has_an_answer() -> None:
    assert "RLIMIT_MEMLOCK" in limits(1 << 60)


def test_a_machine_without_cgroups_has_no_memory_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    limited(monkeypatch, resource.RLIM_INFINITY, resource.RLIM_INFINITY, MIB)

    def gone(text: str) -> tuple[int, Path]:
        raise FileNotFoundError("/proc/self/cgroup")

    monkeypatch.setattr(registering_limits, "memory_limit", gone)
    assert "memory limit: none" in limits(GIB)
