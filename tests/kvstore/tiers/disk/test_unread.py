"""A segment that the system refuses to read may hold anything: no tombstone newer than it may be lost."""

import errno
from pathlib import Path

import pytest
from made_pages import make_page

from kvstore.segments import log
from kvstore.segments.record import BLOCK
from kvstore.segments.recovery import RecoveredSegment
from kvstore.segments.segment import Segment
from kvstore.tiers.disk import DiskTier
from kvstore.tiers.disk.catalog import DiskCatalog

MIB = 1 << 20
KEY, OTHER = bytes(63) + b"1", bytes(63) + b"2"


def with_tombstones(segment: int, *keys: bytes) -> Segment:
    made = Segment(Path("nowhere"), segment, None, BLOCK, direct=False, patience=None)
    made.add_tombstones(keys)
    return made


def test_a_tombstone_is_pending_while_an_unread_segment_may_hold_the_page() -> None:
    catalog = DiskCatalog(MIB)
    assert catalog.evict_segment(with_tombstones(2, KEY), behind_unread=False) == ([], []), "nothing older holds it"
    assert catalog.evict_segment(with_tombstones(3, KEY), behind_unread=True) == ([], [KEY])
    catalog.segment_not_deleted(3, [OTHER])
    catalog.forget([OTHER])
    assert sorted(catalog.pending_tombstones()) == [KEY, OTHER]
    catalog.segment_deleted(3)
    assert catalog.pending_tombstones() == [KEY], "the other one lay in the deleted segment, and nowhere else"


def test_a_removed_page_stays_away_when_its_segment_can_be_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = [make_page(number, 300_000) for number in range(6)]

    def refuse_the_first(path: Path, segment: int) -> RecoveredSegment:
        if segment == 1:
            raise OSError(errno.EIO, "refused")
        return recover(path, segment)

    recover = log.recover
    tier = DiskTier(tmp_path, 8 * MIB, segment_bytes=MIB)
    tier.write(pages[:4])  # the last one is in the second segment
    tier.remove([pages[0].key])
    tier.close()
    with monkeypatch.context() as patch:
        patch.setattr(log, "recover", refuse_the_first)
        tier = DiskTier(tmp_path, 8 * MIB, segment_bytes=MIB)
        assert tier.contains([page.key for page in pages[:4]]) == [False, False, False, True]
        tier.write(pages[4:])
        tier.remove([pages[3].key])
        assert not (tmp_path / f"{2:016x}.segment").exists(), "the test wants the tombstone's segment to go"
        tier.close()
    tier = DiskTier(tmp_path, 8 * MIB, segment_bytes=MIB)
    assert tier.contains([page.key for page in pages]) == [False, True, True, False, True, True]
    tier.close()
