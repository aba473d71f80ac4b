"""Encryption at rest: nothing readable on disk, no nonce twice, nobody else's pages, clear words for a wrong key."""

import itertools
import os
import random
import struct
from pathlib import Path

import numpy as np
import pytest
import xxhash
from made_pages import make_page, read_pages

from kvstore.errors import ConfigError
from kvstore.security.secret_files import read_key_file
from kvstore.segments import record
from kvstore.segments.check import check_log
from kvstore.segments.cipher import SegmentCipher
from kvstore.segments.recovery import recover
from kvstore.tiers.disk import DiskTier
from kvstore.tiers.tier import PageWrite

aead = pytest.importorskip("cryptography.hazmat.primitives.ciphers.aead")

MIB = 1 << 20
KEY = b"k" * 32
PAGES = [make_page(n, 20_000 + n) for n in range(10)]


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.glob("*.segment")}


def fill(directory: Path, key: bytes | None = KEY) -> None:
    tier = DiskTier(directory, 8 * MIB, key=key)
    assert all(tier.write(PAGES))
    tier.close()


def found(directory: Path, key: bytes | None = KEY) -> list[bool]:
    tier = DiskTier(directory, 8 * MIB, key=key)
    try:
        return read_pages(tier, PAGES)
    finally:
        tier.close()


def test_pages_come_back_and_nothing_of_them_is_on_disk(tmp_path: Path) -> None:
    fill(tmp_path)
    data = b"".join(contents(tmp_path).values())
    assert all(page.payload.tobytes()[at : at + 16] not in data for page in PAGES for at in range(0, 20_000, 4000))
    assert found(tmp_path) == [True] * 10
    assert not any(report.damaged for report in check_log(tmp_path)), "checked without the key"


@pytest.mark.parametrize(("key", "words"), [(None, "give the key"), (b"w" * 32, "encrypted with another key")])
@pytest.mark.parametrize("killed", [False, True])
def test_a_wrong_key_is_an_error_that_changes_nothing(
    tmp_path: Path, key: bytes | None, words: str, killed: bool
) -> None:
    fill(tmp_path)
    if killed:
        with next(tmp_path.glob("*.segment")).open("r+b") as file:
            file.truncate(file.seek(0, 2) - 4096)
    before = contents(tmp_path)
    with pytest.raises(ConfigError, match=words):
        DiskTier(tmp_path, 8 * MIB, key=key)
    assert contents(tmp_path) == before
    assert found(tmp_path) == [True] * 10


@pytest.mark.parametrize("damaged_pages", [0, 5])
@pytest.mark.parametrize("sealed", [True, False])
def test_without_its_header_a_page_tells_a_wrong_key(tmp_path: Path, damaged_pages: int, sealed: bool) -> None:
    fill(tmp_path)
    path = next(tmp_path.glob("*.segment"))
    pages = np.sort(np.frombuffer(recover(path, 1).table, record.RECORDS), order="length")
    with path.open("r+b") as file:
        file.write(bytes(4096))
        for page in pages[:damaged_pages]:
            file.seek(int(page["offset"]))
            file.write(bytes(100))
        if not sealed:
            file.truncate(path.stat().st_size - 4096)
    before = contents(tmp_path)
    with pytest.raises(ConfigError, match="encrypted with another key"):
        DiskTier(tmp_path, 8 * MIB, key=b"w" * 32)
    assert contents(tmp_path) == before
    assert found(tmp_path) == [False] * damaged_pages + [True] * (10 - damaged_pages)


def test_without_its_header_a_segment_still_asks_for_a_key(tmp_path: Path) -> None:
    fill(tmp_path)
    path = next(tmp_path.glob("*.segment"))
    path.write_bytes(bytes(4096) + path.read_bytes()[4096:])
    with pytest.raises(ConfigError, match="give the key"):
        DiskTier(tmp_path, 8 * MIB)
    assert found(tmp_path) == [True] * 10


def test_plain_and_encrypted_segments_side_by_side(tmp_path: Path) -> None:
    fill(tmp_path, None)
    tier = DiskTier(tmp_path, 8 * MIB, key=KEY)
    more = [make_page(n, 20_000) for n in range(100, 110)]
    assert all(tier.write(more))
    assert read_pages(tier, [*PAGES, *more]) == [True] * 20
    assert tier.check().damaged == 0
    tier.close()
    assert found(tmp_path) == [True] * 10


def records_of(data: bytes) -> list[int]:
    """Where the records of the footer's table stand."""
    footer, count = struct.unpack_from("<QI", data, len(data) - 4096 + 16 + 24)
    return [footer + 88 * index for index in range(count)]


def reseal(data: bytearray) -> bytes:
    """Checksums made good after a change of the footer's table, as somebody would who can write to the disk."""
    footer, count = struct.unpack_from("<QI", data, len(data) - 4096 + 16 + 24)
    struct.pack_into(
        "<Q", data, len(data) - 4096 + 16 + 40, xxhash.xxh3_64_intdigest(bytes(data[footer : footer + 88 * count]))
    )
    trailer = len(data) - 4096
    struct.pack_into("<Q", data, trailer + 8, xxhash.xxh3_64_intdigest(bytes(data[trailer + 16 :])))
    return bytes(data)


def test_who_changes_bytes_and_checksums_is_found_out(tmp_path: Path) -> None:
    fill(tmp_path)
    path = next(tmp_path.glob("*.segment"))
    data = bytearray(path.read_bytes())
    at = records_of(data)[4]
    offset, _, length = struct.unpack_from("<QQI", data, at + 64)
    data[offset + 100] ^= 1
    struct.pack_into("<Q", data, at + 72, xxhash.xxh3_64_intdigest(bytes(data[offset : offset + length])))
    path.write_bytes(reseal(data))
    assert found(tmp_path) == [n != 4 for n in range(10)]


def test_one_pages_bytes_do_not_pass_for_anothers(tmp_path: Path) -> None:
    same = [
        PageWrite(
            page.key,
            xxhash.xxh3_64_intdigest(bytes(4096) + bytes([n])),
            np.frombuffer(bytes(4096) + bytes([n]), np.uint8),
        )
        for n, page in enumerate(PAGES)
    ]
    tier = DiskTier(tmp_path, 8 * MIB, key=KEY)
    assert all(tier.write(same))
    tier.close()
    path = next(tmp_path.glob("*.segment"))
    data = bytearray(path.read_bytes())
    first, second = records_of(data)[:2]
    data[first : first + 64], data[second : second + 64] = data[second : second + 64], data[first : first + 64]
    path.write_bytes(reseal(data))
    tier = DiskTier(tmp_path, 8 * MIB, key=KEY)
    assert read_pages(tier, same) == [False, False] + [True] * 8
    assert tier.statistics().corrupt == 2
    tier.close()


def test_no_nonce_is_used_twice_under_one_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever fails and is tried again: one key and nonce encrypt one text."""
    used: dict[tuple[bytes, bytes], bytes] = {}
    real_init, real_write, real_aead = SegmentCipher.__init__, os.pwritev, aead.AESGCM

    class Watched:
        def __init__(self, key: bytes) -> None:
            self._key, self._real = key, real_aead(key)

        def encrypt_into(self, nonce: bytes, data, page_key: bytes, into) -> int:
            text = bytes(data)
            assert used.setdefault((self._key, nonce), text) == text
            return self._real.encrypt_into(nonce, data, page_key, into)

        def decrypt_into(self, *values) -> int:
            return self._real.decrypt_into(*values)

    def init(self: SegmentCipher, *values: object) -> None:
        with monkeypatch.context() as patch:
            patch.setattr("cryptography.hazmat.primitives.ciphers.aead.AESGCM", Watched)
            real_init(self, *values)

    rng = random.Random(5)

    def fail_sometimes(fd: int, buffers: list, offset: int) -> int:
        if rng.random() < 0.2:
            raise OSError(5, "no")
        return real_write(fd, buffers, offset)

    monkeypatch.setattr(SegmentCipher, "__init__", init)
    monkeypatch.setattr(os, "pwritev", fail_sometimes)
    now = itertools.count(0, 100)  # so that no failure lasts
    for _ in range(3):
        tier = DiskTier(tmp_path, 2 * MIB, key=KEY, clock=lambda: next(now))
        for _ in range(60):
            page = make_page(rng.randrange(40), rng.choice([100, 20_000]))
            tier.write([page])
            read_pages(tier, [page])
            if rng.random() < 0.2:
                tier.remove([make_page(rng.randrange(40), 1).key])
        tier.close()
    assert len(used) > 40
    assert len({key for key, _ in used}) > 10, "each segment has a key of its own"


def test_key_files(tmp_path: Path) -> None:
    path = tmp_path / "key"

    def put(data: bytes, mode: int = 0o600) -> Path:
        path.write_bytes(data)
        path.chmod(mode)
        return path

    assert read_key_file(put(bytes(range(32)))) == bytes(range(32))
    assert read_key_file(put(b"0aFF" * 16 + b"\n")) == bytes.fromhex("0aff" * 16)
    for data in (b"", b"k" * 31, b"k" * 64, b"0a" * 33, b"\xff" * 64, b"0a" * 5000):
        with pytest.raises(ConfigError, match="must hold 32 bytes or 64 hexadecimal digits"):
            read_key_file(put(data))
    with pytest.raises(ConfigError, match="mode 640: only its owner"):
        read_key_file(put(KEY, 0o640))
    with pytest.raises(ConfigError, match="can't be read: No such file"):
        read_key_file(tmp_path / "none")
    with pytest.raises(ConfigError, match="a disk key has 32 bytes, got 5"):
        DiskTier(tmp_path / "tier", 8 * MIB, key=b"short")


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "cryptography.hazmat.primitives.ciphers.aead", None)
    with pytest.raises(ConfigError, match=r"pip install 'kvstore-offload\[encryption\]'"):
        DiskTier(tmp_path, 8 * MIB, key=KEY)
