"""What one call may name."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.errors import LimitExceededError
from kvstore.wire.messages import join_hashes


def check_hashes(hashes: Sequence[bytes], limit: int) -> None:
    """Block hashes of one call.

    Raises:
        InvalidRequestError: a hash that has not 32 bytes.
        LimitExceededError: more than ``limit`` of them.
    """
    join_hashes(hashes)
    check_count(len(hashes), limit)


def check_count(pages: int, limit: int) -> None:
    """Raises LimitExceededError above ``limit`` pages."""
    if pages > limit:
        raise LimitExceededError(f"{pages} pages in one call, the limit is {limit}")
