"""Block tables of sliding-window attention: what a request holds of its past, and what a hit is."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from kvstore.connector.blocks.block import KVCacheBlock
from kvstore.connector.blocks.single_type_manager import Hit, SingleTypeKVCacheManager
from kvstore.connector.blocks.sources import BlockSource
from kvstore.connector.blocks.specs import SlidingWindowSpec


class SlidingWindowManager(SingleTypeKVCacheManager[SlidingWindowSpec]):
    """Blocks of a group whose tokens attend to the ``sliding_window - 1`` tokens before them and to themselves."""

    def find_longest_cache_hit(self, source: BlockSource, max_length: int, *, drop_last: bool) -> Hit:
        """The last place with enough blocks in a row before it for a window; or what there is from the first one on."""
        needed = self._blocks_for_hit(drop_last=drop_last)
        rows: list[Sequence[KVCacheBlock]] = []  # from the back
        start = end = 0
        for index in range(max_length // self.block_size - 1, -1, -1):
            row = source.at(index)
            if row is None:
                rows.clear()
            elif rows or self._is_aligned(index + (not drop_last)):
                start, end = index, end if rows else index + 1
                rows.append(row)
                if len(rows) >= needed:
                    break
        if not rows:
            return self._hit(source, 0, ())
        if len(rows) < needed:  # they begin with the prompt's first block
            end = self._aligned_down(end)
        if drop_last:
            end = self._aligned_down(end - 1)
        return self._hit(source, start, rows[::-1][: max(end - start, 0)])

    def get_num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """Those before the window of the next token and the tokens that are kept besides."""
        return max(0, num_computed_tokens - self.spec.sliding_window + 1 - self.spec.extra_retained_tokens)

    def _aligned_down(self, num_blocks: int) -> int:
        while num_blocks > 0 and not self._is_aligned(num_blocks):
            num_blocks -= 1
        return max(num_blocks, 0)

    def _findable(self, first: int, last: int, boundaries: Collection[int]) -> Iterable[int]:
        """The blocks that lie within a window before a place where hits may end: no hit ever asks for the others. With
        a retention interval, before such a place that is kept."""
        needed = self._blocks_for_hit(drop_last=self._settings.use_eagle)
        # With a block to drop, a hit begins with the block behind the place where it may end.
        shift = int(self._settings.use_eagle)
        found: set[int] = set()
        if self._retention != 0:
            per_segment = (self._retention or self._alignment) // self.block_size
            if needed >= per_segment:
                return range(first, last)
            found.update(i for i in range(max(first, shift), last) if (i - shift) % per_segment >= per_segment - needed)
        if self._retention is not None:
            for boundary in boundaries:
                end = boundary // self._alignment * self._alignment // self.block_size + shift
                found.update(range(max(first, end - needed), min(last, end)))
        return sorted(found)

    def _cap_admission(self, num_blocks: int) -> int:
        """Blocks that leave the window are freed as a prompt is computed in pieces."""
        return min(num_blocks, self.spec.max_admission_blocks_per_request(self._settings.limits))

    def _sliding_window(self) -> int | None:
        return self.spec.sliding_window

    def _blocks_for_hit(self, *, drop_last: bool) -> int:
        # The next token's window holds sliding_window - 1 tokens before it, wherever in a block it begins: hits end at
        # the end of a block. One block more, where the last one is dropped.
        return -(-(self.spec.sliding_window - 1) // self.block_size) + drop_last
