import errno
import fcntl
import os
import re
from pathlib import Path

import numpy as np
import pytest

from kvstore.segments.aligned import aligned_empty, is_aligned, stage_write, take_scratch
from kvstore.segments.blockfile import BlockFile
from kvstore.segments.record import BLOCK, ByteArray, padded

CREATE = os.O_RDWR | os.O_CREAT | os.O_EXCL


def noise(seed: int, length: int) -> ByteArray:
    array = aligned_empty(length)
    array[:] = np.random.default_rng(seed).integers(0, 256, length, dtype=np.uint8)
    return array


def is_direct(fd: int) -> bool:
    return bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)


def round_trip(path: Path, **options: bool) -> None:
    data = [noise(seed, blocks * BLOCK) for seed, blocks in enumerate([1, 3, 2])]
    with BlockFile(path, CREATE, **options) as file:
        file.write(data, BLOCK)
        back = [aligned_empty(2 * BLOCK), aligned_empty(4 * BLOCK)]
        assert file.read(back, BLOCK) == 6 * BLOCK
        assert np.array_equal(np.concatenate(back), np.concatenate(data))
        assert file.size() == 7 * BLOCK


@pytest.mark.parametrize("direct", [True, False])
def test_round_trip(tmp_path: Path, direct: bool) -> None:
    round_trip(tmp_path / "file", direct=direct)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o600


def test_open_refuses_o_direct_after_it_made_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # As tmpfs did before Linux 6.6.
    real = os.open

    def refuse(path: Path, flags: int, mode: int = 0o777) -> int:
        if not flags & os.O_DIRECT:
            return real(path, flags, mode)
        os.close(real(path, flags & ~os.O_DIRECT, mode))
        raise OSError(errno.EINVAL, "no O_DIRECT here")

    monkeypatch.setattr(os, "open", refuse)
    round_trip(tmp_path / "file")


def test_write_and_read_refuse_o_direct(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = {"pwritev": os.pwritev, "preadv": os.preadv}
    refused = []

    def refuse(name: str):
        def call(fd: int, buffers: list, offset: int) -> int:
            if is_direct(fd):
                refused.append(name)
                raise OSError(errno.EINVAL, "no O_DIRECT here")
            return real[name](fd, buffers, offset)

        return call

    for name in real:
        monkeypatch.setattr(os, name, refuse(name))
    round_trip(tmp_path / "file")
    with BlockFile(tmp_path / "file", os.O_RDONLY) as file:
        assert file.read([aligned_empty(BLOCK)], 0) == BLOCK
    assert refused == ["pwritev", "preadv"], "each open file is refused once"


def test_einval_without_o_direct_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.EINVAL, "refused")

    monkeypatch.setattr(os, "pwritev", refuse)
    with BlockFile(tmp_path / "file", CREATE) as file, pytest.raises(OSError, match="refused"):
        file.write([noise(1, BLOCK)], 0)


@pytest.mark.parametrize("most", [BLOCK, BLOCK + 1, 3 * BLOCK - 1])
def test_partial_writes_and_reads_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    real_write, real_read = os.pwritev, os.preadv

    def first(buffers: list, count: int) -> list:
        taken = []
        for buffer in buffers:
            taken.append(buffer[:count])
            count -= len(taken[-1])
        return taken

    monkeypatch.setattr(os, "pwritev", lambda fd, buffers, offset: real_write(fd, first(buffers, most), offset))
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: real_read(fd, first(buffers, most), offset))
    round_trip(tmp_path / "file", direct=False)


def test_a_write_that_gets_nowhere_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pwritev", lambda *_: BLOCK - 1)
    with BlockFile(tmp_path / "file", CREATE) as file, pytest.raises(OSError, match="less than a block"):
        file.write([noise(1, BLOCK)], 0)


def test_more_buffers_than_a_call_takes(tmp_path: Path) -> None:
    data = noise(1, 1500 * BLOCK)
    buffers = [data[at : at + BLOCK] for at in range(0, len(data), BLOCK)]
    back = aligned_empty(len(data))
    with BlockFile(tmp_path / "file", CREATE) as file:
        file.write(buffers, 0)
        assert file.read([back[at : at + BLOCK] for at in range(0, len(data), BLOCK)], 0) == len(data)
    assert np.array_equal(back, data)


def test_a_read_past_the_end_says_so(tmp_path: Path) -> None:
    with BlockFile(tmp_path / "file", CREATE) as file:
        file.write([noise(1, 2 * BLOCK)], 0)
        assert file.read([aligned_empty(5 * BLOCK)], BLOCK) == BLOCK


@pytest.mark.parametrize("shift", [0, 1, 512, 4095])
@pytest.mark.parametrize("length", [1, 4095, 4096, 4097, 3 * 4096, 70_001, 17 << 20])
def test_staging_gives_aligned_padded_buffers(shift: int, length: int) -> None:
    memory = aligned_empty(shift + length + 1)
    payload = memory[shift : shift + length]
    payload[:] = noise(length, length)
    other = noise(2, 100)
    stage_write([noise(3, 1 << 20)[1:]])  # leaves something in the thread's memory
    buffers = stage_write([other, payload])
    assert all(is_aligned(buffer) and len(buffer) % BLOCK == 0 for buffer in buffers)
    staged = np.concatenate(buffers)
    assert len(staged) == BLOCK + padded(length)
    assert np.array_equal(staged[BLOCK : BLOCK + length], payload)
    assert not staged[100:BLOCK].any()
    assert not staged[BLOCK + length :].any(), "padding holds what is no one's business"
    if shift == 0:
        assert sum(not np.shares_memory(buffer, payload) for buffer in buffers) == 1 + (length % BLOCK > 0)


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="a kernel without huge pages")
@pytest.mark.parametrize("length", [BLOCK, 2 << 20, 3 << 20, 24 << 20])
def test_reads_go_to_memory_that_may_be_huge_pages(length: int) -> None:
    memory = take_scratch(length)
    assert len(memory) == length
    start = memory.__array_interface__["data"][0]
    assert start % (2 << 20) == 0
    mappings = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE)
    around = [text for text in mappings if text and within(start, text) and within(start + length - 1, text)]
    assert len(around) == 1
    flags = re.search(r"^VmFlags:(.*)$", around[0], re.MULTILINE)
    assert flags is not None
    assert "hg" in flags[1].split()


def within(address: int, mapping: str) -> bool:
    """Whether an address lies in a mapping of ``/proc/self/smaps``."""
    first, end = mapping.partition(" ")[0].split("-")
    return int(first, 16) <= address < int(end, 16)
