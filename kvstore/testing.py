"""What tests of several parts share: contracts that every implementation of a protocol passes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import numpy as np
import xxhash

from kvstore.tiers.tier import FINGERPRINT_BYTES, KEY_BYTES, PageBytes, PageWrite, Tier

PAGE_BITS = 18
"""A page of 256 KiB, where its size does not matter."""


def make_page(number: int, length: int) -> PageWrite:
    """The page of this number: a key and ``length`` bytes of payload that no other number has."""
    payload = np.random.default_rng(number).integers(0, 256, length, dtype=np.uint8)
    return PageWrite(number.to_bytes(KEY_BYTES, "big"), xxhash.xxh3_64_intdigest(payload.data), payload)


def make_page_of(namespace: int, number: int, length: int) -> PageWrite:
    """The page of this number, in a namespace that is told by a number from 1 to 255."""
    page = make_page(number, length)
    return page._replace(key=bytes([namespace]) * FINGERPRINT_BYTES + page.key[FINGERPRINT_BYTES:])


def read_pages(tier: Tier, pages: Sequence[PageWrite]) -> list[bool]:
    """Read pages back from a tier. Returns which were found; those have exactly the bytes of ``pages``."""
    into = [np.empty_like(page.payload) for page in pages]
    answers = tier.read([page.key for page in pages], into)
    for page, array, answer in zip(pages, into, answers, strict=True):
        if answer is not None:
            assert answer == page.checksum, "the checksum of another page"
            assert np.array_equal(array, page.payload), "wrong bytes"
    return [answer is not None for answer in answers]


class TierContract:
    """What every tier promises (:class:`kvstore.tiers.tier.Tier`).

    A test class derives from it and has a fixture ``open_tier``: a function that opens a tier over storage that is the
    test's own, empty at first and the same at each call, with a limit of 16 MiB.
    """

    @contextmanager
    def opened(self, open_tier: Callable[[], Tier]) -> Iterator[Tier]:
        """The tier, closed in the end."""
        with ExitStack() as stack:
            tier = open_tier()
            stack.callback(tier.close)
            yield tier

    def test_what_was_written_is_found(self, open_tier: Callable[[], Tier]) -> None:
        """Pages of all sizes come back, byte for byte, in one read."""
        pages = [make_page(n, length) for n, length in enumerate([1, 511, 4096, 4097, 65536, 100_000, 1 << 20])]
        with self.opened(open_tier) as tier:
            assert tier.write(pages) == [True] * len(pages)
            assert tier.contains([page.key for page in pages]) == [True] * len(pages)
            assert read_pages(tier, pages[::-1]) == [True] * len(pages)

    def test_any_memory_will_do(self, open_tier: Callable[[], Tier]) -> None:
        """Payloads and destinations may start at any address."""
        with self.opened(open_tier) as tier:
            for number, shift in enumerate([0, 1, 8, 512, 4095]):
                page = make_page(number, 20_000)
                memory = np.zeros(30_000, dtype=np.uint8)
                source = memory[shift : shift + 20_000]
                source[:] = page.payload
                assert tier.write([page._replace(payload=source)]) == [True]
                memory[:] = 7
                assert tier.read([page.key], [source]) == [page.checksum]
                assert np.array_equal(source, page.payload)
                assert set(memory[:shift]) | set(memory[shift + 20_000 :]) <= {7}, "wrote beside the array"

    def test_a_page_never_written_is_a_miss(self, open_tier: Callable[[], Tier]) -> None:
        """Unknown keys are answered, between known ones, and counted."""
        here, absent = make_page(1, 5000), make_page(2, 5000)
        with self.opened(open_tier) as tier:
            tier.write([here])
            assert tier.contains([absent.key, here.key]) == [False, True]
            assert read_pages(tier, [absent, here, absent]) == [False, True, False]
            counts = tier.statistics()
            assert (counts.asked, counts.hit, counts.missed, counts.corrupt) == (3, 1, 2, 0)

    def test_a_page_that_is_here_is_not_stored_again(self, open_tier: Callable[[], Tier]) -> None:
        """The same key twice, in one call and in two, is one page."""
        page = make_page(1, 5000)
        with self.opened(open_tier) as tier:
            assert tier.write([page, page]) == [True, True]
            assert tier.write([page]) == [True]
            counts = tier.statistics()
            assert (counts.stored, counts.pages) == (1, 1)

    def test_an_array_of_another_length_is_a_miss(self, open_tier: Callable[[], Tier]) -> None:
        """A page never fills an array that is not of its length."""
        page = make_page(1, 5000)
        with self.opened(open_tier) as tier:
            tier.write([page])
            assert tier.read([page.key], [np.empty(4999, dtype=np.uint8)]) == [None]
            assert tier.read([page.key], [np.empty(5001, dtype=np.uint8)]) == [None]
            assert read_pages(tier, [page]) == [True]

    def test_a_payload_that_is_not_what_its_checksum_says_is_a_miss(self, open_tier: Callable[[], Tier]) -> None:
        """A caller's error is found at reading, counted, and forgotten: the right page can be stored after it."""
        page = make_page(1, 5000)
        with self.opened(open_tier) as tier:
            tier.write([page._replace(payload=page.payload[::-1].copy())])
            assert read_pages(tier, [page]) == [False]
            assert tier.contains([page.key]) == [False]
            assert tier.statistics().corrupt == 1
            assert tier.write([page]) == [True]
            assert read_pages(tier, [page]) == [True]

    def test_pages_outlive_the_tier(self, open_tier: Callable[[], Tier]) -> None:
        """What was there at closing is there at opening."""
        pages = [make_page(n, 70_000) for n in range(20)]
        with self.opened(open_tier) as tier:
            assert all(tier.write(pages))
        with self.opened(open_tier) as tier:
            assert read_pages(tier, pages) == [True] * 20
            # A tier that nodes share counts what its servers said last.
            end = time.monotonic() + 20.0
            while tier.statistics().pages != 20 and time.monotonic() < end:
                time.sleep(0.01)
            assert tier.statistics().pages == 20

    def test_a_removed_page_is_gone_for_good(self, open_tier: Callable[[], Tier]) -> None:
        """Removed is removed, also over restarts, until it is stored again."""
        kept, removed = make_page(1, 5000), make_page(2, 5000)
        with self.opened(open_tier) as tier:
            tier.write([kept, removed])
            assert tier.remove([removed.key, removed.key, make_page(3, 1).key]) == 1
            assert tier.contains([kept.key, removed.key]) == [True, False]
            assert read_pages(tier, [kept, removed]) == [True, False]
            assert tier.remove([removed.key]) == 0
        with self.opened(open_tier) as tier:
            assert read_pages(tier, [kept, removed]) == [True, False]
            assert tier.write([removed]) == [True]
        with self.opened(open_tier) as tier:
            assert read_pages(tier, [kept, removed]) == [True, True]

    def test_the_limit_holds_and_what_left_is_counted(self, open_tier: Callable[[], Tier]) -> None:
        """Far more than fits: the newest page is here, the rest is here or counted as evicted."""
        pages = [make_page(n, 1 << 20) for n in range(40)]
        with self.opened(open_tier) as tier:
            for page in pages:
                assert tier.write([page]) == [True]
                counts = tier.statistics()
                assert counts.used_bytes <= counts.limit_bytes == 16 << 20
            found = read_pages(tier, pages)
            assert found[-1]
            assert sum(found) == counts.pages == 40 - counts.evicted
            assert sum(found) >= 8, "half of the limit stands empty"

    def test_one_call_may_exceed_the_limit(self, open_tier: Callable[[], Tier]) -> None:
        """What a call's own pages push out is not answered as stored."""
        pages = [make_page(n, 1 << 20) for n in range(40)]
        with self.opened(open_tier) as tier:
            answers = tier.write(pages)
            assert answers == tier.contains([page.key for page in pages]) == read_pages(tier, pages)
            assert 8 <= sum(answers) < 40

    def test_keys_are_found_by_prefix(self, open_tier: Callable[[], Tier]) -> None:
        """A namespace's pages can be listed, the removed ones not among them, also after opening again."""
        page = make_page(1, 100)
        keys = [bytes([namespace]) * 32 + bytes([number]) * 32 for namespace in (1, 2) for number in range(3)]
        with self.opened(open_tier) as tier:
            assert tier.keys(b"") == []
            assert all(tier.write([page._replace(key=key) for key in keys]))
            tier.remove(keys[1:2])
        with self.opened(open_tier) as tier:
            assert sorted(tier.keys(bytes([1]) * 32)) == [keys[0], keys[2]]
            assert sorted(tier.keys(bytes([2]) * 32)) == keys[3:]
            assert tier.keys(bytes([3]) * 32) == []
            assert sorted(tier.keys(b"")) == sorted(set(keys) - {keys[1]})

    def test_a_page_above_the_limit_is_refused(self, open_tier: Callable[[], Tier]) -> None:
        """It pushes nothing out."""
        small, large = make_page(1, 5000), make_page(2, (16 << 20) + 1)
        with self.opened(open_tier) as tier:
            assert tier.write([small, large]) == [True, False]
            assert tier.write([large]) == [False]
            counts = tier.statistics()
            assert (counts.refused, counts.evicted, counts.stored) == (2, 0, 1)
            assert read_pages(tier, [small, large]) == [True, False]

    def test_flush_and_nothing_at_all(self, open_tier: Callable[[], Tier]) -> None:
        """Empty calls are answered; flush may be called at any time."""
        with self.opened(open_tier) as tier:
            tier.flush()
            assert tier.contains([]) == tier.write([]) == []
            assert tier.read([], []) == []
            assert tier.remove([]) == 0
            page = make_page(1, 1 << PAGE_BITS)
            tier.write([page])
            tier.flush()
            tier.flush()
            assert read_pages(tier, [page]) == [True]

    def test_payloads_are_arrays_views_included(self, open_tier: Callable[[], Tier]) -> None:
        """Neighbouring views of one large array, as an arena gives them, are written and read in place."""
        arena: PageBytes = np.empty(8 << PAGE_BITS, dtype=np.uint8)
        pages = []
        for number in range(8):
            page = make_page(number, 1 << PAGE_BITS)
            view = arena[number << PAGE_BITS : (number + 1) << PAGE_BITS]
            view[:] = page.payload
            pages.append(page._replace(payload=view))
        with self.opened(open_tier) as tier:
            assert all(tier.write(pages))
            expected = arena.copy()
            arena[:] = 0
            assert None not in tier.read([page.key for page in pages], [page.payload for page in pages])
            assert np.array_equal(arena, expected)

    def test_a_namespace_keeps_to_its_quota(self, open_tier: Callable[[], Tier]) -> None:
        """At every moment, by letting go of its own pages; the newest is here, what left is counted."""
        pages = [make_page_of(1, n, 1 << PAGE_BITS) for n in range(24)]
        others = [make_page_of(2, n, 1 << PAGE_BITS) for n in range(4)]
        quota = 3 << 20
        with self.opened(open_tier) as tier:
            assert all(tier.write(others))
            tier.set_quota(pages[0].key[:32], quota)
            for page in pages:
                assert tier.write([page]) == [True]
                assert tier.used_by(page.key[:32]) <= quota
            found = read_pages(tier, pages)
            assert found[-1]
            assert 4 <= sum(found) == 24 - tier.statistics().evicted
            assert tier.used_by(pages[0].key[:32]) >= sum(found) << PAGE_BITS
            assert read_pages(tier, others) == [True] * 4
            assert tier.used_by(others[0].key[:32]) >= 4 << PAGE_BITS

    def test_one_call_may_exceed_a_quota(self, open_tier: Callable[[], Tier]) -> None:
        """Its answers are true, and every page that is not here afterwards is counted."""
        pages = [make_page_of(1, n, 1 << PAGE_BITS) for n in range(24)]
        with self.opened(open_tier) as tier:
            tier.set_quota(pages[0].key[:32], 3 << 20)
            answers = tier.write(pages)
            assert answers == tier.contains([page.key for page in pages]) == read_pages(tier, pages)
            assert 4 <= sum(answers) < 12
            assert tier.used_by(pages[0].key[:32]) <= 3 << 20
            counts = tier.statistics()
            assert counts.refused + counts.evicted == answers.count(False)

    def test_a_page_above_its_quota_is_refused(self, open_tier: Callable[[], Tier]) -> None:
        """It pushes nothing out."""
        small, large = make_page_of(1, 1, 5000), make_page_of(1, 2, 1 << 20)
        with self.opened(open_tier) as tier:
            tier.set_quota(small.key[:32], 1 << 20)
            assert tier.write([small]) == [True]
            assert tier.write([large]) == [False]
            counts = tier.statistics()
            assert (counts.refused, counts.evicted, counts.stored) == (1, 0, 1)
            assert read_pages(tier, [small, large]) == [True, False]

    def test_a_quota_may_be_changed(self, open_tier: Callable[[], Tier]) -> None:
        """A lower one counts from the namespace's next write on; none, and the tier's limit alone counts."""
        pages = [make_page_of(1, n, 1 << PAGE_BITS) for n in range(32)]
        namespace = pages[0].key[:32]
        with self.opened(open_tier) as tier:
            assert all(tier.write(pages[:16]))
            tier.set_quota(namespace, 2 << 20)
            assert tier.write([make_page_of(2, 1, 5000)]) == [True]
            assert read_pages(tier, pages[:16]) == [True] * 16
            assert tier.write([pages[16]]) == [True]
            assert tier.used_by(namespace) <= 2 << 20
            tier.set_quota(namespace, 0)
            assert all(tier.write(pages[16:]))
            assert tier.used_by(namespace) > 2 << 20

    def test_the_limit_may_be_changed(self, open_tier: Callable[[], Tier]) -> None:
        """A lower one holds when the next page was written at the latest; a higher one gives room again."""
        pages = [make_page(n, 1 << 20) for n in range(40)]
        with self.opened(open_tier) as tier:
            assert all(tier.write(pages[:12]))
            tier.set_limit(8 << 20)
            for page in pages[12:24]:
                assert tier.write([page]) == [True]
                counts = tier.statistics()
                assert counts.used_bytes <= counts.limit_bytes == 8 << 20
            assert read_pages(tier, pages[23:24]) == [True]
            tier.set_limit(16 << 20)
            for page in pages[24:]:
                assert tier.write([page]) == [True]
            counts = tier.statistics()
            assert 8 << 20 < counts.used_bytes <= counts.limit_bytes == 16 << 20

    def test_touched_pages_leave_last(self, open_tier: Callable[[], Tier]) -> None:
        """What is used in a faster tier stays for longer than what is not. Unknown keys are passed over."""
        pages = [make_page_of(1, n, 1 << 20) for n in range(20)]
        with self.opened(open_tier) as tier:
            tier.set_quota(pages[0].key[:32], 8 << 20)
            for page in pages:
                assert tier.touch([pages[0].key, make_page_of(3, 1, 1).key]) == [page is not pages[0], False]
                assert tier.write([page]) == [True]
            found = read_pages(tier, pages)
            assert found[0]
            assert found[-1]
            assert not found[1]

    def test_bytes_are_counted_by_namespace(self, open_tier: Callable[[], Tier]) -> None:
        """Those of pages that are here. A tier may keep the bytes of a page until those beside it go as well."""
        pages = [make_page_of(1, n, 70_000) for n in range(4)]
        with self.opened(open_tier) as tier:
            assert tier.used_by(pages[0].key[:32]) == 0
            tier.write(pages)
            before = tier.used_by(pages[0].key[:32])
            assert 4 * 70_000 <= before <= tier.statistics().used_bytes
            tier.write(pages)
            assert tier.used_by(pages[0].key[:32]) == before
            tier.remove([page.key for page in pages[:3]])
            assert 70_000 <= tier.used_by(pages[0].key[:32]) <= before
            tier.remove([page.key for page in pages])
            assert tier.used_by(pages[0].key[:32]) == 0
            assert tier.used_by(bytes([9]) * 32) == 0
