"""Page copies where the paged KV is on a CUDA device: through a staging buffer there, on streams of their own.

The device gathers blocks into a contiguous staging buffer; from it each page crosses the bus in one copy, straight into
the arena. That copy is asynchronous and at full speed where the arena is pinned (:mod:`gpu.pinned`), and still right
where it is not.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch

from gpu.layout import PageLayout

STAGING_BYTES = 64 << 20
"""Most device memory that one copy takes for its staging buffer (at least one page)."""


class DeviceCopies:
    """Copies between tensors on a CUDA device and pages in host memory."""

    def __init__(self, layers: Sequence[torch.Tensor], layout: PageLayout) -> None:
        self._layers = [layer.detach() for layer in layers]
        self._layout = layout
        self._device = layers[0].device
        # One stream a direction: a store does not queue behind a load, and the bus carries both at once.
        self._out: torch.cuda.Stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._in: torch.cuda.Stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._compute: torch.cuda.Stream = torch.cuda.current_stream(self._device)

    def gather(self, block_ids: Sequence[int], out: Sequence[npt.NDArray[np.uint8]]) -> None:
        """Copy blocks into pages."""
        self._out.wait_stream(self._compute)
        with torch.cuda.stream(self._out):
            for batch in self._batches(len(block_ids)):
                index = torch.tensor(block_ids[batch], device=self._device)
                staging = torch.empty(
                    (len(index), *self._layout.page_shape), dtype=self._layout.dtype, device=self._device
                )
                for number, layer in enumerate(self._layers):
                    staging[:, number] = layer.index_select(1, index).transpose(0, 1)
                for page, staged in zip(out[batch], _as_bytes(staging), strict=True):
                    tensor_over(page).copy_(staged, non_blocking=True)
            done = self._out.record_event()
        done.synchronize()

    def scatter(self, pages: Sequence[npt.NDArray[np.uint8]], block_ids: Sequence[int]) -> None:
        """Copy pages into blocks."""
        self._in.wait_stream(self._compute)
        with torch.cuda.stream(self._in):
            for batch in self._batches(len(block_ids)):
                index = torch.tensor(block_ids[batch], device=self._device)
                staging = torch.empty(
                    (len(index), *self._layout.page_shape), dtype=self._layout.dtype, device=self._device
                )
                for page, staged in zip(pages[batch], _as_bytes(staging), strict=True):
                    staged.copy_(tensor_over(page), non_blocking=True)
                for number, layer in enumerate(self._layers):
                    layer.index_copy_(1, index, staging[:, number].transpose(0, 1))
            done = self._in.record_event()
        done.synchronize()

    def _batches(self, count: int) -> Iterator[slice]:
        pages = max(1, STAGING_BYTES // self._layout.page_bytes)
        return (slice(start, min(start + pages, count)) for start in range(0, count, pages))


def tensor_over(page: npt.NDArray[np.uint8]) -> torch.Tensor:
    """A uint8 tensor over an array's memory, without a copy, also where the array is read-only.

    Torch has no read-only tensors and warns when it wraps such memory. Through the address it does not ask: whoever
    calls this writes to the tensor only where the array is writable, and keeps the array alive.
    """
    memory = (ctypes.c_uint8 * page.size).from_address(page.ctypes.data)
    return torch.frombuffer(memory, dtype=torch.uint8)


def _as_bytes(staging: torch.Tensor) -> torch.Tensor:
    """``(pages, page_bytes)`` bytes over the same memory."""
    return staging.view(len(staging), -1).view(torch.uint8)
