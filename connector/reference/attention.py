"""Attention over a paged KV cache: write the new tokens' keys and values, then read the context block by block."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional

from kvstore.connector.reference.batch import BatchedSequence


class PagedAttention:
    """One batch's view of a group's paged KV: where its new tokens go, and what each of its sequences attends to.

    A layer's KV has shape ``(2, num_blocks, block_size, kv_heads, head_size)``. All sequences write before one reads: a
    sequence may hold blocks that another one fills in the same batch.

    Args:
        sequences: at least 1.
        group: whose blocks these are.
        block_size: tokens a block.
        window: a token attends to itself and the ``window - 1`` tokens before it. None: to all tokens before it.
    """

    def __init__(
        self, sequences: Sequence[BatchedSequence], group: int, block_size: int, window: int | None = None
    ) -> None:
        self.block_size = block_size
        self._lengths = [len(s.token_ids) for s in sequences]
        self._blocks: list[torch.Tensor] = []
        self._spans: list[slice] = []
        self._masks: list[torch.Tensor | None] = []
        slot_blocks, slot_offsets = [], []
        for s, length in zip(sequences, self._lengths, strict=True):
            total = s.context_len + length
            # Blocks that no new token looks back to may be gone.
            first = 0 if window is None else max(0, s.context_len - window + 1) // block_size
            blocks = torch.tensor(s.block_ids[group][first : -(-total // block_size)])
            assert blocks.all(), f"a token at or behind {s.context_len} needs block {first} or one behind it: {blocks}"
            start = first * block_size
            positions = torch.arange(s.context_len, total)
            slot_blocks.append(blocks[positions // block_size - first])
            slot_offsets.append(positions % block_size)
            self._blocks.append(blocks)
            self._spans.append(slice(0, total - start))
            self._masks.append(_mask(positions, torch.arange(start, total), window))
        self._slot_blocks = torch.cat(slot_blocks)
        self._slot_offsets = torch.cat(slot_offsets)

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
        for part, blocks, span, mask in zip(
            torch.split(query, self._lengths), self._blocks, self._spans, self._masks, strict=True
        ):
            context = kv[:, blocks].flatten(1, 2)[:, span].transpose(1, 2)
            attended = functional.scaled_dot_product_attention(
                part.transpose(0, 1)[None], context[0][None], context[1][None], attn_mask=mask, enable_gqa=True
            )
            outputs.append(attended[0].transpose(0, 1))
        return torch.cat(outputs)


def _mask(queries: torch.Tensor, keys: torch.Tensor, window: int | None) -> torch.Tensor | None:
    """Which keys each query attends to, both given by position: itself and what is before it, inside the window."""
    if len(queries) == 1 and window is None:
        return None  # decoding one token: everything
    distance = queries[:, None] - keys
    mask = distance >= 0
    return mask if window is None else mask & (distance < window)
