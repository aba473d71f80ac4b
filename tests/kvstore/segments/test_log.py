"""The log over whole files: what is found again, what is cut, what is left alone."""

import errno
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from kvstore.errors import ConfigError, FormatError, InUseError, ResourceError
from kvstore.segments import record
from kvstore.segments.log import RecoveryReport, SegmentLog
from kvstore.segments.record import BLOCK, SegmentHeader, Trailer
from kvstore.segments.segment import Entry

MIB = 1 << 20
FIRST = "0000000000000001.segment"
SECOND = "0000000000000002.segment"


def entry(number: int, length: int = 5000) -> Entry:
    payload = np.full(length, number % 256, dtype=np.uint8)
    return Entry(number.to_bytes(64, "big"), number, payload)


def tombstone(number: int) -> Entry:
    return Entry(number.to_bytes(64, "big"), 0, None)


@contextmanager
def opened(directory: Path, limit_bytes: int = 64 * MIB, *, close: bool = True, **options: int) -> Iterator[SegmentLog]:
    log = SegmentLog(directory, limit_bytes, **options)
    try:
        yield log
        if close:
            log.seal()
    finally:
        log.close()


def found(log: SegmentLog) -> list[int]:
    """The numbers of the records, tombstones negative, in order."""
    return [
        int.from_bytes(each["key"].tobytes(), "big") * (-1 if each["codec"] == record.TOMBSTONE else 1)
        for each in records(log)
    ]


def records(log: SegmentLog) -> npt.NDArray[np.void]:
    return np.concatenate([np.zeros(0, record.RECORDS), *(table for _, table in log.replay())])


def reopened(directory: Path) -> tuple[list[int], RecoveryReport]:
    with opened(directory) as log:
        return found(log), log.settle()


def write_chunks(directory: Path, *chunks: list[Entry], sealed: bool) -> list[int]:
    """A directory with one segment. Returns where each chunk ends."""
    ends = []
    with opened(directory, close=sealed) as log:
        for chunk in chunks:
            segment, _ = log.append(chunk)
            ends.append(segment.size)
    return ends


def test_records_are_found_in_order(tmp_path: Path) -> None:
    write_chunks(tmp_path, [entry(1), entry(2)], [tombstone(1)], [entry(1, 1)], sealed=True)
    write_chunks(tmp_path, [entry(4)], [tombstone(2)], sealed=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == [FIRST, SECOND, "lock"]
    numbers, report = reopened(tmp_path)
    assert numbers == [1, 2, -1, 1, 4, -2]
    assert report == RecoveryReport(segments=2, scanned=1, records=6)
    assert reopened(tmp_path)[1] == RecoveryReport(segments=2, records=6), "the scanned one is sealed now"


def test_directory_and_files_are_private(tmp_path: Path) -> None:
    directory = tmp_path / "a" / "b"
    write_chunks(directory, [entry(1)], sealed=True)
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in directory.iterdir()} == {0o600}


def test_a_sealed_segment_is_opened_by_its_footer_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_chunks(tmp_path, *[[entry(n)] for n in range(200)], sealed=True)
    reads = []
    real = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, count, at: reads.append(at) or real(fd, count, at))
    numbers, _ = reopened(tmp_path)
    assert numbers == list(range(200))
    assert len(reads) == 3, "segment header, trailer, table"


def test_a_torn_tail_is_cut_at_whole_chunks(tmp_path: Path) -> None:
    ends = write_chunks(
        tmp_path / "whole", [entry(1), entry(2)], [entry(3)], [entry(4, 1), entry(5, 9000)], sealed=False
    )
    data = (tmp_path / "whole" / FIRST).read_bytes()
    assert len(data) == ends[-1]
    numbers = {ends[0]: [1, 2], ends[1]: [1, 2, 3], ends[2]: [1, 2, 3, 4, 5]}
    near = {start + step for start in [0, BLOCK, *ends] for step in (-BLOCK, -4095, -1, 0, 1, 16, 64, 152, 4095, BLOCK)}
    for length in sorted(length for length in near if 0 <= length <= len(data)):
        directory = tmp_path / str(length)
        directory.mkdir()
        (directory / FIRST).write_bytes(data[:length])
        whole = max((end for end in ends if end <= length), default=0)
        got, report = reopened(directory)
        assert got == numbers.get(whole, [])
        if length >= BLOCK:
            assert report.cut_bytes == length - max(whole, BLOCK)
            assert reopened(directory) == (got, RecoveryReport(segments=1, records=len(got)))
            assert (directory / FIRST).read_bytes()[:whole] == data[:whole]


def test_a_tail_that_was_never_written_is_cut(tmp_path: Path) -> None:
    # After a loss of power a file may have its length, and zeros or another chunk's beginning in place of its bytes.
    ends = write_chunks(tmp_path, [entry(1)], [entry(2, 50_000)], sealed=False)
    data = bytearray((tmp_path / FIRST).read_bytes())
    data[ends[0] :] = bytes(len(data) - ends[0])
    (tmp_path / FIRST).write_bytes(data)
    assert reopened(tmp_path) == ([1], RecoveryReport(1, 1, 0, ends[1] - ends[0], 1))


def test_a_damaged_chunk_header_costs_that_chunk_only(tmp_path: Path) -> None:
    ends = write_chunks(tmp_path, [entry(1)], [entry(2, 50_000)], [entry(3)], sealed=False)
    data = bytearray((tmp_path / FIRST).read_bytes())
    data[ends[0] + 100] ^= 1
    (tmp_path / FIRST).write_bytes(data)
    assert reopened(tmp_path) == ([1, 3], RecoveryReport(1, 1, 0, 0, 2))


def test_payload_that_looks_like_a_chunk_is_not_one(tmp_path: Path) -> None:
    # The payload of chunk 2 is a piece of another log; then the header of chunk 2 is damaged, and the scan meets it.
    write_chunks(tmp_path / "other", *[[entry(n)] for n in range(66, 70)], sealed=False)
    payload = np.frombuffer((tmp_path / "other" / FIRST).read_bytes()[BLOCK:], dtype=np.uint8)
    key = (2).to_bytes(64, "big")
    ends = write_chunks(tmp_path, [entry(1)], [Entry(key, 0, payload)], [entry(3)], sealed=False)
    data = bytearray((tmp_path / FIRST).read_bytes())
    data[ends[0]] ^= 1
    (tmp_path / FIRST).write_bytes(data)
    assert reopened(tmp_path)[0] == [1, 3]


def test_payload_that_looks_like_a_footer_is_not_one(tmp_path: Path) -> None:
    # All is right about this footer, its place in the file included, but for the stamp, which no client ever sees.
    table = np.array([(bytes(64), BLOCK, 0, 1, record.RAW, b"")], record.RECORDS).tobytes()
    trailer = Trailer(1, b"guessed stamp !!", 3 * BLOCK, 1, record.table_checksum(table))
    payload = np.frombuffer(bytes(BLOCK) + table.ljust(BLOCK, b"\0") + record.encode_trailer(trailer), dtype=np.uint8)
    ends = write_chunks(tmp_path, [Entry((1).to_bytes(64, "big"), 0, payload)], sealed=False)
    assert ends == [trailer.footer + record.footer_bytes(1)]
    assert reopened(tmp_path)[0] == [1]


def test_a_chunk_is_not_taken_twice(tmp_path: Path) -> None:
    ends = write_chunks(tmp_path, [entry(1)], [tombstone(1)], sealed=False)
    data = (tmp_path / FIRST).read_bytes()
    (tmp_path / FIRST).write_bytes(data + data[BLOCK : ends[0]])
    assert reopened(tmp_path)[0] == [1, -1]


@pytest.mark.parametrize("at", [-1, -BLOCK, -2 * BLOCK], ids=["trailer's end", "trailer", "table"])
def test_a_sealed_segment_with_a_damaged_footer_is_scanned_and_sealed_again(tmp_path: Path, at: int) -> None:
    write_chunks(tmp_path, [entry(1)], [entry(2), tombstone(1)], sealed=True)
    data = (tmp_path / FIRST).read_bytes()
    damaged = bytearray(data)
    damaged[at] ^= 1
    (tmp_path / FIRST).write_bytes(damaged)
    assert reopened(tmp_path) == ([1, 2, -1], RecoveryReport(1, 1, 0, record.footer_bytes(3), 3))
    assert (tmp_path / FIRST).read_bytes() == data


@pytest.mark.parametrize("sealed", [True, False])
def test_a_damaged_segment_header_costs_nothing(tmp_path: Path, sealed: bool) -> None:
    write_chunks(tmp_path, [entry(1)], [entry(2)], sealed=sealed)
    data = bytearray((tmp_path / FIRST).read_bytes())
    data[:BLOCK] = bytes(BLOCK)
    (tmp_path / FIRST).write_bytes(data)
    assert reopened(tmp_path)[0] == [1, 2]


def test_without_any_sound_header_a_file_counts_and_is_left(tmp_path: Path) -> None:
    (tmp_path / FIRST).write_bytes(bytes(3 * MIB))
    (tmp_path / SECOND).write_bytes(b"")
    with opened(tmp_path) as log:
        assert found(log) == []
        assert log.settle() == RecoveryReport(segments=2, unreadable=2)
        assert log.used_bytes == BLOCK + 3 * MIB
        log.append([entry(1)])
        assert (tmp_path / FIRST).read_bytes() == bytes(3 * MIB)


def test_a_renamed_segment_is_not_taken_for_another(tmp_path: Path) -> None:
    write_chunks(tmp_path, [entry(1)], sealed=True)
    (tmp_path / FIRST).rename(tmp_path / SECOND)
    assert reopened(tmp_path) == ([], RecoveryReport(segments=1, unreadable=1))


def test_a_newer_version_is_refused_and_nothing_changes(tmp_path: Path) -> None:
    write_chunks(tmp_path, [entry(1)], sealed=False)
    with (tmp_path / FIRST).open("ab") as file:
        file.write(b"torn")
    newer = record.encode_segment_header(SegmentHeader(2, b"s" * 16, version=3)) + b"whatever"
    (tmp_path / SECOND).write_bytes(newer)
    before = {path.name: path.read_bytes() for path in tmp_path.glob("*.segment")}
    for _ in range(2):
        with pytest.raises(FormatError, match=rf"{SECOND}: segment format version 3.* reads up to 2"):
            SegmentLog(tmp_path, 64 * MIB)
    assert {path.name: path.read_bytes() for path in tmp_path.glob("*.segment")} == before
    (tmp_path / SECOND).unlink()
    assert reopened(tmp_path)[0] == [1], "the directory was let go"


def test_a_damaged_version_is_damage_and_no_newer_version(tmp_path: Path) -> None:
    write_chunks(tmp_path, [entry(1)], sealed=True)
    data = bytearray((tmp_path / FIRST).read_bytes())
    data[16] ^= 0x40
    (tmp_path / FIRST).write_bytes(data)
    assert reopened(tmp_path)[0] == [1]


def test_files_of_others_are_left_alone(tmp_path: Path) -> None:
    write_chunks(tmp_path, [entry(1)], sealed=True)
    names = ["notes.txt", "1.segment", "00000000000000AA.segment", "0000000000000005.segment.bak"]
    for name in names:
        (tmp_path / name).write_bytes(b"not ours")
    (tmp_path / "0000000000000007.segment").mkdir()
    (tmp_path / "0000000000000008.segment").symlink_to(tmp_path / "notes.txt")
    with opened(tmp_path, 2 * MIB, segment_bytes=MIB) as log:
        assert found(log) == [1]
        log.settle()
        for number in range(10):
            size = log.chunk_size([entry(number, MIB // 2)])
            while log.missing(size) > 0:
                log.delete(log.evictable(size)[0])
            segment, _ = log.append([entry(number, MIB // 2)])
        assert segment.id > 8
    assert [(tmp_path / name).read_bytes() for name in names] == [b"not ours"] * 4
    assert (tmp_path / "0000000000000008.segment").is_symlink()


def test_a_file_that_can_not_be_read_is_left_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_chunks(tmp_path, [entry(1)], sealed=True)
    write_chunks(tmp_path, [entry(2)], sealed=False)
    before = (tmp_path / FIRST).read_bytes()
    real = os.pread

    def refuse(fd: int, count: int, at: int) -> bytes:
        if os.fstat(fd).st_ino == (tmp_path / FIRST).stat().st_ino:
            raise OSError(errno.EIO, "bad sector")
        return real(fd, count, at)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pread", refuse)
        assert reopened(tmp_path) == ([2], RecoveryReport(segments=2, scanned=1, unreadable=1, records=1))
    assert (tmp_path / FIRST).read_bytes() == before
    assert reopened(tmp_path)[0] == [1, 2]


def test_a_tail_that_can_not_be_cut_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_chunks(tmp_path, [entry(1)], sealed=False)
    with (tmp_path / FIRST).open("ab") as file:
        file.write(bytes(6000))

    def refuse(*_: object) -> None:
        raise OSError(errno.EROFS, "read-only")

    with monkeypatch.context() as patch:
        patch.setattr(os, "ftruncate", refuse)
        with opened(tmp_path) as log:
            assert found(log) == [1]
            log.settle()
            assert log.used_bytes >= BLOCK + (tmp_path / FIRST).stat().st_size
    assert reopened(tmp_path) == ([1], RecoveryReport(1, 1, 0, 6000, 1))


def test_a_segment_ends_at_its_size(tmp_path: Path) -> None:
    with opened(tmp_path, 64 * MIB, segment_bytes=MIB) as log:
        for number in range(6):
            log.append([entry(number, 300_000)])
        log.append([entry(6, 5 * MIB)])
        log.append([entry(7, 100)])
    sizes = [path.stat().st_size for path in sorted(tmp_path.glob("*.segment"))]
    assert len(sizes) == 4
    assert max(sizes[0], sizes[1], sizes[3]) <= MIB
    assert 5 * MIB < sizes[2] < 6 * MIB


def test_a_failed_append_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwritev

    def half(fd: int, buffers: list, offset: int) -> int:
        real(fd, buffers[:1], offset)
        raise OSError(errno.EIO, "bad sector")

    with opened(tmp_path) as log:
        log.append([entry(1)])
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwritev", half)
            with pytest.raises(OSError, match="bad sector"):
                log.append([entry(2)])
            with pytest.raises(OSError, match="bad sector"):
                log.append([entry(3)])
        assert [path.name for path in tmp_path.glob("*.segment")] == [FIRST], "an empty segment is not kept"
        log.append([entry(4)])
        assert log.used_bytes >= sum(path.stat().st_size for path in tmp_path.iterdir())
    numbers, report = reopened(tmp_path)
    assert numbers == [1, 4]
    assert report.cut_bytes == 0, "the torn chunk was cut at once"


def test_no_space_for_a_footer_is_no_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.ENOSPC, "full")

    with opened(tmp_path, close=False) as log:
        log.append([entry(1)])
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwritev", refuse)
            log.seal()
        log.append([entry(2)])
    assert reopened(tmp_path)[0] == [1, 2]


def test_sizes_out_of_range_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"disk limit is 1048575 bytes, the least is 1048576"):
        SegmentLog(tmp_path / "new", MIB - 1)
    with pytest.raises(ConfigError, match=r"segments of 3145729 bytes.*524288.*3145728"):
        SegmentLog(tmp_path / "new", 3 * MIB, segment_bytes=3 * MIB + 1)
    assert not (tmp_path / "new").exists()


def test_a_directory_that_can_not_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ResourceError, match=r"file can't be used"):
        SegmentLog(tmp_path / "file", 2 * MIB)
    with pytest.raises(ResourceError, match=r"file/below can't be used: Not a directory"):
        SegmentLog(tmp_path / "file" / "below", 2 * MIB)

    def refuse(*_: object) -> int:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(ResourceError, match=r"dir can't be used: Permission denied"):
        SegmentLog(tmp_path / "dir", 2 * MIB)


def test_a_second_opener_is_told_who_was_first(tmp_path: Path) -> None:
    code = "import pathlib, sys, kvstore.segments.log as log; log.SegmentLog(pathlib.Path(sys.argv[1]), 1 << 21)"
    second = [sys.executable, "-c", code, str(tmp_path)]
    with opened(tmp_path):
        with pytest.raises(InUseError, match=rf"{tmp_path} is in use by process {os.getpid()}"):
            SegmentLog(tmp_path, 64 * MIB)
        done = subprocess.run(second, capture_output=True, text=True, check=False, cwd=Path.cwd())
        assert done.returncode == 1
        assert f"InUseError: {tmp_path} is in use by process {os.getpid()}" in done.stderr
    done = subprocess.run(second, capture_output=True, text=True, check=False, cwd=Path.cwd())
    assert done.returncode == 0, done.stderr


def test_a_scan_reads_the_records_that_a_footer_has(tmp_path: Path) -> None:
    chunks = [[entry(n * 50 + m, 10 + m) for m in range(50)] for n in range(3)]
    write_chunks(tmp_path, *chunks, sealed=False)
    with opened(tmp_path) as log:
        scanned = records(log)
        assert log.settle().scanned == 1
    with opened(tmp_path) as log:
        assert records(log).tobytes() == scanned.tobytes()
        assert log.settle().scanned == 0
