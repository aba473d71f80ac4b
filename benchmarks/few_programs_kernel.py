"""A Triton kernel that copies a list of runs by as many programs as it is launched with. See `copy_strategies.py`."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def copy_by_few(numbers, runs, words, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """``numbers``: source addresses of all runs, then target addresses; ``words``: of 8 bytes, a run."""
    run = tl.program_id(0).to(tl.int64)
    while run < runs:
        source = tl.multiple_of(tl.load(numbers + run).to(tl.pointer_type(tl.int64)), 16)
        target = tl.multiple_of(tl.load(numbers + runs + run).to(tl.pointer_type(tl.int64)), 16)
        for start in range(0, words, WIDTH):
            at = start + tl.arange(0, WIDTH)
            tl.store(target + at, tl.load(source + at, mask=at < words), mask=at < words)
        run += tl.num_programs(0)
