"""What was found is taken out once, by who reads it, while its lease lasts."""

from __future__ import annotations

from fake_clock import FakeClock

from kvstore import PendingLoad
from kvstore.connector.hicache.found_pages import FoundPages, FoundPart

A, B, C, D = (bytes([number]) * 32 for number in range(4))


def part(*hashes: bytes, until: float = 2000.0) -> FoundPart:
    return FoundPart(hashes, PendingLoad([], [], lambda: 0), 100 * len(hashes), until)


def test_a_part_is_taken_by_its_first_page_once() -> None:
    found = FoundPages(FakeClock().monotonic)
    mine = part(A, B)
    found.add(mine)
    assert found.held_bytes == 200
    assert found.take([B]) is None
    assert found.take([A, C]) is None, "other pages behind the first one"
    assert found.take([A, B, C]) is mine
    assert found.take([A, B]) is None
    assert found.held_bytes == 0
    assert found.take([]) is None


def test_a_part_may_have_more_than_is_read() -> None:
    found = FoundPages(FakeClock().monotonic)
    mine = part(A, B, C)
    found.add(mine)
    assert found.take([A, B]) is mine


def test_two_requests_with_one_prompt_have_a_part_each_and_the_latest_goes_first() -> None:
    found = FoundPages(FakeClock().monotonic)
    first, second = part(A, until=2000.0), part(A, until=2001.0)
    found.add(first)
    found.add(second)
    assert found.held_bytes == 200
    assert found.take([A]) is second
    assert found.take([A]) is first


def test_what_nobody_read_in_time_is_handed_back_and_not_read() -> None:
    clock = FakeClock()
    found = FoundPages(clock.monotonic)
    old, other, new = part(A, until=clock.now + 1), part(B, until=clock.now + 1), part(A, until=clock.now + 3)
    for each in (old, other, new):
        found.add(each)
    assert found.take_late() is None
    clock.now += 2
    assert found.held_bytes == 100
    assert found.take([B]) is None
    assert [found.take_late(), found.take_late(), found.take_late()] == [old, other, None]
    assert found.take([A]) is new
