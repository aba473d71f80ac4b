"""Page copies where the paged KV is in host memory: one memory copy a run of contiguous bytes, nothing between."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from gpu.layout import PageLayout


class HostCopies:
    """Copies between CPU tensors and pages, in the caller's thread."""

    def __init__(self, layers: Sequence[torch.Tensor], layout: PageLayout) -> None:
        self._shape = (layout.layers, 2, layout.block_bytes)
        # NumPy has no bfloat16 and takes read-only pages as they are: look at everything as bytes.
        self._layers = [_block_bytes(layer, layout.block_bytes) for layer in layers]

    def gather(self, block_ids: Sequence[int], out: Sequence[npt.NDArray[np.uint8]]) -> None:
        """Copy blocks into pages."""
        for block_id, page in zip(block_ids, out, strict=True):
            for part, layer in zip(page.reshape(self._shape), self._layers, strict=True):
                np.copyto(part, layer[:, block_id])

    def scatter(self, pages: Sequence[npt.NDArray[np.uint8]], block_ids: Sequence[int]) -> None:
        """Copy pages into blocks."""
        for block_id, page in zip(block_ids, pages, strict=True):
            for part, layer in zip(page.reshape(self._shape), self._layers, strict=True):
                np.copyto(layer[:, block_id], part)


def _block_bytes(layer: torch.Tensor, block_bytes: int) -> npt.NDArray[np.uint8]:
    """The same memory as ``(2, num_blocks, block_bytes)`` bytes."""
    size = layer.dtype.itemsize
    as_bytes = layer.detach().view(torch.uint8)
    return as_bytes.as_strided(
        (2, layer.shape[1], block_bytes), (layer.stride(0) * size, layer.stride(1) * size, 1)
    ).numpy()
