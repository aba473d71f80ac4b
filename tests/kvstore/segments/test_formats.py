"""The format as bytes: what an older version wrote is read, what a newer one wrote is refused, with words."""

import struct
from pathlib import Path

import numpy as np
import pytest
import xxhash

from kvstore.errors import FormatError
from kvstore.segments import record, recovery
from kvstore.tiers.disk import DiskTier

pytest.importorskip("cryptography")

MIB = 1 << 20
STAMP = bytes(range(16))
KEYS = [bytes([number]) * 64 for number in (1, 2, 3)]
PAYLOADS = [b"first" * 1000, b"second" * 10, b"third" * 2000]


def closed(magic: bytes, body: bytes, size: int) -> bytes:
    body = body.ljust(size - 16, b"\0")
    return magic + struct.pack("<Q", xxhash.xxh3_64_intdigest(body)) + body


def blocks(length: int) -> int:
    return -(-length // 4096) * 4096


def version_1(*, sealed: bool) -> bytes:
    """A segment as version 1 wrote it, without any of the code under test: three pages, the second one removed."""
    data = closed(b"KVSEGMNT", struct.pack("<IIQ16s", 1, 0, 7, STAMP), 4096)
    table = b""
    for sequence, entries in enumerate(
        [[(KEYS[0], PAYLOADS[0]), (KEYS[1], PAYLOADS[1])], [(KEYS[1], None)], [(KEYS[2], PAYLOADS[2])]]
    ):
        at = len(data) + 4096
        records = payloads = b""
        for key, payload in entries:
            size = 0 if payload is None else len(payload)
            checksum = 0 if payload is None else xxhash.xxh3_64_intdigest(payload)
            records += struct.pack("<64sQQIB3x", key, at + len(payloads), checksum, size, 255 if payload is None else 0)
            payloads += (payload or b"").ljust(blocks(size), b"\0")
        header = struct.pack("<Q16sIIQ8x", 7, STAMP, sequence, len(entries), len(payloads))
        data += closed(b"KVCHUNK1", header + records, 4096) + payloads
        table += records
    if not sealed:
        return data
    trailer = struct.pack("<Q16sQIIQ", 7, STAMP, len(data), 4, 0, xxhash.xxh3_64_intdigest(table))
    return data + table.ljust(4096, b"\0") + closed(b"KVTRAIL1", trailer, 4096)


def read(tier: DiskTier) -> list[bytes | None]:
    into = [np.empty(len(payload), np.uint8) for payload in PAYLOADS]
    answers = tier.read(KEYS, into)
    return [None if answer is None else array.tobytes() for answer, array in zip(answers, into, strict=True)]


@pytest.mark.parametrize("sealed", [True, False])
@pytest.mark.parametrize("key", [None, b"k" * 32])
def test_version_1_is_read_with_and_without_a_key(tmp_path: Path, sealed: bool, key: bytes | None) -> None:
    (tmp_path / f"{7:016x}.segment").write_bytes(version_1(sealed=sealed))
    for _ in range(2):
        tier = DiskTier(tmp_path, 8 * MIB, key=key)
        assert read(tier) == [PAYLOADS[0], None, PAYLOADS[2]]
        assert tier.contains(KEYS) == [True, False, True]
        tier.close()
    assert (tmp_path / f"{7:016x}.segment").read_bytes() == version_1(sealed=True), "nothing of it is changed"


def write(directory: Path, key: bytes | None) -> None:
    tier = DiskTier(directory, 8 * MIB, key=key)
    pages = [
        (key, xxhash.xxh3_64_intdigest(data), np.frombuffer(data, np.uint8))
        for key, data in zip(KEYS, PAYLOADS, strict=True)
    ]
    from kvstore.tiers.tier import PageWrite

    assert tier.write([PageWrite(*page) for page in pages]) == [True] * 3
    tier.close()


def test_what_is_not_encrypted_is_still_written_as_version_1(tmp_path: Path) -> None:
    write(tmp_path, None)
    [path] = tmp_path.glob("*.segment")
    assert struct.unpack_from("<II", path.read_bytes(), 16) == (1, 0)


def test_an_older_version_refuses_what_is_newer_and_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, b"k" * 32)
    [path] = tmp_path.glob("*.segment")
    before = path.read_bytes()
    assert struct.unpack_from("<II", before, 16) == (2, 1)
    monkeypatch.setattr(record, "FORMAT_VERSION", 1)
    assert recovery.record.FORMAT_VERSION == 1
    with pytest.raises(FormatError, match=r"segment format version 2; this version of kvstore reads up to 1. Nothing"):
        DiskTier(tmp_path, 8 * MIB)
    assert path.read_bytes() == before
