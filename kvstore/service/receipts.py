"""Results of recent stores by network, for a client that lost the answer with its connection."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from kvstore.errors import InvalidRequestError
from kvstore.store.results import Published

MOST_RECEIPTS = 4096
"""Most results that are kept, the newest; and most stores that are not taken any more."""


@dataclass(slots=True)
class Receipt:
    """One reservation's. ``published`` is set by whoever receives it, before it is done."""

    cut: Callable[[], object]
    published: Published | None = None


class Receipts:
    """Results by the reservation's number, the ``ticket`` of the wire. Safe for threads."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._under_way: dict[int, Receipt] = {}
        self._done: OrderedDict[int, Published] = OrderedDict()
        self._barred: OrderedDict[int, None] = OrderedDict()
        """Asked for before anything came: nothing is taken under these any more."""

    @contextmanager
    def receiving(self, number: int, cut: Callable[[], object], *, new: bool = False) -> Iterator[Receipt]:
        """Receive a reservation's payloads. ``cut`` ends the connection that they come by, from any thread.

        Raises:
            InvalidRequestError: it should be ``new``, a number that the client chose, and is known already.
        """
        receipt = Receipt(cut)
        with self._changed:
            if new and (number in self._under_way or number in self._done or number in self._barred):
                raise InvalidRequestError("this store came before, or was settled: nothing more is taken of it")
            # Two connections may name one reservation; the store lets one of them write.
            first = self._under_way.setdefault(number, receipt) is receipt
        try:
            yield receipt
        finally:
            with self._changed:
                if first:
                    del self._under_way[number]
                if receipt.published is not None:
                    self._done[number] = receipt.published
                    _keep_newest(self._done)
                self._changed.notify_all()

    def settle(self, number: int, timeout: float) -> Published | None:
        """End what is still being received, and say what became of it. None: nothing was received, nor will be.

        Raises:
            TimeoutError: its thread did not end in time.
        """
        with self._changed:
            under_way = self._under_way.get(number)
            if under_way is not None:
                under_way.cut()
                if not self._changed.wait_for(lambda: number not in self._under_way, timeout):
                    raise TimeoutError
            if number not in self._done:
                self._barred[number] = None
                _keep_newest(self._barred)
            return self._done.get(number)


def _keep_newest(numbers: OrderedDict[int, Any]) -> None:
    while len(numbers) > MOST_RECEIPTS:
        numbers.popitem(last=False)
