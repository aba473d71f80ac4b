"""What a disk tier still has after a kill, a restart, and a reclaim of its segments."""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import child_process
import pytest
from disk_tiers import MIB, flip, killed, opened, segments
from made_pages import make_page, read_pages

from kvstore.segments.record import BLOCK
from kvstore.tiers.disk import CheckReport


def test_what_was_answered_as_stored_survives_a_kill(tmp_path: Path) -> None:
    pages = [make_page(n, 60_000) for n in range(40)]
    with opened(tmp_path / "tier") as tier:
        for at in range(0, 40, 5):
            assert all(tier.write(pages[at : at + 5]))
        tier.remove([pages[3].key, pages[39].key])
        tier.write([pages[39]])
        copy = killed(tmp_path / "tier", tmp_path / "copy")
    with opened(copy) as tier:
        assert read_pages(tier, pages) == [n != 3 for n in range(40)]
        assert tier.check() == CheckReport(39, 0, 39 * 60_000)


def test_sigkill_of_a_process_that_writes(tmp_path: Path) -> None:
    code = """
import sys
from pathlib import Path
from made_pages import make_page
from kvstore.tiers.disk import DiskTier
tier = DiskTier(Path(sys.argv[1]), 256 << 20)
for number in range(0, 100_000, 4):
    if all(tier.write([make_page(n, 50_000) for n in range(number, number + 4)])):
        print(number, flush=True)
"""
    for kill, most in enumerate([1, 30, 70]):
        command = [sys.executable, "-c", code, str(tmp_path / str(kill))]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=child_process.environment()) as writer:
            assert writer.stdout is not None
            lines = [writer.stdout.readline() for _ in range(most)]
            writer.send_signal(signal.SIGKILL)
            lines += writer.stdout.readlines()
        stored = [number + step for number in map(int, lines) for step in range(4)]
        with opened(tmp_path / str(kill), 256 * MIB) as tier:
            assert all(read_pages(tier, [make_page(number, 50_000) for number in stored]))


def test_opening_and_closing_again_and_again_leaves_no_files(tmp_path: Path) -> None:
    with opened(tmp_path) as tier:
        tier.write([make_page(1, 5000)])
    before = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    for _ in range(5):
        with opened(tmp_path) as tier:
            assert read_pages(tier, [make_page(1, 5000)]) == [True]
    assert {path.name: path.stat().st_size for path in tmp_path.iterdir()} == before


def test_a_tombstone_survives_the_reclaim_of_its_page_and_its_own(tmp_path: Path) -> None:
    first = make_page(1, 300_000)
    with opened(tmp_path / "tier", 4 * MIB, segment_bytes=MIB) as tier:
        tier.write([first])
        for number in range(2, 5):
            tier.write([make_page(number, 300_000)])
        tier.remove([first.key])
        for number in range(5, 40):
            tier.write([make_page(number, 300_000)])
            copy = killed(tmp_path / "tier", tmp_path / str(number))
            with opened(copy, 4 * MIB, segment_bytes=MIB) as again:
                assert again.contains([first.key]) == [False]
                keys = [make_page(n, 1).key for n in range(1, number + 1)]
                assert again.contains(keys) == tier.contains(keys)


def test_a_damaged_page_stays_forgotten_over_a_restart(tmp_path: Path) -> None:
    page = make_page(1, 5000)
    with opened(tmp_path) as tier:
        tier.write([page])
        flip(segments(tmp_path)[0], 2 * BLOCK)
        assert read_pages(tier, [page]) == [False]
    with opened(tmp_path) as tier:
        assert tier.contains([page.key]) == [False]


def test_many_tombstones(tmp_path: Path) -> None:
    pages = [make_page(n, 10) for n in range(1200)]
    with opened(tmp_path / "tier") as tier:
        assert all(tier.write(pages))
        assert tier.remove([page.key for page in pages[1:]]) == 1199
        copy = killed(tmp_path / "tier", tmp_path / "copy")
    with opened(copy) as tier:
        assert read_pages(tier, pages) == [True] + [False] * 1199


def test_a_page_stored_again_outlives_its_first_copy(tmp_path: Path) -> None:
    page = make_page(1, 300_000)
    with opened(tmp_path, 3 * MIB, segment_bytes=MIB) as tier:
        tier.write([page])
        for number in range(2, 5):
            tier.write([make_page(number, 300_000)])
        tier.remove([page.key])
        tier.write([page])
        number = 5
        while segments(tmp_path)[0].name == f"{1:016x}.segment":
            tier.write([make_page(number, 300_000)])
            number += 1
        assert read_pages(tier, [page, make_page(2, 300_000)]) == [True, False]
        assert tier.statistics().evicted == 2


def test_a_page_stored_again_is_not_hidden_by_a_late_tombstone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = make_page(1, 5000)
    with opened(tmp_path / "tier") as tier:
        tier.write([page])
        real, refused = os.pwritev, []

        def full_for_a_while(fd: int, buffers: list[memoryview], offset: int) -> int:
            if sum(map(len, buffers)) == BLOCK and offset:  # a tombstone, not a segment header
                refused.append(offset)
                raise OSError(errno.ENOSPC, "full")
            return real(fd, buffers, offset)

        with monkeypatch.context() as patch:
            patch.setattr(os, "pwritev", full_for_a_while)
            assert tier.remove([page.key]) == 1
            assert tier.write([page]) == [True]
            assert refused
        tier.flush()
        copy = killed(tmp_path / "tier", tmp_path / "copy")
    for directory in (tmp_path / "tier", copy):
        with opened(directory) as tier:
            assert read_pages(tier, [page]) == [True]


def test_a_flush_brings_to_disk_what_was_forgotten(tmp_path: Path) -> None:
    page = make_page(1, 5000)
    with opened(tmp_path / "tier") as tier:
        tier.write([page])
        flip(segments(tmp_path / "tier")[0], 2 * BLOCK)
        assert read_pages(tier, [page]) == [False]
        tier.flush()
        copy = killed(tmp_path / "tier", tmp_path / "copy")
    with opened(copy) as tier:
        assert tier.contains([page.key]) == [False]
