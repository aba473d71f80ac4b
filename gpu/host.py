"""Page copies where the paged KV is in host memory: one memory copy a run of contiguous bytes, nothing between."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch

from kvstore.gpu.layout import PageLayout
from kvstore.gpu.runs import (
    SHORTEST_RUN,
    Addresses,
    can_copy_runs,
    copy_runs,
)
from kvstore.gpu.tensors import run_view

Pages = Sequence[npt.NDArray[np.uint8]]


class HostCopies:
    """Copies between CPU tensors and pages, in the caller's thread."""

    def __init__(self, layers: Sequence[torch.Tensor], layout: PageLayout) -> None:
        runs = self._runs = layout.runs
        self._page_shape = (layout.layers, runs.parts, runs.rows, runs.pieces_per_page, runs.run_bytes)
        # NumPy has no bfloat16 and takes read-only pages as they are: look at everything as bytes.
        self._layers = [run_view(layer, layout).numpy() for layer in layers]
        self._in_lists = runs.run_bytes >= SHORTEST_RUN and can_copy_runs()

    def gather(self, piece_ids: Sequence[int], out: Pages, after: object = None) -> None:
        """Copy pieces into pages. There is nothing to wait for."""
        every = range(len(self._layers))
        if self._in_lists:
            copy_runs(self._in_pages(out, every), self._in_blocks(piece_ids, every), self._runs.run_bytes)
            return
        for part, piece in self._pairs(piece_ids, out, every):
            np.copyto(part, piece)

    def scatter(
        self,
        pages: Pages,
        piece_ids: Sequence[int],
        on_layer: Callable[[int], None] | None = None,
        after: object = None,
    ) -> None:
        """Copy pages into pieces, one layer after the other where somebody waits for layers."""
        every = range(len(self._layers))
        for layers in [every] if on_layer is None else [range(each, each + 1) for each in every]:
            if self._in_lists:
                copy_runs(self._in_blocks(piece_ids, layers), self._in_pages(pages, layers), self._runs.run_bytes)
            else:
                for part, piece in self._pairs(piece_ids, pages, layers):
                    np.copyto(piece, part)
            if on_layer is not None:
                on_layer(layers.start)

    def _pairs(
        self, piece_ids: Sequence[int], pages: Pages, layers: range
    ) -> Iterator[tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]]:
        """What lies in a page and in a block, run by run."""
        per_block, per_page = self._runs.pieces_per_block, self._runs.pieces_per_page
        for number, page in enumerate(pages):
            parts = page.reshape(self._page_shape)
            for index in layers:
                for piece in range(per_page):
                    block, inside = divmod(piece_ids[number * per_page + piece], per_block)
                    yield parts[index, :, :, piece], self._layers[index][:, block, inside]

    def _in_blocks(self, piece_ids: Sequence[int], layers: range) -> Addresses:
        """Where the runs begin, by page, then as they lie in it."""
        runs = self._runs
        block, inside = np.divmod(
            np.array(piece_ids, np.int64).reshape(-1, runs.pieces_per_page), runs.pieces_per_block
        )
        layer = np.array([self._layers[index].ctypes.data for index in layers], np.int64)
        part = np.arange(runs.parts) * runs.part_stride
        row = np.arange(runs.rows) * runs.row_stride
        piece = block * runs.block_stride + inside * runs.run_bytes
        starts = (layer[:, None] + part)[None, :, :, None, None] + row[:, None] + piece[:, None, None, None, :]
        return np.asarray(starts.reshape(-1), np.uint64)

    def _in_pages(self, pages: Pages, layers: range) -> Addresses:
        """The same for the pages."""
        per_layer = self._runs.parts * self._runs.rows * self._runs.pieces_per_page
        start = np.array([page.ctypes.data for page in pages], np.int64)
        run = np.arange(layers.start * per_layer, layers.stop * per_layer) * self._runs.run_bytes
        return np.asarray((start[:, None] + run).reshape(-1), np.uint64)
