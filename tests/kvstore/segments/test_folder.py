"""What lies in the folder under a segment's name and is none: it is left alone and named, and writing goes on."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from made_pages import make_page, read_pages

from kvstore.cli.main import main
from kvstore.segments.folder import LAST_ID
from kvstore.segments.log import SegmentLog
from kvstore.segments.segment import Entry, Segment, segment_name
from kvstore.store.formats import refuse_newer
from kvstore.tiers.disk import DiskTier

MIB = 1 << 20
FIRST = segment_name(1)
PAGES = [make_page(n, 70_000) for n in range(12)]


def empty(path: Path, sound: bytes) -> None:
    path.write_bytes(b"")


def garbage(path: Path, sound: bytes) -> None:
    path.write_bytes(b"\xa5" * 10_000)


def copied(path: Path, sound: bytes) -> None:
    path.write_bytes(sound)


def folder(path: Path, sound: bytes) -> None:
    path.mkdir()
    (path / "notes").write_text("mine")


def link(path: Path, sound: bytes) -> None:
    target = path.with_name("target")
    target.write_bytes(sound)
    path.symlink_to(target)


def dangling(path: Path, sound: bytes) -> None:
    path.symlink_to("nowhere")


def pipe(path: Path, sound: bytes) -> None:
    os.mkfifo(path)


def unreadable(path: Path, sound: bytes) -> None:
    path.symlink_to(path.name)  # a loop: the system refuses whatever is asked


def open_tier(directory: Path) -> DiskTier:
    return DiskTier(directory, 64 * MIB)


def fill(directory: Path) -> bytes:
    """Four pages, the second of them removed. Returns the segment's bytes."""
    tier = open_tier(directory)
    assert all(tier.write(PAGES[:4]))
    assert tier.remove([PAGES[1].key]) == 1
    tier.close()
    return (directory / FIRST).read_bytes()


def looks(path: Path) -> object:
    """What lies there, so far as it may not change."""
    if path.is_symlink():
        return path.readlink()
    return sorted(path.iterdir()) if path.is_dir() else path.read_bytes() if path.is_file() else path.lstat().st_mode


@pytest.mark.parametrize("name", [segment_name(LAST_ID), segment_name(1 << 63), segment_name((1 << 63) + 7)])
@pytest.mark.parametrize("put", [empty, garbage, copied, folder, link, dangling, pipe, unreadable])
def test_a_number_that_no_log_gets_to_is_left_alone_and_named(
    tmp_path: Path, put: Callable[[Path, bytes], None], name: str, caplog: pytest.LogCaptureFixture
) -> None:
    put(tmp_path / name, fill(tmp_path))
    before = looks(tmp_path / name)
    refuse_newer(tmp_path)
    for at in (4, 8):
        caplog.clear()
        tier = open_tier(tmp_path)
        [line] = [message for message in caplog.messages if "left alone" in message]
        assert name in line and str(tmp_path) in line
        assert tier.write(PAGES[at : at + 4]) == [True] * 4
        tier.check()
        tier.close()
    tier = open_tier(tmp_path)
    assert read_pages(tier, PAGES) == [True, False] + [True] * 10
    tier.close()
    assert looks(tmp_path / name) == before
    assert max(path.name for path in tmp_path.glob("*.segment") if path.name != name) < segment_name(10)


@pytest.mark.parametrize("name", [segment_name(2), segment_name(9), segment_name((1 << 63) - 1)])
@pytest.mark.parametrize("put", [empty, garbage, copied, folder, link, dangling, pipe])
def test_a_number_that_a_log_may_get_to_is_in_nobodys_way(
    tmp_path: Path, put: Callable[[Path, bytes], None], name: str
) -> None:
    put(tmp_path / name, fill(tmp_path))
    for at in (4, 8):
        tier = open_tier(tmp_path)
        assert tier.write(PAGES[at : at + 4]) == [True] * 4
        tier.check()
        tier.close()
    tier = open_tier(tmp_path)
    assert read_pages(tier, PAGES) == [True, False] + [True] * 10
    tier.close()


@pytest.mark.parametrize("put", [empty, folder, dangling])
def test_what_is_put_there_while_the_log_is_open_costs_a_number_and_no_page(
    tmp_path: Path, put: Callable[[Path, bytes], None], caplog: pytest.LogCaptureFixture
) -> None:
    tier = open_tier(tmp_path)
    for number in (1, 2):
        put(tmp_path / segment_name(number), b"")
    assert tier.write(PAGES[:4]) == [True] * 4
    assert tier.statistics().errors == 0
    tier.close()
    assert [name in caplog.text for name in (FIRST, segment_name(2))] == [True, True]
    tier = open_tier(tmp_path)
    assert read_pages(tier, PAGES[:4]) == [True] * 4
    tier.close()


@pytest.mark.parametrize(
    "name",
    ["FFFFFFFFFFFFFFFF.segment", "1.segment", "00000000000000001.segment", "000000000000000A.segment", ".segment"],
)
def test_a_name_that_is_not_quite_a_segments_is_left_alone_and_named(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / name).write_bytes(fill(tmp_path))
    tier = open_tier(tmp_path)
    assert repr(name) in caplog.text
    assert read_pages(tier, PAGES[:4]) == [True, False, True, True]
    tier.close()


def test_a_crowd_of_them_is_one_line_and_no_name_breaks_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for number in range(20):
        (tmp_path / f"a\n{number:02}.segment").mkdir()
    open_tier(tmp_path).close()
    [line] = caplog.messages
    assert "and 12 more" in line
    assert "\n" not in line


def sound_segment(directory: Path, number: int, pages: range, *, gone: range = range(0)) -> None:
    """One that a log wrote behind somebody's file of a huge number."""
    segment = Segment.create(directory, number, direct=False)
    segment.append([Entry(PAGES[n].key, PAGES[n].checksum, PAGES[n].payload) for n in pages])
    if gone:
        segment.append([Entry(PAGES[n].key, 0, None) for n in gone])
    assert segment.seal() is None


@pytest.mark.parametrize("number", [1 << 63, (1 << 63) + 5, LAST_ID - 3])
def test_a_sound_segment_is_one_whatever_its_number(tmp_path: Path, number: int) -> None:
    fill(tmp_path)
    sound_segment(tmp_path, number, range(4, 6), gone=range(1))
    tier = open_tier(tmp_path)
    assert read_pages(tier, PAGES[:6]) == [False, False, True, True, True, True]
    assert tier.write(PAGES[6:8]) == [True, True]
    assert tier.remove([PAGES[4].key]) == 1
    tier.close()
    tier = open_tier(tmp_path)
    assert read_pages(tier, PAGES[:8]) == [False, False, True, True, False, True, True, True]
    tier.check()
    tier.close()


def test_behind_the_last_number_pages_are_refused_and_nothing_is_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fill(tmp_path)
    sound_segment(tmp_path, LAST_ID, range(4, 6))
    tier = open_tier(tmp_path)
    assert tier.write(PAGES[6:8]) == [False, False]
    assert "no number is left for a segment" in caplog.text
    assert tier.statistics().refused == 2
    assert read_pages(tier, PAGES[:6]) == [True, False, True, True, True, True]
    tier.close()


def test_the_limit_holds_and_what_is_left_alone_never_leaves(tmp_path: Path) -> None:
    name = tmp_path / segment_name(LAST_ID)
    name.write_bytes(b"mine" * 100_000)
    tier = DiskTier(tmp_path, 2 * MIB)
    for page in (make_page(n, 70_000) for n in range(60)):
        assert tier.write([page]) == [True]
    assert tier.statistics().evicted > 0
    tier.check()
    tier.close()
    assert name.read_bytes() == b"mine" * 100_000


@pytest.mark.parametrize("put", [empty, garbage, copied, folder, dangling])
@pytest.mark.parametrize("repair", [False, True])
def test_the_check_names_what_it_leaves_alone(
    tmp_path: Path, put: Callable[[Path, bytes], None], capsys: pytest.CaptureFixture[str], *, repair: bool
) -> None:
    name = segment_name(LAST_ID)
    put(tmp_path / name, fill(tmp_path))
    before = looks(tmp_path / name)
    for options in ([], ["--json"]):
        assert main(["check", str(tmp_path), *options, *(["--repair"] if repair else [])]) == 0
        said = capsys.readouterr()
        assert name in said.err
        if options:
            told = json.loads(said.out)
            assert (told["left_alone"], [each["name"] for each in told["segments"]]) == ([name], [FIRST])
    assert looks(tmp_path / name) == before


def test_a_lock_that_is_a_folder_or_a_link_is_named(tmp_path: Path) -> None:
    (tmp_path / "a" / "lock").mkdir(parents=True)
    with pytest.raises(OSError, match=r"a can't be used: .*/a/lock: Is a directory"):
        open_tier(tmp_path / "a")
    (tmp_path / "b").mkdir()
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "b" / "lock").symlink_to(tmp_path / "precious")
    with pytest.raises(OSError, match=r"b can't be used: .*/b/lock: "):
        open_tier(tmp_path / "b")
    assert (tmp_path / "precious").read_text() == "mine"


def test_a_log_without_foreign_files_says_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fill(tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    with caplog.at_level(logging.DEBUG):
        SegmentLog(tmp_path, 64 * MIB).close()
    assert caplog.messages == []
