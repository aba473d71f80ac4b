"""Full attention: every block is kept until its request is freed, and a hit is a run of blocks from the first on."""

from __future__ import annotations

from collections.abc import Mapping

from kvstore.connector.blocks.request import Request
from kvstore.connector.blocks.single_type_manager import Hit, SingleTypeManager
from kvstore.connector.blocks.sources import BlockSource
from kvstore.connector.blocks.specs import FullAttentionSpec


class FullAttentionManager(SingleTypeManager[FullAttentionSpec]):
    """Blocks of a group with full attention."""

    def find_longest_hit(self, source: BlockSource, max_length: int, *, drop_last: bool) -> Hit:
        """The run of blocks up to the first one missing: no hash behind it can hit, as each names the whole prefix."""
        columns = source.leading(max_length // self.block_size)
        length = len(columns[0]) * self.block_size
        if drop_last and length:
            length -= self.block_size
        length -= length % self._alignment
        for column in columns:
            del column[length // self.block_size :]
        return columns, length

    def cache_blocks(self, request: Request, num_tokens: int) -> None:
        """See :meth:`SingleTypeManager.cache_blocks`. Where hashes are closer together than blocks are long, the end of
        the prompt is noted too, for those who follow the events: no hit here ends inside a block."""
        super().cache_blocks(request, num_tokens)
        if self.hashes_per_block > 1:
            self._cache_prompt_tail(request, num_tokens)

    def _cache_prompt_tail(self, request: Request, num_tokens: int) -> None:
        step = self._settings.hash_block_size
        # The last token of a prompt is always computed again, unless a drafting head has the last block computed.
        num_steps = (request.num_prompt_tokens - (not self._settings.use_eagle)) // step
        end = num_steps * step
        index = end // self.block_size
        table = self._tables.get(request.request_id, ())
        if not end or end > num_tokens or not end % self.block_size or index >= len(table) or table[index].is_null:
            return
        hashes = request.block_hashes
        is_new = self._pool.cache_tail(table[index], hashes[num_steps - 1], self.group_id, end)
        if is_new and self._pool.enable_kv_cache_events:
            parent = hashes[num_steps - 2] if num_steps > 1 else None
            self._note_stored(
                request, [num_steps - 1], [hashes[num_steps - 1]], parent, (num_steps - 1, num_steps), step
            )

    def get_num_common_prefix_blocks(self, request_id: str, popped: Mapping[int, int]) -> int:
        """The leading blocks that as many requests hold as there are."""
        num_requests = sum(bool(table) for table in self._tables.values())
        common = 0
        for block in self._tables.get(request_id, ()):
            if block.ref_cnt - popped.get(block.block_id, 0) != num_requests:
                break
            common += 1
        return common
