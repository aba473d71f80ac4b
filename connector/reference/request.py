"""A request of the reference engine: its tokens, how far they are computed, and what that took."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvstore.connector.blocks.hashing import BlockHash, BlockHashChain
from kvstore.connector.disagg.handover import Prompt


class Request:
    """One prompt and the answer that grows behind it. The scheduler changes it, everyone else reads it.

    Args:
        request_id: unique among the engine's requests.
        prompt_token_ids: at least 1.
        max_tokens: length of the answer, at least 1.
        hash_block_size: tokens between two of its hashes.
        transfer: its ``kv_transfer_params``: ``do_remote_decode`` asks for a ticket, ``do_remote_prefill`` brings one.
    """

    num_in_flight_tokens = 0
    """Each step is over before the next one is scheduled."""
    skip_reading_prefix_cache = False
    """No request needs what is computed for tokens before its last one."""
    shared_prefix_boundary = 0
    """The engine keeps every window and state."""
    prefix_keys = None
    """Tokens are all that a request's KV depends on."""

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        max_tokens: int,
        hash_block_size: int,
        transfer: Mapping[str, Any] | None = None,
    ) -> None:
        self.request_id = request_id
        self.transfer = dict(transfer or {})
        self.ticket: dict[str, Any] | None = None
        """What it is answered with, for whoever decodes."""
        self.token_ids = list(prompt_token_ids)
        """Prompt and answer so far."""
        self.num_prompt_tokens = len(self.token_ids)
        self.max_tokens = max_tokens
        self.num_computed_tokens = 0
        """Leading tokens whose KV is in the request's blocks, or being loaded there."""
        self.receiving = False
        """A load from kvstore may still write to its blocks."""
        self.num_hit_tokens = 0
        """Tokens that it would have without what is loaded."""
        self.sending = False
        """It is over, and stores to kvstore may still read from its blocks."""
        self.num_preemptions = 0
        """How often its blocks were taken from it."""
        self._hash_block_size = hash_block_size
        self._chain = BlockHashChain(hash_block_size)
        self._chain.extend(self.token_ids)

        self.arrived_at = time.perf_counter()
        self.first_token_at: float | None = None
        self.tokens_computed = 0
        self.tokens_hit = 0
        self.tokens_loaded = 0
        self.smallest_gap = float("inf")

    @property
    def prompt(self) -> Prompt:
        """Its prompt, for tickets."""
        return Prompt(self.token_ids[: self.num_prompt_tokens], self._chain, self._hash_block_size)

    @property
    def num_tokens(self) -> int:
        """Prompt tokens and tokens generated so far."""
        return len(self.token_ids)

    @property
    def block_hashes(self) -> Sequence[BlockHash]:
        """One for each ``hash_block_size`` of its tokens."""
        return self._chain.hashes

    def hashes_of_blocks(self, block_size: int) -> Sequence[BlockHash]:
        """One for each full block of its tokens, in a group with blocks of this size: a multiple of the hashes'."""
        # A hash names all tokens before it, so that of a block's end names the block.
        step = block_size // self._hash_block_size
        return self._chain.hashes if step == 1 else self._chain.hashes[step - 1 :: step]

    @property
    def answer(self) -> list[int]:
        """The tokens generated so far."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def complete(self) -> bool:
        """Whether the answer has its full length."""
        return self.num_tokens - self.num_prompt_tokens >= self.max_tokens

    def append(self, token_id: int, gap: float) -> None:
        """Take the next token of the answer.

        Args:
            token_id: the most likely one.
            gap: by how much its logit exceeds that of the second most likely one.
        """
        self.token_ids.append(token_id)
        self._chain.extend((token_id,))
        self.smallest_gap = min(self.smallest_gap, gap)
        if self.first_token_at is None:
            self.first_token_at = time.perf_counter()


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of a request, and what it took."""

    request_id: str
    token_ids: tuple[int, ...]
    """The tokens generated, without the prompt; fewer than ``max_tokens`` when aborted."""
    aborted: bool
    prompt_tokens: int
    tokens_computed: int
    """Tokens that went through the model, those computed again after a preemption included."""
    tokens_hit: int
    """Tokens found in the engine's own blocks."""
    tokens_loaded: int
    """Tokens loaded from kvstore."""
    time_to_first_token: float
    """Seconds from the request's arrival; infinite when it was aborted before."""
    smallest_gap: float
    """The smallest distance between the best and the second best logit at any of its tokens: float rounding far below
    it can't have changed the answer. Infinite without tokens."""
    ticket: Mapping[str, Any] | None
    """``kv_transfer_params`` for whoever decodes, where the request asked for them."""


def answer_of(request: Request, *, aborted: bool) -> Answer:
    """What came of a request that is over."""
    first = float("inf") if request.first_token_at is None else request.first_token_at - request.arrived_at
    return Answer(
        request_id=request.request_id,
        token_ids=tuple(request.answer),
        aborted=aborted,
        prompt_tokens=request.num_prompt_tokens,
        tokens_computed=request.tokens_computed,
        tokens_hit=request.tokens_hit,
        tokens_loaded=request.tokens_loaded,
        time_to_first_token=first,
        smallest_gap=request.smallest_gap,
        ticket=request.ticket,
    )
