"""The request protocol: what the block manager reads of an engine's request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvstore.connector.blocks.extra_keys import PrefixKeys
from kvstore.connector.blocks.hashing import BlockHash


class Request(Protocol):
    """An engine's request, as far as the block manager reads it. The manager changes none of it."""

    @property
    def request_id(self) -> str:
        """Unique among the requests that hold blocks."""

    @property
    def num_tokens(self) -> int:
        """Prompt tokens and tokens generated so far."""

    @property
    def num_prompt_tokens(self) -> int:
        """Prompt tokens alone."""

    @property
    def num_computed_tokens(self) -> int:
        """Leading tokens whose KV is in the request's blocks, or is being loaded there. 0 while it holds no blocks."""

    @property
    def num_in_flight_tokens(self) -> int:
        """Of these, tokens of steps that are not over: blocks that such a step reads are kept. 0 where each step is
        over before the next one is scheduled."""

    @property
    def block_hashes(self) -> Sequence[BlockHash]:
        """One for each ``hash_block_size`` of its tokens: see
        :class:`kvstore.connector.blocks.hashing.BlockHashChain`."""

    @property
    def skip_reading_prefix_cache(self) -> bool:
        """True: nothing is looked up, because every token has to be computed (prompt log-probabilities, pooling)."""

    @property
    def num_preemptions(self) -> int:
        """How often its blocks were taken from it, for the statistics."""

    @property
    def shared_prefix_boundary(self) -> int:
        """What :meth:`kvstore.connector.blocks.manager.KVCacheManager.get_shared_prefix_boundary` said at its last
        lookup. Read only where the configuration has a retention interval."""

    @property
    def token_ids(self) -> Sequence[int]:
        """Prompt tokens and tokens generated so far, for events."""

    @property
    def prefix_keys(self) -> PrefixKeys | None:
        """What besides tokens its KV depends on, for events."""
