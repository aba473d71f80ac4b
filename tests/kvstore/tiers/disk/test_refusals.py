"""What a system refuses of a disk tier: writes, reads, syncs."""

import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import child_process
import pytest
from disk_tiers import MIB, Clock, bytes_on_disk, killed, opened, refuse, segments
from made_pages import make_page, read_pages

from kvstore.errors import ResourceError
from kvstore.segments.record import BLOCK
from kvstore.tiers.disk import CheckReport


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("written", [0, BLOCK, 3 * BLOCK, 5 * BLOCK + 100])
def test_a_refused_write_is_answered_and_the_tier_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, written: int
) -> None:
    before, lost, after = make_page(1, 20_000), make_page(2, 20_000), make_page(3, 20_000)
    real = os.pwrite
    clock = Clock()
    with opened(tmp_path / "tier", clock=clock) as tier:
        assert tier.write([before]) == [True]
        with monkeypatch.context() as patch:

            def tear(fd: int, buffers: list[memoryview], offset: int) -> int:
                fcntl.fcntl(fd, fcntl.F_SETFL, 0)  # buffered, to write any length
                real(fd, b"".join(buffers)[:written], offset)
                raise OSError(number, os.strerror(number))

            patch.setattr(os, "pwritev", tear)
            for _ in range(3):
                assert tier.write([lost]) == [False]
                # When the disk is full, what is there leaves for what is new.
                assert read_pages(tier, [before, lost]) == [number == errno.EIO, False]
            assert tier.remove([before.key]) == (number == errno.EIO)
        counts = tier.statistics()
        # A full disk is tried once more, after a segment left; with EIO, a tombstone for what may be there after all.
        assert counts.errors == 4
        assert (counts.stored, counts.refused, counts.late) == (1, 3, 0)
        assert bytes_on_disk(tmp_path / "tier") <= counts.used_bytes
        clock.now = 100
        assert tier.write([after, lost]) == [True, True]
        assert read_pages(tier, [before, lost, after]) == [False, True, True]
        copy = killed(tmp_path / "tier", tmp_path / "copy")
    with opened(copy) as tier:
        assert read_pages(tier, [before, lost, after]) == [False, True, True], "the removal was made good"
        assert tier.check().damaged == 0


def test_a_full_file_system(tmp_path: Path) -> None:
    """A real one would need root: a limit on the file's size makes real short writes and real refusals."""
    code = """
import resource, signal, sys
from pathlib import Path
from made_pages import make_page, read_pages
from kvstore.tiers.disk import DiskTier
tier = DiskTier(Path(sys.argv[1]), 64 << 20)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
pages = [make_page(n, 300_000) for n in range(10)]
answers = [tier.write([page])[0] for page in pages]
assert read_pages(tier, pages) == answers
assert sum(answers) >= 7, answers
assert tier.statistics().errors == 10 - sum(answers) > 0
tier.check()
tier.close()
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, env=child_process.environment())


def test_a_refused_read_is_a_miss_and_the_page_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pages = [make_page(n, 5000) for n in range(3)]
    with opened(tmp_path) as tier:
        tier.write(pages)
        with monkeypatch.context() as patch:
            patch.setattr(os, "preadv", refuse(errno.EIO))
            assert read_pages(tier, pages) == [False] * 3
            assert tier.check() == CheckReport(3, 3, 15_000)
            counts = tier.statistics()
            assert (counts.missed, counts.corrupt, counts.errors) == (3, 0, 1)
        assert tier.write(pages[:1]) == [True]
        assert tier.statistics().stored == 4, "a page that can't be read is written anew"
        assert read_pages(tier, pages) == [True] * 3
        assert tier.write(pages) == [True] * 3
        assert tier.statistics().stored == 4, "and one that was read is not"


def test_a_flush_that_fails_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = make_page(1, 5000)
    with opened(tmp_path) as tier:
        tier.write([page])
        with monkeypatch.context() as patch:
            patch.setattr(os, "fdatasync", refuse(errno.EIO))
            with pytest.raises(ResourceError, match="may not survive a loss of power"):
                tier.flush()
            assert tier.statistics().errors == 1
            assert read_pages(tier, [page]) == [True]


def test_flush_syncs_every_file_that_was_written_and_the_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: set[int] = set()
    with opened(tmp_path, 8 * MIB) as tier:
        for name in ("fdatasync", "fsync"):
            monkeypatch.setattr(os, name, lambda fd: synced.add(os.fstat(fd).st_ino))
        tier.write([make_page(n, 300_000) for n in range(10)])
        assert len(segments(tmp_path)) > 2
        tier.flush()
        assert synced == {path.stat().st_ino for path in [tmp_path, *segments(tmp_path)]}
        synced.clear()
        tier.flush()
        assert not synced, "nothing was written since"
        tier.write([make_page(20, 5000)])
        tier.flush()
        assert synced == {segments(tmp_path)[-1].stat().st_ino}


def test_closing_is_never_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = make_page(1, 5000)
    with opened(tmp_path) as tier:
        tier.write([page])
        with monkeypatch.context() as patch:
            for name in ("pwritev", "fdatasync", "ftruncate", "fsync"):
                patch.setattr(os, name, refuse(errno.EIO))
            tier.close()
        assert tier.write([page]) == [False], "closed: nothing is written behind the next owner's back"
    with opened(tmp_path) as tier:
        assert read_pages(tier, [page]) == [True]
