"""Builders for block manager scenarios: requests that are written down as words of tokens, and what an engine does.

Blocks hold 4 tokens unless a scenario says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from kvstore.connector.blocks import (
    BlockHash,
    BlockHashChain,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheManager,
    KVCacheSpec,
    PrefixKeys,
)

BLOCK_SIZE = 4


class FakeRequest:
    """A request as an engine's scheduler keeps it."""

    def __init__(
        self,
        request_id: str,
        tokens: Sequence[int],
        *,
        hash_block_size: int = BLOCK_SIZE,
        keys: PrefixKeys | None = None,
        skip_reading: bool = False,
    ) -> None:
        self.request_id = request_id
        self.token_ids: list[int] = []
        self.num_prompt_tokens = len(tokens)
        self.num_computed_tokens = 0
        self.num_in_flight_tokens = 0
        self.num_preemptions = 0
        self.skip_reading_prefix_cache = skip_reading
        self.shared_prefix_boundary = 0
        self.prefix_keys = keys
        self._chain = BlockHashChain(hash_block_size, keys or ())
        self.append(tokens)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def block_hashes(self) -> list[BlockHash]:
        return self._chain.hashes

    def append(self, tokens: Sequence[int]) -> None:
        self._chain.extend(tokens)
        self.token_ids.extend(tokens)


@pytest.fixture
def new_request() -> Callable[..., FakeRequest]:
    """``new_request("a", "SSSS pppp x")``: one token a letter, blanks only for the reader."""

    def make(request_id: str, text: str, **options: Any) -> FakeRequest:
        return FakeRequest(request_id, [ord(letter) for letter in text if letter != " "], **options)

    return make


@pytest.fixture
def new_manager() -> Callable[..., KVCacheManager]:
    """A manager with this many usable blocks (ids 1 …), and a group for each spec; one of full attention for none."""

    def make(num_blocks: int, *specs: KVCacheSpec, max_model_len: int = 1000, **options: Any) -> KVCacheManager:
        specs = specs or (FullAttentionSpec(block_size=BLOCK_SIZE, token_bytes=8),)
        groups = tuple(KVCacheGroupSpec((f"layer {index}",), spec) for index, spec in enumerate(specs))
        return KVCacheManager(KVCacheConfig(num_blocks + 1, groups), max_model_len, **options)

    return make


@pytest.fixture
def compute() -> Callable[..., tuple[list[int], ...] | None]:
    """Gives a request that has blocks slots for its next tokens, and computes them: all that it has, where no number is
    given. The ids of the blocks that were added; None: too few free blocks."""

    def run(
        manager: KVCacheManager, request: FakeRequest, num_tokens: int | None = None, **options: Any
    ) -> tuple[list[int], ...] | None:
        if num_tokens is None:
            num_tokens = request.num_tokens - request.num_computed_tokens
        added = manager.allocate_slots(request, num_tokens, **options)
        manager.check_integrity()
        if added is None:
            return None
        request.num_computed_tokens += num_tokens
        return added.get_block_ids()

    return run


@pytest.fixture
def prefill(compute) -> Callable[..., tuple[list[int], ...] | None]:
    """Looks a request up, gives it slots for all its tokens, computes them: in one step, or ``chunk`` tokens a step,
    the first of which ends at a multiple of that. The ids of its blocks by group, or None: too few free blocks."""

    def run(
        manager: KVCacheManager, request: FakeRequest, *, chunk: int | None = None, **options: Any
    ) -> tuple[list[int], ...] | None:
        manager.new_step_starts()
        hit, num_hit = manager.get_computed_blocks(request)
        num_new = request.num_tokens - num_hit
        if chunk is not None:
            num_new = min(num_new, chunk - num_hit % chunk)
        added = manager.allocate_slots(request, num_new, num_hit, hit, **options)
        manager.check_integrity()
        if added is None:
            return None
        request.num_computed_tokens = num_hit + num_new
        while request.num_computed_tokens < request.num_tokens:
            assert chunk is not None
            manager.new_step_starts()
            if compute(manager, request, min(chunk, request.num_tokens - request.num_computed_tokens)) is None:
                return None
        return manager.get_block_ids(request.request_id)

    return run


@pytest.fixture
def hit_tokens() -> Callable[[KVCacheManager, FakeRequest], int]:
    """How many tokens of a request would hit."""
    return lambda manager, request: manager.get_computed_blocks(request)[1]


@pytest.fixture
def unhashed_ids() -> Callable[[KVCacheManager, str], list[list[int]]]:
    """The ids of a request's blocks that no one can find by hash, a list a group, without the null block."""

    def ids(manager: KVCacheManager, request_id: str) -> list[list[int]]:
        return [
            [block.block_id for block in group if block.block_hash is None and not block.is_null]
            for group in manager.get_blocks(request_id).blocks
        ]

    return ids


@pytest.fixture
def start_load() -> Callable[..., tuple[int, int] | None]:
    """Looks a request up with what kvstore has (by group, a word of 1 and 0), and gives it blocks: its tokens
    that hit here and those that are being loaded. None: too few free blocks."""

    def run(manager: KVCacheManager, request: FakeRequest, *presence: str) -> tuple[int, int] | None:
        present = {group: [page == "1" for page in word] for group, word in enumerate(presence)}
        blocks, num_local, num_external = manager.get_computed_blocks_with(request, present)
        added = manager.allocate_slots(
            request, 0, num_local, blocks, num_external_computed_tokens=num_external, delay_cache_blocks=True
        )
        manager.check_integrity()
        if added is None:
            return None
        request.num_computed_tokens = num_local + num_external
        return num_local, num_external

    return run


@pytest.fixture
def end_load() -> Callable[..., int]:
    """Ends a load; blocks with these ids were not filled. The request's computed tokens."""

    def run(manager: KVCacheManager, request: FakeRequest, *invalid_block_ids: int) -> int:
        request.num_computed_tokens = manager.complete_load(request, invalid_block_ids)
        manager.check_integrity()
        return request.num_computed_tokens

    return run
