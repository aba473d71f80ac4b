"""The third copy strategy: a Triton kernel that reads, or writes, pages in pinned host memory; one launch a call.

It runs on the device's multiprocessors, with which the engine computes, and so on a few of them only
(:data:`PROGRAMS`), whatever there is to copy. It saves the staging buffer and a copy a page or a run. Which is better
is measured.

With ``TRITON_INTERPRET=1`` in the environment it runs on CPU tensors, slowly, which is how its bytes are tested without
a GPU. What is compiled for one is looked at without it, too.
"""

# ruff: noqa: N803 - Triton's way to write what is known when it compiles

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from kvstore.gpu.cudart import cuda_runtime
from kvstore.gpu.layout import PageLayout
from kvstore.gpu.pinned import is_pinned
from kvstore.gpu.strategies import on_device
from kvstore.gpu.tensors import PageBytes

PROGRAMS = 12
"""Each has a multiprocessor to itself, of the 132 of an H100. vLLM's copy kernel has as many, measured there. By
calculation it is enough: PCIe 5.0 carries 55 GB/s, and a read over it takes up to 2 µs, so 110 KB must be under way;
these ask for up to 32 KiB each."""

LAUNCH_OPTIONS = {"num_warps": 8, "enable_fp_fusion": False}
"""256 threads a program. Nothing here multiplies fractions, but Triton 3.9 warns whoever leaves its default."""

_WORDS_AT_ONCE = 4096
"""Words that one program copies at once, of one run or of several: 16 a thread, which all fit into registers."""

_LONGEST_ACCESS = 16
"""Most bytes that a thread loads or stores at once: two words of 8."""

_CACHE_LINE = 128
"""Bytes. What a run is cut into begins at multiples of it in the run, so that no access straddles two needlessly."""

_WORDS = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}


class Kernel:
    """:class:`kvstore.gpu.strategies.CopyStrategy` by the kernel below.

    It is compiled twice for a layout, once a direction, at the first call of each: whatever differs from call to call
    is no reason to compile it again.

    Args:
        layers: one tensor a layer.
        layout: of these layers.
        programs: how many copy, whatever there is to copy.
    """

    def __init__(self, layers: Sequence[torch.Tensor], layout: PageLayout, programs: int = PROGRAMS) -> None:
        self._layers = list(layers)  # they must not go away: the kernel knows addresses only
        self._layer_addresses = [layer.data_ptr() for layer in layers]
        self._layout = layout
        self._grid = (programs,)
        self._alignment = alignment(self._layer_addresses, layout)
        self._variants = {gather: variant(layout, self._alignment, gather=gather) for gather in (False, True)}
        self._device = layers[0].device
        runtime = cuda_runtime(self._device)
        self._has_host_addresses = runtime is None or runtime.can_use_host_pointers(self._device.index)

    def takes(self, pages: Sequence[PageBytes]) -> bool:
        """Whether the device can reach all of these pages, at their addresses, which are aligned as compiled for."""
        return self._has_host_addresses and all(
            page.ctypes.data % self._alignment == 0 and is_pinned(page) for page in pages
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
        copy_runs[self._grid](numbers, pieces, layers.start, len(layers), **self._variants[gather], **LAUNCH_OPTIONS)


def alignment(layer_addresses: Sequence[int], layout: PageLayout) -> int:
    """Bytes, at most 16 and a power of two, of which the addresses of all runs in these layers are multiples.

    So are those of all runs in a page whose own address is one, since the length of a run is.
    """
    runs = layout.runs
    strides = runs.part_stride, runs.block_stride, runs.row_stride
    return math.gcd(_LONGEST_ACCESS, runs.run_bytes, *strides, *layer_addresses)


def variant(layout: PageLayout, alignment: int, *, gather: bool) -> dict[str, Any]:
    """What :func:`copy_runs` is compiled for: its constants, by name."""
    runs = layout.runs
    word = min(alignment, max(_WORDS))
    words, line = runs.run_bytes // word, _CACHE_LINE // word
    tiles = triton.cdiv(words, _WORDS_AT_ONCE)
    tile_words = words if tiles == 1 else triton.cdiv(words, tiles * line) * line  # tiles of about equal length
    width = triton.next_power_of_2(tile_words)
    return {
        "LAYERS": layout.layers,
        "PARTS": runs.parts,
        "PART_STRIDE": runs.part_stride,
        "BLOCK_STRIDE": runs.block_stride,
        "ROWS": runs.rows,
        "ROW_STRIDE": runs.row_stride,
        "PIECES_PER_BLOCK": runs.pieces_per_block,
        "PIECES_PER_PAGE": runs.pieces_per_page,
        "RUN_BYTES": runs.run_bytes,
        "RUN_WORDS": words,
        "WORD": _WORDS[word],
        "ALIGNMENT": alignment,
        "TILES": tiles,
        "TILE_WORDS": tile_words,
        "WIDTH": width,
        "RUNS_AT_ONCE": _WORDS_AT_ONCE // width,
        "GATHER": gather,
    }


# Compiled once, not for each kind of number: a load must not wait for the compiler.
@triton.jit(do_not_specialize=["numbers", "pieces", "first_layer", "layers"])  # type: ignore[untyped-decorator, unused-ignore]
def copy_runs(  # type: ignore[no-untyped-def]  # noqa: D103
    numbers,
    pieces,
    first_layer,
    layers,
    LAYERS: tl.constexpr,
    PARTS: tl.constexpr,
    PART_STRIDE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    ROWS: tl.constexpr,
    ROW_STRIDE: tl.constexpr,
    PIECES_PER_BLOCK: tl.constexpr,
    PIECES_PER_PAGE: tl.constexpr,
    RUN_BYTES: tl.constexpr,
    RUN_WORDS: tl.constexpr,
    WORD: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    TILES: tl.constexpr,
    TILE_WORDS: tl.constexpr,
    WIDTH: tl.constexpr,
    RUNS_AT_ONCE: tl.constexpr,
    GATHER: tl.constexpr,
):
    # The runs of all pages in the order of their bytes. A long run takes several steps, a tile each; of short ones a
    # step takes several. All divisors but one are constants, for which the compiler multiplies.
    # 64 bits throughout: a KV cache has more bytes than 32 bits count.
    runs = pieces.to(tl.int64) * layers * (PARTS * ROWS)
    step = tl.program_id(0).to(tl.int64)
    while step // TILES * RUNS_AT_ONCE < runs:
        run = step // TILES * RUNS_AT_ONCE + tl.arange(0, RUNS_AT_ONCE)
        is_run = run < runs
        piece_of_page = run % PIECES_PER_PAGE
        row = run // PIECES_PER_PAGE % ROWS
        part = run // (PIECES_PER_PAGE * ROWS) % PARTS
        layers_before = run // (PIECES_PER_PAGE * ROWS * PARTS)
        page = layers_before // layers
        layer = first_layer + layers_before - page * layers

        piece = tl.load(numbers + LAYERS + page * PIECES_PER_PAGE + piece_of_page, mask=is_run, other=0)
        inside = tl.load(numbers + layer, mask=is_run, other=0)
        inside += part * PART_STRIDE + row * ROW_STRIDE
        inside += piece // PIECES_PER_BLOCK * BLOCK_STRIDE + piece % PIECES_PER_BLOCK * RUN_BYTES
        outside = tl.load(numbers + LAYERS + pieces + page, mask=is_run, other=0)
        outside += (((layer * PARTS + part) * ROWS + row) * PIECES_PER_PAGE + piece_of_page) * RUN_BYTES

        column = tl.arange(0, WIDTH)
        word = step % TILES * TILE_WORDS + column
        mask = is_run[:, None] & ((column < TILE_WORDS) & (word < RUN_WORDS))[None, :]
        # A promise to the compiler, which makes long accesses of it: ``alignment`` and ``Kernel.takes`` have looked.
        inside = tl.multiple_of(inside.to(tl.pointer_type(WORD)), ALIGNMENT)[:, None] + word[None, :]
        outside = tl.multiple_of(outside.to(tl.pointer_type(WORD)), ALIGNMENT)[:, None] + word[None, :]
        if GATHER:
            tl.store(outside, tl.load(inside, mask=mask), mask=mask)
        else:
            tl.store(inside, tl.load(outside, mask=mask), mask=mask)
        step += tl.num_programs(0)
