"""A disk tier keeps to its limit at every moment."""

import errno
import os
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from disk_tiers import MIB, Clock, bytes_on_disk, opened, refuse
from made_pages import make_page, read_pages

from kvstore.segments.record import BLOCK
from kvstore.segments.write_budget import FILE_BYTES
from kvstore.tiers.tier import PageWrite


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
            assert bytes_on_disk(directory) <= limit, name
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
                assert bytes_on_disk(directory) <= tier.statistics().used_bytes <= limit
            tier.check()
            carried += tier.statistics().carried
    assert calls.count("pwritev") > 100
    assert carried or limit < 4 * MIB


def test_the_limit_holds_where_one_segment_could_fill_it(tmp_path: Path) -> None:
    with opened(tmp_path, MIB, segment_bytes=MIB) as tier:
        for number in range(900):
            assert tier.write([make_page(number, BLOCK * (1 + number % 100 // 99))]) == [True]
            assert bytes_on_disk(tmp_path) <= tier.statistics().used_bytes <= MIB
        assert tier.statistics().evicted > 0


def test_a_smaller_limit_at_opening_drops_the_oldest(tmp_path: Path) -> None:
    pages = [make_page(n, MIB) for n in range(12)]
    with opened(tmp_path, 16 * MIB) as tier:
        tier.write(pages)
    with opened(tmp_path, 6 * MIB) as tier:
        counts = tier.statistics()
        assert bytes_on_disk(tmp_path) <= counts.used_bytes <= 6 * MIB
        found = read_pages(tier, pages)
        assert found == [False] * counts.evicted + [True] * counts.pages
        assert counts.pages >= 4


@pytest.mark.parametrize("length", [1, 4096, 100_000, 2 * MIB - 7 * BLOCK, 2 * MIB - 5 * BLOCK])
def test_a_page_that_just_fits_pushes_all_others_out(tmp_path: Path, length: int) -> None:
    # Lock, segment header, chunk header, table, trailer: five blocks beside the payload.
    with opened(tmp_path, 2 * MIB) as tier:
        assert all(tier.write([make_page(1, 1000), make_page(2, length)])) == (length < MIB)
        assert read_pages(tier, [make_page(2, length)]) == [True]
        assert bytes_on_disk(tmp_path) <= tier.statistics().used_bytes <= 2 * MIB


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
                assert bytes_on_disk(tmp_path / "tier") <= tier.statistics().used_bytes <= 4 * MIB
            assert tier.statistics().errors > 0
        clock.now = 100
        page = make_page(20, 500_000)
        assert tier.write([page]) == [True]
        assert read_pages(tier, [page]) == [True]
        tier.check()


def test_the_file_of_a_new_write_limit_counts_at_once(tmp_path: Path) -> None:
    with opened(tmp_path) as tier:
        before = tier.statistics().used_bytes
        tier.set_write_limit(1 << 30)
        assert tier.statistics().used_bytes == before + FILE_BYTES
        tier.check()
        tier.set_write_limit(0)
        assert tier.statistics().used_bytes == before, "nothing was written, so there is no file"
