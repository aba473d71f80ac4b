"""Cross-attention: blocks for what an encoder made of a request's other input, all at once, shared with no one."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.connector.blocks.block import Block
from kvstore.connector.blocks.request import Request
from kvstore.connector.blocks.single_type_manager import Hit, SingleTypeManager
from kvstore.connector.blocks.sources import BlockSource
from kvstore.connector.blocks.specs import CrossAttentionSpec


class CrossAttentionManager(SingleTypeManager[CrossAttentionSpec]):
    """Blocks of a group whose tokens attend to an encoder's. Its ``num_tokens`` are the encoder's tokens."""

    holds_encoder_tokens = True

    def find_longest_hit(self, source: BlockSource, max_length: int, *, drop_last: bool) -> Hit:
        """Nothing: the encoder's tokens are not part of the prompt."""
        return self._hit(source, 0, ())

    def add_computed_blocks(self, request_id: str, blocks: Sequence[Block], num_computed_tokens: int) -> None:
        """Nothing is ever computed."""
        assert not blocks, f"request {request_id} is given hits for an encoder's tokens"

    def allocate_external_blocks(self, request_id: str, num_computed_tokens: int) -> None:
        """Nothing comes from elsewhere."""

    def cache_blocks(self, request: Request, num_tokens: int) -> None:
        """Nothing is found by others."""

    def complete_load(self, request_id: str, num_computed_tokens: int) -> None:
        """Nothing was loaded."""
