"""Full attention: every block is kept until its request is freed, and a hit is a run of blocks from the first on."""

from __future__ import annotations

from collections.abc import Mapping

from connector.blocks.single_type import Hit, SingleTypeManager
from connector.blocks.sources import BlockSource
from connector.blocks.specs import FullAttentionSpec


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

    def get_num_common_prefix_blocks(self, request_id: str, popped: Mapping[int, int]) -> int:
        """The leading blocks that as many requests hold as there are."""
        num_requests = sum(bool(table) for table in self._tables.values())
        common = 0
        for block in self._tables.get(request_id, ()):
            if block.ref_cnt - popped.get(block.block_id, 0) != num_requests:
                break
            common += 1
        return common
