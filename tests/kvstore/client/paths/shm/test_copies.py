"""Slots that lie side by side are copied at once, and every byte goes where it belongs."""

from __future__ import annotations

import numpy as np
import pytest

import kvstore
from kvstore.client.paths.buffers import Rows, page_arrays
from kvstore.client.paths.shm import mapped_arena as mapped
from kvstore.client.paths.shm.copies import copy_runs, slot_bytes


class Copies:
    """Copies, and counts."""

    def __init__(self) -> None:
        self.made = 0

    def __call__(self, target: np.ndarray, source: np.ndarray) -> None:
        self.made += 1
        np.copyto(target, source)


@pytest.mark.parametrize("length", [4096, 5000, 8192, 1])
@pytest.mark.parametrize(
    ("slots", "copies"),
    [([0], 1), ([0, 1, 2, 3], 1), ([3, 2, 1, 0], 4), ([5, 6, 1, 2, 3, 9], 3), ([0, 2, 4], 3), ([], 0)],
)
def test_neighbours_go_by_one_copy(length, slots, copies):
    stride = slot_bytes(length)
    offsets = [slot * stride for slot in slots]
    data = np.random.default_rng(length).integers(0, 256, (len(slots), length), np.uint8)
    arena, copy = np.zeros(10 * stride, np.uint8), Copies()
    copy_runs(arena, offsets, stride, Rows(data), copy, out=False)
    assert copy.made == copies
    expected = np.zeros_like(arena)
    for offset, page in zip(offsets, data, strict=True):
        expected[offset : offset + length] = page
    assert np.array_equal(arena, expected), "nothing beside the pages is written"
    for into in (np.zeros_like(data), [np.zeros(length, np.uint8) for _ in slots]):
        copy = Copies()
        copy_runs(arena, offsets, stride, page_arrays(into, len(slots), length, writable=True), copy, out=True)
        assert copy.made == (copies if isinstance(into, np.ndarray) else len(slots))
        assert np.array_equal(np.array(into).reshape(data.shape), data)


def test_a_load_of_neighbours_is_one_copy(start_node, hashes, python_core, monkeypatch):
    node = start_node(disk_limit=0)
    copy = Copies()
    monkeypatch.setattr(mapped, "copy_bytes", copy)
    with kvstore.connect(f"unix://{node.config.socket}", timeout=20.0) as client:
        pages = client.namespace(kvstore.Layout(model="a", block_size=16, page_bytes=5000))
        data = np.random.default_rng(0).integers(0, 256, (8, 5000), np.uint8)
        assert pages.store(hashes(8), data).stored == 8
        into = np.zeros_like(data)
        assert pages.load(hashes(8), into) == 8
        assert np.array_equal(into, data)
    assert copy.made == (1 if mapped.CAN_READ else 0)
