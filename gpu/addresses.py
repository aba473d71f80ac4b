"""Where the runs of a batch of pages begin, in blocks and in pages: addresses for calls that copy a whole list."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvstore.gpu.layout import PageLayout
from kvstore.gpu.tensors import PageBytes

Addresses = npt.NDArray[np.uint64]


class RunAddresses:
    """The addresses of one paged KV's runs. What does not change from call to call is prepared here.

    Args:
        starts: where each layer's first block begins, an address of this process or of the device.
        layout: of the layers.
    """

    def __init__(self, starts: Sequence[int], layout: PageLayout) -> None:
        runs = self._runs = layout.runs
        part = np.arange(runs.parts)[:, None] * runs.part_stride
        row = np.arange(runs.rows) * runs.row_stride
        layer = np.array(starts, np.int64)[:, None, None]
        self._in_blocks = (layer + part + row).reshape(1, layout.layers, -1, 1)
        in_order = np.arange(layout.layers * runs.of_a_layer, dtype=np.int64) * runs.run_bytes
        self._in_pages = in_order.reshape(1, layout.layers, runs.of_a_layer)

    def in_blocks(self, piece_ids: Sequence[int]) -> Addresses:
        """Of the pieces' runs, ``(pages, layers, runs)``: in the order in which they lie in a page."""
        runs = self._runs
        ids = np.array(piece_ids, np.int64).reshape(-1, 1, 1, runs.pieces_per_page)
        if runs.pieces_per_block == 1:
            places = ids * runs.block_stride
        else:
            blocks, inside = np.divmod(ids, runs.pieces_per_block)
            places = blocks * runs.block_stride + inside * runs.run_bytes
        starts = self._in_blocks + places
        return starts.reshape(*starts.shape[:2], -1).view(np.uint64)

    def in_pages(self, pages: Sequence[PageBytes]) -> Addresses:
        """Of the same runs in pages, in the same shape."""
        starts = np.array([page.ctypes.data for page in pages], np.int64)
        return (starts[:, None, None] + self._in_pages).view(np.uint64)
