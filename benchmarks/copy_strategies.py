"""What `device.py` and `copy_cost.py` compare: the product's copy strategies, and two that it does not use.

*batched* gives the driver all copies of a call at once (`cuMemcpyBatchAsync`, CUDA 12.8), *batched, merged* too, where
the layers of a block lie side by side and are one copy; *few programs* is a kernel that copies everything by so many
programs and leaves the other multiprocessors to the engine.
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from kvstore.gpu.cuda import strategies_for
from kvstore.gpu.layout import PageLayout
from kvstore.gpu.strategies import CopyStrategy, on_device
from kvstore.gpu.tensors import PageBytes, describe

Addresses = npt.NDArray[np.uint64]
FEW = (12, 32)
_BATCHED_SINCE = 12080  # CUDA 12.8
_STREAM, _ANY = 1, 3  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM and _ANY


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


@dataclass(frozen=True)
class Copies:
    """Source and target addresses, and sizes, of every copy of one call."""

    inside: Addresses
    outside: Addresses
    sizes: Addresses


class Batched:
    """:class:`kvstore.gpu.strategies.CopyStrategy` by one call of the driver. ``describe_copies`` runs anywhere."""

    def __init__(self, layers: Sequence[torch.Tensor], *, merged: bool = False) -> None:
        count = 1 if merged else len(layers)
        self._starts = np.array([layer.data_ptr() for layer in layers[:count]], np.uint64)
        self._stride = np.uint64(layers[0].stride(0))
        self._run_bytes = layers[0].shape[1] * (len(layers) if merged else 1)
        self._runs = np.arange(count, dtype=np.uint64) * np.uint64(self._run_bytes)

    def takes(self, pages: Sequence[PageBytes]) -> bool:
        """Any pages."""
        return True

    def describe_copies(self, ids: Sequence[int], pages: Sequence[PageBytes]) -> Copies:
        """What the driver is given."""
        inside = (self._starts[None, :] + np.array(ids, np.uint64)[:, None] * self._stride).ravel()
        starts = np.array([page.ctypes.data for page in pages], np.uint64)
        outside = (starts[:, None] + self._runs).ravel()
        return Copies(inside, outside, np.full(len(inside), self._run_bytes, np.uint64))

    def gather(self, piece_ids: Sequence[int], out: Sequence[PageBytes]) -> None:
        """Queue copies of blocks into pages."""
        copies = self.describe_copies(piece_ids, out)
        self._queue(copies.outside, copies.inside, copies.sizes, _STREAM)

    def scatter(self, pages: Sequence[PageBytes], piece_ids: Sequence[int], shares: Sequence[range]) -> Generator[None]:
        """Queue copies of pages into blocks, all layers at once."""
        copies = self.describe_copies(piece_ids, pages)
        self._queue(copies.inside, copies.outside, copies.sizes, _ANY)
        yield

    @cached_property
    def _call(self) -> Callable[..., int]:
        driver = ctypes.CDLL("libcuda.so.1")
        address, status = ctypes.c_void_p(), ctypes.c_int()
        error = driver.cuGetProcAddress_v2(
            b"cuMemcpyBatchAsync",
            ctypes.byref(address),
            ctypes.c_int(_BATCHED_SINCE),
            ctypes.c_uint64(0),
            ctypes.byref(status),
        )
        if error or not address.value:
            raise OSError(f"the driver has no cuMemcpyBatchAsync: error {error}, status {status.value}")
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        call = ctypes.CFUNCTYPE(ctypes.c_int, pointer, pointer, pointer, size, pointer, pointer, size, pointer, pointer)
        made: Callable[..., int] = call(address.value)
        return made

    def _queue(self, targets: Addresses, sources: Addresses, sizes: Addresses, access_order: int) -> None:
        # CUmemcpyAttributes: access order of the source, two locations of two words each (no hints), flags.
        attributes = (ctypes.c_uint * 6)(access_order)
        first, failed = ctypes.c_size_t(0), ctypes.c_size_t(0)
        error = self._call(
            targets.ctypes.data,
            sources.ctypes.data,
            sizes.ctypes.data,
            len(targets),
            ctypes.addressof(attributes),
            ctypes.addressof(first),
            1,
            ctypes.addressof(failed),
            torch.cuda.current_stream().cuda_stream,
        )
        if error:
            raise OSError(f"cuMemcpyBatchAsync: error {error} at copy {failed.value}")


class FewPrograms:
    """:class:`kvstore.gpu.strategies.CopyStrategy` by a kernel of a fixed number of programs. Pages must be pinned."""

    def __init__(self, layers: Sequence[torch.Tensor], programs: int) -> None:
        self._layers = list(layers)
        self._programs = programs
        self._batch = Batched(layers)

    def takes(self, pages: Sequence[PageBytes]) -> bool:
        """Any pages that are pinned, which whoever makes this sees to."""
        return True

    def gather(self, piece_ids: Sequence[int], out: Sequence[PageBytes]) -> None:
        """Queue one launch that copies blocks into pages."""
        copies = self._batch.describe_copies(piece_ids, out)
        self._launch(copies.inside, copies.outside)

    def scatter(self, pages: Sequence[PageBytes], piece_ids: Sequence[int], shares: Sequence[range]) -> Generator[None]:
        """Queue one launch that copies pages into blocks, all layers at once."""
        copies = self._batch.describe_copies(piece_ids, pages)
        self._launch(copies.outside, copies.inside)
        yield

    def _launch(self, sources: Addresses, targets: Addresses) -> None:
        from few_programs_kernel import copy_by_few

        first = self._layers[0]
        numbers = on_device([*sources.tolist(), *targets.tolist()], first.device)
        programs = min(self._programs, len(sources))
        copy_by_few[(programs,)](numbers, len(sources), first.shape[1] // 8, WIDTH=1024)


def product_strategies(
    layers: Sequence[torch.Tensor], layout: PageLayout, *, pinned: bool
) -> tuple[dict[str, CopyStrategy], dict[str, str]]:
    """The product's, by name, and why others are not among them."""
    strategies, skipped = strategies_for(layers, layout), {}
    if "kernel" not in strategies:
        skipped["kernel"] = "triton is not installed"
    elif not pinned:  # what it can't reach would end the process's use of the device
        del strategies["kernel"]
        skipped["kernel"] = "host memory is not pinned"
    return strategies, skipped


def all_strategies(work: Workload, *, pinned: bool) -> tuple[dict[str, CopyStrategy], dict[str, str]]:
    """The product's strategies and those above, by name, and why others are not among them."""
    strategies, skipped = product_strategies(work.layers, work.layout, pinned=pinned)
    few = [f"few programs ({programs})" for programs in FEW]
    if work.layers[0].device.type != "cuda":
        return strategies, skipped | dict.fromkeys(("batched", "batched, merged", *few), "needs a CUDA device")
    strategies["batched"] = Batched(work.layers)
    if work.shape.layers_inside:
        strategies["batched, merged"] = Batched(work.layers, merged=True)
    if importlib.util.find_spec("triton") is None or not pinned:
        return strategies, skipped | dict.fromkeys(few, skipped["kernel"])
    return strategies | {name: FewPrograms(work.layers, each) for name, each in zip(few, FEW, strict=True)}, skipped
