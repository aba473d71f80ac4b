"""The batches of one transfer: the next one is begun while the one before it is still being copied."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from kvstore.gpu.begun import BegunCopy

Pending = TypeVar("Pending")


@dataclass(slots=True)
class Batch(Generic[Pending]):
    """Whose copy has begun."""

    pages: slice
    """Of the transfer's."""
    pending: Pending
    copy: BegunCopy
    held: ExitStack
    """What is given back behind the copy. Whoever closes it early waits for that."""
    block_ids: list[int]
    """That are copied."""
    began: float
    """When the node was asked, by ``time.monotonic``."""


def carry_out(
    begin: Callable[[bool], Batch[Pending] | None],
    finish: Callable[[Batch[Pending]], bool],
    may_overlap: Callable[[], bool],
) -> None:
    """Begin batches in order, and finish them in the same order: on a device two at most are under way. What was done
    when it had begun is finished before the next one is begun.

    A batch that can't be begun leaves those before it, which are finished. One that can't be finished, or whose
    transfer is not wanted any more, takes the one behind it along.

    Args:
        begin: the next batch; told whether no other is under way. None: there is none, or another one may be begun
            only when those under way are finished.
        finish: waits for a batch's copy and completes it. False: there is no point in going on.
        may_overlap: whether the next batch may be begun beside one that is under way. It does not raise.
    """
    begun: deque[Batch[Pending]] = deque()

    def finish_down_to(most: int) -> bool:
        while len(begun) > most:
            batch = begun.popleft()
            with batch.held:
                if not finish(batch):
                    return False
        return True

    try:
        while finish_down_to(1 if begun and may_overlap() else 0):
            alone = not begun
            try:
                batch = begin(alone)
            except Exception:
                finish_down_to(0)
                raise
            if batch is not None:
                begun.append(batch)
            elif alone:
                return
            if not finish_down_to(0 if batch is None or batch.copy.is_done else 1):
                return
    finally:
        with ExitStack() as ending:
            for batch in reversed(begun):
                ending.push(batch.held)
