"""Attention over a paged KV cache: write the new tokens' keys and values, then read the context block by block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class BatchedSequence:
    """One request's share of a batch: some tokens right behind a context that is in its blocks already."""

    token_ids: Sequence[int]
    """The tokens to compute, at least 1."""
    context_len: int
    """Tokens before them whose KV is in the blocks."""
    block_ids: Sequence[int]
    """The request's blocks in the order of its tokens; enough for context and new tokens."""


class PagedAttention:
    """One batch's view of the paged KV: where its new tokens go, and what each of its sequences attends to.

    A layer's KV has shape ``(2, num_blocks, block_size, kv_heads, head_size)``. All sequences write before one reads: a
    sequence may hold blocks that another one fills in the same batch.

    Args:
        sequences: at least 1.
        block_size: tokens a block.
    """

    def __init__(self, sequences: Sequence[BatchedSequence], block_size: int) -> None:
        self.positions = torch.cat([torch.arange(s.context_len, s.context_len + len(s.token_ids)) for s in sequences])
        self._lengths = [len(s.token_ids) for s in sequences]
        self._blocks: list[torch.Tensor] = []
        self._totals: list[int] = []
        self._masks: list[torch.Tensor | None] = []
        block_of_token = []
        start = 0
        for s, length in zip(sequences, self._lengths, strict=True):
            total = s.context_len + length
            blocks = torch.tensor(s.block_ids[: -(-total // block_size)])
            block_of_token.append(blocks[self.positions[start : start + length] // block_size])
            self._blocks.append(blocks)
            self._totals.append(total)
            # A token sees the whole context and the new tokens up to itself. Decoding one token needs no mask.
            self._masks.append(None if length == 1 else torch.ones(length, total, dtype=torch.bool).tril(s.context_len))
            start += length
        self._slot_blocks = torch.cat(block_of_token)
        self._slot_offsets = self.positions % block_size

    def __call__(self, kv: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Cache keys and values, and attend.

        Args:
            kv: this layer's cache; written in place.
            query: ``(tokens, heads, head_size)`` of all sequences in turn.
            key: ``(tokens, kv_heads, head_size)``.
            value: as ``key``.

        Returns:
            ``(tokens, heads, head_size)``.
        """
        kv[0, self._slot_blocks, self._slot_offsets] = key
        kv[1, self._slot_blocks, self._slot_offsets] = value
        outputs = []
        for part, blocks, total, mask in zip(
            torch.split(query, self._lengths), self._blocks, self._totals, self._masks, strict=True
        ):
            context = kv[:, blocks].flatten(1, 2)[:, :total].transpose(1, 2)
            attended = functional.scaled_dot_product_attention(
                part.transpose(0, 1)[None], context[0][None], context[1][None], attn_mask=mask, enable_gqa=True
            )
            outputs.append(attended[0].transpose(0, 1))
        return torch.cat(outputs)
