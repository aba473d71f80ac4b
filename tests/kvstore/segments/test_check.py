"""``kvstore check``: damage of every kind is found, named, and repaired without losing anything else."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import child_process
import pytest
from made_pages import make_page, read_pages

from kvstore.cli.main import main
from kvstore.errors import ConfigError, FormatError, InUseError
from kvstore.segments import record
from kvstore.segments.check import SegmentReport, check_log
from kvstore.segments.record import BLOCK, SegmentHeader
from kvstore.tiers.disk import DiskTier

MIB = 1 << 20
PAGES = [make_page(n, 70_000) for n in range(40)]
GONE = PAGES[3]


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Several sealed segments of pages, with a removed page and a tombstone for it."""
    directory = tmp_path_factory.mktemp("sample") / "tier"
    tier = DiskTier(directory, 8 * MIB)
    for at in range(0, 40, 4):
        assert all(tier.write(PAGES[at : at + 4]))
    tier.remove([GONE.key])
    tier.close()
    return directory


@pytest.fixture
def directory(sample: Path, tmp_path: Path) -> Path:
    shutil.copytree(sample, tmp_path / "tier")
    return tmp_path / "tier"


def segments(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.segment"))


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in segments(directory)}


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


def found(directory: Path) -> list[bool]:
    tier = DiskTier(directory, 8 * MIB)
    try:
        assert tier.recovery.cut_bytes == tier.recovery.scanned == tier.recovery.unreadable == 0
        here = read_pages(tier, PAGES)
        assert tier.statistics().corrupt == 0
        return here
    finally:
        tier.close()


def everything_but(*numbers: int) -> list[bool]:
    return [n not in (3, *numbers) for n in range(40)]


def test_a_sound_log(directory: Path) -> None:
    before = contents(directory)
    told: list[tuple[int, int]] = []
    reports = list(check_log(directory, repair=True, progress=lambda done, size: told.append((done, size))))
    assert [report.name for report in reports] == list(before)
    assert not any(report.damaged for report in reports)
    assert sum(report.pages for report in reports) == 40, "a record that was removed is one, too"
    assert contents(directory) == before
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert told[-1][0] == told[-1][1] == sum(map(len, before.values()))


def damage_payload(directory: Path) -> None:
    flip(segments(directory)[0], 2 * BLOCK + 100)  # page 0
    flip(segments(directory)[0], 2 * BLOCK + 18 * BLOCK * 2 + 69_999)  # page 2


def damage_trailer(directory: Path) -> None:
    flip(segments(directory)[1], -10)


def damage_header(directory: Path) -> None:
    flip(segments(directory)[1], 20)


def tear(directory: Path) -> None:
    with segments(directory)[1].open("ab") as file:
        file.write(b"torn" * 3000)


def destroy(directory: Path) -> None:
    path = segments(directory)[0]
    path.write_bytes(bytes(2 * BLOCK) + path.read_bytes()[2 * BLOCK :])


@pytest.mark.parametrize(
    ("harm", "at", "expected", "lost"),
    [
        (damage_payload, 0, {"damaged_pages": 2}, {0, 2}),
        (damage_trailer, 1, {"cut_bytes": 2 * BLOCK}, set()),
        (damage_header, 1, {"header_damaged": True}, set()),
        (tear, 1, {}, set()),
        (destroy, 0, {"unreadable": True}, None),
    ],
)
def test_damage_is_found_and_repaired(directory: Path, harm, at: int, expected: dict[str, object], lost) -> None:
    harm(directory)
    before = contents(directory)
    first_pages = {n for n in range(40) if PAGES[n].payload.tobytes() in (directory / next(iter(before))).read_bytes()}
    reports = list(check_log(directory))
    assert [report.damaged for report in reports] == [index == at for index in range(len(reports))]
    for name, value in expected.items():
        assert getattr(reports[at], name) == value
    assert contents(directory) == before, "nothing is changed unasked"
    repaired = list(check_log(directory, repair=True))
    assert [report.repaired for report in repaired] == [report.damaged for report in reports]
    assert not any(report.damaged for report in check_log(directory))
    assert found(directory) == everything_but(*(first_pages if lost is None else lost))


def test_a_dropped_page_uncovers_no_page_that_was_removed(directory: Path) -> None:
    tier = DiskTier(directory, 8 * MIB)
    assert tier.write([GONE]) == [True]
    tier.close()
    last = segments(directory)[-1]
    flip(last, last.read_bytes().index(GONE.payload.tobytes()))
    assert [report.damaged_pages for report in check_log(directory, repair=True)][-1] == 1
    assert found(directory) == everything_but()


def test_an_open_log_is_left_alone(directory: Path) -> None:
    tier = DiskTier(directory, 8 * MIB)
    with pytest.raises(InUseError, match="is in use by process"):
        list(check_log(directory))
    tier.close()


def test_a_newer_version_is_refused_before_anything_is_changed(directory: Path) -> None:
    tear(directory)
    newer = record.encode_segment_header(SegmentHeader(99, b"s" * 16, version=record.FORMAT_VERSION + 1))
    (directory / f"{99:016x}.segment").write_bytes(newer)
    before = contents(directory)
    with pytest.raises(FormatError, match="this version of kvstore reads up to"):
        list(check_log(directory, repair=True))
    assert contents(directory) == before


def test_other_directories(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a directory"):
        list(check_log(tmp_path / "none"))
    assert list(check_log(tmp_path)) == []
    assert list(tmp_path.iterdir()) == [], "a directory that is not kvstore's gets no lock"


def test_the_command_and_its_exit_codes(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(directory)]) == 0
    out = capsys.readouterr().out
    assert "with 40 pages are sound" in out
    assert all(path.name in out for path in segments(directory))
    damage_payload(directory)
    assert main(["check", str(directory)]) == 1
    assert "nothing was changed" in capsys.readouterr().out
    assert main(["check", "--json", str(directory)]) == 1
    answer = json.loads(capsys.readouterr().out)
    assert answer["damaged"] == 1
    assert answer["segments"][0] | {"bytes": 0} == {
        "name": segments(directory)[0].name,
        "bytes": 0,
        "pages": answer["segments"][0]["pages"],
        "damaged_pages": 2,
        "cut_bytes": 0,
        "header_damaged": False,
        "unreadable": False,
        "repaired": False,
        "damaged": True,
    }
    assert set(SegmentReport.__dataclass_fields__) < set(answer["segments"][0])
    assert main(["check", "--repair", str(directory)]) == 1
    assert capsys.readouterr().out.endswith("segments: repaired\n")
    assert main(["check", str(directory)]) == 0
    assert main(["check", str(directory / "none")]) == 2
    assert "is not a directory" in capsys.readouterr().err
    (directory / "empty").mkdir()
    for flags in ([], ["--json"], ["--repair"]):
        assert main(["check", str(directory / "empty"), *flags]) == 2
        assert capsys.readouterr() == ("", f"kvstore check: no segments in {directory}/empty\n")
    tier = DiskTier(directory, 8 * MIB)
    assert main(["check", str(directory)]) == 1
    assert "in use by process" in capsys.readouterr().err
    tier.close()


def test_what_a_kill_leaves_can_be_checked(tmp_path: Path) -> None:
    code = """
import os, signal, sys
from pathlib import Path
from made_pages import make_page
from kvstore.tiers.disk import DiskTier
tier = DiskTier(Path(sys.argv[1]), 8 << 20)
assert all(tier.write([make_page(n, 70_000) for n in range(10)]))
os.kill(os.getpid(), signal.SIGKILL)
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False, env=child_process.environment())
    [report] = check_log(tmp_path)
    assert (report.pages, report.damaged) == (10, False)
