"""Prompts with the prefix structure of real conversations.

The lines of ``conversation_excerpt.jsonl`` (its source and licence: ``CONVERSATION_EXCERPT.md``) are turns of
conversations that share a system prompt. They say which 512-token blocks of two prompts are equal, and nothing of what
is in them: here each block becomes a shorter one of made-up tokens, the same wherever the trace has the same block.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from importlib.resources import files

import numpy as np

from kvstore.errors import FormatError, InvalidRequestError

TRACE_BLOCK_TOKENS = 512
"""Tokens that one of the trace's hash ids stands for."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of the trace: a conversation up to its latest question."""

    conversation: int
    """Numbered in the order in which conversations begin."""
    number: int
    """0 for a conversation's first turn."""
    input_length: int
    """Tokens of the prompt in the trace."""
    hash_ids: tuple[int, ...]
    """One id a block of :data:`TRACE_BLOCK_TOKENS` of them, the last one mostly not full."""

    @property
    def name(self) -> str:
        """Unique among the turns."""
        return f"conversation {self.conversation}, turn {self.number}"


def read_excerpt(text: str | None = None) -> list[Turn]:
    """The turns of the excerpt, in the order of the trace.

    Args:
        text: lines as in the trace; by default those of the excerpt. Turns belong to one conversation when their second
            block is the same (the first one is the system prompt that all share).

    Raises:
        FormatError: a line is not such an object.
    """
    if text is None:
        text = (files("kvstore.connector.reference") / "conversation_excerpt.jsonl").read_text()
    conversations: dict[int, list[Turn]] = {}
    turns = []
    for number, line in enumerate(text.splitlines(), 1):
        try:
            fields = json.loads(line)
            length, hash_ids = int(fields["input_length"]), tuple(map(int, fields["hash_ids"]))
            conversation = conversations.setdefault(hash_ids[1], [])
        except (ValueError, TypeError, KeyError, IndexError) as error:
            raise FormatError(f"line {number} of the trace is no request of two blocks or more: {error!r}") from error
        place = list(conversations).index(hash_ids[1])
        conversation.append(Turn(place, len(conversation), length, hash_ids))
        turns.append(conversation[-1])
    return turns


def prompt_of(turn: Turn, block_tokens: int, vocab_size: int) -> list[int]:
    """A turn's prompt, scaled down.

    Args:
        turn: of the trace.
        block_tokens: tokens that each :data:`TRACE_BLOCK_TOKENS` of the trace become, at least 1. A multiple of the
            engine's block size keeps equal blocks equal pages.
        vocab_size: token ids lie below it.

    Returns:
        Token ids: of each of the turn's blocks all, of the last one as many as the prompt's length leaves.

    Raises:
        InvalidRequestError: ``block_tokens`` or ``vocab_size`` below 1.
    """
    if block_tokens < 1 or vocab_size < 1:
        raise InvalidRequestError(f"block_tokens and vocab_size must be at least 1, got {block_tokens}, {vocab_size}")
    length = -(-turn.input_length * block_tokens // TRACE_BLOCK_TOKENS)
    tokens = [token for hash_id in turn.hash_ids for token in _tokens(hash_id, block_tokens, vocab_size)]
    return tokens[:length]


def _tokens(hash_id: int, count: int, vocab_size: int) -> list[int]:
    """Tokens that depend on the id alone, on every machine and in every version."""
    stream = hashlib.shake_256(b"kvstore/conversation-excerpt/%d" % hash_id).digest(4 * count)
    tokens: list[int] = (np.frombuffer(stream, "<u4") % vocab_size).tolist()
    return tokens
