from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from dice import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig as HFConfig
from transformers import LlamaForCausalLM

import kvstore
from kvstore.connector.blocks import KVCacheConfig
from kvstore.connector.reference.batch import BatchedSequence
from kvstore.connector.reference.engine import Engine
from kvstore.connector.reference.kv_cache import KVCache
from kvstore.connector.reference.model import Llama
from kvstore.connector.reference.request import Answer
from kvstore.errors import InvalidRequestError, UnavailableError
from kvstore.hashing import hash_blocks

BLOCK_SIZE = 16
SYSTEM = [random.Random(f"system {index}").randrange(512) for index in range(40)]
MAX_TOKENS = 6


def prompt(turn: int) -> list[int]:
    """Prompts of 45 … 135 tokens that share a system prompt of two blocks and a half."""
    return SYSTEM + [random.Random(f"{turn} {index}").randrange(512) for index in range(5 + 18 * turn)]


TURNS = range(6)


@pytest.fixture(scope="module")
def expected(tiny: Llama) -> dict[int, tuple[int, ...]]:
    """The answer to each prompt, from the model alone: no engine, no batch, no chunk, no cache kept."""
    answers = {}
    for turn in TURNS:
        tokens = prompt(turn)
        for _ in range(MAX_TOKENS):
            cache = KVCache(KVCacheConfig(16, tiny.config.cache_groups(BLOCK_SIZE)))
            with torch.inference_mode():
                logits = tiny([BatchedSequence(tokens, 0, [range(1, 16)])], cache)[0]
            best = logits.topk(2)
            assert best.values[0] - best.values[1] > 1e-3, "rounding could decide between these two tokens"
            tokens = [*tokens, int(best.indices[0])]
        answers[turn] = tuple(tokens[-MAX_TOKENS:])
    return answers


MakeEngine = Callable[..., Engine]


@pytest.fixture
def make_engine(tiny: Llama, zeroes_blocks: bool) -> Iterator[MakeEngine]:
    """Engines that are closed, and checked for blocks that got lost, when the test is over."""
    engines: list[Engine] = []

    def make(client: Any = None, **options: Any) -> Engine:
        # Deadlines that no slow machine reaches: what is late is tested where the clock is the test's.
        defaults = {"num_blocks": 64, "lookup_budget": 60.0, "load_deadline": 60.0, "store_deadline": 60.0}
        engines.append(Engine(tiny, client=client, zeroes_blocks=zeroes_blocks, **defaults | options))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()
        check_idle(engine)


def check_idle(engine: Engine) -> None:
    assert not engine.has_unfinished
    assert engine.manager.usage == 0.0
    engine.manager.check_integrity()


def ask(engine: Engine, *turns: int) -> dict[int, Answer]:
    """Answers to these prompts, asked for all at once."""
    for turn in turns:
        engine.add_request(str(turn), prompt(turn), MAX_TOKENS)
    return {int(answer.request_id): answer for answer in engine.run()}


def token_ids(answers: dict[int, Answer]) -> dict[int, tuple[int, ...]]:
    return {turn: answer.token_ids for turn, answer in answers.items()}


def step_until(engine: Engine, condition: Callable[[], bool]) -> list[Answer]:
    answers = []
    for _ in range(100_000):
        if condition():
            return answers
        answers += engine.step()
    raise AssertionError("the condition never held")


# -- computing ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("token_budget", [7, 64, 1000])
def test_answers_do_not_depend_on_batches_and_chunks(
    make_engine: MakeEngine, expected: dict[int, tuple[int, ...]], token_budget: int
) -> None:
    answers = ask(make_engine(token_budget=token_budget), *TURNS)

    assert token_ids(answers) == expected
    assert all(answer.time_to_first_token < float("inf") for answer in answers.values())
    assert all(answer.smallest_gap > 1e-3 for answer in answers.values())


def test_logits_in_the_engine_equal_those_of_transformers(make_engine: MakeEngine, tiny: Llama) -> None:
    config = tiny.config
    theirs = LlamaForCausalLM(
        HFConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            rms_norm_eps=config.rms_norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
            tie_word_embeddings=False,
            dtype=torch.float32,
        )
    ).eval()
    theirs.load_state_dict(config_weights(tiny), strict=True)
    engine = make_engine(token_budget=50)
    compared = 0

    def compare(module: object, args: tuple[Any, ...], logits: torch.Tensor) -> None:
        nonlocal compared
        for request, ours in zip(engine_requests(engine, args[0]), logits, strict=True):
            with torch.inference_mode():
                expected = theirs(torch.tensor([request])).logits[0, -1]
            torch.testing.assert_close(ours, expected, rtol=1e-4, atol=2e-5)
            compared += 1

    handle = tiny.register_forward_hook(compare)
    try:
        # Twice, the second time with a prefix hit: chunks, batches that mix both phases, and hits, all at once.
        ask(engine, 3, 1, 5)
        again = ask(engine, 4, 5)
    finally:
        handle.remove()

    assert compared > 2 * MAX_TOKENS
    assert again[4].tokens_hit == 32
    assert again[5].tokens_hit == len(prompt(5)) // BLOCK_SIZE * BLOCK_SIZE


def config_weights(model: Llama) -> dict[str, torch.Tensor]:
    return dict(model.state_dict())


def engine_requests(engine: Engine, sequences: list[BatchedSequence]) -> list[list[int]]:
    """The tokens of each sequence from the first one on, found by its last block: no request knows its place."""
    by_blocks = {
        tuple(engine.manager.get_block_ids(request.request_id)[0]): request.token_ids
        for request in engine._scheduler._running
    }
    return [by_blocks[tuple(s.block_ids[0])][: s.context_len + len(s.token_ids)] for s in sequences]


def test_a_prefix_in_the_engines_own_blocks_is_not_computed_again(
    make_engine: MakeEngine, expected: dict[int, tuple[int, ...]]
) -> None:
    engine = make_engine()
    first, second = ask(engine, 2)[2], ask(engine, 2)[2]

    assert first.token_ids == second.token_ids == expected[2]
    assert (first.tokens_hit, first.tokens_computed) == (0, 81 + MAX_TOKENS - 1)
    assert (second.tokens_hit, second.tokens_computed) == (80, 1 + MAX_TOKENS - 1)


def test_requests_that_do_not_fit_together_are_preempted_and_answered_all_the_same(
    make_engine: MakeEngine, expected: dict[int, tuple[int, ...]]
) -> None:
    # Each fits alone; together their prompts fit to the last block, and the answers do not.
    engine = make_engine(num_blocks=1 + 6 + 5, token_budget=1000)
    engine.add_request("3", prompt(3)[:90], 20)
    engine.add_request("2", prompt(2)[:78], 20)
    together = engine.run()
    assert engine.num_preemptions

    for answer in together:
        alone = make_engine()
        length = {"3": 90, "2": 78}[answer.request_id]
        alone.add_request("alone", prompt(int(answer.request_id))[:length], 20)
        assert alone.run()[0].token_ids == answer.token_ids
        assert answer.smallest_gap > 1e-4


def test_a_request_waits_until_there_is_room(make_engine: MakeEngine, expected: dict[int, tuple[int, ...]]) -> None:
    engine = make_engine(num_blocks=1 + 9, max_requests=2)

    assert token_ids(ask(engine, *reversed(TURNS))) == expected


# -- kvstore -----------------------------------------------------------------------------------------------------------


def test_another_engine_loads_what_the_first_one_stored(
    make_engine: MakeEngine, node: Any, expected: dict[int, tuple[int, ...]]
) -> None:
    first = make_engine(node)
    assert token_ids(ask(first, *TURNS)) == expected
    first.close()

    answers = ask(make_engine(node), *TURNS)

    assert token_ids(answers) == expected
    for turn, answer in answers.items():
        full = (len(prompt(turn)) - 1) // BLOCK_SIZE * BLOCK_SIZE
        assert answer.tokens_hit + answer.tokens_loaded == full
        assert answer.tokens_computed == len(prompt(turn)) - full + MAX_TOKENS - 1
    assert answers[0].tokens_loaded > 0


def test_what_was_loaded_is_not_stored_again_and_what_is_new_is(make_engine: MakeEngine, node: Any) -> None:
    first = make_engine(node)
    ask(first, 1)
    first.close()
    before = set(node.stored)

    second = make_engine(node)
    ask(second, 1, 2)
    second.close()

    assert second.worker is not None
    statistics = second.worker.statistics()
    assert statistics.pages_present == 1  # the block that the answer completes: it is not looked up, only offered
    assert statistics.pages_stored == len(set(node.stored) - before)
    assert set(hash_blocks(prompt(2), BLOCK_SIZE)) <= set(node.stored)


@pytest.mark.parametrize("lost", [0, 1, 4, 7])
def test_a_load_that_breaks_off_is_computed_from_there(
    make_engine: MakeEngine, node: Any, expected: dict[int, tuple[int, ...]], lost: int
) -> None:
    first = make_engine(node)
    ask(first, 5)
    first.close()
    node.lost.add((0, hash_blocks(prompt(5), BLOCK_SIZE)[lost]))

    answer = ask(make_engine(node), 5)[5]

    assert answer.token_ids == expected[5]
    assert answer.tokens_loaded == lost * BLOCK_SIZE
    assert answer.tokens_computed == len(prompt(5)) - lost * BLOCK_SIZE + MAX_TOKENS - 1


@pytest.mark.parametrize("call", ["before_lookup", "before_load", "before_store"])
def test_a_node_that_fails_costs_a_miss_and_never_an_answer(
    make_engine: MakeEngine, node: Any, expected: dict[int, tuple[int, ...]], call: str
) -> None:
    first = make_engine(node)
    ask(first, *TURNS)
    first.close()

    def fail() -> None:
        raise UnavailableError("no node here")

    setattr(node, call, fail)
    answers = ask(make_engine(node), *TURNS)

    assert token_ids(answers) == expected
    if call != "before_store":
        assert sum(answer.tokens_loaded for answer in answers.values()) == 0


def test_an_engine_starts_without_its_node(make_engine: MakeEngine, expected: dict[int, tuple[int, ...]]) -> None:
    with kvstore.connect("unix:///nonexistent/kvstore.sock", timeout=0.2) as client:
        assert token_ids(ask(make_engine(client), 1)) == {1: expected[1]}


def test_pages_go_through_a_real_store(
    make_engine: MakeEngine, tmp_path: Path, shm_folder: Path, expected: dict[int, tuple[int, ...]]
) -> None:
    url = f"embedded://{tmp_path}?arena=8MiB&disk_limit=64MiB&arena_dir={shm_folder}/arena"
    with kvstore.connect(url) as client:
        first = make_engine(client)
        assert token_ids(ask(first, *TURNS)) == expected
        first.close()

        second = make_engine(client)
        answers = ask(second, *TURNS)
        second.close()

    assert token_ids(answers) == expected
    assert all(answer.tokens_computed < BLOCK_SIZE + MAX_TOKENS for answer in answers.values())


def test_a_node_that_does_not_answer_costs_no_more_than_the_deadline(
    make_engine: MakeEngine, node: Any, gate: Any, expected: dict[int, tuple[int, ...]]
) -> None:
    first = make_engine(node)
    ask(first, 4)
    first.close()
    node.before_load = gate

    engine = make_engine(node, load_deadline=0.01)
    answer = ask(engine, 4)[4]
    assert answer.token_ids == expected[4]
    assert answer.tokens_loaded == 0
    gate.opened.set()


def test_others_are_served_while_one_waits_for_its_pages(
    make_engine: MakeEngine, node: Any, gate: Any, expected: dict[int, tuple[int, ...]]
) -> None:
    first = make_engine(node)
    ask(first, 4)
    first.close()
    node.before_load = gate
    engine = make_engine(node)
    engine.add_request("4", prompt(4), MAX_TOKENS)
    step_until(engine, gate.reached.is_set)

    # Another prompt altogether: it has nothing to load and is not held up.
    engine.add_request("other", prompt(3)[40:], MAX_TOKENS)
    answers: list[Answer] = []
    while not answers:
        answers = engine.step()
    assert [answer.request_id for answer in answers] == ["other"]

    gate.opened.set()
    assert [answer.token_ids for answer in engine.run()] == [expected[4]]


def test_blocks_are_held_while_a_store_reads_them(make_engine: MakeEngine, node: Any, gate: Any) -> None:
    node.before_store = gate
    engine = make_engine(node)

    answers = ask(engine, 3)

    assert answers[3].token_ids
    assert engine.manager.usage > 0.0
    for _ in range(5):
        engine.step()
        assert engine.manager.usage > 0.0
    gate.opened.set()
    step_until(engine, lambda: engine.manager.usage == 0.0)
    assert set(hash_blocks(prompt(3), BLOCK_SIZE)) <= set(node.stored)


def test_two_loaded_requests_that_do_not_fit_together_are_both_answered(
    make_engine: MakeEngine, node: Any, expected: dict[int, tuple[int, ...]]
) -> None:
    first = make_engine(node)
    ask(first, 4, 5)
    first.close()

    # Both are loaded to their last full block and find no block for one more.
    engine = make_engine(node, num_blocks=1 + 7 + 8)
    assert token_ids(ask(engine, 4, 5)) == {turn: expected[turn] for turn in (4, 5)}


def test_preempted_requests_store_and_load_right_pages(make_engine: MakeEngine, node: Any) -> None:
    engine = make_engine(node, num_blocks=1 + 6 + 5, token_budget=1000)
    engine.add_request("3", prompt(3)[:90], 20)
    engine.add_request("2", prompt(2)[:78], 20)
    together = {answer.request_id: answer.token_ids for answer in engine.run()}
    assert engine.num_preemptions
    engine.close()

    other = make_engine(node)
    other.add_request("3", prompt(3)[:90], 20)
    other.add_request("2", prompt(2)[:78], 20)
    again = other.run()

    assert {answer.request_id: answer.token_ids for answer in again} == together
    assert all(answer.tokens_loaded > 0 for answer in again)


def test_a_store_under_way_is_given_up_when_its_blocks_go_to_another_request(
    make_engine: MakeEngine, node: Any, gate: Any, node_kind: Callable[[], Any]
) -> None:
    right = node_kind()
    roomy = make_engine(right)
    roomy.add_request("3", prompt(3)[:90], 20)
    roomy.add_request("2", prompt(2)[:78], 20)
    roomy.run()
    roomy.close()

    node.before_store = gate  # nothing is copied out before blocks have been given away and written again
    engine = make_engine(node, num_blocks=1 + 6 + 5, token_budget=1000)
    engine.add_request("3", prompt(3)[:90], 20)
    engine.add_request("2", prompt(2)[:78], 20)
    step_until(engine, lambda: engine.num_preemptions > 0)
    engine.abort("2")
    engine.add_request("other", prompt(5)[70:130], 1)  # takes every block that is left
    step_until(engine, lambda: not engine.has_unfinished)
    gate.opened.set()
    engine.close()

    assert engine.worker is not None
    assert engine.worker.statistics().pages_dropped > 0
    right_pages = {block_hash for block_hash in node.stored if block_hash in right.stored}
    assert set(hash_blocks(prompt(3)[:90], BLOCK_SIZE)) <= right_pages
    for block_hash in right_pages:
        torch.testing.assert_close(
            torch.from_numpy(node.stored[block_hash]).view(torch.float32),
            torch.from_numpy(right.stored[block_hash]).view(torch.float32),
            rtol=1e-3,
            atol=1e-4,
        )


# -- answers depend on the whole context -------------------------------------------------------------------------------


def test_answers_vary_between_prompts_and_within_one(expected: dict[int, tuple[int, ...]]) -> None:
    assert len(set(expected.values())) == len(expected)
    assert all(len(set(answer)) > MAX_TOKENS // 2 for answer in expected.values())


@pytest.mark.parametrize("damaged", [0, 3, 6])
def test_a_damaged_page_anywhere_in_the_prompt_changes_the_answer(
    make_engine: MakeEngine, node: Any, expected: dict[int, tuple[int, ...]], damaged: int
) -> None:
    first = make_engine(node)
    ask(first, 5)
    first.close()
    node.stored[hash_blocks(prompt(5), BLOCK_SIZE)[damaged]][:] = 0

    answer = ask(make_engine(node), 5)[5]

    assert answer.tokens_loaded == 128
    assert answer.token_ids != expected[5]


# -- aborting ----------------------------------------------------------------------------------------------------------


def test_a_waiting_request_is_aborted(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.add_request("1", prompt(1), MAX_TOKENS)

    answer = engine.abort("1")

    assert answer is not None
    assert answer.aborted
    assert answer.token_ids == ()
    assert engine.abort("1") is None


def test_a_running_request_is_aborted_and_the_others_go_on(
    make_engine: MakeEngine, node: Any, expected: dict[int, tuple[int, ...]]
) -> None:
    engine = make_engine(node, token_budget=32)
    for turn in (5, 2):
        engine.add_request(str(turn), prompt(turn), MAX_TOKENS)
    step_until(engine, lambda: engine.manager.usage > 0.0)

    assert engine.abort("5") is not None

    assert [answer.token_ids for answer in engine.run()] == [expected[2]]


def test_blocks_of_an_aborted_request_belong_to_its_load_until_that_is_over(
    make_engine: MakeEngine, node: Any, gate: Any, expected: dict[int, tuple[int, ...]]
) -> None:
    first = make_engine(node)
    ask(first, 5)
    first.close()
    node.before_load = gate
    engine = make_engine(node)
    engine.add_request("5", prompt(5), MAX_TOKENS)
    step_until(engine, gate.reached.is_set)

    assert engine.abort("5") is not None
    for _ in range(5):
        engine.step()
    assert engine.manager.usage > 0.0
    with pytest.raises(InvalidRequestError, match="request 5 is under way"):
        engine.add_request("5", prompt(5), MAX_TOKENS)

    gate.opened.set()
    step_until(engine, lambda: engine.manager.usage == 0.0)
    assert token_ids(ask(engine, 5)) == {5: expected[5]}


# -- bad input ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "max_tokens", "says"),
    [
        ([], 1, "at least 1 token .* got 0 and 1"),
        ([1], 0, "got 1 and 0"),
        ([1, 512], 1, "between 0 and 511"),
        ([-1], 1, "between 0 and 511"),
        ([1] * 100, 100, "100 tokens and an answer of 100 do not fit: they need 13 blocks, the engine has 9"),
    ],
)
def test_requests_that_can_not_be_served_are_refused(
    make_engine: MakeEngine, tokens: list[int], max_tokens: int, says: str
) -> None:
    engine = make_engine(num_blocks=10)

    with pytest.raises(InvalidRequestError, match=says):
        engine.add_request("bad", tokens, max_tokens)

    assert not engine.has_unfinished


# -- all of it at once -------------------------------------------------------------------------------------------------

ACTIONS = st.one_of(
    st.tuples(st.just("ask"), st.sampled_from(TURNS)),
    st.tuples(st.just("abort"), st.sampled_from(TURNS)),
    st.tuples(st.just("lose"), st.integers(0, 30)),
    st.tuples(st.just("step"), st.integers(1, 8)),
)


@given(
    actions=st.lists(ACTIONS, max_size=25),
    num_blocks=st.integers(10, 30),
    token_budget=st.integers(5, 100),
    max_requests=st.integers(1, 6),
    zeroes_blocks=st.booleans(),
)
@settings(max_examples=examples(120), deadline=None)
def test_whatever_happens_answers_are_right_and_no_block_is_lost(
    tiny: Llama,
    expected: dict[int, tuple[int, ...]],
    node_kind: Callable[[], Any],
    actions: list[tuple[str, int]],
    num_blocks: int,
    token_budget: int,
    max_requests: int,
    zeroes_blocks: bool,
) -> None:
    node = node_kind()
    engine = Engine(
        tiny,
        num_blocks=num_blocks,
        token_budget=token_budget,
        max_requests=max_requests,
        client=node,
        zeroes_blocks=zeroes_blocks,
    )
    answers: list[Answer] = []
    asked = 0
    turns = {}
    try:
        for action, number in actions:
            if action == "ask":
                turns[str(asked)] = number
                engine.add_request(str(asked), prompt(number), MAX_TOKENS)
                asked += 1
            elif action == "abort":
                engine.abort(str(asked - 1 - number))
            elif action == "lose" and node.stored:
                node.lost.add((0, sorted(node.stored)[number % len(node.stored)]))
            elif action == "step":
                for _ in range(number):
                    answers += engine.step()
        answers += engine.run()
    finally:
        engine.close()

    check_idle(engine)
    for answer in answers:
        assert answer.token_ids == expected[turns[answer.request_id]]
        done = answer.tokens_hit + answer.tokens_loaded + answer.tokens_computed
        assert done >= answer.prompt_tokens + MAX_TOKENS - 1


@pytest.mark.parametrize("codec", ["int8", "fp8"])
def test_an_engine_with_a_codec_stores_smaller_pages_under_another_name(
    tiny: Llama, make_engine: MakeEngine, node: Any, codec: str
) -> None:
    (plain,) = tiny.config.layouts(tiny.config.cache_groups(BLOCK_SIZE))
    first = make_engine(node, codec=codec)
    first.add_request("a", prompt(5), 1)
    first.run()
    first.close()
    (layout,) = {namespace.layout for namespace, _ in first.worker._groups}
    second = make_engine(node, codec=codec)
    second.add_request("b", prompt(5), 1)
    (answer,) = second.run()

    assert layout.codec == codec
    assert layout.identity != plain.identity
    assert {page.size for page in node.stored.values()} == {layout.page_bytes}
    assert layout.page_bytes < plain.page_bytes / 3
    assert answer.tokens_loaded == len(prompt(5)) // BLOCK_SIZE * BLOCK_SIZE
