"""Base of the paths that map no arena: pages are sent from, and received into, this process's own memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvstore.client.paths.path import OpenedNamespace, Path
from kvstore.client.paths.pending import PendingLoad
from kvstore.client.paths.transfer import Transfer
from kvstore.page_codes import StoreOutcome

Bytes = npt.NDArray[np.uint8]


class BufferedPath(Path):
    """:class:`kvstore.client.paths.path.Path` without an arena."""

    def prepare_load(self, namespace: OpenedNamespace, transfer: Transfer) -> PendingLoad:
        """Receive the leading pages."""
        pages: list[Bytes] = [np.empty(namespace.layout.page_bytes, np.uint8) for _ in range(transfer.page_count)]
        tiers = self.load(namespace, transfer._replace(pages=pages))
        for page in pages:
            page.flags.writeable = False
        return PendingLoad(pages[: len(tiers)], tiers, lambda: len(tiers))


def pages_to_fill(outcomes: bytes, page_bytes: int) -> tuple[list[Bytes | None], list[Bytes]]:
    """For each outcome of a reservation a page to be filled and sent, or None where nothing is reserved; and these
    pages alone."""
    reserved = StoreOutcome.RESERVED
    pages = [np.empty(page_bytes, np.uint8) if outcome == reserved else None for outcome in outcomes]
    return pages, [page for page in pages if page is not None]


def pages_to_send(pages: Sequence[Bytes], outcomes: bytes) -> list[Bytes]:
    """Those of a store's pages for which slots are reserved."""
    reserved = StoreOutcome.RESERVED
    return [page for page, outcome in zip(pages, outcomes, strict=True) if outcome == reserved]
