"""``kvstore bench disk`` as people run it, on a few MiB."""

import errno
import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from kvstore.cli.bench import disk, disk_opening, disk_speed
from kvstore.cli.main import EXIT_FAILED, EXIT_USAGE, main
from kvstore.tiers.disk import DiskTier

SMALL = ["--size", "4MiB", "--log-size", "32MiB", "--rounds", "2"]


class DiskUsage(NamedTuple):
    """What is asked of :func:`shutil.disk_usage`."""

    free: int


@pytest.fixture(autouse=True)
def few_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "INDEX_PAGES", 5000)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    try:
        os.close(os.open(tmp_path / "try", os.O_WRONLY | os.O_CREAT | os.O_DIRECT))
    except OSError:
        pytest.skip("no O_DIRECT here")
    (tmp_path / "try").unlink()
    return tmp_path


def test_json_has_every_figure_and_nothing_is_left_behind(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "disk", "--directory", str(directory), *SMALL, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert [row["page_bytes"] for row in answer["speed"]] == [2 << 20, 64 << 10]
    assert all(value > 0 for row in answer["speed"] for value in row.values())
    assert answer["opening"]["bytes"] == answer["opening"]["written_bytes"] == 32 << 20
    assert answer["opening"]["segments"] == 1
    assert answer["index"]["pages"] == 5000
    assert not list(directory.iterdir())


def test_the_table_and_the_sentences(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plot = directory / "plot.svg"
    assert main(["bench", "disk", "--directory", str(directory), *SMALL, "--plot", str(plot)]) == 0
    assert plot.read_text().count("<polyline") == 3
    answer = capsys.readouterr()
    assert [line.split()[:3] for line in answer.out.splitlines()[2:8]] == [
        [*size.split(), what] for size in ("2 MiB", "64 KiB") for what in ("write", "load", "prefix")
    ]
    assert "a log of 32 MiB in pages of 64 KiB opens in" in answer.out
    assert "index of 5,000 pages" in answer.out
    assert "extrapolated" not in answer.out
    assert not answer.err


def test_a_log_that_has_no_room_is_extrapolated(
    directory: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: DiskUsage(64 << 20))
    assert main(["bench", "disk", "--directory", str(directory), *SMALL, "--log-size", "1GiB"]) == 0
    assert "extrapolated from 32 MiB: the disk has no more room" in capsys.readouterr().out
    assert main(["bench", "disk", "--directory", str(directory), "--size", "64MiB"]) == EXIT_USAGE
    assert "--size is 64 MiB" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--size", "3MiB"], "--size is 3 MiB, it must be a multiple of 2 MiB"),
        (["--size", "0"], "--size is 0"),
        (["--log-size", "1MiB"], "--log-size is 1 MiB, it must be a multiple of 16 MiB"),
        (["--rounds", "0"], "--rounds is 0, the least is 1"),
        (["--directory", "/none"], "/none: No such file"),
    ],
)
def test_bad_flags_are_named(flags: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "disk", *flags]) == EXIT_USAGE
    answer = capsys.readouterr()
    assert words in answer.err
    assert answer.err.count("\n") == 1


def test_no_direct_io_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def refuse(path: Any, flags: int, *rest: Any, **options: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no")
        return real(path, flags, *rest, **options)

    monkeypatch.setattr(os, "open", refuse)
    assert main(["bench", "disk", "--directory", str(tmp_path), *SMALL]) == EXIT_USAGE
    assert "has no O_DIRECT" in capsys.readouterr().err


def test_bytes_that_do_not_come_back_end_it(
    directory: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A measurement of what did not work would be worth nothing."""
    monkeypatch.setattr(DiskTier, "read", lambda self, keys, into: [None] * len(keys))
    assert main(["bench", "disk", "--directory", str(directory), *SMALL]) == EXIT_FAILED
    assert "not every page came back" in capsys.readouterr().err


def test_plain_io_moves_the_bytes(directory: Path) -> None:
    data = np.frombuffer(np.random.default_rng(1).bytes(4 << 20), np.uint8)
    aligned, into = disk_speed.aligned_empty(4 << 20), disk_speed.aligned_empty(4 << 20)
    aligned[:] = data
    disk_speed.plain_write(directory / "plain", aligned)
    assert (directory / "plain").read_bytes() == data.tobytes()
    disk_speed.plain_read(directory / "plain", into)
    assert np.array_equal(into, data)


def test_a_log_of_holes_is_a_log(tmp_path: Path) -> None:
    disk_opening.make_log(tmp_path / "log", 10_000, 65536)
    tier = DiskTier(tmp_path / "log", 4 << 30)
    assert tier.statistics().pages == 10_000
    assert tier.recovery.segments == 3
    assert tier.recovery.scanned == 0
    tier.close()
