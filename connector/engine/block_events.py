"""Block events: which blocks kvstore holds, for those who listen to an engine's events, such as routers."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

REMEMBERED = 1 << 16
"""Most blocks that are on their way, most that were told of, and most that nobody has taken yet. Beyond it the oldest
is forgotten."""


@dataclass(frozen=True, slots=True)
class EventBlock:
    """A block as the engine names it."""

    name: Any
    parent: Any
    """None for the first of a prompt."""
    token_ids: Sequence[int]
    group: int
    lora_id: int | None = None
    lora_name: str | None = None


class BlockEvents:
    """A block is told of once all its parts are stored, and again when a lookup finds that it has gone. There is one
    part a rank, each of which is stored by one worker."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._planned: dict[tuple[int, bytes], tuple[EventBlock, int]] = {}  # and how many parts are stored
        self._known: dict[tuple[int, bytes], EventBlock] = {}
        self._stored: deque[EventBlock] = deque(maxlen=REMEMBERED)
        self._removed: deque[EventBlock] = deque(maxlen=REMEMBERED)

    def plan(self, block_hash: bytes, block: EventBlock) -> None:
        """A block is to be stored, if it is not there already."""
        key = block.group, block_hash
        if key not in self._known:
            self._planned[key] = block, 0
            _bound(self._planned)

    def store(self, group: int, hashes: Sequence[bytes]) -> None:
        """One worker's parts of these blocks are stored."""
        for block_hash in hashes:
            key = group, block_hash
            if key not in self._planned:
                continue
            block, parts = self._planned.pop(key)
            if parts + 1 < self._ranks:
                self._planned[key] = block, parts + 1
                continue
            self._known[key] = block
            _bound(self._known)
            self._stored.append(block)

    def miss(self, group: int, block_hash: bytes) -> None:
        """This block is not there."""
        block = self._known.pop((group, block_hash), None)
        if block is not None:
            self._removed.append(block)

    def take(self) -> tuple[list[EventBlock], list[EventBlock]]:
        """Blocks that were stored, and blocks that have gone, since the last call; the latest, where they are many."""
        stored, removed = list(self._stored), list(self._removed)
        self._stored.clear()
        self._removed.clear()
        return stored, removed


def blocks_of(request: Any, group: int, size: int, hash_size: int, places: range) -> Iterator[tuple[int, EventBlock]]:
    """Blocks of an engine's request as the engine names them: by the last of its hashes in each.

    Args:
        request: it has ``block_hashes``, ``all_token_ids`` and ``lora_request``.
        group: whose blocks.
        size: tokens of one of them.
        hash_size: tokens between two of the request's hashes.
        places: which blocks. Those that the request has no hash of yet are left out.
    """
    hashes_a_block = size // hash_size
    names = request.block_hashes[hashes_a_block - 1 :: hashes_a_block]
    lora = request.lora_request
    for index in places[: max(0, len(names) - places.start)]:
        yield (
            index,
            EventBlock(
                names[index],
                names[index - 1] if index else None,
                request.all_token_ids[index * size : (index + 1) * size],
                group,
                lora.adapter_id if lora is not None else None,
                lora.name if lora is not None else None,
            ),
        )


def _bound(blocks: dict[Any, Any]) -> None:
    if len(blocks) > REMEMBERED:
        del blocks[next(iter(blocks))]
