"""Prompts that share what they have in common inside a block: the engine copies the block, and goes on in the copy.

Full attention and recurrent states of ``"align"``, in blocks of 16 tokens with a hash for each 4 of them.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from kvstore.connector.reference.engine import Engine
from kvstore.connector.reference.kv_cache import KVCache
from kvstore.connector.reference.model import Llama, LlamaConfig
from kvstore.connector.reference.request import Answer
from kvstore.errors import ConfigError

MAX_TOKENS = 8
PROMPT = [random.Random(f"prompt {index}").randrange(512) for index in range(75)]
"""72 of its tokens are found again: 4 blocks, and half of the fifth."""
LONGER = [*PROMPT[:72], *(random.Random(f"longer {index}").randrange(512) for index in range(40))]

_numbers = itertools.count()
MakeEngine = Callable[..., Engine]


@pytest.fixture(scope="module")
def model() -> Llama:
    return Llama(
        LlamaConfig(
            vocab_size=512,
            hidden_size=128,
            intermediate_size=192,
            num_layers=3,
            num_heads=8,
            num_kv_heads=2,
            seed=3,
            layer_types=("recurrent", "full", "recurrent"),
        )
    )


@pytest.fixture(scope="module")
def right(model: Llama) -> Callable[[Sequence[int]], tuple[int, ...]]:
    """Answers of engines that find nothing again."""

    def answer(tokens: Sequence[int]) -> tuple[int, ...]:
        engine = Engine(model, num_blocks=100, enable_caching=False)
        engine.add_request("alone", tokens, MAX_TOKENS)
        (alone,) = engine.run()
        assert alone.smallest_gap > 1e-3, "rounding could decide between two tokens"
        return alone.token_ids

    return answer


@pytest.fixture
def make_engine(model: Llama) -> Iterator[MakeEngine]:
    """Engines that are closed, and checked for blocks that got lost, when the test is over."""
    engines: list[Engine] = []

    def make(client: Any = None, **options: Any) -> Engine:
        defaults = {"num_blocks": 100, "lookup_budget": 60.0, "load_deadline": 60.0, "store_deadline": 60.0}
        defaults |= {"mamba_cache_mode": "align", "prefix_match_unit": 4}
        engines.append(Engine(model, client=client, **defaults | options))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()
        engine.manager.check_integrity()
        assert engine.manager.usage == 0.0


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The copies that engines make."""
    copies: list[tuple[int, int]] = []
    original = KVCache.copy

    def copy(cache: KVCache, pairs: Sequence[tuple[int, int]]) -> None:
        copies.extend(pairs)
        original(cache, pairs)

    monkeypatch.setattr(KVCache, "copy", copy)
    return copies


def run(engine: Engine, *prompts: Sequence[int]) -> list[Answer]:
    """Answers in the order of the prompts, asked for all at once."""
    for tokens in prompts:
        engine.add_request(str(next(_numbers)), tokens, MAX_TOKENS)
    answers: list[Answer] = []
    while engine.has_unfinished:
        answers += engine.step()
        engine.manager.check_integrity()
    return sorted(answers, key=lambda answer: int(answer.request_id))


def test_a_prompt_is_found_up_to_its_last_hash(make_engine: MakeEngine, right: Any, copied: list) -> None:
    engine = make_engine()
    (first,) = run(engine, PROMPT)
    assert len(copied) == 2  # of the states that it left to others, one for each recurrent layer
    (again,) = run(engine, PROMPT)
    (longer,) = run(engine, LONGER)
    assert [answer.tokens_hit for answer in (first, again, longer)] == [0, 72, 72]
    assert first.token_ids == again.token_ids == right(PROMPT)
    assert longer.token_ids == right(LONGER)
    assert len(copied) > 2
    assert engine.manager.cache_hit_alignment_tokens == 4


@pytest.mark.parametrize("token_budget", [7, 50, 1000])
def test_many_go_on_from_one_block_at_once(make_engine: MakeEngine, right: Any, token_budget: int) -> None:
    engine = make_engine(token_budget=token_budget)
    run(engine, PROMPT)
    answers = run(engine, PROMPT, LONGER, PROMPT, LONGER[:90])
    assert [answer.tokens_hit for answer in answers[:3]] == [72] * 3
    assert answers[3].tokens_hit in (72, 80)  # or what the second one has left meanwhile
    assert [answer.token_ids for answer in answers] == [right(PROMPT), right(LONGER), right(PROMPT), right(LONGER[:90])]


def test_answers_are_right_where_blocks_are_taken_from_requests(
    make_engine: MakeEngine, right: Any, copied: list
) -> None:
    engine = make_engine(num_blocks=22, token_budget=40)
    prompts = [PROMPT, LONGER, PROMPT, LONGER[:90], PROMPT[:50], PROMPT]
    for _ in range(2):
        answers = run(engine, *prompts)
        assert [answer.token_ids for answer in answers] == [right(tokens) for tokens in prompts]
    assert engine.num_preemptions
    assert copied


def test_a_request_that_just_fits_has_room_for_its_copies(make_engine: MakeEngine, right: Any) -> None:
    """Its last block is hit inside: that one and its copy are held at once."""
    needed = make_engine(token_budget=16)._blocks_needed(len(PROMPT) + 4)
    engine = make_engine(num_blocks=1 + needed, token_budget=16)
    for _ in range(2):
        engine.add_request(str(next(_numbers)), PROMPT, 4)
        answers: list[Answer] = []
        for _ in range(100):
            answers += engine.step()
        assert [answer.token_ids for answer in answers] == [right(PROMPT)[:4]]


@pytest.mark.parametrize("zeroes_blocks", [False, True], ids=["told first", "zeroed first"])
def test_whole_pages_come_from_kvstore_and_the_rest_of_a_prompt_from_here(
    make_engine: MakeEngine, right: Any, node: Any, zeroes_blocks: bool
) -> None:
    first = make_engine(node, zeroes_blocks=zeroes_blocks)
    (answer,) = run(first, PROMPT)
    first.settle()
    pages = {key: page.copy() for key, page in node.stored.items()}

    second = make_engine(node, zeroes_blocks=zeroes_blocks)
    answers = [run(second, tokens)[0] for tokens in (PROMPT, PROMPT, LONGER)]
    assert [(a.tokens_loaded, a.tokens_hit) for a in answers] == [(64, 0), (0, 72), (0, 72)]
    assert [a.token_ids for a in answers] == [answer.token_ids, right(PROMPT), right(LONGER)]
    second.settle()
    for key, page in pages.items():
        assert (node.stored[key] == page).all()


def test_with_windows_whole_blocks_are_found(right: Any) -> None:
    """A window's blocks can't be hit inside."""
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_layers=3,
        num_heads=4,
        num_kv_heads=2,
        layer_types=("recurrent", "full", "sliding"),
        sliding_window=20,
    )
    engine = Engine(Llama(config), num_blocks=60, mamba_cache_mode="align", prefix_match_unit=4)
    tokens = [index % 64 for index in range(75)]
    assert [run(engine, tokens)[0].tokens_hit for _ in range(2)] == [0, 64]
    engine.close()


def test_a_unit_that_does_not_fit_is_refused(model: Llama) -> None:
    with pytest.raises(ConfigError, match=r"prefix_match_unit must fit into the blocks of each group.* got 5 for"):
        Engine(model, num_blocks=10, prefix_match_unit=5)


def test_a_copy_takes_a_block_as_it_is_in_every_layer(model: Llama) -> None:
    engine = Engine(model, num_blocks=6)
    cache = engine._cache
    for rows in cache.rows.values():
        rows[2:4] = torch.rand_like(rows[2:4])
    wanted = {name: (rows[2].clone(), rows[3].clone()) for name, rows in cache.rows.items()}
    cache.copy([(2, 4), (3, 5)])
    for name, rows in cache.rows.items():
        assert (rows[4].equal(wanted[name][0]), rows[5].equal(wanted[name][1])) == (True, True)
    engine.close()
