"""The engine with layers of several kinds: windows, recurrence, full attention, and all of them together."""

from __future__ import annotations

import itertools
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dice import examples
from hypothesis import given, settings
from hypothesis import strategies as st

import kvstore
from kvstore.connector.blocks.specs import MambaCacheMode, MambaSpec, SlidingWindowSpec
from kvstore.connector.reference.engine import Engine
from kvstore.connector.reference.model import Llama
from kvstore.connector.reference.request import Answer

BLOCK_SIZE = 16
MAX_TOKENS = 6
SYSTEM = [random.Random(f"system {index}").randrange(512) for index in range(70)]
Tokens = tuple[int, ...]


def prompt(turn: int) -> Tokens:
    """Prompts of 75 … 165 tokens that share a system prompt of four blocks and a bit."""
    return (*SYSTEM, *(random.Random(f"{turn} {index}").randrange(512) for index in range(5 + 18 * turn)))


TURNS = range(6)
_numbers = itertools.count()


class Alone:
    """What comes of prompts that are computed one by one, each in an engine of its own that finds nothing again."""

    def __init__(self, model: Llama, node_kind: Callable[[], Any]) -> None:
        self._model = model
        self._node_kind = node_kind
        self._answers: dict[Tokens, Tokens] = {}
        self.pages: dict[tuple[int, bytes], torch.Tensor] = {}
        """By group and hash, of every prompt that was asked for."""

    def answer(self, tokens: Sequence[int]) -> Tokens:
        key = tuple(tokens)
        if key not in self._answers:
            node = self._node_kind()
            engine = Engine(
                self._model, num_blocks=100, token_budget=1000, client=node, enable_caching=False, store_deadline=60.0
            )
            engine.add_request("alone", tokens, MAX_TOKENS)
            answers = []
            while engine.has_unfinished:
                answers += engine.step()
                assert engine.worker is not None
                engine.worker.wait_for_save()  # without caching, blocks left behind are given out again at once
            (answer,) = answers
            engine.close()
            assert answer.tokens_computed == len(tokens) + MAX_TOKENS - 1
            assert answer.smallest_gap > 1e-3, "rounding could decide between two tokens"
            self._answers[key] = answer.token_ids
            self.pages |= pages_of(node)
        return self._answers[key]

    def check_pages(self, node: Any) -> None:
        """Every page that a node has of these prompts is right, up to rounding."""
        for key, page in pages_of(node).items():
            if key in self.pages:
                torch.testing.assert_close(page, self.pages[key], rtol=1e-3, atol=1e-4)


def pages_of(node: Any) -> dict[tuple[int, bytes], torch.Tensor]:
    return {
        (group, block_hash): torch.from_numpy(page).view(torch.float32)
        for group, pages in list(node.by_group.items())
        for block_hash, page in pages.copy().items()  # other threads store
    }


@pytest.fixture(scope="module")
def alone(mixed: Llama, node_kind: Callable[[], Any]) -> Alone:
    made = Alone(mixed, node_kind)
    for turn in TURNS:
        made.answer(prompt(turn))
    return made


MakeEngine = Callable[..., Engine]


@pytest.fixture
def make_engine(mixed: Llama, zeroes_blocks: bool) -> Iterator[MakeEngine]:
    """Engines that are closed, and checked for blocks that got lost, when the test is over."""
    engines: list[Engine] = []

    def make(client: Any = None, **options: Any) -> Engine:
        defaults = {"num_blocks": 200, "lookup_budget": 60.0, "load_deadline": 60.0, "store_deadline": 60.0}
        engines.append(Engine(mixed, client=client, zeroes_blocks=zeroes_blocks, **defaults | options))
        return engines[-1]

    yield make
    for engine in engines:
        close(engine)


def close(engine: Engine) -> None:
    engine.close()
    assert not engine.has_unfinished
    assert engine.manager.usage == 0.0
    engine.manager.check_integrity()


def step(engine: Engine) -> list[Answer]:
    answers = engine.step()
    engine.manager.check_integrity()
    return answers


def run(engine: Engine) -> list[Answer]:
    answers = []
    while engine.has_unfinished:
        answers += step(engine)
    return answers


def ask(engine: Engine, *turns: int) -> dict[int, Answer]:
    """Answers to these prompts, asked for all at once."""
    for turn in turns:
        engine.add_request(f"{turn} {next(_numbers)}", prompt(turn), MAX_TOKENS)
    return {int(answer.request_id.split()[0]): answer for answer in run(engine)}


def check(answers: dict[int, Answer], alone: Alone) -> None:
    assert {turn: answer.token_ids for turn, answer in answers.items()} == {
        turn: alone.answer(prompt(turn)) for turn in answers
    }


def longest_hit(engine: Engine, num_tokens: int) -> int:
    """Tokens of a prompt that need not be computed, when everything of it is cached."""
    alignment = engine.manager.scheduler_block_size
    return (num_tokens - 1) // alignment * alignment


def needed_pages(engine: Engine, num_tokens: int) -> dict[int, list[int]]:
    """By group, which of a prompt's blocks a hit of ``num_tokens`` needs, counted from the prompt's first block."""
    needed = {}
    for group, spec in enumerate(group.kv_cache_spec for group in engine.manager.config.kv_cache_groups):
        end = num_tokens // spec.block_size
        start = 0
        if isinstance(spec, MambaSpec):
            start = end - 1
        elif isinstance(spec, SlidingWindowSpec):
            start = max(0, num_tokens - spec.sliding_window + 1) // spec.block_size
        needed[group] = list(range(start, end))
    return needed


def page_key(engine: Engine, tokens: Sequence[int], group: int, index: int) -> tuple[int, bytes]:
    hashes = kvstore.hash_blocks(tokens, engine.manager.hash_block_size)
    step = engine.manager.block_sizes[group] // engine.manager.hash_block_size
    return group, hashes[(index + 1) * step - 1]


def step_until(engine: Engine, condition: Callable[[], bool]) -> None:
    for _ in range(100_000):
        if condition():
            return
        step(engine)
    raise AssertionError("the condition never held")


# -- the engine's own blocks -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("token_budget", [7, 50, 1000])
def test_answers_do_not_depend_on_batches_chunks_and_hits(
    make_engine: MakeEngine, alone: Alone, token_budget: int
) -> None:
    engine = make_engine(token_budget=token_budget)
    check(ask(engine, *TURNS), alone)

    again = ask(engine, *TURNS)

    check(again, alone)
    for turn, answer in again.items():
        assert answer.tokens_hit == longest_hit(engine, len(prompt(turn)))
        assert answer.tokens_computed == len(prompt(turn)) - answer.tokens_hit + MAX_TOKENS - 1


@pytest.mark.parametrize("token_budget", [7, 50, 1000])
def test_the_last_state_of_a_prompt_is_enough(
    make_engine: MakeEngine, alone: Alone, node: Any, token_budget: int
) -> None:
    engine = make_engine(node, token_budget=token_budget, mamba_cache_mode="align")
    for _ in range(2):
        answers = ask(engine, *TURNS)
        check(answers, alone)
    close(engine)
    assert all(answer.tokens_hit == longest_hit(engine, answer.prompt_tokens) for answer in answers.values())
    alone.check_pages(node)

    # Which states are kept says nothing of what is in them: engines of both kinds share pages.
    for mode in ("align", "all"):
        other = make_engine(node, mamba_cache_mode=mode)
        answers = ask(other, 5)
        check(answers, alone)
        assert answers[5].tokens_loaded == longest_hit(other, len(prompt(5)))


def test_a_conversation_goes_on_from_its_own_answers(make_engine: MakeEngine, alone: Alone, node: Any) -> None:
    for engine in (make_engine(token_budget=60), make_engine(node, token_budget=60), make_engine(node)):
        tokens = prompt(1)
        for turn in range(3):
            engine.add_request(str(turn), tokens, MAX_TOKENS)
            (answer,) = run(engine)
            assert answer.token_ids == alone.answer(tokens)
            if turn:
                # The answer's last token has not been computed, and no block may end at its last but one.
                assert answer.tokens_hit + answer.tokens_loaded >= len(tokens) - 20 - MAX_TOKENS - 2 * BLOCK_SIZE
            tokens = (*tokens, *answer.token_ids, *prompt(5)[70 + 20 * turn : 90 + 20 * turn])
    alone.check_pages(node)


def test_blocks_that_nothing_looks_back_to_are_given_to_others(make_engine: MakeEngine, alone: Alone) -> None:
    groups = make_engine().manager.config.kv_cache_groups
    whole = sum(-(-(len(prompt(5)) + MAX_TOKENS) // group.kv_cache_spec.block_size) for group in groups)
    engine = make_engine(num_blocks=whole - 1, token_budget=16)

    check(ask(engine, 5), alone)

    assert engine.num_preemptions == 0


def test_requests_that_do_not_fit_together_are_preempted_and_answered_all_the_same(
    make_engine: MakeEngine, alone: Alone, node: Any
) -> None:
    preemptions = 0
    for client, token_budget in ((None, 16), (None, 1000), (node, 1000), (node, 16)):
        one = make_engine(token_budget=token_budget)._blocks_needed(len(prompt(5)) + MAX_TOKENS)
        for extra in (1, one // 2):
            engine = make_engine(client, num_blocks=1 + one + extra, token_budget=token_budget)
            check(ask(engine, *TURNS), alone)
            check(ask(engine, *TURNS), alone)
            preemptions += engine.num_preemptions
    assert preemptions > 0
    alone.check_pages(node)


# -- kvstore -----------------------------------------------------------------------------------------------------------


def test_another_engine_loads_what_the_first_one_stored(
    make_engine: MakeEngine, alone: Alone, tmp_path: Path, shm_folder: Path
) -> None:
    url = f"embedded://{tmp_path}?arena=8MiB&disk_limit=64MiB&arena_dir={shm_folder}/arena"
    with kvstore.connect(url) as client:
        first = make_engine(client, token_budget=50)
        check(ask(first, *TURNS), alone)
        close(first)

        for turn in TURNS:  # one engine each: nothing is in its own blocks
            engine = make_engine(client)
            answers = ask(engine, turn)
            close(engine)

            check(answers, alone)
            hit = longest_hit(engine, len(prompt(turn)))
            assert (answers[turn].tokens_loaded, answers[turn].tokens_hit) == (hit, 0)
            assert engine.worker is not None
            loaded = sum(engine.worker.statistics().pages_loaded.values())
            assert loaded == sum(map(len, needed_pages(engine, hit).values()))

        together = make_engine(client)
        check(ask(together, *TURNS), alone)
        check(ask(together, *TURNS), alone)
        close(together)


def test_pages_of_every_group_are_stored(make_engine: MakeEngine, alone: Alone, node: Any) -> None:
    engine = make_engine(node, token_budget=50)
    check(ask(engine, *TURNS), alone)
    close(engine)

    for turn in TURNS:
        for group, block_size in enumerate(engine.manager.block_sizes):
            for index in range(len(prompt(turn)) // block_size):
                assert page_key(engine, prompt(turn), group, index) in alone.pages
                assert page_key(engine, prompt(turn), group, index) in pages_of(node)
    alone.check_pages(node)


def test_a_hit_is_made_of_blocks_here_and_pages_there(make_engine: MakeEngine, alone: Alone, node: Any) -> None:
    first = make_engine(node)
    ask(first, *TURNS)
    close(first)

    engine = make_engine(node, num_blocks=make_engine()._blocks_needed(len(prompt(5)) + MAX_TOKENS) + 4)
    for turn in (0, 5, 1, 4, 0, 3, 5):
        answers = ask(engine, turn)
        check(answers, alone)
        assert answers[turn].tokens_hit + answers[turn].tokens_loaded == longest_hit(engine, len(prompt(turn)))
    alone.check_pages(node)


@pytest.fixture
def stored(make_engine: MakeEngine, node: Any) -> Engine:
    """The engine that stored the last prompt's pages in ``node``."""
    engine = make_engine(node)
    ask(engine, 5)
    close(engine)
    return engine


def test_a_page_of_any_group_that_changed_changes_the_answer(
    make_engine: MakeEngine, alone: Alone, node: Any, stored: Engine
) -> None:
    """That answers are right shows something only if what is loaded matters."""
    hit = longest_hit(stored, len(prompt(5)))
    for group, indices in needed_pages(stored, hit).items():
        _, block_hash = page_key(stored, prompt(5), group, indices[-1])
        page = node.by_group[group][block_hash]
        before = page.copy()
        page.view("float32")[:] *= -3.0

        answer = ask(make_engine(node), 5)[5]

        assert answer.tokens_loaded == hit
        assert answer.token_ids != alone.answer(prompt(5))
        page[:] = before
    check(ask(make_engine(node), 5), alone)


@pytest.mark.parametrize("place", [0, 1, -1])
def test_pages_that_do_not_come_are_computed(
    make_engine: MakeEngine, alone: Alone, node: Any, stored: Engine, place: int
) -> None:
    hit = longest_hit(stored, len(prompt(5)))
    for group, indices in needed_pages(stored, hit).items():
        lost = indices[min(place, len(indices) - 1)]
        node.lost = {page_key(stored, prompt(5), group, lost)}

        engine = make_engine(node)
        answers = ask(engine, 5)

        check(answers, alone)
        answer = answers[5]
        assert answer.tokens_loaded <= lost * engine.manager.block_sizes[group]
        assert answer.tokens_computed == len(prompt(5)) - answer.tokens_loaded + MAX_TOKENS - 1
        check(ask(engine, *TURNS), alone)
        close(engine)
    alone.check_pages(node)


def test_pages_evicted_between_lookup_and_load_are_computed(
    make_engine: MakeEngine, alone: Alone, node: Any, stored: Engine
) -> None:
    loads = 0

    def evict() -> None:
        nonlocal loads
        loads += 1
        for pages in node.by_group.values():
            for block_hash in list(pages)[loads % 2 :: 2]:
                del pages[block_hash]

    node.before_load = evict
    engine = make_engine(node)

    check(ask(engine, 5), alone)
    check(ask(engine, *TURNS), alone)
    assert loads
    alone.check_pages(node)


def test_damaged_pages_on_disk_are_computed(
    make_engine: MakeEngine, alone: Alone, start_node: Callable[..., Any], short_folder: Path, shm_folder: Path
) -> None:
    node = start_node()
    with kvstore.connect(f"unix://{short_folder}/s") as client:
        first = make_engine(client)
        check(ask(first, *TURNS), alone)
        close(first)
        client.flush()
        # Of each group one page, each in the middle of another prompt's hit.
        for turn, layout in zip(TURNS[::-1], first.layouts, strict=False):
            index = needed_pages(first, longest_hit(first, len(prompt(turn))))[layout.group][-1]
            page = np.empty(layout.page_bytes, np.uint8)
            _, block_hash = page_key(first, prompt(turn), layout.group, index)
            assert client.namespace(layout).load([block_hash], page) == 1
            overwrite(page.tobytes(), short_folder / "disk")
    node.stop()
    shutil.rmtree(shm_folder / "arena")

    start_node()
    with kvstore.connect(f"unix://{short_folder}/s") as client:
        engine = make_engine(client)
        check(ask(engine, *TURNS), alone)
        close(engine)
        assert engine.worker is not None
        statistics = engine.worker.statistics()
        assert statistics.pages_loaded["disk"] > 0
        assert statistics.pages_not_loaded >= len(first.layouts)
        assert client.status().tier("disk").counters["corrupt"] == len(first.layouts)


def overwrite(page: bytes, folder: Path) -> None:
    """Damage a page wherever a file of the disk tier has it."""
    found = False
    for path in folder.rglob("*"):
        if path.is_file():
            content = path.read_bytes()
            if (at := content.find(page)) >= 0:
                found = True
                path.write_bytes(content[:at] + bytes(64) + content[at + 64 :])
    assert found


# -- blocks that copies still use --------------------------------------------------------------------------------------


def test_a_block_that_left_its_request_while_a_store_reads_it_never_becomes_a_wrong_page(
    make_engine: MakeEngine, alone: Alone, node: Any, gate: Any
) -> None:
    node.before_store = gate  # nothing is copied out before blocks have been given away and written again
    engine = make_engine(
        node, num_blocks=1 + make_engine()._blocks_needed(len(prompt(5)) + MAX_TOKENS), token_budget=16, max_requests=2
    )
    engine.add_request("5", prompt(5), MAX_TOKENS)
    engine.add_request("4", prompt(4)[70:], MAX_TOKENS)
    step_until(engine, lambda: len(engine._scheduler._running) + len(engine._scheduler._waiting) < 2)
    gate.opened.set()
    run(engine)
    close(engine)

    alone.answer(prompt(4)[70:])
    alone.check_pages(node)


def test_a_request_aborted_while_its_pages_come_keeps_its_blocks_until_then(
    make_engine: MakeEngine, alone: Alone, node: Any, stored: Engine, gate: Any
) -> None:
    node.before_load = gate
    engine = make_engine(node)
    engine.add_request("5", prompt(5), MAX_TOKENS)
    step_until(engine, gate.reached.is_set)
    held = engine.manager.usage

    assert engine.abort("5") is not None
    for _ in range(3):
        step(engine)
    assert engine.manager.usage == held > 0.0

    gate.opened.set()
    step_until(engine, lambda: engine.manager.usage == 0.0)
    check(ask(engine, 5), alone)


# -- all of it at once -------------------------------------------------------------------------------------------------

ACTIONS = st.one_of(
    st.tuples(st.just("ask"), st.sampled_from(TURNS)),
    st.tuples(st.just("ask"), st.sampled_from(TURNS)),
    st.tuples(st.just("abort"), st.sampled_from(TURNS)),
    st.tuples(st.just("lose"), st.integers(0, 60)),
    st.tuples(st.just("evict"), st.integers(0, 60)),
    st.tuples(st.just("step"), st.integers(1, 8)),
)


@given(
    stored_before=st.sets(st.sampled_from(TURNS), max_size=3),
    actions=st.lists(ACTIONS, min_size=6, max_size=30),
    extra_blocks=st.integers(0, 20),
    token_budget=st.integers(5, 200),
    max_requests=st.integers(2, 6),
    mamba_cache_mode=st.sampled_from(("all", "align")),
    zeroes_blocks=st.booleans(),
)
@settings(max_examples=examples(40), deadline=None)
def test_whatever_happens_answers_and_pages_are_right_and_no_block_is_lost(
    mixed: Llama,
    alone: Alone,
    node_kind: Callable[[], Any],
    stored_before: set[int],
    actions: list[tuple[str, int]],
    extra_blocks: int,
    token_budget: int,
    max_requests: int,
    mamba_cache_mode: MambaCacheMode,
    zeroes_blocks: bool,
) -> None:
    node = node_kind()
    first = Engine(mixed, num_blocks=200, client=node)
    ask(first, *stored_before)
    close(first)
    probe = Engine(mixed, num_blocks=2, token_budget=token_budget)
    num_blocks = 1 + probe._blocks_needed(len(prompt(5)) + MAX_TOKENS) + extra_blocks
    engine = Engine(
        mixed,
        num_blocks=num_blocks,
        token_budget=token_budget,
        max_requests=max_requests,
        client=node,
        mamba_cache_mode=mamba_cache_mode,
        zeroes_blocks=zeroes_blocks,
    )
    answers: list[Answer] = []
    turns: dict[str, int] = {}
    try:
        for action, number in actions:
            stored = sorted(pages_of(node))
            if action == "ask":
                turns[str(len(turns))] = number
                engine.add_request(str(len(turns) - 1), prompt(number), MAX_TOKENS)
            elif action == "abort":
                engine.abort(str(len(turns) - 1 - number))
            elif action == "lose" and stored:
                node.lost.add(stored[number % len(stored)])
            elif action == "evict" and stored:
                group, block_hash = stored[number % len(stored)]
                del node.by_group[group][block_hash]
            elif action == "step":
                for _ in range(number):
                    answers += step(engine)
        answers += run(engine)
    finally:
        engine.close()

    close(engine)
    for answer in answers:
        assert answer.token_ids == alone.answer(prompt(turns[answer.request_id]))
        done = answer.tokens_hit + answer.tokens_loaded + answer.tokens_computed
        assert done >= answer.prompt_tokens + MAX_TOKENS - 1
    alone.check_pages(node)
