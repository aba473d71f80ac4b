"""What the block manager needs to know of a request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from connector.blocks.hashing import BlockHash


class Request(Protocol):
    """An engine's request, as far as the block manager reads it. The manager changes none of it."""

    @property
    def request_id(self) -> str:
        """Unique among the requests that hold blocks."""

    @property
    def num_tokens(self) -> int:
        """Prompt tokens and tokens generated so far."""

    @property
    def num_computed_tokens(self) -> int:
        """Leading tokens whose KV is in the request's blocks, or is being loaded there. 0 while it holds no blocks."""

    @property
    def block_hashes(self) -> Sequence[BlockHash]:
        """One for each full block of its tokens, ``num_tokens // block_size`` of them."""
