"""What became of payloads that came by the network, for a client that lost the answer with its connection."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from kvstore.answers import Published

MOST_RECEIPTS = 4096
"""Most results that are kept, the newest."""


@dataclass(slots=True)
class Receipt:
    """One ticket's. ``published`` is set by whoever receives it, before it is done."""

    cut: Callable[[], object]
    published: Published | None = None


class Receipts:
    """Results by ticket. Safe for threads."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._under_way: dict[int, Receipt] = {}
        self._done: OrderedDict[int, Published] = OrderedDict()

    @contextmanager
    def receiving(self, ticket: int, cut: Callable[[], object]) -> Iterator[Receipt]:
        """Receive a ticket's payloads. ``cut`` ends the connection that they come by, from any thread."""
        receipt = Receipt(cut)
        with self._changed:
            # Two connections may name one ticket; the store lets one of them write.
            first = self._under_way.setdefault(ticket, receipt) is receipt
        try:
            yield receipt
        finally:
            with self._changed:
                if first:
                    del self._under_way[ticket]
                if receipt.published is not None:
                    self._done[ticket] = receipt.published
                    while len(self._done) > MOST_RECEIPTS:
                        self._done.popitem(last=False)
                self._changed.notify_all()

    def settle(self, ticket: int, timeout: float) -> Published | None:
        """End what is still being received, and say what became of it. None: nothing was received.

        Raises:
            TimeoutError: its thread did not end in time.
        """
        with self._changed:
            under_way = self._under_way.get(ticket)
            if under_way is not None:
                under_way.cut()
                if not self._changed.wait_for(lambda: ticket not in self._under_way, timeout):
                    raise TimeoutError
            return self._done.get(ticket)
