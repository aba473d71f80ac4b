"""What is counted of loads and stores: by namespace, and of the prefixes that are loaded most."""

from __future__ import annotations

import pytest

from kvstore.namespaces import usage
from kvstore.namespaces.usage import HotPrefix, NamespaceCounts, Usage
from kvstore.page_codes import PageTier

A = b"a" * 32


def key(number: int) -> bytes:
    return A + number.to_bytes(32, "big")


def keys(*numbers: int) -> list[bytes]:
    return [key(number) for number in numbers]


@pytest.fixture
def counted() -> Usage:
    return Usage()


def test_pages_add_up_to_those_that_were_asked_for_and_offered(counted: Usage) -> None:
    counted.loaded(1, keys(1, 2, 3, 4), bytes([PageTier.ARENA, PageTier.DISK, PageTier.REDIS]), 1, 100)
    counted.stored(1, 100, stored=3, present=2, refused=1)
    assert counted.of(1) == counted.total == NamespaceCounts(1, 1, 1, 1, 3, 2, 1)
    assert (counted.loaded_bytes, counted.stored_bytes) == (300, 300)
    counted.forget(1, A, "mine")
    assert counted.of(1) == NamespaceCounts() and counted.total.stored == 3
    assert {tenant: counts["stored"] for tenant, counts in counted.gone.items()} == {"mine": 3}


def test_the_hottest_prefix_is_the_one_that_brought_most_pages(counted: Usage) -> None:
    for turn in range(3):  # they share four pages
        counted.loaded(1, keys(1, 2, 3, 4, 50 + turn), bytes([PageTier.ARENA]) * 5, 0, 1)
    for _ in range(5):
        counted.loaded(1, keys(7, 8), bytes([PageTier.ARENA]), 1, 1)
    assert counted.hottest(2) == [HotPrefix(A, key(4)[32:], 4, 3), HotPrefix(A, key(7)[32:], 1, 5)]


def test_what_was_not_loaded_is_not_hot(counted: Usage) -> None:
    counted.loaded(1, keys(1, 2), b"", 2, 1)
    counted.loaded(1, [], b"", 0, 1)
    assert counted.hottest(10) == []


def test_it_does_not_grow_and_what_is_hot_stays(counted: Usage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage, "MOST_PREFIXES", 8)
    for number in range(1000):
        counted.loaded(1, keys(1), bytes([PageTier.ARENA]), 0, 1)
        counted.loaded(1, keys(100 + number), bytes([PageTier.ARENA]), 0, 1)
        assert len(counted._prefixes) <= 8
    assert counted.hottest(1)[0].last == key(1)[32:]
