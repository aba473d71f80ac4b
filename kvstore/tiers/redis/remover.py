"""Removing pages: their entries are deleted until none is found any more, or no server says so."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.errors import ResourceError
from kvstore.tiers.redis.context import Context
from kvstore.tiers.redis.format.entry import decode
from kvstore.tiers.redis.net.resp import ServerError
from kvstore.tiers.redis.net.server import runs

_LOOKS = 4
"""How often a page is looked for: compaction may point it elsewhere between a look and its deletion."""


class Remover:
    """Safe for threads."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._entries = context.entries

    def remove(self, keys: Sequence[bytes]) -> int:
        """See :meth:`kvstore.tiers.redis.RedisTier.remove`."""
        keys = list(dict.fromkeys(keys))
        removed = left = 0
        batches = runs(keys)
        for number, batch in enumerate(batches):
            gone, unsure, anybody = self._remove(batch)
            removed += gone
            left += unsure
            if not anybody:  # nor will anybody answer for the rest
                left += sum(map(len, batches[number + 1 :]))
                break
        if left:
            raise ResourceError(
                f"redis: {left} of {len(keys)} pages may still be there: their servers did not answer in time"
                f" ({removed} were removed)"
            )
        return removed

    def _remove(self, keys: Sequence[bytes]) -> tuple[int, int, bool]:
        """How many pages were removed, of how many nobody knows, and whether any server answers."""
        removed = 0
        for _ in range(_LOOKS):
            deadline = self._context.deadline()
            raw, _ = self._entries.seen(keys, deadline)
            unanswered = [key for key, value in zip(keys, raw, strict=True) if isinstance(value, ServerError)]
            if len(unanswered) == len(keys):
                return removed, len(unanswered), False
            found = [(key, entry) for key, value in zip(keys, raw, strict=True) if (entry := decode(value)) is not None]
            keys = [key for key, _ in found] + unanswered
            if not found:
                break
            removed += self._entries.forget(found, deadline)
        return removed, len(keys), True
