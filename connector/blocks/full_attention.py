"""Block tables of full attention: a request holds all of its blocks, and a hit is a run of them from the first one."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from kvstore.connector.blocks.block import KVCacheBlock
from kvstore.connector.blocks.request import Request
from kvstore.connector.blocks.single_type_manager import Hit, SingleTypeKVCacheManager
from kvstore.connector.blocks.sources import BlockSource
from kvstore.connector.blocks.specs import FullAttentionSpec


class FullAttentionManager(SingleTypeKVCacheManager[FullAttentionSpec]):
    """Blocks of a group with full attention."""

    def find_longest_cache_hit(self, source: BlockSource, max_length: int, *, drop_last: bool) -> Hit:
        """The run of blocks up to the first one missing: no hash behind it can hit, as each names the whole prefix.

        Where hits may end inside a block, the longest tail of a prompt that is in the block behind them, too.
        """
        columns = source.leading(max_length // self.block_size)
        length = len(columns[0]) * self.block_size
        if self._hits_inside_blocks:
            length = self._add_tail(source, columns, max_length)
        if drop_last and length:
            # Of a block that is hit inside the rest stays of use: KV is only ever added to it.
            length -= min(self._alignment, self.block_size)
        length -= length % self._alignment
        for column in columns:
            del column[-(-length // self.block_size) :]
        return columns, length

    def _add_tail(self, source: BlockSource, columns: list[list[KVCacheBlock]], max_length: int) -> int:
        whole = len(columns[0]) * self.block_size
        most = min(whole + self.block_size - self._alignment, max_length - max_length % self._alignment)
        for length in range(most, whole, -self._alignment):
            row = source.inside(length // self._alignment)
            if row is not None:
                for column, block in zip(columns, row, strict=True):
                    column.append(block)
                return length
        return whole

    def cache_blocks(self, request: Request, num_tokens: int, boundaries: Collection[int] = ()) -> None:
        """Lets the request's full blocks before token ``num_tokens`` be found by others, wherever they end.

        Where hashes are closer together than blocks are long, the end of the prompt is noted too: for those who follow
        the events, and for hits inside a block.
        """
        super().cache_blocks(request, num_tokens, boundaries)
        if self.hashes_per_block > 1:
            self._cache_prompt_tail(request, num_tokens)

    def _cache_prompt_tail(self, request: Request, num_tokens: int) -> None:
        step = self._settings.hash_block_size
        # The last token of a prompt is always computed again, unless a drafting head has the last block computed.
        end = (request.num_prompt_tokens - (not self._settings.use_eagle)) // step * step
        if 0 < end <= num_tokens and end % self.block_size:
            self._cache_up_to(request, end)

    def get_num_common_prefix_blocks(self, request_id: str, popped: Mapping[int, int]) -> int:
        """The leading blocks that as many requests hold as there are."""
        num_requests = sum(bool(table) for table in self._tables.values())
        common = 0
        for block in self._tables.get(request_id, ()):
            if block.ref_cnt - popped.get(block.block_id, 0) != num_requests:
                break
            common += 1
        return common
