"""The contract of a tier, kept on disk; bad input, and I/O in large pieces."""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from disk_tiers import MIB, opened
from made_pages import make_page, read_pages
from tier_contract import TierContract

from kvstore.errors import ConfigError, FormatError, InUseError, InvalidRequestError, ResourceError
from kvstore.segments import record
from kvstore.segments.aligned import aligned_empty
from kvstore.segments.record import BLOCK, SegmentHeader
from kvstore.tiers.disk import DiskTier
from kvstore.tiers.tier import Tier


class TestContract(TierContract):
    @pytest.fixture(params=["direct", "buffered", "memory", "encrypted"])
    def open_tier(self, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[], Tier]]:
        if request.param == "encrypted":
            pytest.importorskip("cryptography")
            yield lambda: DiskTier(tmp_path / "tier", 16 * MIB, key=b"k" * 32)
            return
        if request.param != "memory":
            yield lambda: DiskTier(tmp_path / "tier", 16 * MIB, direct=request.param == "direct")
            return
        directory = Path("/dev/shm") / f"kvstore-test-{os.getpid()}"
        yield lambda: DiskTier(directory, 16 * MIB)
        shutil.rmtree(directory)


def test_bad_input_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"disk limit is 1000 bytes, the least is 1048576"):
        DiskTier(tmp_path / "tier", 1000)
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ResourceError, match="file can't be used"):
        DiskTier(tmp_path / "file", 8 * MIB)
    with opened(tmp_path / "tier") as tier:
        with pytest.raises(InvalidRequestError, match="a page key has 63 bytes, it must have 64"):
            tier.write([make_page(1, 10), make_page(2, 10)._replace(key=bytes(63))])
        assert tier.statistics().pages == 0
        with pytest.raises(InUseError, match=f"process {os.getpid()}"):
            DiskTier(tmp_path / "tier", 8 * MIB)
        tier.write([make_page(1, 10)])
    newer = tmp_path / "tier" / f"{9:016x}.segment"
    newer.write_bytes(record.encode_segment_header(SegmentHeader(9, b"s" * 16, version=3)))
    with pytest.raises(FormatError, match="version 3"):
        DiskTier(tmp_path / "tier", 8 * MIB)
    newer.unlink()
    with opened(tmp_path / "tier") as tier:
        assert read_pages(tier, [make_page(1, 10)]) == [True]


def test_neighbours_go_and_come_in_one_call_each_and_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arena = aligned_empty(16 * MIB)
    arena[:] = np.random.default_rng(1).integers(0, 256, len(arena), dtype=np.uint8)
    views = [arena[at : at + MIB] for at in range(0, len(arena), MIB)]
    pages = [make_page(n, 1)._replace(payload=view, checksum=0) for n, view in enumerate(views)]
    calls: list[tuple[str, int, int]] = []
    inside: list[bool] = []  # Python's own list: several threads append

    def watched(name: str) -> Callable[..., int]:
        real = getattr(os, name)

        def call(fd: int, buffers: list[memoryview], offset: int) -> int:
            count: int = real(fd, buffers, offset)
            calls.append((name, len(buffers), count))
            inside.append(all(np.shares_memory(np.asarray(buffer), arena) for buffer in buffers[-8:]))
            return count

        return call

    with opened(tmp_path, 256 * MIB, verify=False) as tier:
        tier.write([make_page(99, 100)])
        for name in ("pwritev", "preadv"):
            monkeypatch.setattr(os, name, watched(name))
        assert all(tier.write(pages))
        assert calls == [("pwritev", 17, 16 * MIB + BLOCK)]
        calls.clear()
        assert None not in tier.read([page.key for page in pages], views)
        assert calls == [("preadv", 1, 2 * MIB)] * 8
        assert inside == [True] + [False] * 8, "what may be late is read beside the arena"
