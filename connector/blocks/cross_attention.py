"""Block tables of cross-attention: an encoder's tokens, which no two requests share."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from kvstore.connector.blocks.block import KVCacheBlock
from kvstore.connector.blocks.request import Request
from kvstore.connector.blocks.single_type_manager import Hit, SingleTypeKVCacheManager
from kvstore.connector.blocks.sources import BlockSource
from kvstore.connector.blocks.specs import CrossAttentionSpec


class CrossAttentionManager(SingleTypeKVCacheManager[CrossAttentionSpec]):
    """Blocks of a group whose tokens attend to an encoder's. Its ``num_tokens`` are the encoder's tokens."""

    holds_encoder_tokens = True

    def find_longest_cache_hit(self, source: BlockSource, max_length: int, *, drop_last: bool) -> Hit:
        """Nothing: the encoder's tokens are not part of the prompt."""
        return self._hit(source, 0, ())

    def add_local_computed_blocks(
        self, request_id: str, blocks: Sequence[KVCacheBlock], num_computed_tokens: int
    ) -> None:
        """Nothing is ever computed."""
        assert not blocks, f"request {request_id} is given hits for an encoder's tokens"

    def allocate_external_computed_blocks(self, request_id: str, num_computed_tokens: int) -> None:
        """Nothing comes from elsewhere."""

    def cache_blocks(self, request: Request, num_tokens: int, boundaries: Collection[int] = ()) -> None:
        """Nothing is found by others."""

    def complete_load(self, request_id: str, num_computed_tokens: int) -> None:
        """Nothing was loaded."""
