"""Damaged, cut and deleted files of a disk tier: a miss, never other bytes."""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from disk_tiers import flip, opened, segments
from made_pages import make_page, read_pages

from kvstore.segments.aligned import aligned_empty
from kvstore.segments.record import BLOCK
from kvstore.tiers.disk import CheckReport

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
