"""What leaves a full disk tier, what is carried over, and what must not come back."""

import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import child_process
import pytest
from disk_tiers import MIB, bytes_on_disk, opened
from made_pages import make_page, read_pages


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """In memory: these tests write a lot, and what they show does not depend on the file system."""
    with tempfile.TemporaryDirectory(prefix="kvstore-test-", dir="/dev/shm") as name:
        yield Path(name)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.glob("*.segment"))


def test_pages_that_are_read_outlive_many_times_the_limit(tmp_path: Path) -> None:
    pages = [make_page(n, 60_000) for n in range(1500)]
    hot = pages[:300:15]  # two in each segment
    with opened(tmp_path, 16 * MIB) as tier:
        for number, page in enumerate(pages):
            if number % 50 == 0:
                assert all(read_pages(tier, [each for each in hot if int.from_bytes(each.key) < number])), number
            tier.write([page])
            assert bytes_on_disk(tmp_path) <= tier.statistics().used_bytes <= 16 * MIB
        counts = tier.statistics()
        assert counts.carried >= 20
        assert counts.evicted > 1000
        assert tier.check().damaged == 0
    with opened(tmp_path, 16 * MIB) as tier:
        assert all(read_pages(tier, hot)), "carried over pages are found again"


def test_pages_that_were_only_written_are_not_carried(tmp_path: Path) -> None:
    with opened(tmp_path, 16 * MIB) as tier:
        for number in range(600):
            tier.write([make_page(number, 60_000)])
        found = tier.contains([make_page(number, 1).key for number in range(600)])
        assert tier.statistics().carried == 0
        assert found == sorted(found), "then the oldest leave"


def test_however_hot_all_is_at_most_a_third_is_written_again(tmp_path: Path) -> None:
    with opened(tmp_path, 16 * MIB) as tier:
        for number in range(1000):
            page = make_page(number, 60_000)
            assert tier.write([page]) == [True], "new pages are always taken"
            assert read_pages(tier, [page]) == [True]
            if number % 10 == 0:
                tier.touch(tier.keys(b""))
        counts = tier.statistics()
        assert 0 < counts.carried <= counts.stored / 3


def test_the_segment_in_which_least_is_wanted_leaves_first(tmp_path: Path) -> None:
    with opened(tmp_path, 16 * MIB, segment_bytes=2 * MIB) as tier:
        for number in range(6 * 31):  # 31 pages a segment
            tier.write([make_page(number, 60_000)])
        segments = names(tmp_path)
        old = [make_page(number, 60_000) for number in range(31)]
        assert len(segments) >= 6
        for page in old:
            read_pages(tier, [page])
        number = 1000
        while names(tmp_path)[:1] == segments[:1] and names(tmp_path)[1] == segments[1]:
            tier.write([make_page(number, 60_000)])
            number += 1
        assert names(tmp_path)[0] == segments[0], "the oldest stays: it is read"
        assert all(read_pages(tier, old))


def test_touched_pages_are_as_good_as_read_ones(tmp_path: Path) -> None:
    hot = [make_page(n, 60_000) for n in range(5)]
    with opened(tmp_path, 16 * MIB) as tier:
        tier.write(hot)
        for number in range(100, 900):
            if number % 30 == 0:
                tier.touch([page.key for page in hot] + [bytes(64)])
            tier.write([make_page(number, 60_000)])
        assert read_pages(tier, hot) == [True] * 5


@pytest.mark.parametrize("removed_again", [False, True])
def test_a_removed_page_stays_away_though_its_tombstone_leaves_first(tmp_path: Path, removed_again: bool) -> None:
    """The page's segment is kept, since all else in it is read; those with its tombstones leave one after the other."""
    page = make_page(1, 60_000)
    kept = [make_page(n, 60_000) for n in range(2, 30)]
    with opened(tmp_path / "tier", 16 * MIB, segment_bytes=2 * MIB) as tier:
        tier.write([page, *kept])
        first = names(tmp_path / "tier")[0]
        for number in range(100, 140):
            tier.write([make_page(number, 60_000)])
        tier.remove([page.key])
        if removed_again:
            assert tier.write([page]) == [True]
            for number in range(140, 180):
                tier.write([make_page(number, 60_000)])
            tier.remove([page.key])
        for number in range(200, 900):
            read_pages(tier, kept)
            tier.write([make_page(number, 60_000)])
            assert tier.contains([page.key]) == [False]
            if number % 20 == 0:
                copy = tmp_path / str(number)
                shutil.copytree(tmp_path / "tier", copy)
                with opened(copy, 16 * MIB, segment_bytes=2 * MIB) as again:
                    assert again.contains([page.key]) == [False], number
                    keys = [make_page(n, 1).key for n in range(1000)]
                    assert again.contains(keys) == tier.contains(keys)
                shutil.rmtree(copy)
            if number == 400:
                assert names(tmp_path / "tier")[0] == first, "the test wants it to stay"
        assert names(tmp_path / "tier")[1] > "0" * 14 + "05", "the test wants the tombstone's segment to go"


def test_a_segment_without_pages_is_deleted_at_once(tmp_path: Path) -> None:
    pages = [make_page(n, 60_000) for n in range(150)]
    with opened(tmp_path, 32 * MIB, segment_bytes=2 * MIB) as tier:
        tier.write(pages)
        before = names(tmp_path)
        assert tier.remove([page.key for page in pages[:100]]) == 100
        after = names(tmp_path)
        assert len(before) - len(after) >= 2
        assert bytes_on_disk(tmp_path) <= tier.statistics().used_bytes < 8 * MIB
        assert read_pages(tier, pages) == [False] * 100 + [True] * 50
    with opened(tmp_path, 32 * MIB, segment_bytes=2 * MIB) as tier:
        assert read_pages(tier, pages) == [False] * 100 + [True] * 50


@pytest.mark.parametrize("lines", [150, 400, 900])
def test_sigkill_in_the_middle_of_reclaim(tmp_path: Path, lines: int) -> None:
    """Whatever was being carried over, removed or deleted: no wrong page, and none that was removed."""
    code = """
import sys
from pathlib import Path
from made_pages import make_page, read_pages
from kvstore.tiers.disk import DiskTier
tier = DiskTier(Path(sys.argv[1]), 4 << 20, segment_bytes=512 << 10)
hot = [make_page(n, 30_000) for n in range(0, 400, 20)]
for number in range(100_000):
    tier.write([make_page(number, 30_000)])
    read_pages(tier, hot)
    if number % 7 == 3:
        tier.remove([make_page(number - 3, 1).key])
        print(number - 3, flush=True)
    else:
        print(-1, flush=True)
"""
    command = [sys.executable, "-c", code, str(tmp_path / "tier")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=child_process.environment()) as writer:
        assert writer.stdout is not None
        told = [writer.stdout.readline() for _ in range(lines)]
        writer.send_signal(signal.SIGKILL)
        told += writer.stdout.readlines()
    removed = [number for number in map(int, told) if number >= 0]
    with opened(tmp_path / "tier", 4 * MIB, segment_bytes=MIB // 2) as tier:
        assert bytes_on_disk(tmp_path / "tier") <= tier.statistics().used_bytes <= 4 * MIB
        assert not any(tier.contains([make_page(number, 1).key for number in removed]))
        assert tier.check().damaged == 0
        pages = [make_page(number, 30_000) for number in range(len(told))]
        found = read_pages(tier, pages)
        assert sum(found) > 60
        assert found[-1], "the newest that was acknowledged"
        assert tier.statistics().corrupt == 0
