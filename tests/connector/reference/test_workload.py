from __future__ import annotations

from itertools import pairwise

import pytest

from kvstore.connector.reference.demo import DemoSize, make_prompts
from kvstore.connector.reference.model import LlamaConfig
from kvstore.connector.reference.workload import Turn, prompt_of, read_excerpt
from kvstore.errors import FormatError, InvalidRequestError
from kvstore.hashing import hash_blocks


def shared_tokens(one: list[int], other: list[int]) -> int:
    for at, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return at
    return min(len(one), len(other))


def test_the_excerpt_holds_conversations_of_several_turns() -> None:
    turns = read_excerpt()

    by_conversation = {turn.conversation: [t for t in turns if t.conversation == turn.conversation] for turn in turns}
    assert len(by_conversation) == 5
    for conversation in by_conversation.values():
        assert [turn.number for turn in conversation] == [0, 1, 2]
        for earlier, later in pairwise(conversation):
            assert later.input_length > earlier.input_length
            # The last block of a turn is not full, and another one when the next turn has filled it.
            assert later.hash_ids[: len(earlier.hash_ids) - 1] == earlier.hash_ids[:-1]
    assert len({turn.name for turn in turns}) == len(turns)


def test_prompts_share_exactly_the_blocks_that_the_trace_shares() -> None:
    turns = read_excerpt()
    for one in turns:
        for other in turns:
            if one is other:
                continue
            blocks = shared_tokens(list(one.hash_ids), list(other.hash_ids))
            tokens = shared_tokens(prompt_of(one, 32, 2048), prompt_of(other, 32, 2048))
            assert blocks * 32 <= tokens < blocks * 32 + 8  # a few tokens more by chance


def test_lengths_are_scaled() -> None:
    turn = Turn(0, 0, 1025, (7, 8, 9))

    assert len(prompt_of(turn, 512, 100)) == 1025
    assert len(prompt_of(turn, 32, 100)) == 65
    assert len(prompt_of(turn, 1, 100)) == 3


def test_tokens_are_the_same_on_every_machine() -> None:
    turn = Turn(0, 0, 1024, (0, 46))

    assert prompt_of(turn, 4, 2048) == [151, 1008, 1832, 89, 1399, 1029, 85, 524]


def test_the_demos_prompts_are_of_the_models_vocabulary_and_in_order_of_length() -> None:
    size = DemoSize()
    first, second, third = make_prompts(size)

    assert LlamaConfig().vocab_size == size.vocab_size
    assert size.block_tokens % 16 == 0
    by_name = {prompt.name: prompt.token_ids for prompt in (*first, *second, *third)}
    assert all(0 <= token < size.vocab_size for tokens in by_name.values() for token in tokens)
    # B gets prompts that A had, and longer ones; C one that B had, and longer ones.
    assert len({p.name for p in first} & {p.name for p in second}) == 2
    assert len({p.name for p in second} & {p.name for p in third}) == 1
    assert not {p.name for p in first} & {p.name for p in third}
    system = {hash_blocks(tokens, 16)[size.block_tokens // 16 - 1] for tokens in by_name.values()}
    assert len(system) == 1


@pytest.mark.parametrize("line", ["{", "[]", '{"input_length": 3}', '{"input_length": 3, "hash_ids": [1]}', "7"])
def test_a_line_that_is_no_request_is_named(line: str) -> None:
    with pytest.raises(FormatError, match="line 2 of the trace"):
        read_excerpt('{"input_length": 600, "hash_ids": [1, 2]}\n' + line)


@pytest.mark.parametrize(("block_tokens", "vocab_size"), [(0, 10), (16, 0)])
def test_sizes_below_one_are_refused(block_tokens: int, vocab_size: int) -> None:
    with pytest.raises(InvalidRequestError, match=f"got {block_tokens}, {vocab_size}"):
        prompt_of(read_excerpt()[0], block_tokens, vocab_size)
