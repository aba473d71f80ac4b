"""Page copies where the paged KV is in host memory: one memory copy a run of contiguous bytes, nothing between."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from gpu.layout import PageLayout
from gpu.tensors import run_view


class HostCopies:
    """Copies between CPU tensors and pages, in the caller's thread."""

    def __init__(self, layers: Sequence[torch.Tensor], layout: PageLayout) -> None:
        runs = layout.runs
        self._pieces = runs.pieces_per_block, runs.pieces_per_page
        self._page_shape = (layout.layers, runs.parts, runs.rows, runs.pieces_per_page, runs.run_bytes)
        # NumPy has no bfloat16 and takes read-only pages as they are: look at everything as bytes.
        self._layers = [run_view(layer, layout).numpy() for layer in layers]

    def gather(self, piece_ids: Sequence[int], out: Sequence[npt.NDArray[np.uint8]]) -> None:
        """Copy pieces into pages."""
        per_block, per_page = self._pieces
        for number, page in enumerate(out):
            for part, layer in zip(page.reshape(self._page_shape), self._layers, strict=True):
                for piece in range(per_page):
                    block, inside = divmod(piece_ids[number * per_page + piece], per_block)
                    np.copyto(part[:, :, piece], layer[:, block, inside])

    def scatter(
        self,
        pages: Sequence[npt.NDArray[np.uint8]],
        piece_ids: Sequence[int],
        on_layer: Callable[[int], None] | None = None,
    ) -> None:
        """Copy pages into pieces, one layer after the other where somebody waits for layers."""
        every = range(len(self._layers))
        for layers in [every] if on_layer is None else [range(each, each + 1) for each in every]:
            self._scatter(pages, piece_ids, layers)
            if on_layer is not None:
                on_layer(layers.start)

    def _scatter(self, pages: Sequence[npt.NDArray[np.uint8]], piece_ids: Sequence[int], layers: range) -> None:
        per_block, per_page = self._pieces
        for number, page in enumerate(pages):
            parts = page.reshape(self._page_shape)
            for index in layers:
                for piece in range(per_page):
                    block, inside = divmod(piece_ids[number * per_page + piece], per_block)
                    np.copyto(self._layers[index][:, block, inside], parts[index, :, :, piece])
