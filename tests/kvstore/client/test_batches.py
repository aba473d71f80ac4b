"""One call that takes several batches is still one prefix, and one truth."""

from __future__ import annotations

import numpy as np
import pytest

PAGE_BYTES = 64 << 10


@pytest.fixture
def small(make_place):
    """An arena of 64 pages without a disk tier: batches of 16."""
    return make_place(arena=4 << 20, disk_limit=0)


@pytest.fixture
def pages(small, layout):
    return small.connect().namespace(layout.__class__(model="b", block_size=16, page_bytes=PAGE_BYTES))


def test_what_left_again_for_the_same_call_is_not_called_stored(pages, hashes, payload):
    asked = hashes(150)
    data = payload(150, page_bytes=PAGE_BYTES)
    result = pages.store(asked, data)
    present = pages.lookup(asked).present
    assert result.stored == sum(present)
    assert (result.present, result.stored + result.refused) == (0, 150)
    assert present[-16:] == (True,) * 16, "the newest pages are kept"
    into = np.zeros((16, PAGE_BYTES), np.uint8)
    assert pages.load(asked[-16:], into) == 16
    assert np.array_equal(into, data[-16:])
    again = pages.store(asked, data)
    assert again.stored + again.present + again.refused == 150
    assert again.stored + again.present == sum(pages.lookup(asked).present)


def test_a_long_prefix_leaves_from_its_tail(pages, hashes, payload):
    assert pages.batch_pages < 20
    whole, foreign = hashes(40), hashes(44, name=7)
    pages.store(whole, payload(40, page_bytes=PAGE_BYTES))
    pages.store(foreign, payload(44, seed=1, page_bytes=PAGE_BYTES))
    left = pages.lookup(whole)
    assert 0 < left.prefix == sum(left.present) < 40, "what is left is the head"


def test_a_long_prefix_that_was_loaded_leaves_from_its_tail(pages, hashes, payload):
    whole, foreign = hashes(40), hashes(44, name=7)
    for start in (32, 16, 0):  # the head is the oldest
        pages.store(whole[start : start + 16], payload(min(16, 40 - start), page_bytes=PAGE_BYTES))
    pages.evict(whole[32:])
    pages.store(whole[32:], payload(8, page_bytes=PAGE_BYTES))
    assert pages.load(whole, np.empty((40, PAGE_BYTES), np.uint8)) == 40
    pages.store(foreign, payload(44, seed=1, page_bytes=PAGE_BYTES))
    left = pages.lookup(whole)
    assert 0 < left.prefix == sum(left.present) < 40


def test_all_calls_of_one_store_share_its_deadline(pages, hashes, payload, monkeypatch):
    control = pages._client._control
    given = []

    def recording(call):
        def recorded(*arguments):
            given.append((call.__name__, arguments[-1]))
            return call(*arguments)

        return recorded

    for name in ("touch", "lookup"):
        monkeypatch.setattr(control, name, recording(getattr(control, name)))
    pages.store(hashes(150), payload(150, page_bytes=PAGE_BYTES))
    assert [name for name, _ in given] == ["touch", "lookup"]
    assert given[0][1] >= given[1][1], "the lookup has what the touch has left of the time"
