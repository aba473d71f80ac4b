import errno
import fcntl
import os
import random
import select
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.errors import ConfigError, FormatError, InUseError, InvalidRequestError, ResourceError
from kvstore.segments import record
from kvstore.segments.aligned import aligned_empty
from kvstore.segments.record import BLOCK, SegmentHeader
from kvstore.testing import TierContract, make_page, read_pages
from kvstore.tiers.disk import CheckReport, DiskTier
from kvstore.tiers.tier import PageWrite, Tier

MIB = 1 << 20


@contextmanager
def opened(directory: Path, limit_bytes: int = 16 * MIB, **options: Any) -> Iterator[DiskTier]:
    tier = DiskTier(directory, limit_bytes, **options)
    try:
        yield tier
    finally:
        tier.close()


def killed(directory: Path, copy: Path) -> Path:
    """What a process that is killed now would leave."""
    shutil.copytree(directory, copy)
    return copy


def files_bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.iterdir())


def segments(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.segment"))


def refuse(number: int) -> Callable[..., int]:
    def call(*_: object, **__: object) -> int:
        raise OSError(number, os.strerror(number))

    return call


class Clock:
    """Seconds that a test moves by itself."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


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


# --- survival


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
from kvstore.testing import make_page
from kvstore.tiers.disk import DiskTier
tier = DiskTier(Path(sys.argv[1]), 256 << 20)
for number in range(0, 100_000, 4):
    if all(tier.write([make_page(n, 50_000) for n in range(number, number + 4)])):
        print(number, flush=True)
"""
    for kill, most in enumerate([1, 30, 70]):
        command = [sys.executable, "-c", code, str(tmp_path / str(kill))]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path.cwd()) as writer:
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


# --- damage


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


DAMAGED = [make_page(1, 5000), make_page(2, 4096), make_page(3, 1), make_page(4, 5000)]


def sample_directory(directory: Path, *, sealed: bool) -> bytes:
    """One segment: three pages in a chunk, a tombstone for the last, another page. Returns its bytes."""
    with opened(directory) as tier:
        assert tier.write(DAMAGED[:3]) == [True] * 3
        assert tier.remove([DAMAGED[2].key]) == 1
        assert tier.write(DAMAGED[3:]) == [True]
        if not sealed:
            return segments(directory)[0].read_bytes()
    return segments(directory)[0].read_bytes()


# Where each region of that segment starts.
CHUNK = BLOCK
PAYLOAD = 2 * BLOCK  # 5000 bytes in two blocks, 4096 in one, 1 in one
TOMBSTONES = 6 * BLOCK
LAST_CHUNK = 7 * BLOCK
LAST_PAYLOAD = 8 * BLOCK
FOOTER = 10 * BLOCK
TRAILER = 11 * BLOCK
HEADER_FIELDS = 64
REGIONS = {
    "segment header": [*range(48), 100, CHUNK - 1],
    "chunk header": [*range(CHUNK, CHUNK + HEADER_FIELDS)],
    "record table": [*range(CHUNK + HEADER_FIELDS, CHUNK + HEADER_FIELDS + 3 * 88, 3)],
    "header padding": [CHUNK + 500, PAYLOAD - 1],
    "payload": [PAYLOAD, PAYLOAD + 2500, PAYLOAD + 4999, PAYLOAD + 2 * BLOCK, PAYLOAD + 3 * BLOCK],
    "payload padding": [PAYLOAD + 5000, PAYLOAD + 2 * BLOCK - 1, PAYLOAD + 3 * BLOCK + 1, TOMBSTONES - 1],
    "tombstone": [*range(TOMBSTONES, TOMBSTONES + HEADER_FIELDS + 88, 5), LAST_CHUNK - 1],
    "last chunk header": [*range(LAST_CHUNK, LAST_CHUNK + HEADER_FIELDS + 88, 5), LAST_PAYLOAD - 1],
    "last payload": [LAST_PAYLOAD, LAST_PAYLOAD + 4999],
    "footer table": [*range(FOOTER, FOOTER + 5 * 88, 7), TRAILER - 1],
    "trailer": [*range(TRAILER, TRAILER + 72), TRAILER + BLOCK - 1],
}


@pytest.mark.parametrize("sealed", [True, False], ids=["sealed", "unsealed"])
@pytest.mark.parametrize("region", REGIONS)
def test_a_flipped_byte_anywhere_is_a_miss_or_nothing(shm: Path, region: str, sealed: bool) -> None:
    tmp_path = shm  # hundreds of directories that are opened, flushed and closed
    data = sample_directory(tmp_path / "sample", sealed=sealed)
    assert len(data) == (TRAILER + BLOCK if sealed else FOOTER)
    in_payload = {0: range(PAYLOAD, PAYLOAD + 5000), 1: range(PAYLOAD + 2 * BLOCK, PAYLOAD + 3 * BLOCK)}
    in_payload[3] = range(LAST_PAYLOAD, LAST_PAYLOAD + 5000)
    for at in REGIONS[region]:
        if at >= len(data):
            continue
        directory = tmp_path / str(at)
        directory.mkdir()
        path = directory / f"{1:016x}.segment"
        damaged = bytearray(data)
        damaged[at] ^= 0x10
        path.write_bytes(damaged)
        for _ in range(2):  # opening cuts and seals: what it made of the damage is opened again
            with opened(directory) as tier:
                found = read_pages(tier, DAMAGED)  # compares all bytes
                counts = tier.statistics()
                assert counts.missed == found.count(False)
                assert counts.hit + counts.missed == counts.asked == 4
                hit_by = [index for index, extent in in_payload.items() if at in extent]
                if sealed or region in ("segment header", "payload", "payload padding", "last payload"):
                    # One flip in a sealed segment, or in an unsealed one outside of chunk headers, costs no other page.
                    assert found == [index != 2 and index not in hit_by for index in range(4)]
                assert counts.corrupt <= len(hit_by)
                assert tier.write(DAMAGED) == [True] * 4, "every page can be stored again"
                assert read_pages(tier, DAMAGED) == [True] * 4
            shutil.rmtree(directory)
            directory.mkdir()
            path.write_bytes(damaged)


def test_a_page_damaged_while_the_tier_is_open_is_a_counted_miss(tmp_path: Path) -> None:
    pages = [make_page(n, 5000) for n in range(3)]
    with opened(tmp_path) as tier:
        tier.write(pages)
        flip(segments(tmp_path)[0], PAYLOAD + 2 * BLOCK + 4999)
        assert tier.check() == CheckReport(3, 1, 15_000)
        assert tier.statistics().asked == 0, "a check counts nothing"
        assert read_pages(tier, pages) == [True, False, True]
        counts = tier.statistics()
        assert (counts.hit, counts.missed, counts.corrupt, counts.errors, counts.pages) == (2, 1, 1, 0, 2)
        assert tier.contains([page.key for page in pages]) == [True, False, True]
        assert tier.check() == CheckReport(2, 0, 10_000)


def test_only_the_checksum_stands_between_damage_and_the_reader(tmp_path: Path) -> None:
    page = make_page(1, 5000)
    with opened(tmp_path, verify=False) as tier:
        tier.write([page])
        flip(segments(tmp_path)[0], PAYLOAD)
        into = np.empty(5000, dtype=np.uint8)
        assert tier.read([page.key], [into]) == [page.checksum]
        assert int((into != page.payload).sum()) == 1


def test_a_file_cut_short_under_the_tier_is_a_miss(tmp_path: Path) -> None:
    pages = [make_page(n, 2 * BLOCK) for n in range(3)]
    into = [aligned_empty(2 * BLOCK) for _ in pages]
    with opened(tmp_path, direct=False) as tier:
        tier.write(pages)
        os.truncate(segments(tmp_path)[0], PAYLOAD + 3 * BLOCK)
        for page, array in zip(pages, into, strict=True):
            array[:] = page.payload  # the right bytes are there already: they prove nothing
        assert tier.read([page.key for page in pages], into) == [pages[0].checksum, None, None]
        assert tier.statistics().corrupt == 2


def test_a_file_deleted_under_the_tier_is_a_miss(tmp_path: Path) -> None:
    page = make_page(1, 5000)
    with opened(tmp_path) as tier:
        tier.write([page])
        segments(tmp_path)[0].unlink()
        assert read_pages(tier, [page]) == [False]
        assert tier.statistics().errors == 1


# --- the limit


@pytest.mark.parametrize(
    ("limit", "segment_bytes"), [(MIB, None), (MIB, MIB), (8 * MIB, None), (9 * MIB + 12_345, None)]
)
def test_the_limit_holds_after_every_single_system_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int, segment_bytes: int | None
) -> None:
    directory = tmp_path / "tier"
    calls = []

    def watched(name: str) -> Callable[..., object]:
        real = getattr(os, name)

        def call(*args: object, **options: object) -> object:
            answer = real(*args, **options)
            assert files_bytes(directory) <= limit, name
            calls.append(name)
            return answer

        return call

    for name in ("pwritev", "ftruncate"):
        monkeypatch.setattr(os, name, watched(name))
    rng = random.Random(limit)
    number = carried = 0
    for _ in range(4):
        with opened(directory, limit, segment_bytes=segment_bytes) as tier:
            for _ in range(40):
                length = rng.choice([100, 5000, 70_000, 300_000, 1_500_000, 3_000_000])
                batch = [make_page(number + step, length) for step in range(rng.randint(1, 6))]
                number += len(batch)
                answers = tier.write(batch)
                assert answers == tier.contains([page.key for page in batch]), "what is here is what was answered"
                assert answers[-1] == (length + 5 * BLOCK < limit)
                for _ in range(3):  # so that there is something to carry over
                    read_pages(tier, [batch[0]])
                if rng.random() < 0.3:
                    tier.remove([make_page(rng.randrange(number), 1).key for _ in range(5)])
                assert files_bytes(directory) <= tier.statistics().used_bytes <= limit
            tier.check()
            carried += tier.statistics().carried
    assert calls.count("pwritev") > 100
    assert carried or limit < 4 * MIB


def test_the_limit_holds_where_one_segment_could_fill_it(tmp_path: Path) -> None:
    with opened(tmp_path, MIB, segment_bytes=MIB) as tier:
        for number in range(900):
            assert tier.write([make_page(number, BLOCK * (1 + number % 100 // 99))]) == [True]
            assert files_bytes(tmp_path) <= tier.statistics().used_bytes <= MIB
        assert tier.statistics().evicted > 0


def test_a_smaller_limit_at_opening_drops_the_oldest(tmp_path: Path) -> None:
    pages = [make_page(n, MIB) for n in range(12)]
    with opened(tmp_path, 16 * MIB) as tier:
        tier.write(pages)
    with opened(tmp_path, 6 * MIB) as tier:
        counts = tier.statistics()
        assert files_bytes(tmp_path) <= counts.used_bytes <= 6 * MIB
        found = read_pages(tier, pages)
        assert found == [False] * counts.evicted + [True] * counts.pages
        assert counts.pages >= 4


@pytest.mark.parametrize("length", [1, 4096, 100_000, 2 * MIB - 7 * BLOCK, 2 * MIB - 5 * BLOCK])
def test_a_page_that_just_fits_pushes_all_others_out(tmp_path: Path, length: int) -> None:
    # Lock, segment header, chunk header, table, trailer: five blocks beside the payload.
    with opened(tmp_path, 2 * MIB) as tier:
        assert all(tier.write([make_page(1, 1000), make_page(2, length)])) == (length < MIB)
        assert read_pages(tier, [make_page(2, length)]) == [True]
        assert files_bytes(tmp_path) <= tier.statistics().used_bytes <= 2 * MIB


def test_one_byte_more_is_refused(tmp_path: Path) -> None:
    with opened(tmp_path, 2 * MIB) as tier:
        tier.write([make_page(1, 1000)])
        assert tier.write([make_page(2, 2 * MIB - 5 * BLOCK + 1)]) == [False]
        assert tier.statistics().refused == 1
        assert read_pages(tier, [make_page(1, 1000)]) == [True]


def test_an_empty_page_is_refused(tmp_path: Path) -> None:
    with opened(tmp_path) as tier:
        assert tier.write([PageWrite(bytes(64), 0, np.empty(0, dtype=np.uint8))]) == [False]
        assert tier.statistics().refused == 1


def test_a_segment_that_can_not_be_deleted_stops_the_writes_and_not_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    with opened(tmp_path / "tier", 4 * MIB, clock=clock) as tier:
        stored = [make_page(n, 500_000) for n in range(7)]
        assert all(tier.write(stored))
        with monkeypatch.context() as patch:
            patch.setattr(Path, "unlink", refuse(errno.EIO))
            for number in range(10, 15):
                tier.write([make_page(number, 500_000)])
                assert files_bytes(tmp_path / "tier") <= tier.statistics().used_bytes <= 4 * MIB
            assert tier.statistics().errors > 0
        clock.now = 100
        page = make_page(20, 500_000)
        assert tier.write([page]) == [True]
        assert read_pages(tier, [page]) == [True]
        tier.check()


# --- faults


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
        assert files_bytes(tmp_path / "tier") <= counts.used_bytes
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
from kvstore.testing import make_page, read_pages
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
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, cwd=Path.cwd())


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


# --- bad input


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


# --- I/O in large pieces


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


# --- threads


def test_making_room_waits_for_a_reader_who_gets_his_own_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = make_page(1, 500_000)
    in_read, go_on, in_wait = threading.Event(), threading.Event(), threading.Event()
    real_preadv, real_wait_for = os.preadv, threading.Condition.wait_for

    def slow(*args: object) -> int:
        in_read.set()
        assert go_on.wait(30)
        return real_preadv(*args)

    def watched(self: threading.Condition, *args: object, **options: object) -> object:
        if self is oldest._state and oldest._readers:
            in_wait.set()
        return real_wait_for(self, *args, **options)

    answers: list[list[bool]] = []
    with opened(tmp_path, 2 * MIB, segment_bytes=MIB) as tier:
        tier.write([first])
        oldest = tier._log.segments[0]
        monkeypatch.setattr(os, "preadv", slow)
        reader = threading.Thread(target=lambda: answers.append(read_pages(tier, [first])))
        reader.start()
        assert in_read.wait(30)
        monkeypatch.setattr(threading.Condition, "wait_for", watched)
        rest = [make_page(n, 500_000) for n in range(2, 6)]
        writer = threading.Thread(target=lambda: answers.append([tier.write([page])[0] for page in rest]))
        writer.start()
        assert in_wait.wait(30)
        assert oldest.path.exists(), "the bytes are not free while someone reads them"
        assert tier.contains([first.key]) == [False], "but no one else finds them"
        go_on.set()
        reader.join(30)
        writer.join(30)
        assert answers == [[True], [True] * 4]
        assert not oldest.path.exists()
        tier.check()


def test_readers_under_constant_reclaim_never_get_other_bytes(tmp_path: Path) -> None:
    pages = [make_page(n, 40_000 + n) for n in range(60)]
    done = threading.Event()

    def read(seed: int) -> int:
        rng = random.Random(seed)
        found = 0
        while not done.is_set():
            found += sum(read_pages(tier, rng.sample(pages, 4)))
        return found

    with opened(tmp_path, 2 * MIB, segment_bytes=MIB) as tier, ThreadPoolExecutor(2) as readers:
        found = [readers.submit(read, seed) for seed in range(2)]
        try:
            rng = random.Random(9)
            for _ in range(400):
                batch = rng.sample(pages, 3)
                here = tier.contains([page.key for page in batch])
                answers = tier.write(batch)
                # One that was here already may have to leave for the new ones; the newest of those is here.
                assert all(here) or [answer for answer, was in zip(answers, here, strict=True) if not was][-1]
                if rng.random() < 0.1:
                    tier.remove([rng.choice(pages).key])
        finally:
            done.set()
        assert min(future.result(30) for future in found) > 0
        counts = tier.statistics()
        assert counts.evicted > 100, "the test made no room"
        assert counts.corrupt == counts.errors == 0
        assert counts.asked == counts.hit + counts.missed
        assert tier.check().damaged == 0


def test_two_writers_of_the_same_pages_store_each_once(tmp_path: Path) -> None:
    pages = [make_page(n, 5000) for n in range(50)]
    together = threading.Barrier(2)
    answers: list[list[bool]] = []

    def write() -> None:
        together.wait(30)
        answers.append([tier.write([page])[0] for page in pages])

    with opened(tmp_path) as tier:
        writers = [threading.Thread(target=write) for _ in range(2)]
        for writer in writers:
            writer.start()
        for writer in writers:
            writer.join(30)
        assert answers == [[True] * 50] * 2
        assert tier.statistics().stored == 50


def test_a_process_that_ends_lets_the_directory_go(tmp_path: Path) -> None:
    code = """
import sys
from pathlib import Path
from kvstore.tiers.disk import DiskTier
tier = DiskTier(Path(sys.argv[1]), 8 << 20)
print("open", flush=True)
sys.stdin.read()
"""
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=Path.cwd()) as owner:
        assert owner.stdout is not None
        select.select([owner.stdout], [], [], 30)
        with pytest.raises(InUseError, match=f"is in use by process {owner.pid}"):
            DiskTier(tmp_path, 8 * MIB)
        owner.kill()
    with opened(tmp_path, 8 * MIB):
        pass
