"""Block tables of attention groups (full, windowed, chunked, cross): what a request holds, and what a hit is."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from kvstore.connector.blocks.block import KVCacheBlock
from kvstore.connector.blocks.request import Request
from kvstore.connector.blocks.single_type_manager import Hit, SingleTypeKVCacheManager
from kvstore.connector.blocks.sources import BlockSource
from kvstore.connector.blocks.specs import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    SlidingWindowSpec,
)


class FullAttentionManager(SingleTypeKVCacheManager[FullAttentionSpec]):
    """Blocks of a group with full attention."""

    def find_longest_cache_hit(self, source: BlockSource, max_length: int, *, drop_last: bool) -> Hit:
        """The run of blocks up to the first one missing: no hash behind it can hit, as each names the whole prefix."""
        columns = source.leading(max_length // self.block_size)
        length = len(columns[0]) * self.block_size
        if drop_last and length:
            length -= self.block_size
        length -= length % self._alignment
        for column in columns:
            del column[length // self.block_size :]
        return columns, length

    def cache_blocks(self, request: Request, num_tokens: int, boundaries: Collection[int] = ()) -> None:
        """Lets the request's full blocks before token ``num_tokens`` be found by others, wherever they end.

        Where hashes are closer together than blocks are long, the end of the prompt is noted too, for those who follow
        the events: no hit here ends inside a block.
        """
        super().cache_blocks(request, num_tokens, boundaries)
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
        is_new = self._pool.cache_partial_block(table[index], hashes[num_steps - 1], self.group_id, end)
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
