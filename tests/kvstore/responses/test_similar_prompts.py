"""Answers for similar prompts: guards, the decision by entry, and both on prompts that nothing was tuned on."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from kvstore.responses.semantic import lexical
from kvstore.responses.semantic.beginning import beginning
from kvstore.responses.semantic.decision import Experience, Outcome
from kvstore.responses.semantic.group import MOST_PROMPTS, Group
from kvstore.responses.semantic.guards import Guard, Likeness, compare
from kvstore.responses.semantic.interval import upper_end
from kvstore.responses.semantic.reading import read_prompt

BOUND = 0.02
FIRST, SIMILAR, NEGATED = (f"How {word} I reset my password?" for word in ("do", "can", "can't"))
CORPUS = Path(__file__).parents[3] / "benchmarks/similar"
TEXT, SAME, OTHER = Likeness.SAME_TEXT, Likeness.SAME_WORDS, Likeness.OTHER_WORDS


@pytest.fixture
def corpus(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(CORPUS))
    return importlib.import_module("corpus")


@pytest.fixture
def stream(corpus: ModuleType) -> ModuleType:
    return importlib.import_module("stream")


@pytest.mark.parametrize(
    ("left", "right", "guard"),
    [
        ("Convert 5 miles", "Convert 6 miles", Guard.NUMBERS),
        ("Add two eggs", "Add three eggs", Guard.NUMBERS),
        ("Where is order 1234567?", "Where is order 1234568?", Guard.NUMBERS),
        ("Where is order 9007199254740993?", "Where is order 9007199254740992?", Guard.NUMBERS),
        ("Is a 1,000 km trip long?", "Is a 1,000 mi trip long?", Guard.NUMBERS),
        ("How heavy is it in grams?", "How heavy is it in ounces?", Guard.UNITS),
        ("Is it open on Monday?", "Is it open on Tuesday?", Guard.DATES),
        ("What does get_user do?", "What does set_user do?", Guard.IDENTIFIERS),
        ("What changed in v1.2.3?", "What changed in v1.2.4?", Guard.IDENTIFIERS),
        ('Define "affect"', 'Define "effect"', Guard.QUOTED),
        ("Why can I log in?", "Why can't I log in?", Guard.NEGATIONS),
        ("Travel with a passport", "Travel without a passport", Guard.NEGATIONS),
        ("How do I enable 2FA?", "How do I disable 2FA?", Guard.OPPOSITES),
        ("How do I turn on the light?", "How do I turn off the light?", Guard.OPPOSITES),
        ("Is it healthy?", "Is it unhealthy?", Guard.OPPOSITES),
        ("Trains from Rome to Paris", "Trains from Paris to Rome", Guard.DIRECTIONS),
        ("Are cats smarter than dogs?", "Are dogs smarter than cats?", Guard.DIRECTIONS),
        ("Who lives in France?", "Who lives in Spain?", Guard.NAMES),
        ("When was he born?", "Where was he born?", Guard.QUESTIONS),
        ("Do just paid plans have it?", "Do paid plans have it?", Guard.SCOPES),
        ("Do all plans have it?", "Do plans have it?", Guard.SCOPES),
        ("May I take ibuprofen or aspirin?", "May I take ibuprofen and aspirin?", Guard.SCOPES),
        ("Why dont cats swim?", "Why do cats swim?", Guard.NEGATIONS),
        ("What is the capital of Peru?", "¿Cuál es la capital de Perú?", Guard.LANGUAGES),
    ],
)
def test_guards_refuse_what_is_another_question(left: str, right: str, guard: Guard) -> None:
    assert compare(read_prompt(left), read_prompt(right)).refused_by is guard
    assert compare(read_prompt(right), read_prompt(left)).refused_by is guard


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ("What do I owe you?", "What do you owe me?"),
        ("How can I help you?", "How can you help me?"),
        ("When can I pay rent?", "When must I pay rent?"),
        ("Do I have to pay?", "Have I paid?"),
        ("Has Tesla bought SolarCity?", "Does Tesla buy SolarCity?"),
        ("Is the row a number?", "Has the row a number?"),
    ],
)
def test_small_words_that_change_a_question_are_seen(left: str, right: str) -> None:
    """Their content is the same, so they must be proven, as others are whose words differ."""
    assert compare(read_prompt(left), read_prompt(right)).likeness is OTHER
    assert compare(read_prompt(right), read_prompt(left)).likeness is OTHER


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ("How do I reset my password?", "What are the steps to reset my password?"),
        ("How do I reset my password?", "Could you please tell me how to reset my password"),
        ("What is the capital of France?", "What's France's capital?"),
        ("How do I delete a file in Linux?", "In Linux, how can I remove a file?"),
        ("What is 10 percent of 250?", "What's 10% of 250?"),
        ("Add twenty-five eggs", "Add 25 eggs"),
        ("Do you accept Visa here?", "Is Visa accepted here?"),
        ("Do only paid plans include it?", "Do just paid plans include it?"),
        ("I want to cook rice, how does that work?", "How do I cook rice?"),
        ("whats the capital of Peru", "What is the capital of Peru?"),
        ("Has Germany invaded Poland?", "Did Germany ever invade Poland?"),
        ("How do I reset my password?", "How do you reset a password?"),
        ("How tall is Mount Everest?", "height of Mount Everest"),
        ("What does a liter of milk weigh?", "What is the weight of a liter of milk?"),
        ('How do you say "good night" in Spanish?', 'Translate "good night" into Spanish'),
        ("Did Tesla buy SolarCity?", "Was SolarCity bought by Tesla?"),
        ("My phone won't charge, what can I do?", "What should I do if my phone doesn't charge?"),
        ("What's the difference between a virus and a bacterium?", "viruses vs bacteria"),
        ("How do I remove duplicates from a list in Python?", "python list remove duplicates"),
        ("Is it safe to eat raw eggs?", "eating raw eggs safe"),
        ("Why do leaves change colour in autumn?", "reason for leaves changing color in the fall"),
        ("Answer in French: what is photosynthesis?", "What is photosynthesis? Answer in French."),
    ],
)
def test_the_same_in_other_small_words_is_the_same(left: str, right: str) -> None:
    compared = compare(read_prompt(left), read_prompt(right))
    assert compared.refused_by is None
    assert compared.likeness in (TEXT, SAME)


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ("How do I reset my password?", "What are the steps to reset my password?"),
        ("How do I reset my password?", "Could you please tell me how to reset my password"),
        ("whats the capital of Peru", "What is the capital of Peru?"),
        ("Could you tell me what the capital of Peru is?", "What is the capital of Peru?"),
        ("How do I reset my password?", "How do you reset a password?"),
        ("Comment annuler mon abonnement ?", "Comment annuler mon abonnement?"),
    ],
)
def test_a_text_that_is_asked_for_in_another_way_is_the_same_text(left: str, right: str) -> None:
    assert compare(read_prompt(left), read_prompt(right)).likeness is TEXT


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ("How do I delete a file in Linux?", "In Linux, how can I delete a file?"),  # another order
        ("How do I delete a file?", "How do I remove a file?"),  # a synonym
        ("How do I reset my password?", "How do I reset my passwords?"),
        ("Add twenty-five eggs", "Add 25 eggs"),
        ("Is it safe to eat raw eggs?", "eating raw eggs safe"),
    ],
)
def test_the_same_words_are_not_the_same_text(left: str, right: str) -> None:
    assert compare(read_prompt(left), read_prompt(right)).likeness is SAME


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ("How do I reset my password?", "How do I reset my Gmail password?"),
        ("Did Germany invade Poland?", "Was Germany invaded by Poland?"),
        ("Did the dog bite the man?", "Did the man bite the dog?"),
        ("Can I eat before a test?", "Should I eat before a test?"),
        ("Who is the chancellor?", "Who was the chancellor?"),
        ("Write a poem for my mother", "Write a poem about my mother"),
        ("What is my name?", "What is your name?"),
        ("", "?"),
        # what a thing is, is for, does and has
        ("What is a router?", "What is a router for?"),
        ("What is an accountant?", "What does an accountant do?"),
        ("What is a password?", "What is my password?"),
        # who and whose
        ("What is my friend's mother's name?", "What is my mother's friend's name?"),
        ("Should my kid play with my neighbor's dog?", "Should my neighbor's kid play with my dog?"),
        ("What did Freud's friends think of Jung?", "What did Jung's friends think of Freud?"),
        ("What do lions eat?", "What eats lions?"),
        # what a word belongs to
        ("Do I need a new battery for my phone?", "Do I need a battery for my new phone?"),
        ("What is the largest city in the country?", "What is the city in the largest country?"),
        ("Why do I pay tax when I do not work?", "Why do I not pay tax when I work?"),
        ("Substitute baking soda for baking powder", "Substitute baking powder for baking soda"),
        ("How do I get from degrees C to degrees F?", "How do I get from degrees F to degrees C?"),
        ("hectare in acres", "How many hectares does an acre have?"),
        ("Is Monday a holiday?", "Is a holiday on Monday?"),
        # what people type into a search
        ("dog bites man", "Does the man bite the dog?"),
        ("boat house price", "How much does a house boat cost?"),
        ("paris london train", "How do I get from London to Paris by train?"),
        ("sugar free chocolate", "Is chocolate free of sugar?"),
        ("best restaurant paris", "What is a good restaurant in Paris?"),
        ("What is the country code of France?", "What is the country of France?"),
        ("What does the wizard of Oz want?", "What does the wizard of Oz get?"),
        # which way, when, how long
        ("What is the cheapest way to get to the airport?", "How do I get to the airport?"),
        ("On what date does the sale start?", "At what time does the sale start?"),
        ("How many people live in Berlin?", "How many people lived in Berlin?"),
        ("Remind me in 10 minutes", "Remind me for 10 minutes"),
        ("How do I get here from the station?", "How do I get there from the station?"),
        # what is asked about is a small word, a sign, an ending
        ("explain its vs. it's", "explain then vs. than"),
        ("What does && do in bash?", "What does || do in bash?"),
        ("What is (2+3)*4?", "What is 2+(3*4)?"),
        ("1/2 - 1/4", "1/2 : 1/4"),
        ("What does the is operator do?", "What does the in operator do?"),
        ("Correct this sentence: she go to school", "Correct this sentence: she goes to school"),
        ("Why am I bored?", "Why am I boring?"),
        ("Was kostet das?", "Was kostete das?"),
    ],
)
def test_what_may_be_another_question_needs_proof(left: str, right: str) -> None:
    compared = compare(read_prompt(left), read_prompt(right))
    assert compared.refused_by is not None or compared.likeness is OTHER


def test_intervals_are_exact() -> None:
    assert upper_end(0, 200, 0.975) == pytest.approx(0.01828, abs=1e-5)
    assert upper_end(1, 100) == pytest.approx(0.04656, abs=1e-5)
    assert (upper_end(0, 0), upper_end(3, 3)) == (1.0, 1.0)


def outcomes(count: int, similarity: float, right: bool = True, likeness: Likeness = SAME) -> list[Outcome]:
    return [Outcome(f"{similarity} {right} {number}", likeness, similarity, right) for number in range(count)]


def test_nothing_is_hit_before_enough_entries_were_checked() -> None:
    assert Experience().wrong("new", SAME, 1.0) == 1.0
    assert Experience(outcomes(140, 0.7)).wrong("new", SAME, 0.8) > BOUND
    assert Experience(outcomes(200, 0.7)).wrong("new", SAME, 0.8) <= BOUND
    one = Outcome("one", SAME, 0.7, True)
    assert Experience(200 * [one]).wrong("new", SAME, 0.8) > BOUND  # one entry, however often it was checked


def test_outcomes_count_for_what_is_as_similar_or_more_and_alike() -> None:
    known = Experience(outcomes(300, 0.7))
    assert known.wrong("new", SAME, 0.69) == 1.0
    assert known.wrong("new", OTHER, 0.9) == 1.0
    assert Experience([*outcomes(300, 0.7), *outcomes(60, 0.6, False)]).wrong("new", SAME, 0.65) > 10 * BOUND


def test_a_wrong_one_counts_for_what_is_less_similar_too() -> None:
    known = Experience([*outcomes(160, 0.3), *outcomes(100, 0.6)])
    assert known.wrong("new", SAME, 0.4) <= BOUND
    for number in range(3):
        known.add(Outcome(f"bad {number}", SAME, 0.9, False))
    assert known.wrong("new", SAME, 0.4) > BOUND
    assert known.wrong("new", SAME, 0.95) > BOUND


def test_it_begins_with_the_same_text_alone_and_a_wrong_one_ends_that_until_others_prove_it() -> None:
    known = Experience(beginning())
    assert known.wrong("new", TEXT, 0.3) <= BOUND
    assert known.wrong("new", SAME, 1.0) == known.wrong("new", OTHER, 1.0) == 1.0
    known.add(Outcome("bad", TEXT, 0.9, False))
    for similarity in (0.2, 0.6, 0.95):
        assert known.wrong("new", TEXT, similarity) > BOUND
    for each in outcomes(80, 0.7, True, TEXT):
        known.add(each)
    assert known.wrong("new", TEXT, 0.75) <= BOUND
    assert known.wrong("new", SAME, 1.0) == 1.0


def test_comparisons_at_a_place_open_a_kind_and_one_that_is_wrong_shuts_it() -> None:
    known = Experience(beginning())
    for each in outcomes(155, 0.7):
        known.add(each)
    assert known.wrong("new", SAME, 0.8) <= BOUND
    assert known.wrong("new", OTHER, 0.8) == 1.0
    known.add(Outcome("bad", SAME, 0.75, False))
    assert known.wrong("new", SAME, 0.8) > BOUND
    assert known.wrong("new", TEXT, 0.8) <= BOUND


def test_an_entry_that_was_wrong_is_not_told_and_one_with_much_proof_is() -> None:
    known = Experience(outcomes(300, 0.7))
    assert known.wrong("bad", SAME, 0.8) <= BOUND
    known.add(Outcome("bad", SAME, 0.8, False))
    assert known.wrong("bad", SAME, 0.8) > 10 * BOUND
    assert known.wrong("other", SAME, 0.8) <= BOUND
    mixed = Experience([*outcomes(100, 0.7, True, OTHER), *outcomes(100, 0.7, False, OTHER)])
    for _ in range(5):
        mixed.add(Outcome("good", OTHER, 0.75, True))
    assert mixed.wrong("good", OTHER, 0.8) > BOUND
    for _ in range(15):
        mixed.add(Outcome("good", OTHER, 0.75, True))
    assert mixed.wrong("good", OTHER, 0.8) <= BOUND
    assert mixed.wrong("good", OTHER, 0.5) > 0.5  # below what was checked


def test_the_lexical_embedding_is_the_same_everywhere() -> None:
    vector = lexical.embed("How do I reset my password?")
    assert float(vector @ vector) == pytest.approx(1, abs=1e-6)
    assert float(vector @ lexical.embed("how do i RESET my password")) == pytest.approx(1, abs=1e-6)
    assert float(vector @ lexical.embed("Best pizza in Rome")) < 0.3
    assert not lexical.embed("?!").any()
    assert int(np.argmax(vector)) == int(np.argmax(lexical.embed("How do I reset my password?")))


def test_a_group_is_capped_and_forgets() -> None:
    group, known = Group(), Experience(outcomes(300, 0.0))
    for number in range(MOST_PROMPTS + 3):
        text = f"What is the word {'abcdefghij'[number % 10]}{number}?"
        group.add(str(number), text, lexical.embed(text))
    assert len(group) == MOST_PROMPTS
    text = "What is the word j99?"
    asked = "Please tell me what the word j99 is"
    found = group.search(asked, lexical.embed(asked), known).found
    assert found is not None
    assert (found.entry, found.likeness) == ("99", TEXT)
    group.remove("99")
    again = group.search(text, lexical.embed(text), known).found
    assert again is None or again.entry != "99"
    assert group.search(text, np.ones(7, np.float32), known).found is None  # another embedder's


def test_half_of_the_prompts_were_not_tuned_on(corpus: ModuleType) -> None:
    families = corpus.read_families()
    tuned, held_out = corpus.halves(families)
    negatives = sum(1 for family in families for _ in family.hard_negatives())
    paraphrases = sum(1 for family in families for _ in family.paraphrases())
    assert negatives + paraphrases >= 400
    assert negatives >= (negatives + paraphrases) / 3
    kinds = {family.kind for family in held_out}
    assert kinds >= {"number", "negation", "antonym", "name", "unit", "date", "direction", "language"}
    prompts = [{prompt for family in half for each in family.intents for prompt in each} for half in (tuned, held_out)]
    assert not prompts[0] & prompts[1]


def test_the_bound_is_kept_and_paraphrases_hit_on_the_other_half(corpus: ModuleType, stream: ModuleType) -> None:
    """Each intent counts once, however often it is asked."""
    _, held_out = corpus.halves(corpus.read_families())
    requests = stream.requests_of(held_out, 10_000, 0)
    result = stream.by_entry(requests, lexical.embed, Experience(beginning()), BOUND, 0)
    assert len(result.hit_intents) >= 183  # of fewer, even none that is wrong shows nothing
    assert result.wrong_at_most < BOUND, str(result)
    assert result.share_of_paraphrases >= 0.2, str(result)


def test_pairs_of_ones_own_are_intents_and_are_asked_alone(
    corpus: ModuleType, stream: ModuleType, tmp_path: Path
) -> None:
    file = tmp_path / "mine.jsonl"
    pairs = [(FIRST, SIMILAR, True), (SIMILAR, "Steps to reset my password", True), (FIRST, NEGATED, False)]
    file.write_text("\n".join(json.dumps({"a": a, "b": b, "same": same}) for a, b, same in pairs))
    assert corpus.read_pairs(file) == pairs
    family = corpus.family_of(pairs)
    assert [len(prompts) for prompts in family.intents] == [3, 1]
    result = stream.alone(pairs, lexical.embed, Experience(beginning()), BOUND)
    assert (result.right, result.same, result.wrong, result.other) == (2, 2, 0, 1)
