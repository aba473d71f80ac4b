"""Builders for block manager scenarios: blocks of 4 tokens, requests that are written down as words of tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from connector.blocks import BlockHash, BlockHashChain, CacheConfig, FullAttentionSpec, KVCacheManager

BLOCK_SIZE = 4


class FakeRequest:
    def __init__(self, request_id: str, tokens: Sequence[int]) -> None:
        self.request_id = request_id
        self.num_tokens = 0
        self.num_computed_tokens = 0
        self._chain = BlockHashChain(BLOCK_SIZE)
        self.append(tokens)

    @property
    def block_hashes(self) -> Sequence[BlockHash]:
        return self._chain.hashes

    def append(self, tokens: Sequence[int]) -> None:
        self._chain.extend(tokens)
        self.num_tokens += len(tokens)


@pytest.fixture
def new_request() -> Callable[[str, str], FakeRequest]:
    """``new_request("a", "SSSS pppp x")``: one token a letter, blanks only for the reader."""
    return lambda request_id, text: FakeRequest(request_id, [ord(letter) for letter in text if letter != " "])


@pytest.fixture
def new_manager() -> Callable[..., KVCacheManager]:
    """A manager with this many usable blocks (ids 1 …)."""

    def make(num_blocks: int, **options: bool) -> KVCacheManager:
        spec = FullAttentionSpec(block_size=BLOCK_SIZE, page_bytes=64)
        return KVCacheManager(CacheConfig(num_blocks=num_blocks + 1, groups=(spec,)), **options)

    return make


@pytest.fixture
def prefill() -> Callable[[KVCacheManager, FakeRequest], list[int] | None]:
    """Looks a request up, gives it slots for all its tokens, computes them. Its block ids, or None for no room."""

    def run(manager: KVCacheManager, request: FakeRequest) -> list[int] | None:
        hit, num_hit = manager.get_computed_blocks(request)
        added = manager.allocate_slots(request, request.num_tokens - num_hit, num_hit, hit)
        manager.check_integrity()
        if added is None:
            return None
        request.num_computed_tokens = request.num_tokens
        (block_ids,) = manager.get_block_ids(request.request_id)
        return block_ids

    return run
