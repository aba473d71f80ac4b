"""What `device.py` and `copy_cost.py` compare: the product's copy strategies, and what it does not use.

*kernel of 24 programs* (or 32) is the product's kernel with more than it has, on multiprocessors that the engine would
compute with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kvstore.gpu.cuda import strategies_for
from kvstore.gpu.layout import PageLayout
from kvstore.gpu.strategies import CopyStrategy
from kvstore.gpu.tensors import describe

MORE_PROGRAMS = (24, 32)


@dataclass(frozen=True)
class Shape:
    """One model's KV as vLLM lays it out: one buffer for all layers, (layers, blocks, bytes)."""

    layers: int
    blocks: int
    run_bytes: int
    """Of one layer in a block."""
    layers_inside: bool = False
    """(blocks, layers, bytes) instead: all layers of a block side by side."""


SHAPES = {
    "32 layers x 64 KiB": Shape(32, 512, 64 << 10),
    "32 layers x 64 KiB, layers inside blocks": Shape(32, 512, 64 << 10, layers_inside=True),
    "80 layers x 8 KiB": Shape(80, 1024, 8 << 10),
    "61 layers x 18 KiB (MLA)": Shape(61, 1024, 18 << 10),
}


class Workload:
    """A KV of random bytes (on zeros a wrong copy looks right), pages that leave it, and others that come in."""

    def __init__(self, shape: Shape, device: torch.device, size: int) -> None:
        buffer = torch.empty(shape.layers * shape.blocks * shape.run_bytes, dtype=torch.uint8, device=device)
        for part in buffer.split(1 << 28):
            part.random_(0, 256)
        if shape.layers_inside:
            by_layer = buffer.view(shape.blocks, shape.layers, shape.run_bytes).transpose(0, 1)
        else:
            by_layer = buffer.view(shape.layers, shape.blocks, shape.run_bytes)
        self.shape = shape
        self.layers = list(by_layer)
        self.layout = describe(self.layers, "block dim")
        count = min(shape.blocks // 2, max(1, size // self.layout.page_bytes))
        ids = np.random.default_rng(0).permutation(shape.blocks).tolist()
        self.out_ids, self.in_ids = ids[:count], ids[count : 2 * count]
        self.memory = np.zeros(2 * count * self.layout.page_bytes, np.uint8)
        pages = list(self.memory.reshape(2 * count, -1))
        self.leaving, self.coming = pages[:count], pages[count:]

    @property
    def size(self) -> int:
        """Bytes in one direction."""
        return len(self.leaving) * self.layout.page_bytes

    def content(self, block: int) -> bytes:
        """What a block holds: a page's bytes."""
        return b"".join(layer[block].cpu().numpy().tobytes() for layer in self.layers)


def product_strategies(
    layers: Sequence[torch.Tensor], layout: PageLayout, *, pinned: bool
) -> tuple[dict[str, CopyStrategy], dict[str, str]]:
    """The product's, by name, and why others are not among them."""
    strategies, skipped = strategies_for(layers, layout), {}
    for name, without in ("kernel", "triton is not installed"), ("batch", "needs a CUDA device, and CUDA 12.8"):
        if name not in strategies:
            skipped[name] = without
        elif not pinned:  # a kernel that can't reach it would end the process's use of the device
            del strategies[name]
            skipped[name] = "host memory is not pinned"
    return strategies, skipped


def all_strategies(work: Workload, *, pinned: bool) -> tuple[dict[str, CopyStrategy], dict[str, str]]:
    """The product's strategies and those above, by name, and why others are not among them."""
    strategies, skipped = product_strategies(work.layers, work.layout, pinned=pinned)
    more = [f"kernel of {programs} programs" for programs in MORE_PROGRAMS]
    if work.layers[0].device.type != "cuda":
        return strategies, skipped | dict.fromkeys(more, "needs a CUDA device")
    if "kernel" in skipped:
        return strategies, skipped | dict.fromkeys(more, skipped["kernel"])
    from kvstore.gpu.triton_kernel import Kernel

    kernels = [Kernel(work.layers, work.layout, programs) for programs in MORE_PROGRAMS]
    return strategies | dict(zip(more, kernels, strict=True)), skipped
