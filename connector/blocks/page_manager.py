"""The block manager for engines that speak of pages and keep no block hashes with their requests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from kvstore.connector.blocks.block import KVCacheBlock, KVCacheBlocks
from kvstore.connector.blocks.copies import KVCacheBlockCopy
from kvstore.connector.blocks.events import KVCacheEvent
from kvstore.connector.blocks.extra_keys import PrefixKeys
from kvstore.connector.blocks.hashing import BlockHash, BlockHashChain
from kvstore.connector.blocks.manager import KVCacheManager
from kvstore.connector.blocks.sources import Presence
from kvstore.connector.blocks.statistics import PrefixCacheStats
from kvstore.errors import InvalidRequestError
from kvstore.hashing import TokenIds


class PageManager:
    """A :class:`KVCacheManager`, called with request ids and token ids. A page is a block: ids, hits and events are
    those of the manager.

    :class:`kvstore.connector.reference.pages.PageEngine` is a whole engine over it. For each request, in this order::

        pages, num_hit = get_computed_pages(request_id, token_ids)
        allocate_pages(request_id, num_new_tokens, num_hit, pages)      None: too few are free
        ... the engine computes the tokens ...
        set_computed_tokens(request_id, num_computed_tokens)
        append_tokens(request_id, [token_id]); allocate_pages(request_id, 1); ...
        finish(request_id)                      or free_pages(request_id), and from the start again

    Tokens are hashed once, when they come. The hashes are kept from the first lookup to :meth:`finish`, also while the
    request holds no pages: a request that was preempted finds its pages again without hashing anything.

    Each method that names a request raises InvalidRequestError for one that is not known: never looked up, or finished.
    What else the manager refuses, it refuses here.

    Not thread-safe: it belongs to the scheduler's thread.

    Args:
        manager: of the engine's blocks. Requests may be given to it directly as well, under other ids.
    """

    def __init__(self, manager: KVCacheManager) -> None:
        self.manager = manager
        self._requests: dict[str, _PagedRequest] = {}

    @property
    def num_requests(self) -> int:
        """Requests whose hashes are kept, whether they hold pages or not."""
        return len(self._requests)

    @property
    def usage(self) -> float:
        """The share of pages that requests hold, 0.0 … 1.0."""
        return self.manager.usage

    # A request's way, in its order.

    def get_computed_pages(
        self,
        request_id: str,
        token_ids: TokenIds,
        keys: PrefixKeys | None = None,
        *,
        skip_reading_prefix_cache: bool = False,
    ) -> tuple[KVCacheBlocks, int]:
        """The longest prefix of a request that is in cached pages. Holds nothing.

        The first call makes the request known, and ``token_ids`` is its prompt. It may be called again while the
        request waits for pages or after it was preempted, then with all its tokens so far.

        Args:
            token_ids: at least 1.
            keys: what besides tokens its KV depends on.
            skip_reading_prefix_cache: True: nothing hits, every token has to be computed.

        Returns:
            The pages, and how many tokens they hold. Valid until the next call that allocates or evicts.

        Raises:
            InvalidRequestError: no token, or one that is none; tokens or keys that are not those known so far (what is
                known stays).
        """
        request = self._requests.get(request_id)
        if request is None:
            request = _PagedRequest(request_id, self.manager.hash_block_size, keys)
            if not len(token_ids):
                raise InvalidRequestError(f"request {request_id}: at least 1 token is needed, got 0")
            request.append(token_ids)
            request.num_prompt_tokens = request.num_tokens
            self._requests[request_id] = request
        else:
            request.check_same(token_ids, keys)
        request.skip_reading_prefix_cache = skip_reading_prefix_cache
        if self.manager.config.prefix_cache_retention_interval is not None:
            request.shared_prefix_boundary = self.manager.get_shared_prefix_boundary(request)
        return self.manager.get_computed_blocks(request)

    def get_computed_pages_with(self, request_id: str, presence: Presence) -> tuple[KVCacheBlocks, int, int]:
        """The longest prefix of a known request that is in cached pages or in kvstore. Holds nothing.

        Args:
            presence: by group, whether kvstore has the page of the request's first, second, … block.

        Returns:
            The pages, some of them to be loaded; the tokens that hit without kvstore; how many more hit because of it.
            For :meth:`allocate_pages` with ``num_external_computed_tokens``.
        """
        return self.manager.get_computed_blocks_with(self._known(request_id), presence)

    def get_block_hashes(self, request_id: str) -> Sequence[BlockHash]:
        """The names of a request's pages in kvstore: one hash for each ``hash_block_size`` tokens so far. It grows with
        the tokens; not to be changed.
        """
        return self._known(request_id).block_hashes

    def allocate_pages(
        self,
        request_id: str,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_pages: KVCacheBlocks | None = None,
        num_lookahead_tokens: int = 0,
        num_external_computed_tokens: int = 0,
        delay_cache_pages: bool = False,
        num_encoder_tokens: int = 0,
        full_sequence_must_fit: bool = False,
        reserved_pages: int = 0,
        watermark_pages: int = 0,
    ) -> KVCacheBlocks | None:
        """Gives a request the pages that its next step needs; see :meth:`KVCacheManager.allocate_slots`.

        Tokens that hit and external ones count as computed from now on; the new ones when
        :meth:`set_computed_tokens` says so.

        Returns:
            The pages added, or None when too few are free; then nothing has changed.
        """
        request = self._known(request_id)
        added = self.manager.allocate_slots(
            request,
            num_new_tokens,
            num_new_computed_tokens,
            new_computed_pages,
            num_lookahead_tokens=num_lookahead_tokens,
            num_external_computed_tokens=num_external_computed_tokens,
            delay_cache_blocks=delay_cache_pages,
            num_encoder_tokens=num_encoder_tokens,
            full_sequence_must_fit=full_sequence_must_fit,
            reserved_blocks=reserved_pages,
            watermark_blocks=watermark_pages,
        )
        if added is not None:
            request.num_computed_tokens += num_new_computed_tokens + num_external_computed_tokens
            request.num_slots = request.num_computed_tokens + num_new_tokens + num_lookahead_tokens
        return added

    def append_tokens(self, request_id: str, token_ids: TokenIds) -> None:
        """The request's next tokens. They are hashed as their blocks fill.

        Raises:
            InvalidRequestError: an id is not an integer between 0 and 2³¹-1; none of the tokens was taken.
        """
        self._known(request_id).append(token_ids)

    def set_computed_tokens(self, request_id: str, num_computed_tokens: int, num_in_flight_tokens: int = 0) -> None:
        """How far a request is computed. After a step; or before it ends, in engines whose steps overlap.

        It may go back, when drafted tokens were rejected.

        Args:
            num_computed_tokens: leading tokens whose KV is in its pages when the steps under way are over.
            num_in_flight_tokens: of these, tokens of steps that are not over.

        Raises:
            InvalidRequestError: more tokens than the request was given pages for, or more in flight than computed.
        """
        request = self._known(request_id)
        if not 0 <= num_in_flight_tokens <= num_computed_tokens <= request.num_slots:
            raise InvalidRequestError(
                f"request {request_id}: {num_computed_tokens} tokens can't be computed with {num_in_flight_tokens} of"
                f" them in flight: it was given pages for {request.num_slots}"
            )
        request.num_computed_tokens = num_computed_tokens
        request.num_in_flight_tokens = num_in_flight_tokens

    def get_pages_to_load(self, request_id: str) -> tuple[Sequence[tuple[int, KVCacheBlock]], ...]:
        """The pages that are to be filled from kvstore, by group, each with its place in the request."""
        self._known(request_id)
        return self.manager.get_blocks_to_load(request_id)

    def complete_load(self, request_id: str, invalid_page_ids: Iterable[int] = ()) -> int:
        """Ends the wait for external tokens: what came is cached, what did not is computed.

        Args:
            invalid_page_ids: pages that were not filled.

        Returns:
            How many leading tokens are computed now. With 0 the request holds no pages any longer and starts over.
        """
        request = self._known(request_id)
        request.num_computed_tokens = self.manager.complete_load(request, invalid_page_ids)
        if not request.num_computed_tokens:
            request.forget_pages()
        else:  # pages that others hold were given back behind a failure
            held = zip(self.manager.get_block_ids(request_id), self.manager.block_sizes, strict=True)
            request.num_slots = min([request.num_slots, *(len(ids) * block_size for ids, block_size in held)])
        return request.num_computed_tokens

    def cache_pages(self, request_id: str, num_computed_tokens: int) -> None:
        """Lets a request's full pages below ``num_computed_tokens`` be found by others. Their content must be there."""
        self.manager.cache_blocks(self._known(request_id), num_computed_tokens)

    def remove_skipped_pages(self, request_id: str, processed_computed_tokens: int) -> None:
        """Frees the pages that a request needs no longer once this many tokens are processed."""
        self._known(request_id)
        self.manager.remove_skipped_blocks(request_id, processed_computed_tokens)

    def free_pages(self, request_id: str) -> None:
        """Preempts a request: takes its pages, tail first. Its tokens and hashes stay, and no token is computed.

        Nothing happens to a request that holds no pages.
        """
        request = self._known(request_id)
        self.manager.free(request)
        request.is_preempted()

    def pop_pages_for_free(self, request_id: str) -> list[KVCacheBlock]:
        """As :meth:`free_pages`, but nobody is given the pages before :meth:`free_popped`: a copy still reads them.

        :meth:`finish` may follow at once.
        """
        request = self._known(request_id)
        pages = self.manager.pop_blocks_for_free(request)
        request.is_preempted()
        return pages

    def free_popped(self, pages: Sequence[KVCacheBlock]) -> None:
        """Frees pages that :meth:`pop_pages_for_free` returned, all or some of them."""
        self.manager.free_popped(pages)

    def finish(self, request_id: str) -> None:
        """Ends a request, in whatever state it is: its pages are free, its tokens and hashes are forgotten."""
        self.manager.free(self._known(request_id))
        del self._requests[request_id]

    # Pages of one request.

    def get_pages(self, request_id: str) -> KVCacheBlocks:
        """The pages that a request holds, by group."""
        self._known(request_id)
        return self.manager.get_blocks(request_id)

    def get_page_ids(self, request_id: str) -> tuple[list[int], ...]:
        """The ids of the pages that a request holds, one list a group."""
        self._known(request_id)
        return self.manager.get_block_ids(request_id)

    def get_num_common_prefix_pages(self, request_id: str) -> list[int]:
        """By group, how many leading pages of this request every request with pages holds."""
        self._known(request_id)
        return self.manager.get_num_common_prefix_blocks(request_id)

    def estimate_cached_tokens(self, request_id: str) -> int:
        """How many leading tokens of a request could be hit at most, judged by its own pages."""
        return self.manager.estimate_cached_tokens(self._known(request_id))

    # All pages.

    def evict_pages(self, page_ids: Iterable[int]) -> None:
        """Lets these pages be found no longer; who holds them keeps them."""
        self.manager.evict_blocks(page_ids)

    def reset_prefix_cache(self) -> bool:
        """Forgets everything cached. Refused (False, nothing has changed) while a request holds pages. Hashes stay."""
        return self.manager.reset_prefix_cache()

    def new_step_starts(self) -> None:
        """To be called before each step is scheduled; see :meth:`KVCacheManager.new_step_starts`."""
        self.manager.new_step_starts()

    def take_page_copies(self) -> list[KVCacheBlockCopy]:
        """The copies of pages that a step has to make first; see :meth:`KVCacheManager.take_kv_cache_block_copies`."""
        return self.manager.take_kv_cache_block_copies()

    def free_copied(self, copies: Sequence[KVCacheBlockCopy]) -> None:
        """These copies have been made."""
        self.manager.free_copied(copies)

    def take_events(self) -> list[KVCacheEvent]:
        """What changed in the cache since the last call."""
        return self.manager.take_events()

    def make_prefix_cache_stats(self) -> PrefixCacheStats:
        """What was counted since the last call."""
        return self.manager.make_prefix_cache_stats()

    def _known(self, request_id: str) -> _PagedRequest:
        request = self._requests.get(request_id)
        if request is None:
            raise InvalidRequestError(f"request {request_id} is not known: it was never looked up, or is finished")
        return request


class _PagedRequest:
    """What the manager reads of a request (:class:`kvstore.connector.blocks.request.Request`)."""

    def __init__(self, request_id: str, hash_block_size: int, keys: PrefixKeys | None) -> None:
        self.request_id = request_id
        self.prefix_keys = keys
        self.token_ids: list[int] = []
        self.num_prompt_tokens = 0
        self.num_computed_tokens = 0
        self.num_in_flight_tokens = 0
        self.num_preemptions = 0
        self.skip_reading_prefix_cache = False
        self.shared_prefix_boundary = 0
        self.num_slots = 0
        """Tokens that it was given pages for, so that no more are said to be computed. 0: it holds none."""
        self._chain = BlockHashChain(hash_block_size, () if keys is None else keys)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def block_hashes(self) -> Sequence[BlockHash]:
        return self._chain.hashes

    def append(self, token_ids: TokenIds) -> None:
        try:
            self._chain.extend(token_ids)
        except InvalidRequestError as error:
            raise InvalidRequestError(f"request {self.request_id}: {error}") from error
        self.token_ids += _listed(token_ids)

    def check_same(self, token_ids: TokenIds, keys: PrefixKeys | None) -> None:
        """Check what is given again: other tokens would be looked up by hashes of the former ones."""
        given = _listed(token_ids)
        if given != self.token_ids:
            known = self.token_ids
            pairs = enumerate(zip(given, known, strict=False))
            first = next((index for index, (new, old) in pairs if new != old), min(len(given), len(known)))
            raise InvalidRequestError(
                f"request {self.request_id}: the {len(given)} tokens given are not its {len(known)} tokens so far:"
                f" they differ from token {first} on"
            )
        if keys != self.prefix_keys:
            # Without their values: a salt is a secret.
            raise InvalidRequestError(f"request {self.request_id}: the keys given are not those of its first lookup")

    def is_preempted(self) -> None:
        self.num_preemptions += self.num_slots > 0
        self.forget_pages()

    def forget_pages(self) -> None:
        self.num_computed_tokens = self.num_in_flight_tokens = self.num_slots = 0


def _listed(token_ids: TokenIds) -> list[int]:
    return token_ids.tolist() if isinstance(token_ids, np.ndarray) else list(token_ids)
