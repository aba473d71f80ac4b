"""The smallest engine over the page manager and kvstore: pages in a numpy array, no torch.

It takes a prompt the whole way through :class:`~kvstore.connector.blocks.PageManager`, as an engine does that speaks of
pages and brings no block manager of its own. The "KV" of a token is its id.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvstore import Client, Layout
from kvstore.connector.blocks import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheManager, PageManager
from kvstore.errors import InvalidRequestError

BLOCK_SIZE = 16
TOKEN_BYTES = 4


class PageEngine:
    """Prefills one prompt at a time.

    Args:
        client: connected to kvstore, and the caller's to close.
        num_pages: pages of its memory, at least 2 (page 0 is the null page).
    """

    def __init__(self, client: Client, num_pages: int = 64) -> None:
        group = KVCacheGroupSpec(("layer",), FullAttentionSpec(block_size=BLOCK_SIZE, token_bytes=TOKEN_BYTES))
        self.pages = PageManager(KVCacheManager(KVCacheConfig(num_pages, (group,)), num_pages * BLOCK_SIZE))
        self.memory = np.zeros((num_pages, BLOCK_SIZE), np.int32)
        self.namespace = client.namespace(
            Layout(model="token ids", block_size=BLOCK_SIZE, page_bytes=group.page_bytes, dtype="int32")
        )

    def prefill(self, request_id: str, token_ids: Sequence[int]) -> npt.NDArray[np.int32]:
        """The KV of a prompt, ``(tokens,)``: found in its own pages, loaded from kvstore, and computed for the rest.

        Raises:
            InvalidRequestError: no token, or more than its pages hold.
            UnavailableError: kvstore could not be reached.
            DeadlineError: kvstore did not answer in time.
        """
        self.pages.new_step_starts()
        self.pages.get_computed_pages(request_id, token_ids)
        try:
            return self._prefill(request_id, token_ids)
        finally:
            self.pages.finish(request_id)

    def hit_rate(self) -> float:
        """The share of prompt tokens since the last call that were here or in kvstore, 0.0 … 1.0."""
        stats = self.pages.make_prefix_cache_stats()
        return (stats.hits + stats.external_hits) / max(stats.queries, 1)

    def _prefill(self, request_id: str, token_ids: Sequence[int]) -> npt.NDArray[np.int32]:
        pages, num_tokens = self.pages, len(token_ids)
        hashes = pages.get_block_hashes(request_id)
        present = [tier is not None for tier in self.namespace.lookup(hashes).tiers]
        hit, num_local, num_external = pages.get_computed_pages_with(request_id, {0: present})
        num_new, num_computed = (0 if num_external else num_tokens - num_local), num_local
        given = pages.allocate_pages(
            request_id,
            num_new,
            num_local,
            hit,
            num_external_computed_tokens=num_external,
            delay_cache_pages=num_external > 0,
        )
        if given is not None and num_external:
            (to_load,) = pages.get_pages_to_load(request_id)
            targets = [self.memory[page.block_id] for _, page in to_load]
            num_loaded = self.namespace.load([hashes[index] for index, _ in to_load], targets)
            num_computed = pages.complete_load(request_id, [page.block_id for _, page in to_load[num_loaded:]])
            given = pages.allocate_pages(request_id, num_tokens - num_computed)
        if given is None:
            raise InvalidRequestError(f"request {request_id}: {num_tokens} tokens do not fit into the engine's pages")
        (page_ids,) = pages.get_page_ids(request_id)
        for index in range(num_computed, num_tokens):  # the model
            self.memory[page_ids[index // BLOCK_SIZE], index % BLOCK_SIZE] = token_ids[index]
        pages.set_computed_tokens(request_id, num_tokens)
        self.namespace.store(hashes, [self.memory[page_id] for page_id in page_ids[: len(hashes)]])
        return self.memory[page_ids].ravel()[:num_tokens]
