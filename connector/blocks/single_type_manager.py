"""Block tables of one cache group. The kinds of attention differ in what they hold, and in what a hit is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from kvstore.connector.blocks.block import KVCacheBlock
from kvstore.connector.blocks.events import BlockStored
from kvstore.connector.blocks.hashing import BlockHash
from kvstore.connector.blocks.pool import BlockPool
from kvstore.connector.blocks.request import Request
from kvstore.connector.blocks.sources import BlockSource
from kvstore.connector.blocks.specs import KVCacheSpec, Limits

SpecT = TypeVar("SpecT", bound=KVCacheSpec)

Hit = tuple[list[list[KVCacheBlock]], int]
"""The blocks of a hit, a list for each group that was searched, and the tokens that they stand for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupSettings:
    """What a group's manager has to know of the others, and of the engine."""

    group_id: int
    """The group's place in the configuration."""
    block_size: int
    """Tokens a block, over all ranks that share it."""
    hash_block_size: int
    """Tokens between two of a request's hashes."""
    alignment: int
    """Hits that all groups agree on end at multiples of it. Below ``block_size``: they may end inside a block."""
    use_eagle: bool
    """The last block of each hit in this group is dropped."""
    any_eagle: bool
    """The same for some group."""
    limits: Limits
    """How long requests become."""
    retention_interval: int | None = None
    """See :attr:`kvstore.connector.blocks.cache_config.KVCacheConfig.prefix_cache_retention_interval`."""


class SingleTypeKVCacheManager(ABC, Generic[SpecT]):
    """What each request holds in one group: its *block table*.

    ``table[i]`` is the block of the request's ``i``-th ``block_size`` tokens, or the null block where none is needed.
    A table only grows and loses blocks to the null block: once given, a block id stays where it is. (Recurrent state
    alone moves blocks that it has not written to.)
    """

    holds_encoder_tokens = False
    """Whether blocks of this kind are for an encoder's tokens, and not for the request's own."""

    def __init__(self, spec: SpecT, pool: BlockPool, settings: GroupSettings) -> None:
        self.spec = spec
        self.group_id = settings.group_id
        self.block_size = settings.block_size
        self.hashes_per_block = settings.block_size // settings.hash_block_size
        self._settings = settings
        self._pool = pool
        self._alignment = settings.alignment
        self._retention = settings.retention_interval
        self._tables: dict[str, list[KVCacheBlock]] = {}
        # How many leading blocks of a request have been cached, were hits, or are never to be. A request is in it from
        # its first hit, load or cached block on: from then on it gets no hits any more.
        self._num_cached: dict[str, int] = {}
        # Places of blocks that others can find as they are, and inside of which the request goes on: it writes to a
        # copy, or they find one.
        self._to_copy: dict[str, int] = {}
        # Blocks that wait for their pages, with their places in the table.
        self._loading: dict[str, list[tuple[int, KVCacheBlock]]] = {}

    @abstractmethod
    def find_longest_cache_hit(self, source: BlockSource, max_length: int, *, drop_last: bool) -> Hit:
        """The longest prefix that is computed as far as this kind needs it.

        Args:
            source: of groups that have this one's spec, this one among them.
            max_length: tokens that are looked at, at most.
            drop_last: leave out the last block (a drafting head needs it computed again).

        Returns:
            The blocks, with null blocks where none is needed, and their length: a multiple of the alignment.
        """

    def waits_for_step(self, computed_blocks: Sequence[KVCacheBlock]) -> bool:
        """Whether a hit is of use in the next step only: what it needs is computed by the one that is scheduled."""
        return False

    def get_num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """How many leading tokens no later token needs when so many are computed."""
        return 0

    def get_num_common_prefix_blocks(self, request_id: str, popped: Mapping[int, int]) -> int:
        """How many leading blocks of a request every request with blocks in this group holds. 0 where leading blocks do
        not last.

        Args:
            request_id: of a request that holds blocks.
            popped: by block id, how often a block is held by no request any longer.
        """
        return 0

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
        """How many blocks leave the free queue when a request is given slots.

        Hits that no one holds count too: they are free until they are touched. So do remote pages, each of which
        needs a block, and the copy of a block that is hit inside.

        Args:
            request_id: whose slots they are.
            num_tokens: slots that it needs, those that it has included.
            computed_blocks: hits that it is given.
            num_computed_tokens: tokens that are computed then, hits and loads included.
            num_main_tokens: ``num_tokens`` without those for drafts.
            for_admission: count no more than a request of any length holds at once.
        """
        required = -(-num_tokens // self.block_size)
        if for_admission:
            required = self._cap_admission(required)
        num_held = len(self._tables.get(request_id, ()))
        if request_id in self._num_cached:
            return max(required - num_held, 0)
        num_skipped = self.get_num_skipped_tokens(num_computed_tokens) // self.block_size
        new = required - max(num_skipped, len(computed_blocks) + num_held)
        new = max(new, 0) + self._ends_inside(computed_blocks, num_computed_tokens)
        return new + num_free(computed_blocks[max(0, num_skipped - num_held) :])

    def add_local_computed_blocks(
        self, request_id: str, blocks: Sequence[KVCacheBlock], num_computed_tokens: int
    ) -> None:
        """Gives hits to a request that holds no blocks yet, and holds those that are here.

        Args:
            request_id: whose hits they are.
            blocks: of the prompt's first tokens on.
            num_computed_tokens: tokens that are computed then, loads included; what they make needless is left out.
        """
        assert request_id not in self._tables, f"request {request_id} holds blocks already"
        num_skipped = self.get_num_skipped_tokens(num_computed_tokens) // self.block_size
        kept = list(blocks[num_skipped:]) if num_skipped else list(blocks)
        self._pool.touch([block for block in kept if block.block_id > 0])
        table = [self._pool.null_block] * num_skipped + kept
        self._tables[request_id] = table
        remote = self._pool.remote_block
        self._num_cached[request_id] = table.index(remote) if remote in kept else len(table)
        if self._ends_inside(blocks, num_computed_tokens):
            self._to_copy[request_id] = len(table) - 1
            self._num_cached[request_id] = min(self._num_cached[request_id], len(table) - 1)

    def allocate_external_computed_blocks(self, request_id: str, num_computed_tokens: int) -> None:
        """Gives blocks to the pages that come from elsewhere: where a hit has none, and behind it.

        Called after :meth:`add_local_computed_blocks` of *all* groups: new blocks must not be hits that a later group
        is about to touch.

        Args:
            request_id: whose pages they are.
            num_computed_tokens: tokens that are computed then, hits and loads included.
        """
        if self.get_num_skipped_tokens(num_computed_tokens) >= num_computed_tokens:
            return  # no later token needs any of them
        table = self._tables[request_id]
        remote = self._pool.remote_block
        missing = [index for index, block in enumerate(table) if block is remote]
        missing += range(len(table), -(-num_computed_tokens // self.block_size))
        if not missing:
            return
        new = self._pool.get_new_blocks(len(missing))
        for index, block in zip(missing, new, strict=True):
            if index < len(table):
                table[index] = block
            else:
                table.append(block)
        self._loading[request_id] = list(zip(missing, new, strict=True))

    def allocate_new_blocks(self, request_id: str, num_tokens: int, num_main_tokens: int) -> list[KVCacheBlock]:
        """Gives the request new blocks until it has ``num_tokens`` slots. The pool must have that many.

        Args:
            request_id: whose slots they are.
            num_tokens: slots that it needs, those that it has included.
            num_main_tokens: ``num_tokens`` without those for drafts.

        Returns:
            What was added to its table, behind the copy of a block that it hit inside.
        """
        table = self._tables.setdefault(request_id, [])
        place = self._to_copy.pop(request_id, None)
        copied = [] if place is None else [self._replace_by_copy(table, place)]
        missing = -(-num_tokens // self.block_size) - len(table)
        if missing <= 0:
            return copied
        new = self._pool.get_new_blocks(missing)
        table.extend(new)
        return copied + new

    def cache_blocks(self, request: Request, num_tokens: int, boundaries: Collection[int] = ()) -> None:
        """Lets the request's full blocks below ``num_tokens`` be found by others.

        Args:
            request: whose blocks they are.
            num_tokens: leading tokens.
            boundaries: lengths at which others may go on; they say what is kept where that is not everything.
        """
        first, last = self._num_cached.get(request.request_id, 0), num_tokens // self.block_size
        if first < last:
            self._cache(request, first, last, boundaries)
            self._num_cached[request.request_id] = last

    def note_reused(self, request: Request, num_blocks: int) -> None:
        """Notes a hit of so many whole blocks, as if they had been cached now: those that it does without, too."""
        ends = range(self.hashes_per_block - 1, num_blocks * self.hashes_per_block, self.hashes_per_block)
        block_hashes = [request.block_hashes[end] for end in ends]
        self._note_stored(request, range(num_blocks), block_hashes, None, (0, num_blocks), self.block_size)

    def num_hashed_tokens(self, request_id: str) -> int:
        """The tokens up to the end of the request's last block that others can find."""
        table = self._tables.get(request_id, ())
        for index in range(len(table) - 1, -1, -1):
            if table[index].block_hash is not None:
                return table[index].tail_tokens or (index + 1) * self.block_size
        return 0

    def remove_skipped_blocks(self, request_id: str, num_processed_tokens: int) -> None:
        """Frees the blocks that no token behind ``num_processed_tokens`` needs; the null block takes their place."""
        num_skipped = self.get_num_skipped_tokens(num_processed_tokens) // self.block_size
        table = self._tables.get(request_id)
        if num_skipped <= 0 or table is None:
            return
        freed = []
        # From the back: what lies before a block that is gone already has gone with it.
        for index in range(min(num_skipped, len(table)) - 1, -1, -1):
            if table[index].is_null:
                break
            freed.append(table[index])
            table[index] = self._pool.null_block
        self._pool.free_blocks(freed)

    def blocks_to_load(self, request_id: str) -> Sequence[tuple[int, KVCacheBlock]]:
        """The blocks that wait for their pages, each with its place in the request."""
        return self._loading.get(request_id, ())

    def complete_load(self, request_id: str, num_computed_tokens: int) -> None:
        """Ends the wait for pages: the first so many tokens are there, the blocks behind them hold nothing.

        The table is cut at the first block behind these tokens that is not to be written to: the null block, or one
        that others hold or can find.
        """
        self._loading.pop(request_id, None)
        table = self._tables.get(request_id)
        if table is None:
            return
        first = -(-num_computed_tokens // self.block_size)
        own = (not block.is_null and block.block_hash is None and block.ref_cnt == 1 for block in table[first:])
        end = next((index for index, is_own in enumerate(own, first) if not is_own), None)
        if end is not None:
            self._pool.free_blocks(reversed(table[end:]))
            del table[end:]
        if request_id in self._num_cached:
            self._num_cached[request_id] = min(self._num_cached[request_id], num_computed_tokens // self.block_size)

    def end_loading(self, request_id: str) -> None:
        """The request's blocks wait for no page any longer."""
        self._loading.pop(request_id, None)

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        """Forgets the request and returns its blocks, which are still held. A request without blocks is no error."""
        self._num_cached.pop(request_id, None)
        self._to_copy.pop(request_id, None)
        self._loading.pop(request_id, None)
        return self._tables.pop(request_id, [])

    def free(self, request_id: str) -> None:
        """Lets go of the request's blocks, tail first. A request without blocks is no error."""
        self._pool.free_blocks(reversed(self.pop_blocks_for_free(request_id)))

    def holds(self, request_id: str) -> bool:
        """Whether the request has been given blocks, or could have been, and not been freed."""
        return request_id in self._tables

    def blocks(self, request_id: str) -> Sequence[KVCacheBlock]:
        """The request's blocks in the order of its tokens; none when it holds none."""
        return self._tables.get(request_id, ())

    def new_step_starts(self) -> None:
        """What was cached in the step before has been computed."""

    def count_held(self, held: list[int]) -> None:
        """Adds to ``held``, by block id, how often requests hold each block, and checks what they say of them.

        Raises:
            AssertionError: a request counts blocks as cached that are not there, or the other way round.
        """
        for request_id, table in self._tables.items():
            for block in table:
                assert block.block_id >= 0, f"request {request_id} holds a remote page as if it were here"
                if not block.is_null:
                    held[block.block_id] += 1
            num_cached = self._num_cached.get(request_id, 0)
            if num_cached > len(table):
                raise AssertionError(f"request {request_id}: {num_cached} of {len(table)} blocks count as cached")
            for index, block in self._loading.get(request_id, ()):
                if table[index] is not block and not table[index].is_null:
                    raise AssertionError(f"request {request_id}: block {block.block_id} is loaded and not its own")
        for state in (self._num_cached, self._to_copy, self._loading):
            if unknown := state.keys() - self._tables.keys():
                raise AssertionError(f"something is noted of requests that hold nothing: {sorted(unknown)}")

    @property
    def _hits_inside_blocks(self) -> bool:
        return self._alignment < self.block_size

    def _ends_inside(self, computed_blocks: Sequence[KVCacheBlock], num_computed_tokens: int) -> bool:
        """Whether a hit's last block goes on behind it, and is one that others find: it is not to be written to."""
        if len(computed_blocks) * self.block_size <= num_computed_tokens:
            return False
        return bool(computed_blocks) and computed_blocks[-1] is not self._pool.remote_block

    def _replace_by_copy(self, table: list[KVCacheBlock], place: int) -> KVCacheBlock:
        """Puts a new block in the place of a shared one, whose content it gets before anything is written."""
        shared = table[place]
        (own,) = self._pool.get_new_blocks(1)
        table[place] = own
        self._pool.copy_block(shared, own, self.group_id)
        self._pool.free_blocks((shared,))
        return own

    def _hit(self, source: BlockSource, start: int, rows: Sequence[Sequence[KVCacheBlock]]) -> Hit:
        """A hit of the blocks in ``rows``, the first of which is the prompt's ``start``-th; none before is needed."""
        null = [self._pool.null_block] * start
        columns = [null + [row[group] for row in rows] for group in range(source.num_groups)]
        return columns, (start + len(rows)) * self.block_size

    def _is_aligned(self, num_blocks: int) -> bool:
        """Whether so many blocks end where a hit may end."""
        return num_blocks * self.block_size % self._alignment == 0

    def _cache(self, request: Request, first: int, last: int, boundaries: Collection[int]) -> None:
        table = self._tables[request.request_id]
        hashes, per_block = request.block_hashes, self.hashes_per_block
        findable = [index for index in self._findable(first, last, boundaries) if not table[index].is_null]
        block_hashes = [hashes[(index + 1) * per_block - 1] for index in findable]
        self._pool.cache_full_blocks([table[index] for index in findable], block_hashes, self.group_id)
        if self._pool.enable_kv_cache_events:
            parent = hashes[first * per_block - 1] if first else None
            self._note_stored(request, findable, block_hashes, parent, (first, last), self.block_size)

    def _cache_up_to(self, request: Request, num_tokens: int) -> None:
        """Lets the block in which the request's first so many tokens end be found by their hash, if there is one."""
        place = -(-num_tokens // self.block_size) - 1
        table = self._tables.get(request.request_id, ())
        if place >= len(table) or table[place].is_null:
            return
        step = self._settings.hash_block_size
        index = num_tokens // step - 1
        hashes = request.block_hashes
        is_new = self._pool.cache_partial_block(table[place], hashes[index], self.group_id, num_tokens)
        if is_new and self._pool.enable_kv_cache_events:
            parent = hashes[index - 1] if index else None
            self._note_stored(request, [index], [hashes[index]], parent, (index, index + 1), step)

    def _note_stored(
        self,
        request: Request,
        indices: Sequence[int],
        block_hashes: Sequence[BlockHash],
        parent: BlockHash | None,
        span: tuple[int, int],
        block_size: int,
    ) -> None:
        """Notes that the blocks at ``indices``, of ``block_size`` tokens each, were cached; all of ``span`` was."""
        keys = request.prefix_keys
        extra_keys = [
            None if keys is None else keys.event_keys(index * block_size, (index + 1) * block_size) for index in indices
        ]
        self._pool.note_stored(
            BlockStored(
                block_hashes=tuple(block_hashes),
                parent_block_hash=parent,
                token_ids=tuple(request.token_ids[span[0] * block_size : span[1] * block_size]),
                block_size=block_size,
                lora_name=None if keys is None else keys.lora_name or None,
                extra_keys=tuple(extra_keys),
                group_idx=self.group_id,
                kv_cache_spec_kind=self.spec.kind,
                kv_cache_spec_sliding_window=self._sliding_window(),
            )
        )

    def _findable(self, first: int, last: int, boundaries: Collection[int]) -> Iterable[int]:
        """Which of the blocks from ``first`` to ``last`` others can find, in their order; see :meth:`cache_blocks`."""
        return range(first, last)

    def _cap_admission(self, num_blocks: int) -> int:
        """How many of a request's blocks are held at once."""
        return num_blocks

    def _sliding_window(self) -> int | None:
        return None


def num_free(blocks: Sequence[KVCacheBlock]) -> int:
    """How many of the blocks leave the free queue, or need a block out of it, when they are given to a request."""
    return sum(block.ref_cnt == 0 and not block.is_null for block in blocks)
