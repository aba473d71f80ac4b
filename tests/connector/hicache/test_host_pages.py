"""Pages in parts, copied by address."""

from __future__ import annotations

import numpy as np
import pytest
from host_pool import HostPool

from kvstore.connector.hicache.host_pages import HostPages, copy_one_by_one
from kvstore.gpu.host import can_copy_runs, copy_runs


@pytest.mark.parametrize("copy", [copy_runs, copy_one_by_one])
def test_parts_of_several_sizes_follow_each_other_in_a_page(copy) -> None:  # type: ignore[no-untyped-def]
    assert can_copy_runs()
    keys = np.arange(4 * 40, dtype=np.uint8).reshape(4, 40)
    values = 255 - np.arange(4 * 24, dtype=np.uint8).reshape(4, 24)
    places = [3, 0, 2]
    addresses = [int(part[place].ctypes.data) for place in places for part in (keys, values)]
    pages = HostPages(addresses, [40, 24] * 3, 3, copy)
    assert (len(pages), pages.page_bytes) == (3, 64)
    taken = [np.zeros(64, np.uint8) for _ in range(2)]
    pages.gather([2, 0], taken)
    for page, place in zip(taken, (2, 3), strict=True):
        assert (page == np.concatenate([keys[place], values[place]])).all()
    before = keys.copy(), values.copy()
    page = np.full(64, 7, np.uint8)
    page[40:] = 9
    page.flags.writeable = False
    pages.scatter([page], [1])
    assert (keys[0] == 7).all()
    assert (values[0] == 9).all()
    assert (keys[1:] == before[0][1:]).all()
    assert (values[1:] == before[1][1:]).all()


def test_pages_of_several_shapes_are_refused() -> None:
    pool = HostPool(2, 64)
    addresses = [int(pool.planes[0, place].ctypes.data) for place in range(2)]
    with pytest.raises(ValueError, match=r"several shapes: \[32, 64\]"):
        HostPages(addresses, [64, 32], 2, copy_one_by_one)
    with pytest.raises(ValueError, match="2 addresses and 2 sizes are not those of 3 pages"):
        HostPages(addresses, [64, 64], 3, copy_one_by_one)
