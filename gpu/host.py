"""Gather and scatter where the paged KV is in host memory: memory copies of contiguous runs, in the caller's thread.

A thread that copies beside one that computes in Python gets the interpreter's lock back only after the switch
interval, 5 ms: a prompt of hundreds of runs, copied one by one, would take seconds. The native core
(:mod:`kvstore.core`) copies a whole list of runs and gives the lock away once. Without it, Linux copies 1,024 runs at a
time by one system call, ``process_vm_readv`` on the process itself. Short runs, and systems that refuse the call, are
copied by NumPy, one by one.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator, Sequence
from functools import cache

import numpy as np
import numpy.typing as npt
import torch

from kvstore.core import choice
from kvstore.gpu.addresses import Addresses, RunAddresses
from kvstore.gpu.begun import DONE, BegunCopy
from kvstore.gpu.layout import PageLayout
from kvstore.gpu.tensors import PageBytes, merge_touching, run_view

MOST_RUNS = 1024
"""Most runs a system call: ``IOV_MAX`` of Linux."""

SHORTEST_RUN = 4096
"""Bytes below which a run costs the kernel more than it costs NumPy."""

_SYSTEM = ctypes.CDLL(None, use_errno=True)
_ARGUMENTS = (
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_ulong,
    ctypes.c_void_p,
    ctypes.c_ulong,
    ctypes.c_ulong,
)


class HostCopies:
    """:class:`kvstore.gpu.paged_kv.Copies` for CPU tensors: complete when a call returns, nothing is queued."""

    def __init__(self, layers: Sequence[torch.Tensor], layout: PageLayout) -> None:
        runs = self._runs = layout.runs
        self._page_shape = (layout.layers, runs.parts, runs.rows, runs.pieces_per_page, runs.run_bytes)
        # NumPy has no bfloat16 and takes read-only pages as they are: look at everything as bytes.
        self._layers = [run_view(layer, layout).numpy() for layer in layers]
        self._addresses = RunAddresses([layer.data_ptr() for layer in layers], layout)
        storages = {each.data_ptr(): each.nbytes() for each in (layer.untyped_storage() for layer in layers)}
        self._regions = [*storages.items()]
        """Where the layers lie: addresses and bytes."""
        self._in_lists = choice.native() is not None or (runs.run_bytes >= SHORTEST_RUN and can_copy_runs())
        stretches, of_stretches = merge_touching(layers, layout)
        self._merged = HostCopies(stretches, of_stretches) if len(stretches) < len(layers) else None
        """Copies all layers in fewer runs."""

    def begin_gather(self, piece_ids: Sequence[int], out: Sequence[PageBytes], after: object = None) -> BegunCopy:
        """Copy pieces into pages, at once."""
        self.gather(piece_ids, out)
        return DONE

    def begin_scatter(
        self,
        pages: Sequence[PageBytes],
        piece_ids: Sequence[int],
        on_layer: Callable[[int], None] | None = None,
        after: object = None,
    ) -> BegunCopy:
        """Copy pages into pieces, at once."""
        self.scatter(pages, piece_ids, on_layer)
        return DONE

    def gather(self, piece_ids: Sequence[int], out: Sequence[PageBytes], after: object = None) -> None:
        """Copy pieces into pages. There is nothing to wait for."""
        if self._merged is not None:
            self._merged.gather(piece_ids, out)
            return
        if self._in_lists:
            inside, outside = self._addresses.in_blocks(piece_ids), self._addresses.in_pages(out)
            self._copy(outside, inside, out)
            return
        for part, piece in self._pairs(piece_ids, out, range(len(self._layers))):
            np.copyto(part, piece)

    def scatter(
        self,
        pages: Sequence[PageBytes],
        piece_ids: Sequence[int],
        on_layer: Callable[[int], None] | None = None,
        after: object = None,
    ) -> None:
        """Copy pages into pieces, one layer after the other where somebody waits for layers."""
        if self._merged is not None and on_layer is None:
            self._merged.scatter(pages, piece_ids)
            return
        inside, outside = self._addresses.in_blocks(piece_ids), self._addresses.in_pages(pages)
        every = range(len(self._layers))
        for layers in [every] if on_layer is None else [range(each, each + 1) for each in every]:
            if self._in_lists:
                of = slice(layers.start, layers.stop)
                self._copy(inside[:, of], outside[:, of], pages)
            else:
                for part, piece in self._pairs(piece_ids, pages, layers):
                    np.copyto(piece, part)
            if on_layer is not None:
                on_layer(layers.start)

    def _copy(self, targets: Addresses, sources: Addresses, pages: Sequence[PageBytes]) -> None:
        """Copy a list of runs between the layers and these pages."""
        targets, sources = np.ascontiguousarray(targets).reshape(-1), np.ascontiguousarray(sources).reshape(-1)
        if (core := choice.native()) is None:
            copy_runs(targets, sources, self._runs.run_bytes)
            return
        regions = np.array([*self._regions, *((page.ctypes.data, page.nbytes) for page in pages)], np.uint64)
        core.copy_runs(targets, sources, self._runs.run_bytes, regions)

    def _pairs(
        self, piece_ids: Sequence[int], pages: Sequence[PageBytes], layers: range
    ) -> Iterator[tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]]:
        """What lies in a page and in a block, run by run."""
        per_block, per_page = self._runs.pieces_per_block, self._runs.pieces_per_page
        for number, page in enumerate(pages):
            parts = page.reshape(self._page_shape)
            for index in layers:
                for piece in range(per_page):
                    block, inside = divmod(piece_ids[number * per_page + piece], per_block)
                    yield parts[index, :, :, piece], self._layers[index][:, block, inside]


@cache
def can_copy_runs() -> bool:
    """Whether this system copies lists of runs: some sandboxes refuse it."""
    call = getattr(_SYSTEM, "process_vm_readv", None)
    if call is None:
        return False
    call.argtypes, call.restype = _ARGUMENTS, ctypes.c_ssize_t
    source, target = np.arange(64, dtype=np.uint8), np.zeros(64, np.uint8)
    places = np.array([target.ctypes.data], np.uint64), np.array([source.ctypes.data], np.uint64)
    try:
        copy_runs(*places, source.nbytes)
    except OSError:
        return False
    return bool((source == target).all())


def copy_runs(targets: Addresses, sources: Addresses, run_bytes: int) -> None:
    """Copy ``run_bytes`` bytes from each source to the target at its place. Nothing may overlap.

    Args:
        targets: addresses in this process, of memory that stays while this runs.
        sources: as many.

    Raises:
        OSError: the system refuses. Some runs may have been copied.
    """
    vectors = np.empty((2, len(targets), 2), np.uint64)
    vectors[0, :, 0], vectors[1, :, 0] = targets, sources
    vectors[:, :, 1] = run_bytes
    process = os.getpid()
    for start in range(0, len(targets), MOST_RUNS):
        count = min(MOST_RUNS, len(targets) - start)
        local, remote = (each[start:].ctypes.data for each in vectors)
        copied = _SYSTEM.process_vm_readv(process, local, count, remote, count, 0)
        if copied != count * run_bytes:
            error = ctypes.get_errno() if copied < 0 else 0
            raise OSError(error, f"process_vm_readv copied {copied} of {count * run_bytes} bytes")
