"""A recurrent layer, whose one state stands for all tokens before it: a gated linear recurrence, token by token.

The state is a vector. With each token it fades, channel by channel and as far as the token says, and takes in what the
token brings::

    state = keep * state + brought

The loop is written out, one token after the other in float32: where a prompt is cut into chunks changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional

from kvstore.connector.reference.batch import BatchedSequence


class PagedStates:
    """One batch's view of a group's states: where each of its sequences starts from, and where its states are kept.

    A layer's states have shape ``(num_blocks, channels)``. A block holds the state behind its last token; a request's
    last block, while it is not full, that behind the request's last token. Each block of the new tokens gets its state,
    but for those that are the null block. What a sequence starts from is in the block of its last computed token, which
    is only written when the new tokens go on in the same block: a state that others may hit stays as it is.

    Args:
        sequences: at least 1.
        group: whose blocks these are.
        block_size: tokens a block.
    """

    def __init__(self, sequences: Sequence[BatchedSequence], group: int, block_size: int) -> None:
        self._sequences = sequences
        self._group = group
        self._block_size = block_size

    def __call__(self, states: torch.Tensor, keep: torch.Tensor, brought: torch.Tensor) -> torch.Tensor:
        """Run the recurrence.

        Args:
            states: this layer's; written in place.
            keep: ``(tokens, channels)`` of all sequences in turn: the share of the state that each token leaves.
            brought: as ``keep``: what each token adds.

        Returns:
            ``(tokens, channels)``: the state behind each token.
        """
        outputs = torch.empty_like(brought)
        row = 0
        for s in self._sequences:
            blocks = s.block_ids[self._group]
            state = torch.zeros_like(states[0])
            if s.context_len:
                before = blocks[(s.context_len - 1) // self._block_size]
                assert before, f"the state behind token {s.context_len} is gone"
                state = states[before].clone()
            end = s.context_len + len(s.token_ids)
            for position in range(s.context_len, end):
                state = outputs[row] = torch.addcmul(brought[row], keep[row], state)
                row += 1
                block = blocks[position // self._block_size]
                if block and ((position + 1) % self._block_size == 0 or position + 1 == end):
                    states[block] = state
        return outputs


class GatedRecurrence(nn.Module):
    """The layer around it: what to keep, what to bring and what to let out are projections of the token.

    Args:
        hidden_size: elements of the layer's input and output, and channels of its state.
    """

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.keep_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.in_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.gate_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.out_proj = nn.Linear(hidden_size, hidden_size, bias=False)

    def forward(self, x: torch.Tensor, recur: PagedStates, states: torch.Tensor) -> torch.Tensor:
        """``(tokens, hidden_size)`` of all sequences in turn, in and out."""
        # Some channels forget within ten tokens, some remember hundreds.
        memory = torch.linspace(2.0, 6.0, x.shape[1], dtype=x.dtype)
        keep = torch.sigmoid(self.keep_proj(x) + memory)
        brought = torch.sqrt(1.0 - keep * keep) * self.in_proj(x)  # so that the state neither grows nor dies
        output: torch.Tensor = self.out_proj(recur(states, keep, brought) * functional.silu(self.gate_proj(x)))
        return output
