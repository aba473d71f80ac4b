"""An engine's KV tensors: one a layer, described by a :class:`PageLayout`, and seen as contiguous runs of bytes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from kvstore.errors import InvalidRequestError
from kvstore.gpu.layout import PageLayout, Runs, check_axes

PageBytes = npt.NDArray[np.uint8]
"""One page in host memory: a contiguous one-dimensional array of ``page_bytes`` bytes, mostly a view into the arena."""

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


def by_layer(tensors: Sequence[torch.Tensor], axes: str) -> tuple[list[torch.Tensor], str]:
    """One tensor a layer, and the names of its axes.

    Args:
        tensors: as the axes say: one a layer, or a single one with an axis ``layer``.
        axes: see :mod:`kvstore.gpu.layout`.

    Raises:
        InvalidRequestError: such tensors can't have these axes.
    """
    names = axes.split()
    check_axes(names, axes)
    if "layer" not in names:
        return [tensor.detach() for tensor in tensors], axes
    if len(tensors) != 1 or tensors[0].dim() != len(names):
        raise InvalidRequestError(
            f"axes {axes!r}: one tensor of {len(names)} dimensions is needed,"
            f" got {[tuple(tensor.shape) for tensor in tensors]}"
        )
    at = names.index("layer")
    return list(tensors[0].detach().unbind(at)), " ".join(names[:at] + names[at + 1 :])


def kind_of(layer: torch.Tensor) -> tuple[object, ...]:
    """What layers that are alike have in common."""
    return layer.shape, layer.stride(), layer.dtype, layer.device


def describe(layers: Sequence[torch.Tensor], axes: str, page_tokens: int | None = None) -> PageLayout:
    """The layout of one tensor a layer.

    Raises:
        InvalidRequestError: no layer, tensors that are not alike, or what :meth:`PageLayout.describe` refuses.
    """
    if not layers:
        raise InvalidRequestError("a paged KV needs at least 1 layer, got 0")
    first = layers[0]
    for index, layer in enumerate(layers):
        if kind_of(layer) != kind_of(first):
            raise InvalidRequestError(
                f"layer {index} is {tuple(layer.shape)} {layer.dtype} on {layer.device} with strides {layer.stride()},"
                f" layer 0 is {tuple(first.shape)} {first.dtype} on {first.device} with strides {first.stride()}:"
                " they must be alike"
            )
    strides = [stride * first.itemsize for stride in first.stride()]
    return PageLayout.describe(axes, first.shape, strides, first.itemsize, layers=len(layers), page_tokens=page_tokens)


def merge_touching(layers: Sequence[torch.Tensor], layout: PageLayout) -> tuple[list[torch.Tensor], PageLayout]:
    """Fewer and longer layers where some lie side by side in each block: the first tensor of every stretch, and the
    layout of the stretches. What is given, where none touch."""
    storages = {layer.untyped_storage().data_ptr() for layer in layers}
    # Memory of different tensors may touch by chance; what looks at a stretch looks at one tensor's.
    count = layout.touching([layer.data_ptr() for layer in layers]) if len(storages) == 1 else 1
    return list(layers[::count]), layout.merged(count)


def word_bytes(layers: Sequence[torch.Tensor], runs: Runs) -> int:
    """The longest word, 8 bytes at most, in which all runs can be copied."""
    numbers = [runs.run_bytes, runs.part_stride, runs.block_stride, runs.row_stride]
    for layer in layers:
        numbers += [layer.data_ptr(), int(layer.storage_offset()) * layer.itemsize]
    return next(size for size in _WORDS if not any(number % size for number in numbers))


def run_view(layer: torch.Tensor, layout: PageLayout, word: int = 1) -> torch.Tensor:
    """A layer's memory as ``(parts, blocks, pieces_per_block, rows, words)``, the words of so many bytes."""
    runs = layout.runs
    shape = (runs.parts, layout.num_blocks, runs.pieces_per_block, runs.rows, runs.run_bytes // word)
    strides = (runs.part_stride, runs.block_stride, runs.run_bytes, runs.row_stride, word)
    words = torch.empty(0, dtype=_WORDS[word], device=layer.device)
    before = layer.storage_offset() * layer.itemsize
    words.set_(layer.untyped_storage(), before // word, shape, [stride // word for stride in strides])
    return words
