"""The KV cache manager: the calls by which a scheduler finds, allocates and frees the blocks of its requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from kvstore.connector.blocks.block import KVCacheBlock, KVCacheBlocks
from kvstore.connector.blocks.cache_config import KVCacheConfig
from kvstore.connector.blocks.coordinators import get_kv_cache_coordinator
from kvstore.connector.blocks.copies import KVCacheBlockCopy
from kvstore.connector.blocks.events import KVCacheEvent
from kvstore.connector.blocks.pool import BlockPool
from kvstore.connector.blocks.request import Request
from kvstore.connector.blocks.sources import Presence
from kvstore.connector.blocks.specs import Limits, check_at_least
from kvstore.connector.blocks.statistics import PrefixCacheRecorder, PrefixCacheStats
from kvstore.errors import InvalidRequestError


class KVCacheManager:
    """Gives blocks to requests, and finds what is already computed, here and in kvstore.

    For each request, in this order:

    1. :meth:`get_computed_blocks`; with kvstore, ask it for the pages that are missing here, and
       :meth:`get_computed_blocks_with` its answer.
    2. :meth:`allocate_slots`. With pages to be loaded: ``delay_cache_blocks=True``, then :meth:`get_blocks_to_load`,
       and when they have come or failed :meth:`complete_load`.
    3. :meth:`allocate_slots` again for each step.
    4. :meth:`free` when it is over or preempted; :meth:`pop_blocks_for_free` and later :meth:`free_popped` while a copy
       still uses its blocks. At any moment, whether it is waiting, loading or running.

    Before a step is scheduled: :meth:`new_step_starts`. When it is: :meth:`take_kv_cache_block_copies`, where hits may
    end inside a block: recurrent blocks of ``"align"`` that are longer than the hashes' step.

    Block ids, hits, events and the order of eviction are those of vLLM 0.32's manager after the same calls, with sparse
    retention, hits inside a block, several drafting modules and a watermark too. Where it differs:

    - Left out: zeroing of new blocks, blocks in host memory; recurrent checkpoints inside a step; windows that keep the
      prompt (R-SWA), groups outside of prefix caching, groups that context parallelism does not share.
    - The watermark is the caller's ``watermark_blocks``, call by call: it knows which request waits, and beside whom.
    - A failed load of a hybrid or windowed model is not cut at the first bad block but at the last length before it at
      which every group has what it needs; shared blocks behind it are given back, not written to.
    - Chunks must be whole blocks; elsewhere a hit could end in a chunk whose beginning no one computed.
    - :meth:`get_num_common_prefix_blocks` counts; ``pcp_world_size`` scales blocks as ``dcp_world_size`` does.
    - New tokens behind external ones in one call get no blocks where vLLM fails halfway (recurrent ``"align"`` groups).

    A block counts as cached from the call on in which its slots are allocated, *before* the engine has computed it. The
    engine must write it in the step that it schedules with that call, before any other request of the step reads it.

    Not thread-safe: it belongs to the scheduler's thread.

    Args:
        kv_cache_config: how many blocks, and the groups that share them.
        max_model_len: most tokens of a request, prompt and answer.
        max_in_flight_tokens: most tokens that are scheduled and not settled. None: ``max_model_len``.
        enable_caching: False: every lookup misses, no block is found again.
        use_eagle: drafting heads use the last hidden states: the last block of a hit is computed again.
        num_prefill_lookahead: tokens past those computed that drafting heads read in prefill: 1, or as many as there
            are modules that draft one after the other: a request's last tokens are cached when their KV is final.
        enable_kv_cache_events: note changes of the prefix cache for :meth:`take_events`.
        dcp_world_size: ranks that share each block while decoding.
        pcp_world_size: ranks that share each block in prefill. Both make blocks hold so many times the tokens.

    Raises:
        ConfigError: the groups can't do what is asked of them.
    """

    def __init__(
        self,
        kv_cache_config: KVCacheConfig,
        max_model_len: int,
        *,
        max_in_flight_tokens: int | None = None,
        enable_caching: bool = True,
        use_eagle: bool = False,
        num_prefill_lookahead: int = 0,
        enable_kv_cache_events: bool = False,
        dcp_world_size: int = 1,
        pcp_world_size: int = 1,
    ) -> None:
        check_at_least(1, dcp_world_size=dcp_world_size, pcp_world_size=pcp_world_size)
        check_at_least(0, num_prefill_lookahead=num_prefill_lookahead)
        self.config = kv_cache_config
        self.max_model_len = max_model_len
        num_groups = len(kv_cache_config.kv_cache_groups)
        self.pool = BlockPool(
            kv_cache_config.num_blocks,
            num_groups,
            enable_caching=enable_caching and num_groups > 0,
            enable_kv_cache_events=enable_kv_cache_events,
        )
        limits = Limits(
            max_model_len=max_model_len,
            max_in_flight_tokens=max_in_flight_tokens,
            context_parallel_size=dcp_world_size * pcp_world_size,
        )
        self._coordinator = get_kv_cache_coordinator(
            kv_cache_config,
            self.pool,
            limits,
            use_eagle=use_eagle,
            num_prefill_lookahead=num_prefill_lookahead,
            enable_caching=enable_caching,
        )
        self._nothing = KVCacheBlocks(((),) * num_groups)
        self._popped: Counter[int] = Counter()  # by block id: held for copies, by no request
        self._recorder = PrefixCacheRecorder()
        self._asked_remote: set[str] = set()  # requests that wait for slots, for which kvstore has been asked
        self._loading: dict[str, bool] = {}  # requests with blocks to load; True: nothing is cached until they came

    @property
    def block_sizes(self) -> tuple[int, ...]:
        """Tokens a block, by group, over all ranks that share it."""
        return self._coordinator.block_sizes

    @property
    def hash_block_size(self) -> int:
        """Tokens between two of a request's hashes."""
        return self._coordinator.hash_block_size

    @property
    def scheduler_block_size(self) -> int:
        """The smallest length that is whole blocks of every group. Pages of kvstore are hit up to multiples of it."""
        return self._coordinator.scheduler_block_size

    @property
    def cache_hit_alignment_tokens(self) -> int:
        """Hits end at multiples of it: of :attr:`hash_block_size` where they may end inside a block, elsewhere of
        :attr:`scheduler_block_size`."""
        return self._coordinator.alignment

    @property
    def usage(self) -> float:
        """The share of blocks that requests hold, 0.0 … 1.0. The null block does not count."""
        usable = len(self.pool.blocks) - 1
        return 1.0 - self.pool.num_free_blocks / usable if usable else 0.0

    def get_computed_blocks(self, request: Request) -> tuple[KVCacheBlocks, int]:
        """The longest prefix of a request that is in cached blocks. Changes and holds nothing.

        A request may have an attribute ``kv_cache_report_mode``: with ``"full"`` each hit is told as a
        :class:`BlockStored` event in each group, for those who come to know of requests late.

        When all tokens hit, the last one has to be computed again, to have logits: the hit ends at least one token, and
        hence :attr:`cache_hit_alignment_tokens`, earlier. Nothing is looked up for a request that says so.

        Returns:
            The blocks, with null blocks where a group needs none, and how many tokens they stand for. Valid until the
            next call that allocates or evicts.
        """
        if not self._looks_up(request):
            return self._nothing, 0
        blocks, length, _ = self._coordinator.find_longest_cache_hit(request, request.num_tokens - 1)
        if self.pool.enable_kv_cache_events and getattr(request, "kv_cache_report_mode", "incremental") == "full":
            self._coordinator.note_reused(request, length)
        return self._blocks(blocks), length

    def get_shared_prefix_boundary(self, request: Request) -> int:
        """Where a request parts from one before it whose windows or states were not kept there. Changes nothing.

        With a retention interval, to be asked at each lookup, and to be the request's ``shared_prefix_boundary`` from
        then on: what the next request with this prefix needs is kept there.

        Returns:
            The longest prefix that one of the groups has, in tokens; 0 where the hit is as long.
        """
        if not self._looks_up(request):
            return 0
        _, length, longest = self._coordinator.find_longest_cache_hit(request, request.num_tokens - 1)
        return longest if longest > length else 0

    def get_computed_blocks_with(self, request: Request, presence: Presence) -> tuple[KVCacheBlocks, int, int]:
        """The longest prefix of a request that is in cached blocks or in kvstore. Changes and holds nothing.

        Each group takes its own blocks first, so that a hit may be made of some that are here and some to be loaded, in
        any order.

        Args:
            request: whose prefix it is.
            presence: which pages kvstore has of the request's blocks, by group.

        Returns:
            The blocks, ``pool.remote_block`` standing for pages to be loaded; how many tokens hit without
            kvstore; and how many more hit because of it. For :meth:`allocate_slots`; valid until the next call that
            allocates or evicts.
        """
        if not self._looks_up(request):
            return self._nothing, 0, 0
        local, num_local, _ = self._coordinator.find_longest_cache_hit(request, request.num_tokens - 1)
        blocks = self._blocks(local)
        self._asked_remote.add(request.request_id)
        with_remote, length, _ = self._coordinator.find_longest_cache_hit(request, request.num_tokens - 1, presence)
        if length <= num_local:
            return blocks, num_local, 0
        if not any(self.pool.remote_block in group for group in with_remote):
            return self._blocks(with_remote), length, 0  # a remote page was matched and dropped, for a drafting head
        # A block that is hit inside is not gone on in: the page is loaded over it.
        num_local -= num_local % self.scheduler_block_size
        return self._blocks(with_remote), num_local, length - num_local

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: KVCacheBlocks | None = None,
        num_lookahead_tokens: int = 0,
        num_external_computed_tokens: int = 0,
        delay_cache_blocks: bool = False,
        num_encoder_tokens: int = 0,
        full_sequence_must_fit: bool = False,
        reserved_blocks: int = 0,
        watermark_blocks: int = 0,
    ) -> KVCacheBlocks | None:
        """Gives a request the slots that its next step needs.

        Blocks that the request has left behind (outside a window, say) are freed first. ::

            | computed | new computed | external | new | look-ahead |
            |   has    |    a hit     |  loaded  |    computed      |

        Args:
            request: ``num_computed_tokens`` of it have slots already.
            num_new_tokens: tokens to compute in this step, drafts included. May be 0 while the request only waits for
                external ones.
            num_new_computed_tokens: tokens that hit here. For a request without blocks only.
            new_computed_blocks: what :meth:`get_computed_blocks` or :meth:`get_computed_blocks_with` found; held from
                now on.
            num_lookahead_tokens: more slots, for tokens that a drafting head is about to propose.
            num_external_computed_tokens: tokens behind those that hit here, whose KV comes from elsewhere. Their blocks
                are those in ``new_computed_blocks``, or new ones where that ends before them.
            delay_cache_blocks: the external tokens are still on their way: no block is cached until
                :meth:`complete_load` says that they have come.
            num_encoder_tokens: an encoder's tokens, for cross-attention groups.
            full_sequence_must_fit: also refuse where too few blocks are free for all tokens that the request has.
            reserved_blocks: free blocks that must be left behind the step's slots, for requests that are under way.
            watermark_blocks: free blocks that must be left besides, behind the whole sequence too where that must fit,
                so that requests under way are not preempted soon. For a request that waits while others run.

        Returns:
            The blocks added for the tokens to compute (those of external tokens are in :meth:`get_block_ids` alone),
            first the copy of one that is hit inside. None when too few blocks are free, or when the hit can be read in
            the next step only; then nothing has changed, but that blocks left behind are free.

        Raises:
            InvalidRequestError: the numbers do not fit together; nothing has changed.
        """
        request_id = request.request_id
        coordinator = self._coordinator
        num_external = num_external_computed_tokens
        num_computed = request.num_computed_tokens + num_new_computed_tokens + num_external
        num_main = min(num_computed, self.max_model_len) + num_new_tokens
        num_slots = min(num_main + num_lookahead_tokens, self.max_model_len)
        num_to_cache = min(num_main, request.num_tokens)
        computed_blocks = self._nothing
        if new_computed_blocks is not None and any(new_computed_blocks.blocks):
            computed_blocks = new_computed_blocks
        is_new = not coordinator.holds(request_id)
        numbers = (
            num_new_tokens,
            num_new_computed_tokens,
            num_external,
            num_lookahead_tokens,
            num_encoder_tokens,
            reserved_blocks,
            watermark_blocks,
        )
        problem = self._problem(request, numbers, computed_blocks, is_new=is_new)
        if problem is None and not delay_cache_blocks:
            problem = self._problem_of_hashes(request, num_to_cache)
        if problem is not None:
            raise InvalidRequestError(f"request {request_id}: {problem}")
        if coordinator.waits_for_step(computed_blocks.blocks):
            return None

        if full_sequence_must_fit:
            num_full = min(request.num_tokens, self.max_model_len)
            required = coordinator.get_num_blocks_to_allocate(
                request_id,
                num_full,
                computed_blocks.blocks,
                min(num_computed, self.max_model_len),
                num_full,
                num_encoder_tokens,
                for_admission=True,
            )
            if required + watermark_blocks > self.pool.num_free_blocks:
                return None
        coordinator.remove_skipped_blocks(
            request_id, max(0, min(num_computed, self.max_model_len) - request.num_in_flight_tokens)
        )
        required = coordinator.get_num_blocks_to_allocate(
            request_id, num_slots, computed_blocks.blocks, num_computed, num_main, num_encoder_tokens
        )
        if required + watermark_blocks > self.pool.num_free_blocks - reserved_blocks:
            return None

        if computed_blocks is not self._nothing or num_external:
            coordinator.allocate_new_computed_blocks(request_id, computed_blocks.blocks, num_computed, num_external)
        if num_external:
            self._loading[request_id] = delay_cache_blocks
        elif request_id in self._loading:
            self._end_loading(request_id)
        if is_new and self._looks_up(request):
            asked_remote = num_external > 0 or request_id in self._asked_remote
            self._recorder.record(
                request.num_tokens,
                num_new_computed_tokens,
                num_external if asked_remote else None,
                preempted=request.num_preemptions > 0,
            )
        self._asked_remote.discard(request_id)
        new_blocks = coordinator.allocate_new_blocks(request_id, num_slots, num_main, num_encoder_tokens)
        if not delay_cache_blocks:
            coordinator.cache_blocks(request, num_to_cache)
        return self._blocks(new_blocks)

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        """Lets the request's full blocks below ``num_computed_tokens`` be found by others. Their content must be there.

        Blocks that were cached before are left as they are. For a request that waits for a load this says that so much
        of it has come, as :meth:`complete_load` does.

        Raises:
            InvalidRequestError: the request holds no blocks for so many tokens, or has no hashes for them.
        """
        problem = self._problem_of_hashes(request, num_computed_tokens)
        for block_size, blocks in zip(self.block_sizes, self._coordinator.get_blocks(request.request_id), strict=True):
            if len(blocks) < num_computed_tokens // block_size and self.pool.enable_caching:
                problem = f"{num_computed_tokens} tokens to be cached, it holds {len(blocks)} blocks of {block_size}"
        if problem is not None:
            raise InvalidRequestError(f"request {request.request_id}: {problem}")
        self._end_loading(request.request_id)
        self._coordinator.cache_blocks(request, num_computed_tokens)

    def get_blocks_to_load(self, request_id: str) -> tuple[Sequence[tuple[int, KVCacheBlock]], ...]:
        """The blocks that wait for pages of kvstore, by group, each with its place in the request.

        None, also behind external tokens, where no later token needs them. They hold nothing and belong to the request.
        With ``delay_cache_blocks`` no one finds them until :meth:`complete_load`; without, they must be filled in the
        step that they were given in.
        """
        return tuple(manager.blocks_to_load(request_id) for manager in self._coordinator.managers)

    def complete_load(self, request: Request, invalid_block_ids: Iterable[int] = ()) -> int:
        """Ends the wait for external tokens: what came is cached, what did not is computed.

        Args:
            request: allocated with ``delay_cache_blocks``; its ``num_computed_tokens`` includes the external ones.
            invalid_block_ids: blocks that were not filled. Ids of other requests are ignored.

        Returns:
            How many leading tokens are there now: all, or as many as lie before the first invalid block and have in
            every group what the next token needs. It is the request's ``num_computed_tokens`` from now on. Invalid
            blocks are not cached; they and those behind them are written again, or were given back where others can
            find them. With 0 the request holds no blocks (any longer) and starts over.
        """
        request_id = request.request_id
        num_computed = request.num_computed_tokens
        if self.config.kv_cache_groups and not self._coordinator.holds(request_id):
            return 0
        wanted = set(invalid_block_ids)
        invalid = {
            block.block_id
            for blocks, block_size in zip(self._coordinator.get_blocks(request_id), self.block_sizes, strict=True)
            for block in blocks[: -(-num_computed // block_size)]
            if block.block_id in wanted and not block.is_null
        }
        if invalid:
            self.pool.evict_blocks(invalid)
            num_computed = self._coordinator.find_longest_held(request_id, num_computed, invalid)
            if not num_computed:
                self.free(request)
                return 0
        self._loading.pop(request_id, None)
        self._coordinator.complete_load(request_id, num_computed)
        self._coordinator.cache_blocks(request, num_computed)
        return num_computed

    def remove_skipped_blocks(self, request_id: str, processed_computed_tokens: int) -> None:
        """Frees the blocks of a request that no token behind ``processed_computed_tokens`` needs.

        Args:
            request_id: unknown ones hold nothing.
            processed_computed_tokens: leading tokens whose steps are over.
        """
        self._coordinator.remove_skipped_blocks(request_id, processed_computed_tokens)

    def free(self, request: Request) -> None:
        """Takes the request's blocks back, tail first. Full ones can be hit until they are given to someone else.

        Not while something still copies from or to them: see :meth:`pop_blocks_for_free`.
        """
        self._forget(request.request_id)
        self._coordinator.free(request.request_id)

    def pop_blocks_for_free(self, request: Request) -> list[KVCacheBlock]:
        """Forgets the request, and keeps its blocks from everyone else until :meth:`free_popped`.

        Returns:
            Its blocks of all groups, in the order of its tokens.
        """
        self._forget(request.request_id)
        blocks = [block for block in self._coordinator.pop_blocks_for_free(request.request_id) if not block.is_null]
        self._popped.update(block.block_id for block in blocks)
        return blocks

    def free_popped(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Takes blocks back that :meth:`pop_blocks_for_free` returned, all or some of them, tail first.

        Raises:
            InvalidRequestError: a block is not waiting for it; nothing has changed.
        """
        counts = Counter(block.block_id for block in blocks)
        for block_id, count in counts.items():
            if count > self._popped[block_id]:
                raise InvalidRequestError(f"block {block_id} is freed {count} times, popped {self._popped[block_id]}")
        self._popped -= counts
        self.pool.free_blocks(reversed(blocks))

    def evict_blocks(self, block_ids: Iterable[int]) -> None:
        """Lets these blocks be found no longer; who holds them keeps them.

        Raises:
            InvalidRequestError: an id is out of range; nothing has changed.
        """
        self.pool.evict_blocks(block_ids)

    def reset_prefix_cache(self) -> bool:
        """Forgets everything cached. Refused (False, nothing has changed) while blocks are held."""
        if not self.pool.reset_prefix_cache():
            return False
        self._recorder.record_reset()
        return True

    def new_step_starts(self) -> None:
        """What was scheduled before has been computed: recurrent states of it may be read.

        Raises:
            InvalidRequestError: it has copies to make that were never taken; nothing has changed.
        """
        if self.pool.copies.has_pending:
            raise InvalidRequestError("the step before has copies of blocks to make: take_kv_cache_block_copies")
        self._coordinator.new_step_starts()

    def take_kv_cache_block_copies(self) -> list[KVCacheBlockCopy]:
        """The copies of blocks that the step has to make before it writes anything. To be asked for when all of it is
        scheduled: a request that goes on inside a block that others find writes to a copy, or leaves them one.

        Each names two blocks, which nobody else is given before :meth:`free_copied`. None depends on another one.
        """
        return self.pool.copies.take()

    def free_copied(self, copies: Sequence[KVCacheBlockCopy]) -> None:
        """These copies have been made, at the latest when their step is over.

        Raises:
            InvalidRequestError: one was never taken, or is freed already; nothing has changed.
        """
        self.pool.free_copied(copies)

    def get_num_common_prefix_blocks(self, request_id: str) -> list[int]:
        """By group, how many leading blocks of a request every request with blocks holds; 0 where leading blocks do
        not last until a request ends. (vLLM 0.32 answers 0 in every group.)"""
        elsewhere = self._popped + Counter(block.block_id for block in self.pool.copies.held())
        return self._coordinator.get_num_common_prefix_blocks(request_id, elsewhere)

    def take_events(self) -> list[KVCacheEvent]:
        """What changed in the prefix cache since the last call, in order; nothing unless events are enabled."""
        return self.pool.take_events()

    def get_blocks(self, request_id: str) -> KVCacheBlocks:
        """The blocks that a request holds, null blocks included; none when it holds none."""
        return self._blocks(tuple(tuple(blocks) for blocks in self._coordinator.get_blocks(request_id)))

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...]:
        """The ids of the blocks that a request holds, one list a group."""
        return tuple([block.block_id for block in blocks] for blocks in self._coordinator.get_blocks(request_id))

    def estimate_cached_tokens(self, request: Request) -> int:
        """How many leading tokens of a request could be hit at most, judged by its own blocks: the last cached one of
        the group that is furthest behind."""
        return min(
            (
                manager.num_hashed_tokens(request.request_id)
                for manager in self._coordinator.managers
                if not manager.holds_encoder_tokens
            ),
            default=0,
        )

    def make_prefix_cache_stats(self) -> PrefixCacheStats:
        """What was counted since the last call."""
        return self._recorder.take()

    def check_integrity(self) -> None:
        """Recounts everything; for tests and idle moments.

        Raises:
            AssertionError: blocks, requests, queue and hashes disagree; the message says which.
        """
        self._coordinator.check_integrity(self._popped)

    def _forget(self, request_id: str) -> None:
        self._asked_remote.discard(request_id)
        self._loading.pop(request_id, None)

    def _end_loading(self, request_id: str) -> None:
        if self._loading.pop(request_id, None) is not None:
            self._coordinator.end_loading(request_id)

    def _looks_up(self, request: Request) -> bool:
        return self.pool.enable_caching and not request.skip_reading_prefix_cache

    def _blocks(self, blocks: tuple[Sequence[KVCacheBlock], ...]) -> KVCacheBlocks:
        return KVCacheBlocks(blocks) if any(blocks) else self._nothing

    def _problem(
        self, request: Request, numbers: tuple[int, ...], computed: KVCacheBlocks, *, is_new: bool
    ) -> str | None:
        """What is wrong with the arguments of :meth:`allocate_slots`."""
        new, new_computed, external = numbers[:3]
        if min(numbers) < 0:
            return f"numbers of tokens and blocks must not be negative: {numbers}"
        if not (new or new_computed or external):
            return "at least one token must be new or computed elsewhere, got 0"
        if not is_new:
            if new_computed or external or computed is not self._nothing:
                return "it holds blocks and can't be given computed ones any longer"
            if self._loading.get(request.request_id):
                return "it waits for its load: complete_load comes first"
            return None
        if request.num_computed_tokens and self.config.kv_cache_groups:
            return f"it holds no blocks and says that {request.num_computed_tokens} tokens are computed"
        if len(request.block_hashes) * self._coordinator.hash_block_size > request.num_tokens:
            return (
                f"{len(request.block_hashes)} block hashes for {request.num_tokens} tokens:"
                f" there is one for each {self._coordinator.hash_block_size}"
            )
        return self._problem_of_hit(computed, new_computed, external)

    def _problem_of_hit(self, computed: KVCacheBlocks, num_local: int, num_external: int) -> str | None:
        if len(computed.blocks) != len(self.block_sizes):
            return f"computed blocks of {len(computed.blocks)} groups, there are {len(self.block_sizes)}"
        if num_external and num_local % self.scheduler_block_size and any(computed.blocks):
            return f"{num_local} computed tokens end inside a block: no external tokens can follow there"
        for manager, blocks in zip(self._coordinator.managers, computed.blocks, strict=True):
            lengths = (0,) if manager.holds_encoder_tokens else (num_local, num_local + num_external)
            ends = [length for length in lengths if length % min(manager.block_size, self._coordinator.alignment) == 0]
            if len(blocks) not in [-(-end // manager.block_size) for end in ends]:
                return f"{num_local} computed tokens do not fill {len(blocks)} blocks of {manager.block_size}"
            if self.pool.remote_block in blocks and not num_external:
                return "blocks to be loaded are among the computed ones, and no tokens are external"
        return None

    def _problem_of_hashes(self, request: Request, num_to_cache: int) -> str | None:
        num_hashes = num_to_cache // self._coordinator.hash_block_size
        if self.pool.enable_caching and len(request.block_hashes) < num_hashes:
            return f"{len(request.block_hashes)} block hashes for {num_hashes} full blocks to be cached"
        return None
