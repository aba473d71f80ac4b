"""Answers that are chosen otherwise than greedily: several to one prompt, in a given form, of some tokens alone."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from made_models import WORDS

from tests.vllm.engine import BLOCK_SIZE, Answers, Prompt

NUM_TOKENS = 200
OPTIONS = {"skip_tokenizer_init": False}  # what is allowed next is known by the tokens' names
ALLOWED = [300, 301, 302, 303]
LETTERS = {2 + WORDS.index(letter): letter for letter in WORDS}
"""Tokens that are no numbers."""
FORMS: dict[str, dict[str, Any]] = {
    "json": {"json": {"type": "object", "properties": {"a": {"enum": ["x", "yz"]}}, "required": ["a"]}},
    "regex": {"regex": "[xyz]{6}"},
    "choice": {"choice": ["abc", "bca", "cab"]},
}


@pytest.fixture
def again(
    transfer: dict[str, Any], start_engine: Callable[..., Any], plain: Callable[..., Any]
) -> Callable[[Sequence[Prompt]], Answers]:
    """Have an engine answer what it has stored and forgotten: as one without kvstore does, each time."""

    def run(prompts: Sequence[Prompt]) -> Answers:
        expected = choices(plain(prompts, model="worded", options=OPTIONS))
        with start_engine("worded", transfer=transfer, **OPTIONS) as engine:
            assert choices(engine.run(prompts)) == expected
            engine.drain()
            engine.forget()
            answers: Answers = engine.run(prompts)
            assert choices(answers) == expected
            engine.drain()
            assert engine.state()["blocks_in_use"] == engine.state()["requests"] == 0
        return answers

    return run


def choices(answers: Answers) -> list[tuple[tuple[int, ...], ...]]:
    return [answer.choices for answer in answers.answers]


def text(tokens: Sequence[int]) -> str:
    """Of tokens that are no numbers, without the one that ends an answer."""
    return "".join(LETTERS[token] for token in tokens if token != 1)


def test_several_answers_to_one_prompt(
    again: Callable[[Sequence[Prompt]], Answers], prompt: Callable[..., list[int]]
) -> None:
    sampling = {"n": 4, "temperature": 2.0, "seed": 1}
    answers = again([Prompt(prompt(NUM_TOKENS, seed), 20, sampling=sampling) for seed in range(2)])
    for answer in answers.answers:
        assert len(set(answer.choices)) == 4
    # Of a prompt's four the first one loads; the others have its blocks, or load beside it.
    hits = NUM_TOKENS // BLOCK_SIZE * BLOCK_SIZE
    assert answers.external_hits >= 2 * hits
    assert answers.external_hits + answers.local_hits == 8 * hits


def test_answers_in_a_given_form(
    again: Callable[[Sequence[Prompt]], Answers], prompt: Callable[..., list[int]]
) -> None:
    prompts = [
        Prompt(prompt(NUM_TOKENS, seed), 60, sampling={"structured_outputs": form, "ignore_eos": False})
        for seed, form in enumerate(FORMS.values())
    ]
    answers = again(prompts)
    assert answers.external_hits == len(FORMS) * (NUM_TOKENS // BLOCK_SIZE * BLOCK_SIZE)
    assert {answer.finish for answer in answers.answers} == {"stop"}
    told = dict(zip(FORMS, (text(answer.tokens) for answer in answers.answers), strict=True))
    assert json.loads(told["json"])["a"] in ("x", "yz")
    assert len(told["regex"]) == 6
    assert set(told["regex"]) <= set("xyz")
    assert told["choice"] in FORMS["choice"]["choice"]


@pytest.mark.parametrize(
    "sampling",
    [{"allowed_token_ids": ALLOWED}, {"logit_bias": dict.fromkeys(ALLOWED, 100.0)}],
    ids=["allowed tokens", "bias"],
)
def test_answers_of_some_tokens(
    again: Callable[[Sequence[Prompt]], Answers], prompt: Callable[..., list[int]], sampling: Mapping[str, Any]
) -> None:
    answers = again([Prompt(prompt(NUM_TOKENS), sampling=sampling)])
    assert answers.external_hits == NUM_TOKENS // BLOCK_SIZE * BLOCK_SIZE
    assert set(answers.tokens[0]) <= set(ALLOWED)
