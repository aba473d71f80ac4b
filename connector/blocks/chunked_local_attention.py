"""Block tables of chunked local attention: what a request holds of its last chunk, and what a hit is."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.connector.blocks.block import KVCacheBlock
from kvstore.connector.blocks.single_type_manager import Hit, SingleTypeKVCacheManager
from kvstore.connector.blocks.sources import BlockSource
from kvstore.connector.blocks.specs import ChunkedLocalAttentionSpec


class ChunkedLocalAttentionManager(SingleTypeKVCacheManager[ChunkedLocalAttentionSpec]):
    """Blocks of a group whose tokens attend to those before them in the same chunk."""

    def find_longest_cache_hit(self, source: BlockSource, max_length: int, *, drop_last: bool) -> Hit:
        """Everything before the last chunk, whose blocks no one needs, and the run of blocks from that chunk on."""
        assert not drop_last, "drafting heads and chunked local attention do not go together"
        start = self.get_num_skipped_tokens(max_length) // self.block_size
        rows: list[Sequence[KVCacheBlock]] = []
        for index in range(start, max_length // self.block_size):
            row = source.at(index)
            if row is None:
                break
            rows.append(row)
        return self._hit(source, start, rows)

    def get_num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """Those before the chunk of the next token."""
        return num_computed_tokens - num_computed_tokens % self.spec.attention_chunk_size

    def _cap_admission(self, num_blocks: int) -> int:
        """Blocks of earlier chunks are freed as a prompt is computed in pieces."""
        return min(num_blocks, self.spec.max_admission_blocks_per_request(self._settings.limits))
