"""Copies between slots of the arena and a caller's pages: those that lie side by side on both sides by one copy.

NumPy gives the interpreter's lock away for a copy. Where another thread never waits, it gets it back after Python's
switch interval only: so a copy of many pages is one wait, and not one a page. The native core gives it away once for
all of them, wherever they lie.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from kvstore.arena.format import FRAME_BYTES, frames_for
from kvstore.client.paths.buffers import Rows
from kvstore.core import choice

Bytes = npt.NDArray[np.uint8]
Copy = Callable[[Bytes, Bytes], object]
"""Takes the target and the source."""


def slot_bytes(page_bytes: int) -> int:
    """What a page takes in the arena: the distance of neighbouring slots."""
    return frames_for(page_bytes) * FRAME_BYTES


def copy_slots(
    arena: Bytes, offsets: Sequence[int], stride: int, pages: Sequence[Bytes], copy: Copy, *, out: bool
) -> None:
    """:func:`copy_runs`, by the native core where that runs: ``copy`` has nothing to do then."""
    if (core := choice.native()) is None:
        copy_runs(arena, offsets, stride, pages, copy, out=out)
    elif offsets:
        buffers = pages.table[: len(offsets)] if isinstance(pages, Rows) else pages[: len(offsets)]
        core.copy_slots(arena, list(offsets), pages[0].size, buffers, out)


def copy_runs(
    arena: Bytes, offsets: Sequence[int], stride: int, pages: Sequence[Bytes], copy: Copy, *, out: bool
) -> None:
    """Copy pages into slots, or out of them.

    Args:
        arena: its pages.
        offsets: where each slot lies in it.
        stride: as :func:`slot_bytes`.
        pages: the caller's, as many as there are slots.
        copy: does it.
        out: from the slots.
    """
    table = pages.table if isinstance(pages, Rows) else None
    length = pages[0].size if offsets else 0
    start = 0
    while start < len(offsets):
        end = start + 1
        if table is not None:
            while end < len(offsets) and offsets[end] - offsets[end - 1] == stride:
                end += 1
        at = offsets[start]
        if end - start == 1 or table is None:
            slots, page = arena[at : at + length], pages[start]
        else:
            slots, page = arena[at : at + (end - start) * stride].reshape(-1, stride)[:, :length], table[start:end]
            if length == stride:
                slots, page = slots.reshape(-1), page.reshape(-1)
        if out:
            copy(page, slots)
        else:
            copy(slots, page)
        start = end
