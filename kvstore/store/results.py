"""Results of ``prepare_store``, ``complete_store`` and ``prepare_load``."""

from __future__ import annotations

from typing import NamedTuple


class Reserved(NamedTuple):
    """The answer to ``prepare_store``."""

    lease: int
    """0: nothing was reserved."""
    outcomes: bytes
    """One byte a page, a :class:`kvstore.page_codes.StoreOutcome`."""
    frames: list[int]
    """The first frame of each reserved slot, in the order of the pages."""


class Held(NamedTuple):
    """The answer to ``prepare_load``: the leading pages, held."""

    lease: int
    """0: nothing is held."""
    tiers: bytes
    """One byte for each leading page, the :class:`kvstore.page_codes.PageTier` where it was when it was asked for."""
    frames: list[int]
    """The first frame of each, in the order of the pages."""


class Published(NamedTuple):
    """The answer to ``complete_store``, in pages."""

    stored: int
    present: int
    refused: int
