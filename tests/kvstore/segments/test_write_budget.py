import os
from pathlib import Path

import pytest
from made_pages import make_page, read_pages

from kvstore.segments.write_budget import WriteBudget
from kvstore.tiers.disk import DiskTier

DAY = 86_400
MIB = 1 << 20


class Now:
    def __init__(self) -> None:
        self.now = 20_000.5 * DAY

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def now() -> Now:
    return Now()


def test_a_day_has_its_bytes_and_no_more(tmp_path: Path, now: Now) -> None:
    budget = WriteBudget(tmp_path, 1000, now=now)
    assert [budget.take(400), budget.take(400), budget.take(400), budget.take(200), budget.take(1)] == [
        True,
        True,
        False,
        True,
        False,
    ]
    assert budget.take(100, must=True)
    budget.limit_bytes = 1200
    assert [budget.take(101), budget.take(100)] == [False, True], "what must be written counts"
    budget.limit_bytes = 1000
    now.now += DAY
    assert budget.take(1000)
    assert not budget.take(1)


def test_a_crash_gives_no_byte_back(tmp_path: Path, now: Now) -> None:
    limit = 64_000
    granted = 0
    for _ in range(100):
        budget = WriteBudget(tmp_path, limit, now=now)  # and never closed
        granted += 700 * budget.take(700)
    assert 20_000 < granted <= limit
    assert not WriteBudget(tmp_path, limit, now=now).take(limit // 2)


def test_closed_in_order_it_is_exact(tmp_path: Path, now: Now) -> None:
    granted = 0
    for _ in range(100):
        budget = WriteBudget(tmp_path, 64_000, now=now)
        granted += 700 * budget.take(700)
        budget.close()
    assert granted == 64_000 // 700 * 700


@pytest.mark.parametrize(("moved", "anew"), [(-0.6, False), (-400, True), (0.6, True), (400, True)])
def test_clocks_that_are_set(tmp_path: Path, now: Now, moved: float, anew: bool) -> None:
    WriteBudget(tmp_path, 1000, now=now).take(1000)
    now.now += moved * DAY
    assert WriteBudget(tmp_path, 1000, now=now).take(1000) == anew


@pytest.mark.parametrize("text", [b"", b"day 20000 bytes 999999", b"day x bytes 1\n", b"\xff" * 5000])
def test_a_damaged_file_is_a_new_day(tmp_path: Path, now: Now, text: bytes) -> None:
    (tmp_path / "writes").write_bytes(text)
    assert WriteBudget(tmp_path, 1000, now=now).take(1000)


def test_without_a_limit_there_is_no_file(tmp_path: Path) -> None:
    budget = WriteBudget(tmp_path, 0)
    assert budget.take(1 << 60)
    budget.close()
    assert list(tmp_path.iterdir()) == []


def test_what_can_not_be_written_down_is_not_granted(tmp_path: Path, now: Now, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(5, "no")

    budget = WriteBudget(tmp_path, 1000, now=now)
    monkeypatch.setattr(os, "fdatasync", refuse)
    assert not budget.take(10)
    assert budget.take(10, must=True)
    monkeypatch.undo()
    assert budget.take(10)


@pytest.mark.parametrize("name", ["writes", "writes.new"])
def test_where_a_folder_is_in_the_files_place_it_counts_in_memory_and_says_so(
    tmp_path: Path, now: Now, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / name).mkdir()
    tier = DiskTier(tmp_path, 64 * MIB, write_limit_bytes=2 * MIB, now=now)
    written = sum(tier.write([make_page(number, 200_000)])[0] for number in range(20))
    tier.close()
    assert 7 <= written <= 10, "the day's bytes are a limit all the same"
    assert f"{tmp_path}/{name}" in caplog.text
    assert (tmp_path / name).is_dir()


def test_why_no_page_goes_to_disk_is_said(
    tmp_path: Path, now: Now, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(5, "no")

    budget = WriteBudget(tmp_path, 1000, now=now)
    monkeypatch.setattr(os, "fdatasync", refuse)
    assert [budget.take(10), budget.take(10)] == [False, False]
    [line] = caplog.messages
    assert f"{tmp_path}/writes can't be written, and so no pages go to disk" in line


def test_what_a_link_points_to_is_not_written(tmp_path: Path, now: Now) -> None:
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "writes.new").symlink_to(tmp_path / "precious")
    budget = WriteBudget(tmp_path, 1000, now=now)
    assert budget.take(10)
    budget.close()
    assert (tmp_path / "precious").read_text() == "mine"
    assert not WriteBudget(tmp_path, 1000, now=now).take(991)


def test_a_limit_that_is_reached_is_told_once_a_day(tmp_path: Path, now: Now, caplog: pytest.LogCaptureFixture) -> None:
    budget = WriteBudget(tmp_path, 1 << 20, now=now)
    assert budget.take(1 << 20)
    assert not caplog.messages
    assert [budget.take(1) for _ in range(3)] == [False] * 3
    [line] = caplog.messages
    assert "1 MiB were written today, the limit is 1 MiB" in line
    now.now += DAY
    assert budget.take(1 << 20)
    assert not budget.take(1)
    assert len(caplog.messages) == 2


def test_the_tier_refuses_beyond_its_day_and_over_restarts(tmp_path: Path, now: Now) -> None:
    written: list[int] = []
    real = os.pwritev

    def watch(fd: int, buffers: list[memoryview], offset: int) -> int:
        written.append(real(fd, buffers, offset))
        return written[-1]

    stored = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pwritev", watch)
        for turn in range(4):
            tier = DiskTier(tmp_path, 64 * MIB, write_limit_bytes=4 * MIB, now=now)
            for number in range(10):
                page = make_page(turn * 10 + number, 200_000)
                [answer] = tier.write([page])
                assert read_pages(tier, [page]) == [answer]
                stored += answer
            counts = tier.statistics()
            assert counts.stored + counts.refused == 10
            assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= counts.used_bytes
            tier.remove([make_page(0, 1).key])
            tier.close()
        assert 17 <= stored <= 20
        assert sum(written) <= 4 * MIB + 64 * 1024, "seals and removals are always written"
    now.now += DAY
    tier = DiskTier(tmp_path, 64 * MIB, write_limit_bytes=4 * MIB, now=now)
    assert tier.contains([make_page(0, 1).key, make_page(1, 1).key]) == [False, True]
    assert tier.write([make_page(100, 200_000)]) == [True]
    tier.close()
