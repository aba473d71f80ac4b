"""What `device.py` and `copy_cost.py` compare: the product's copy strategies, and one that it does not use.

*few programs* is a kernel that copies everything by so many programs and leaves the other multiprocessors to the
engine.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Generator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kvstore.gpu.addresses import Addresses, RunAddresses
from kvstore.gpu.cuda import strategies_for
from kvstore.gpu.layout import PageLayout
from kvstore.gpu.strategies import CopyStrategy, on_device
from kvstore.gpu.tensors import PageBytes, describe

FEW = (12, 32)


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


class FewPrograms:
    """:class:`kvstore.gpu.strategies.CopyStrategy` by a kernel of a fixed number of programs. Pages must be pinned."""

    def __init__(self, layers: Sequence[torch.Tensor], programs: int) -> None:
        self._layers = list(layers)
        self._programs = programs
        self._addresses = RunAddresses([layer.data_ptr() for layer in layers], describe(layers, "block dim"))

    def takes(self, pages: Sequence[PageBytes]) -> bool:
        """Any pages that are pinned, which whoever makes this sees to."""
        return True

    def gather(self, piece_ids: Sequence[int], out: Sequence[PageBytes]) -> None:
        """Queue one launch that copies blocks into pages."""
        self._launch(self._addresses.in_blocks(piece_ids), self._addresses.in_pages(out))

    def scatter(self, pages: Sequence[PageBytes], piece_ids: Sequence[int], shares: Sequence[range]) -> Generator[None]:
        """Queue one launch that copies pages into blocks, all layers at once."""
        self._launch(self._addresses.in_pages(pages), self._addresses.in_blocks(piece_ids))
        yield

    def _launch(self, sources: Addresses, targets: Addresses) -> None:
        from few_programs_kernel import copy_by_few

        first = self._layers[0]
        numbers = on_device([*sources.ravel().tolist(), *targets.ravel().tolist()], first.device)
        programs = min(self._programs, sources.size)
        copy_by_few[(programs,)](numbers, sources.size, first.shape[1] // 8, WIDTH=1024)


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
    few = [f"few programs ({programs})" for programs in FEW]
    if work.layers[0].device.type != "cuda":
        return strategies, skipped | dict.fromkeys(few, "needs a CUDA device")
    if importlib.util.find_spec("triton") is None or not pinned:
        return strategies, skipped | dict.fromkeys(few, skipped["kernel"])
    return strategies | {name: FewPrograms(work.layers, each) for name, each in zip(few, FEW, strict=True)}, skipped
