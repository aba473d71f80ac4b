"""Quotas of the disk tier: what leaves for them, stays away, and gives its bytes back."""

import errno
from collections.abc import Iterator
from pathlib import Path

import pytest
from faulty_files import FaultyFiles
from made_pages import make_page_of, read_pages

from kvstore.errors import InvalidRequestError
from kvstore.segments.record import padded
from kvstore.tiers.disk import DiskTier
from kvstore.tiers.tier import PageWrite

MIB = 1 << 20
PAGE = 60_000
FOOTPRINT = padded(PAGE) + 2 * 88
NAMESPACE = bytes([1]) * 32


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyFiles]:
    faulty = FaultyFiles(monkeypatch)
    yield faulty
    faulty.let_go()


def pages_of(namespace: int, count: int) -> list[PageWrite]:
    return [make_page_of(namespace, number, PAGE) for number in range(count)]


def test_what_left_stays_away_after_a_restart_and_its_bytes_come_back(tmp_path: Path) -> None:
    pages, others = pages_of(1, 400), pages_of(2, 10)
    tier = DiskTier(tmp_path, 8 * MIB)
    tier.set_quota(NAMESPACE, 10 * FOOTPRINT)
    tier.write(others)
    for page in pages:  # three times the limit
        assert tier.write([page]) == [True]
        tier.touch([other.key for other in others])
    assert read_pages(tier, others) == [True] * 10, "pages that nobody forgot left for the bytes of those that were"
    assert read_pages(tier, pages) == [number >= 390 for number in range(400)]
    tier.close()
    tier = DiskTier(tmp_path, 8 * MIB)
    assert read_pages(tier, pages) == [number >= 390 for number in range(400)]
    assert tier.used_by(NAMESPACE) == 10 * FOOTPRINT
    tier.close()


def test_a_quota_counts_what_lay_there_at_opening(tmp_path: Path) -> None:
    pages = pages_of(1, 40)
    tier = DiskTier(tmp_path, 16 * MIB, segment_bytes=MIB)
    tier.write(pages[:20])
    tier.write(pages[20:39])
    tier.close()
    tier = DiskTier(tmp_path, 16 * MIB, segment_bytes=MIB)
    tier.set_quota(NAMESPACE, 30 * FOOTPRINT)
    assert tier.write([pages[39]]) == [True]
    here = tier.contains([page.key for page in pages])
    assert here.count(True) == 30
    assert here[-10:] == [True] * 10, "those of the newest segments stay"
    tier.close()


def test_of_one_call_the_head_is_kept_and_the_tail_refused(tmp_path: Path) -> None:
    pages = pages_of(1, 12)
    tier = DiskTier(tmp_path, 16 * MIB)
    tier.set_quota(NAMESPACE, 8 * FOOTPRINT)
    tier.write(pages[10:] + pages[:2])
    assert tier.write(pages[:10]) == [True] * 8 + [False] * 2
    counts = tier.statistics()
    assert (counts.evicted, counts.refused) == (2, 2)
    assert tier.used_by(NAMESPACE) == 8 * FOOTPRINT
    tier.close()


def test_the_tail_of_a_prefix_leaves_before_its_head(tmp_path: Path) -> None:
    pages, more = pages_of(1, 8), [make_page_of(1, 100 + number, PAGE) for number in range(4)]
    tier = DiskTier(tmp_path, 16 * MIB)
    tier.set_quota(NAMESPACE, 8 * FOOTPRINT)
    tier.write(pages)
    for page in more:
        tier.write([page])
    assert tier.contains([page.key for page in pages + more]) == [True] * 4 + [False] * 4 + [True] * 4
    tier.close()


def test_many_pages_leave_in_the_order_of_their_use(tmp_path: Path) -> None:
    """More than are ordered at once, of which some are used again behind that."""
    pages = [make_page_of(1, number, 100) for number in range(600)]
    tier = DiskTier(tmp_path, 64 * MIB)
    tier.set_quota(NAMESPACE, 300 * (4096 + 2 * 88))
    for number, page in enumerate(pages):
        assert tier.write([page]) == [True]
        if number > 310:
            tier.touch([each.key for each in pages[20:30]])
        assert tier.statistics().pages == min(number + 1, 300)
    here = [number for number, found in enumerate(tier.contains([page.key for page in pages])) if found]
    assert here == [*range(20, 30), *range(310, 600)]
    tier.close()


def test_a_write_that_is_refused_costs_no_page(tmp_path: Path, files: FaultyFiles) -> None:
    """By the disk, while it rests, or by the day's limit."""
    now = 0.0
    pages, more = pages_of(1, 8), [make_page_of(1, 100 + number, PAGE) for number in range(8)]
    tier = DiskTier(tmp_path, 16 * MIB, clock=lambda: now, write_limit_bytes=2 * MIB, now=lambda: 0.0)
    tier.set_quota(NAMESPACE, 8 * FOOTPRINT)
    assert tier.write(pages) == [True] * 8
    files.fail(errno.EIO, "write")
    for _ in range(20):
        assert tier.write(more) == [False] * 8
        now += 0.5
    assert read_pages(tier, pages) == [True] * 8
    files.heal()
    now = 1000.0
    assert tier.write(more[:4]) == [True] * 4
    assert read_pages(tier, pages + more[:4]) == [True] * 4 + [False] * 4 + [True] * 4
    while tier._log.budget.take(65_536):
        pass
    assert tier.write(more[4:]) == [False] * 4
    assert read_pages(tier, pages + more) == [True] * 4 + [False] * 4 + [True] * 4 + [False] * 4
    assert (tier.statistics().pages, tier.statistics().evicted) == (8, 4)
    tier.close()


def test_bad_quotas_are_refused(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, MIB)
    with pytest.raises(InvalidRequestError, match="31 bytes, it must have 32"):
        tier.set_quota(b"x" * 31, 1)
    with pytest.raises(InvalidRequestError, match="quota is -1 bytes"):
        tier.set_quota(NAMESPACE, -1)
    tier.close()
