"""What a transfer's parts are: their own hashes and buffers, and the page before them as parent."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore.client.paths.buffers import page_arrays
from kvstore.client.paths.transfer import Transfer

HASHES = [bytes([number]) * 32 for number in range(5)]
TABLE = np.arange(5 * 8, dtype=np.uint8).reshape(5, 8)


@pytest.mark.parametrize("pages", [TABLE, list(TABLE)], ids=["one buffer", "a list"])
@pytest.mark.parametrize(
    ("start", "end", "parent"), [(0, 5, b"p" * 32), (0, 2, b"p" * 32), (1, 3, HASHES[0]), (4, 9, HASHES[3])]
)
def test_a_part_follows_the_page_before_it(pages, start, end, parent):
    whole = Transfer(b"".join(HASHES), page_arrays(pages, 5, 8, writable=False), 7.0, b"p" * 32)
    part = whole.part(start, end)
    assert (part.hashes, part.parent, part.deadline) == (b"".join(HASHES[start:end]), parent, 7.0)
    assert part.page_count == len(part.pages) == len(HASHES[start:end])
    assert np.array_equal(np.stack(list(part.pages)), TABLE[start:end])


def test_a_part_of_pages_that_the_path_lends_has_no_buffers():
    part = Transfer(b"".join(HASHES), (), 7.0).part(2, 4)
    assert (part.hashes, part.pages, part.parent) == (HASHES[2] + HASHES[3], (), HASHES[1])
