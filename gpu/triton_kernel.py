"""The third copy strategy: a Triton kernel that reads, or writes, pages in pinned host memory; one launch a call.

One program copies one run. It runs on the device's multiprocessors, with which the engine computes: a launch takes from
them what a copy engine would not, and saves the staging buffer and a copy a page. Which is better is measured.

With ``TRITON_INTERPRET=1`` in the environment it runs on CPU tensors, slowly, which is how its tests run without a GPU.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence

import torch
import triton
import triton.language as tl

from kvstore.gpu.cudart import cuda_runtime
from kvstore.gpu.layout import PageLayout
from kvstore.gpu.pinned import is_pinned
from kvstore.gpu.strategies import on_device
from kvstore.gpu.tensors import PageBytes, word_bytes

_MOST_AT_ONCE = 1024
"""Words that one program copies at once."""

_WORDS = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}


class Kernel:
    """:class:`kvstore.gpu.strategies.CopyStrategy` by the kernel below."""

    def __init__(self, layers: Sequence[torch.Tensor], layout: PageLayout) -> None:
        self._layers = list(layers)  # they must not go away: the kernel knows addresses only
        self._layer_addresses = [layer.data_ptr() for layer in layers]
        self._layout = layout
        self._runs = layout.runs
        self._word = word_bytes(layers, self._runs)
        self._device = layers[0].device
        runtime = cuda_runtime(self._device)
        self._has_host_addresses = runtime is None or runtime.can_use_host_pointers(self._device.index)

    def takes(self, pages: Sequence[PageBytes]) -> bool:
        """Whether the device can reach all of these pages, at their addresses, and reads them in whole words."""
        return self._has_host_addresses and all(
            page.ctypes.data % self._word == 0 and is_pinned(page) for page in pages
        )

    def gather(self, piece_ids: Sequence[int], out: Sequence[PageBytes]) -> None:
        """Queue copies of pieces into pages."""
        self._launch(len(piece_ids), self._numbers(piece_ids, out), range(self._layout.layers), gather=True)

    def scatter(self, pages: Sequence[PageBytes], piece_ids: Sequence[int], shares: Sequence[range]) -> Generator[None]:
        """Queue copies of pages into pieces, share by share."""
        numbers = self._numbers(piece_ids, pages)
        for layers in shares:
            self._launch(len(piece_ids), numbers, layers, gather=False)
            yield

    def _numbers(self, piece_ids: Sequence[int], pages: Sequence[PageBytes]) -> torch.Tensor:
        """Addresses of layers, pieces, addresses of pages. Once a call, and kept by nobody: an engine that sleeps may
        discard what is on its device."""
        addresses = [page.ctypes.data for page in pages]
        return on_device([*self._layer_addresses, *piece_ids, *addresses], self._device)

    def _launch(self, pieces: int, numbers: torch.Tensor, layers: range, *, gather: bool) -> None:
        runs, word = self._runs, self._word
        words = runs.run_bytes // word
        # In one dimension: CUDA takes 65,535 programs in the others, and a page may have more runs.
        grid = (pieces * len(layers) * runs.parts * runs.rows,)
        copy_runs[grid](
            numbers,
            len(self._layers),
            pieces,
            layers.start,
            runs.parts,
            runs.rows,
            runs.pieces_per_block,
            runs.pieces_per_page,
            words,
            runs.part_stride // word,
            runs.block_stride // word,
            runs.row_stride // word,
            WORD=_WORDS[word],
            WIDTH=min(_MOST_AT_ONCE, triton.next_power_of_2(words)),
            GATHER=gather,
        )


# Compiled once, not for each kind of number: a load must not wait for the compiler.
@triton.jit(do_not_specialize=["pieces", "first_layer"])  # type: ignore[untyped-decorator, unused-ignore]
def copy_runs(  # type: ignore[no-untyped-def]  # noqa: D103
    numbers,
    all_layers,
    pieces,
    first_layer,
    parts,
    rows,
    pieces_per_block,
    pieces_per_page,
    words,
    part_stride,
    block_stride,
    row_stride,
    WORD: tl.constexpr,  # noqa: N803
    WIDTH: tl.constexpr,  # noqa: N803
    GATHER: tl.constexpr,  # noqa: N803
):
    # 64 bits throughout: a KV cache has more words than 32 bits count.
    program = tl.program_id(0).to(tl.int64)
    place = program % pieces
    strip = program // pieces
    row = strip % rows
    part = strip // rows % parts
    layer = first_layer + strip // rows // parts
    piece = tl.load(numbers + all_layers + place)
    block = piece // pieces_per_block
    share = piece % pieces_per_block
    inside = tl.load(numbers + layer).to(tl.pointer_type(WORD))
    inside += part * part_stride + block * block_stride + row * row_stride + share * words
    outside = tl.load(numbers + all_layers + pieces + place // pieces_per_page).to(tl.pointer_type(WORD))
    outside += (((layer * parts + part) * rows + row) * pieces_per_page + place % pieces_per_page) * words
    for start in range(0, words, WIDTH):
        at = start + tl.arange(0, WIDTH)
        mask = at < words
        if GATHER:
            tl.store(outside + at, tl.load(inside + at, mask=mask), mask=mask)
        else:
            tl.store(inside + at, tl.load(outside + at, mask=mask), mask=mask)
