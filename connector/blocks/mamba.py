"""Block tables of recurrent groups: a block holds the state behind its last token, and a hit needs the last alone."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from kvstore.connector.blocks.block import KVCacheBlock
from kvstore.connector.blocks.hashing import BlockHash
from kvstore.connector.blocks.pool import BlockPool
from kvstore.connector.blocks.request import Request
from kvstore.connector.blocks.single_type_manager import (
    GroupSettings,
    Hit,
    SingleTypeKVCacheManager,
    num_free,
)
from kvstore.connector.blocks.sources import BlockSource
from kvstore.connector.blocks.specs import MambaSpec


class MambaManager(SingleTypeKVCacheManager[MambaSpec]):
    """States of a group of recurrent layers, one a block.

    A state that a request writes in this step can be found at once, and read in the next step only: a hit on it waits
    until :meth:`new_step_starts`. That holds for the state at the end of a request's prompt too, when the
    request got it as a hit itself.
    """

    def __init__(self, spec: MambaSpec, pool: BlockPool, settings: GroupSettings) -> None:
        super().__init__(spec, pool, settings)
        self._cached_in_step: set[BlockHash] = set()

    def find_longest_cache_hit(self, source: BlockSource, max_length: int, *, drop_last: bool) -> Hit:
        """The last state that is there. None is dropped: drafting heads have no recurrent layers."""
        if self._hits_inside_blocks:
            return self._find_inside(source, max_length)
        for index in range(max_length // self.block_size - 1, -1, -1):
            if self._is_aligned(index + 1) and (row := source.at(index)) is not None:
                return self._hit(source, index, (row,))
        return self._hit(source, 0, ())

    def _find_inside(self, source: BlockSource, max_length: int) -> Hit:
        for num_hashes in range(max_length // self._alignment, 0, -1):
            place, rest = divmod(num_hashes, self.hashes_per_block)
            row = source.inside(num_hashes) if rest else source.at(place - 1)
            if row is not None:
                columns, _ = self._hit(source, place if rest else place - 1, (row,))
                return columns, num_hashes * self._alignment
        return self._hit(source, 0, ())

    def waits_for_step(self, computed_blocks: Sequence[KVCacheBlock]) -> bool:
        """See :meth:`SingleTypeKVCacheManager.waits_for_step`: a step reads the states that the one before it left."""
        return bool(computed_blocks) and computed_blocks[-1].block_hash in self._cached_in_step

    def get_num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """All but the last one, whose state stands for the others."""
        return max(0, num_computed_tokens - 1)

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        computed_blocks: Sequence[KVCacheBlock],
        num_computed_tokens: int,
        num_main_tokens: int,
        *,
        for_admission: bool = False,
    ) -> int:
        """As for other groups, with blocks for the states of drafts."""
        return super().get_num_blocks_to_allocate(
            request_id,
            num_tokens + self.block_size * self.spec.num_speculative_blocks,
            computed_blocks,
            num_computed_tokens,
            num_main_tokens,
            for_admission=for_admission,
        )

    def allocate_new_blocks(self, request_id: str, num_tokens: int, num_main_tokens: int) -> list[KVCacheBlock]:
        """See :meth:`SingleTypeKVCacheManager.allocate_new_blocks`."""
        return super().allocate_new_blocks(
            request_id, num_tokens + self.block_size * self.spec.num_speculative_blocks, num_main_tokens
        )

    def cache_blocks(self, request: Request, num_tokens: int, boundaries: Collection[int] = ()) -> None:
        """See :meth:`SingleTypeKVCacheManager.cache_blocks`."""
        first = self._num_cached.get(request.request_id, 0)
        super().cache_blocks(request, num_tokens, boundaries)
        last = self._num_cached.get(request.request_id, 0)
        for block in self._tables.get(request.request_id, ())[first:last]:
            if block.block_hash is not None:
                self._cached_in_step.add(block.block_hash)

    def new_step_starts(self) -> None:
        """What was cached in the step before has been computed."""
        self._cached_in_step.clear()

    def _findable(self, first: int, last: int, boundaries: Collection[int]) -> Iterable[int]:
        """All states; with a retention interval the last ones before each place that is kept."""
        if self._retention is None:
            return range(first, last)
        found: set[int] = set()
        if self._retention:
            per_segment = self._retention // self.block_size
            found.update(index for index in range(first, last) if (index + 1) % per_segment == 0)
        for boundary in boundaries:
            found.add(boundary // self._alignment * self._alignment // self.block_size - 1)
        return sorted(index for index in found if first <= index < last)


class AlignedMambaManager(MambaManager):
    """States of an engine whose steps end at block boundaries: a request keeps the state that a step starts from and
    the one that it ends with, and the null block stands for all that it passes on its way.

    At the end of a table stand the running state and ``num_speculative_blocks`` more. As a request goes on, the latter
    move along: no one has found them, and nothing in them lasts.
    """

    def __init__(self, spec: MambaSpec, pool: BlockPool, settings: GroupSettings) -> None:
        super().__init__(spec, pool, settings)
        self._allocated: set[str] = set()  # requests that have a running state of their own
        self._last_state: dict[str, int] = {}  # place of the state that the step under way starts from
        self._num_retired: dict[str, int] = {}  # leading places of a table that are known to hold the null block

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        computed_blocks: Sequence[KVCacheBlock],
        num_computed_tokens: int,
        num_main_tokens: int,
        *,
        for_admission: bool = False,
    ) -> int:
        """See :meth:`MambaManager.get_num_blocks_to_allocate`. Look-ahead slots don't count: drafting heads have no
        recurrent layers."""
        required = self._num_required(num_main_tokens)
        num_held = len(self._tables.get(request_id, ())) + len(computed_blocks)
        is_first = request_id not in self._allocated
        copied = request_id in self._to_copy or self._ends_inside(computed_blocks, num_computed_tokens)
        most = 1 + self.spec.num_speculative_blocks if is_first else 1
        needed = min(max(required - num_held, 0), most) + copied + num_free(computed_blocks)
        num_computed = -(-num_computed_tokens // self.block_size)
        if is_first and num_held < num_computed and not for_admission:
            # A state that comes from elsewhere takes a block, and takes the place of the hit.
            needed = max(needed, 1 + min(required - num_computed, most))
        return needed

    def allocate_new_blocks(self, request_id: str, num_tokens: int, num_main_tokens: int) -> list[KVCacheBlock]:
        """As for other groups, but null blocks and blocks that moved are among the result."""
        table = self._tables.setdefault(request_id, [])
        num_speculative = self.spec.num_speculative_blocks
        before = len(table)
        required = self._num_required(num_main_tokens)
        is_first = request_id not in self._allocated
        self._allocated.add(request_id)
        place = self._to_copy.pop(request_id, None)
        if required <= before and place is None:
            return []
        if not is_first:
            self._last_state[request_id] = before - 1 - num_speculative
        elif before:  # a hit
            self._last_state[request_id] = before - 1
        running = required - num_speculative - 1
        table.extend([self._pool.null_block] * (running - before))
        if not is_first:
            for index in range(before - num_speculative, min(before, running)):
                block = table[index]
                assert block.ref_cnt == 1 and block.block_hash is None, f"block {block.block_id} is not to be moved"
                table.append(block)
                table[index] = self._pool.null_block
        copied = []
        if place is not None and is_first:
            copied.append(self._replace_by_copy(table, place))
        elif place is not None:
            self._leave_copy(table[place])
        table.extend(self._pool.get_new_blocks(max(required - len(table), 0)))
        return copied + table[before:]

    def _leave_copy(self, running: KVCacheBlock) -> None:
        """The request goes on inside the block of its running state, which stays in its place; others find a copy."""
        (copy,) = self._pool.get_new_blocks(1)
        self._pool.move_hashes(running, copy)
        self._pool.copy_block(running, copy, self.group_id)
        self._pool.free_blocks((copy,))
        if copy.block_hash is not None:
            self._cached_in_step.add(copy.block_hash)

    def cache_blocks(self, request: Request, num_tokens: int, boundaries: Collection[int] = ()) -> None:
        """See :meth:`SingleTypeKVCacheManager.cache_blocks`.

        The state where another request with the same prompt can begin is found too, wherever in a block that is, and
        each time anew: it may have been evicted.
        """
        super().cache_blocks(request, num_tokens, boundaries)
        place = -(-num_tokens // self.block_size) - 1
        table = self._tables.get(request.request_id, ())
        if not num_tokens or num_tokens != self._last_prompt_boundary(request):
            return
        if place >= len(table) or table[place].is_null:
            return
        self._cache_up_to(request, num_tokens)
        self._cached_in_step.add(request.block_hashes[num_tokens // self._settings.hash_block_size - 1])
        if num_tokens % self.block_size:
            self._to_copy[request.request_id] = self._num_cached[request.request_id] = place

    def remove_skipped_blocks(self, request_id: str, num_processed_tokens: int) -> None:
        """Frees the states that are behind the request, the one that its last step started from included."""
        table = self._tables.get(request_id)
        if table is None:
            return
        null = self._pool.null_block
        first = self._num_retired.get(request_id, 0)
        last = min(self.get_num_skipped_tokens(num_processed_tokens) // self.block_size, len(table))
        if first < last:
            freed = [block for block in reversed(table[first:last]) if not block.is_null]
            table[first:last] = [null] * (last - first)
            self._num_retired[request_id] = last
            self._pool.free_blocks(freed)
        state = self._last_state.get(request_id)
        if state is not None and state < -(-num_processed_tokens // self.block_size) - 1 and table[state] is not null:
            self._pool.free_blocks([table[state]])
            table[state] = null

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        """See :meth:`SingleTypeKVCacheManager.pop_blocks_for_free`."""
        self._allocated.discard(request_id)
        self._last_state.pop(request_id, None)
        self._num_retired.pop(request_id, None)
        return super().pop_blocks_for_free(request_id)

    def _num_required(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size) + self.spec.num_speculative_blocks

    def _last_prompt_boundary(self, request: Request) -> int:
        """The last place where another request with the same prompt can begin."""
        step = self._settings.hash_block_size
        if self._settings.any_eagle:  # the last block of the prompt is computed again
            return request.num_prompt_tokens // step * step - step
        return (request.num_prompt_tokens - 1) // step * step  # the last token is
