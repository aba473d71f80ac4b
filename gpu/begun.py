"""A copy between blocks and pages that has begun: a device goes on with it by itself, and it is waited for later."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Protocol


class BegunCopy(Protocol):
    """What was given to the copy, blocks and pages, stays as it is until one of the waits has returned."""

    @property
    def is_done(self) -> bool:
        """Whether nothing of it is under way at this moment. Never waits, and any thread may ask. :meth:`wait` is
        called all the same."""
        ...

    def wait(self) -> None:
        """Until the bytes are where they belong; once. Nothing of it is under way any more, even when this raises what
        the device did, or whoever is told of layers."""
        ...

    def end(self) -> None:
        """Instead: until nothing of it is under way any more, wherever the bytes are. Nothing more is queued, and
        nobody is told of a layer. Behind :meth:`wait`, or once more, it does nothing."""
        ...


class DoneCopy:
    """:class:`BegunCopy` that was done when it had begun, as all are in host memory."""

    is_done = True

    def wait(self) -> None:
        """It was done before."""

    def end(self) -> None:
        """It was done before."""


DONE = DoneCopy()


class SeveralCopies:
    """:class:`BegunCopy` of several: all are begun before the first one is waited for. If one can't be begun, nothing
    is copied any more when its error is raised.

    Args:
        begin: begins each.
        in_order: they tell of layers. Otherwise the last one is waited for first: where copies are done one after the
            other, that is the only wait.
    """

    def __init__(self, begin: Iterable[Callable[[], BegunCopy]], *, in_order: bool) -> None:
        self._copies: list[BegunCopy] = []
        try:
            for each in begin:
                self._copies.append(each())
        except BaseException:
            self.end()
            raise
        self._in_order = in_order

    @property
    def is_done(self) -> bool:
        """Whether nothing of any is under way."""
        return all(copy.is_done for copy in self._copies)

    def wait(self) -> None:
        """For all of them."""
        copies: Sequence[BegunCopy] = self._copies if self._in_order else self._copies[::-1]
        try:
            for copy in copies:
                copy.wait()
        finally:
            self.end()

    def end(self) -> None:
        """All of them, also where one fails."""
        with ExitStack() as ending:
            for copy in self._copies:
                ending.callback(copy.end)
