"""Copy strategies: how pages cross between a paged KV on a CUDA device and host memory.

Each only queues its copies, on the current stream: asynchronous copies (``non_blocking``, which is asynchronous where
the host memory is pinned) and kernels. All of them copy the same bytes. Which one is used is
:mod:`kvstore.gpu.preference`'s to say. They work on CPU tensors as well, where they are done when they return. The
other strategies are :mod:`kvstore.gpu.batched` and :mod:`kvstore.gpu.triton_kernel`.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Protocol

import torch

from kvstore.gpu.layout import PageLayout
from kvstore.gpu.pinned import cut
from kvstore.gpu.tensors import PageBytes, merge_touching, run_view, word_bytes

STAGING_BYTES = 16 << 20
"""Device memory of one staging buffer (at least one page). An engine has given nearly all of the device's to its KV."""


class CopyStrategy(Protocol):
    """One way to queue copies. Arguments were checked before; pages stay where they are until the copies are done."""

    def takes(self, pages: Sequence[PageBytes]) -> bool:
        """Whether these pages, in the memory where they are, can be copied."""
        ...

    def gather(self, piece_ids: Sequence[int], out: Sequence[PageBytes]) -> None:
        """Queue copies of pieces into pages."""
        ...

    def scatter(self, pages: Sequence[PageBytes], piece_ids: Sequence[int], shares: Sequence[range]) -> Generator[None]:
        """Queue copies of pages into pieces, one of ``shares`` (ranges of layers) at each ``next``."""
        ...


class Staged:
    """Gathers pieces into a contiguous buffer on the device, from which each page crosses the bus in one copy."""

    def __init__(self, layers: Sequence[torch.Tensor], layout: PageLayout) -> None:
        runs = layout.runs
        word = word_bytes(layers, runs)
        self._layers = [run_view(layer, layout, word) for layer in layers]
        self._layout = layout
        self._runs = runs
        self._page_shape = (runs.parts, runs.rows, runs.pieces_per_page, runs.run_bytes // word)
        self._words = max(STAGING_BYTES, layout.page_bytes) // word

    def takes(self, pages: Sequence[PageBytes]) -> bool:
        """Any pages."""
        return True

    def gather(self, piece_ids: Sequence[int], out: Sequence[PageBytes]) -> None:
        """Queue copies of pieces into pages."""
        places = self._places(piece_ids)
        for start, end in self._batches(len(out), len(self._layers)):
            self._gather(self._of_pages(places, start, end), out[start:end])

    def scatter(self, pages: Sequence[PageBytes], piece_ids: Sequence[int], shares: Sequence[range]) -> Generator[None]:
        """Queue copies of pages into pieces, share by share."""
        places = self._places(piece_ids)
        for layers in shares:
            for start, end in self._batches(len(pages), len(layers)):
                self._scatter(pages[start:end], self._of_pages(places, start, end), layers)
            yield

    # One batch each: when they return nobody holds the buffer, and the next batch, or copy, is given the same memory.

    def _gather(self, places: torch.Tensor, out: Sequence[PageBytes]) -> None:
        blocks, pieces = places
        staging = self._staging(len(out), len(self._layers))
        for index, layer in enumerate(self._layers):
            picked = layer[:, blocks, pieces]  # (parts, pages * pieces_per_page, rows, words)
            by_page = picked.view(len(picked), len(out), self._runs.pieces_per_page, *picked.shape[2:])
            staging[:, index] = by_page.permute(1, 0, 3, 2, 4)
        for page, staged in zip(out, as_bytes(staging), strict=True):
            for outside, inside in in_parts(page, staged):
                outside.copy_(inside, non_blocking=True)

    def _scatter(self, pages: Sequence[PageBytes], places: torch.Tensor, layers: range) -> None:
        blocks, pieces = places
        first, last = layers.start * self._layout.layer_bytes, layers.stop * self._layout.layer_bytes
        staging = self._staging(len(pages), len(layers))
        for page, staged in zip(pages, as_bytes(staging), strict=True):
            for outside, inside in in_parts(page[first:last], staged):
                inside.copy_(outside, non_blocking=True)
        for index, layer in enumerate(layers):
            # (pages, parts, rows, pieces, words) -> (parts, pages * pieces, rows, words)
            self._layers[layer][:, blocks, pieces] = staging[:, index].permute(1, 0, 3, 2, 4).flatten(1, 2)

    def _of_pages(self, places: torch.Tensor, start: int, end: int) -> torch.Tensor:
        return places[:, start * self._runs.pieces_per_page : end * self._runs.pieces_per_page]

    def _staging(self, pages: int, layers: int) -> torch.Tensor:
        """Always a part of as much: torch keeps that for this stream, and gives it out again for what comes next."""
        first, shape = self._layers[0], (pages, layers, *self._page_shape)
        return torch.empty(self._words, dtype=first.dtype, device=first.device)[: math.prod(shape)].view(shape)

    def _places(self, piece_ids: Sequence[int]) -> torch.Tensor:
        """Of each piece its block, and its number there. Once a call."""
        ids = on_device(piece_ids, self._layers[0].device)
        return torch.stack((ids // self._runs.pieces_per_block, ids % self._runs.pieces_per_block))

    def _batches(self, count: int, layers: int) -> Iterator[tuple[int, int]]:
        pages = max(1, STAGING_BYTES // (self._layout.layer_bytes * layers))
        return ((start, min(start + pages, count)) for start in range(0, count, pages))


class RunByRun:
    """One asynchronous copy for each run of contiguous bytes, no buffer between: for layouts with long runs."""

    def __init__(self, layers: Sequence[torch.Tensor], layout: PageLayout) -> None:
        runs = layout.runs
        self._layers = [run_view(layer, layout) for layer in layers]
        self._pieces = runs.pieces_per_block, runs.pieces_per_page
        self._page_shape = (layout.layers, runs.parts, runs.rows, runs.pieces_per_page, runs.run_bytes)

    def takes(self, pages: Sequence[PageBytes]) -> bool:
        """Pages that CUDA takes in one copy each: a run may not lie across a cut either."""
        return all(len(cut(page)) == 1 for page in pages)

    def gather(self, piece_ids: Sequence[int], out: Sequence[PageBytes]) -> None:
        """Queue copies of pieces into pages."""
        for outside, inside in self._pairs(out, piece_ids, range(len(self._layers))):
            outside.copy_(inside, non_blocking=True)

    def scatter(self, pages: Sequence[PageBytes], piece_ids: Sequence[int], shares: Sequence[range]) -> Generator[None]:
        """Queue copies of pages into pieces, share by share."""
        for layers in shares:
            for outside, inside in self._pairs(pages, piece_ids, layers):
                inside.copy_(outside, non_blocking=True)
            yield

    def _pairs(
        self, pages: Sequence[PageBytes], piece_ids: Sequence[int], layers: range
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Each run in its page and in its block."""
        per_block, per_page = self._pieces
        _, parts, rows, _, _ = self._page_shape
        for number, page in enumerate(pages):
            outside = tensor_over(page).view(self._page_shape)
            for layer in layers:
                for piece in range(per_page):
                    block, share = divmod(piece_ids[number * per_page + piece], per_block)
                    for part in range(parts):
                        for row in range(rows):
                            yield outside[layer, part, row, piece], self._layers[layer][part, block, share, row]


class Merged:
    """A strategy for layers of which ``count`` at a time touch: shares of whole stretches are copied in longer runs,
    single layers by themselves."""

    def __init__(self, stretches: CopyStrategy, layers: CopyStrategy, count: int) -> None:
        self._stretches = stretches
        self._layers = layers
        self._count = count

    def takes(self, pages: Sequence[PageBytes]) -> bool:
        """Whether these pages can be copied. A stretch asks for at least what a layer asks for."""
        return self._stretches.takes(pages)

    def gather(self, piece_ids: Sequence[int], out: Sequence[PageBytes]) -> None:
        """Queue copies of pieces into pages."""
        self._stretches.gather(piece_ids, out)

    def scatter(self, pages: Sequence[PageBytes], piece_ids: Sequence[int], shares: Sequence[range]) -> Generator[None]:
        """Queue copies of pages into pieces, share by share."""
        count = self._count
        if any(layers.start % count or layers.stop % count for layers in shares):
            return self._layers.scatter(pages, piece_ids, shares)
        stretches = [range(layers.start // count, layers.stop // count) for layers in shares]
        return self._stretches.scatter(pages, piece_ids, stretches)


def merging(
    make: Callable[[Sequence[torch.Tensor], PageLayout], CopyStrategy],
    layers: Sequence[torch.Tensor],
    layout: PageLayout,
) -> CopyStrategy:
    """A strategy that copies layers that touch as one."""
    stretches, of_stretches = merge_touching(layers, layout)
    if len(stretches) == len(layers):
        return make(layers, layout)
    return Merged(make(stretches, of_stretches), make(layers, layout), len(layers) // len(stretches))


def on_device(numbers: Sequence[int], device: torch.device) -> torch.Tensor:
    """An int64 tensor of these numbers for what is queued behind, by one asynchronous transfer.

    From pinned memory, which torch keeps until they have left it: else this thread would wait until all that the stream
    has queued is done, and what it queues next would come late.
    """
    return torch.tensor(numbers, pin_memory=device.type == "cuda").to(device, non_blocking=True)


def in_parts(page: PageBytes, staged: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """A page and its bytes on the device, in the parts in which CUDA copies the page: nearly always one."""
    start = 0
    for part in cut(page):
        yield tensor_over(part), staged[start : start + part.size]
        start += part.size


def tensor_over(page: PageBytes) -> torch.Tensor:
    """A uint8 tensor over an array's memory, without a copy, also where the array is read-only.

    Torch has no read-only tensors and warns when it wraps such memory. Through the address it does not ask: whoever
    calls this writes to the tensor only where the array is writable, and keeps the array alive.
    """
    memory = (ctypes.c_uint8 * page.size).from_address(page.ctypes.data)
    return torch.frombuffer(memory, dtype=torch.uint8)


def as_bytes(staging: torch.Tensor) -> torch.Tensor:
    """``(pages, bytes)`` over the same memory."""
    return staging.view(len(staging), -1).view(torch.uint8)
