from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace

import pytest
from rich.console import Console

from kvstore.connector.reference.jobs import Answered, RunResult
from kvstore.connector.reference.report import (
    DamagedPage,
    EngineRun,
    Report,
    differences,
    print_report,
)

NAMES = ("first", "second", "third")


def answered(name: str, *token_ids: int, loaded: int = 0, gap: float = 0.5) -> Answered:
    return Answered(name, token_ids, 100, 100 - loaded, 0, loaded, 0.25, gap)


def run(*answers: Answered, **by_tier: int) -> RunResult:
    return RunResult(answers, by_tier, pages_not_loaded=0, pages_stored=5)


def right(loaded: int = 0) -> tuple[Answered, ...]:
    return tuple(answered(name, at, at + 10, at + 20, loaded=loaded) for at, name in enumerate(NAMES))


def good() -> Report:
    plain = run(*right())
    return Report(
        engines=(
            EngineRun("A", plain, plain),
            EngineRun("B", run(*right(64), arena=192), plain),
            EngineRun("C", run(*right(64), arena=96, disk=96), plain),
        ),
        damaged=DamagedPage(
            unverified=run(answered("first", 9, 9, 9)),
            verified=run(right()[0]),
            plain=right()[:1],
            corrupt_counted=1,
        ),
        dtype="float32",
        seconds=12.0,
    )


def with_engine(report: Report, place: int, **changes: RunResult) -> Report:
    engines = list(report.engines)
    engines[place] = replace(engines[place], **changes)
    return replace(report, engines=tuple(engines))


def test_when_everything_held_nothing_failed() -> None:
    report = good()

    assert report.failures() == []
    assert report.identical
    as_dict = report.to_dict()
    assert (as_dict["identical"], as_dict["ok"]) == (True, True)
    assert as_dict["answers"]["compared_tokens"] == 27
    assert as_dict["engines"][2]["tokens_loaded"] == {"arena": 96, "disk": 96}


def one_token_differs(report: Report) -> Report:
    answers = (*right(64)[:2], answered("third", 2, 12, 23, loaded=64))
    return with_engine(report, 1, run=run(*answers, arena=192))


def one_answer_is_missing(report: Report) -> Report:
    return with_engine(report, 1, run=run(*right(64)[:2], arena=192))


def one_answer_is_short(report: Report) -> Report:
    return with_engine(report, 1, run=run(*right(64)[:2], answered("third", 2, 12), arena=192))


def nothing_was_compared(report: Report) -> Report:
    empty = run()
    return replace(report, engines=tuple(replace(each, run=empty, plain=empty) for each in report.engines))


def all_answers_are_the_same(report: Report) -> Report:
    same = run(*(answered(name, 1, 2, 3, loaded=64) for name in NAMES), arena=96, disk=96)
    return replace(report, engines=tuple(replace(each, run=same, plain=same) for each in report.engines))


def answers_repeat_one_token(report: Report) -> Report:
    same = run(*(answered(name, at, at, at, loaded=64) for at, name in enumerate(NAMES)), arena=96, disk=96)
    return replace(report, engines=tuple(replace(each, run=same, plain=same) for each in report.engines))


def not_in_float32(report: Report) -> Report:
    return replace(report, dtype="bfloat16")


@pytest.mark.parametrize(
    "spoil",
    [
        one_token_differs,
        one_answer_is_missing,
        one_answer_is_short,
        nothing_was_compared,
        all_answers_are_the_same,
        answers_repeat_one_token,
        not_in_float32,
    ],
)
def test_identical_is_said_only_of_a_comparison_that_was_made_and_held(spoil: Callable[[Report], Report]) -> None:
    report = spoil(good())

    assert not report.identical
    assert report.failures()
    assert not report.to_dict()["ok"]


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda r: with_engine(r, 0, run=run(*right(16), arena=48)), "A loaded 48 tokens that no one had stored"),
        (lambda r: with_engine(r, 0, run=replace(r.engines[0].run, pages_stored=0)), "A stored nothing"),
        (lambda r: with_engine(r, 1, run=run(*right())), "B loaded nothing"),
        (lambda r: with_engine(r, 2, run=run(*right(64), disk=192)), "C loaded nothing from the arena"),
        (lambda r: with_engine(r, 2, run=run(*right(64), arena=192)), "C loaded nothing from the disk"),
        (lambda r: with_engine(r, 1, plain=run(*right()[:2], replace(right()[2], smallest_gap=1e-6))), "rounding"),
        (lambda r: replace(r, damaged=replace(r.damaged, unverified=run(right()[0]))), "changed no answer"),
        (lambda r: replace(r, damaged=replace(r.damaged, verified=run(answered("first", 1, 1, 1)))), "to first"),
        (lambda r: replace(r, damaged=replace(r.damaged, corrupt_counted=0)), "did not count the damaged page"),
    ],
)
def test_what_did_not_hold_is_said(spoil: Callable[[Report], Report], says: str) -> None:
    failures = spoil(good()).failures()

    assert len(failures) == 1
    assert says in failures[0]


def test_prompts_that_one_side_alone_has_are_differences() -> None:
    assert differences(right(), right()[1:]) == ["first"]
    assert differences(right()[1:], right()) == ["first"]
    assert differences(right(), right()[::-1]) == []


def test_the_table_shows_the_figures_and_every_failure() -> None:
    out = io.StringIO()
    print_report(one_token_differs(good()), Console(file=out, width=80))

    text = out.getvalue()
    assert "…" not in text
    assert "\x1b" not in text
    (row,) = (line for line in text.splitlines() if line.startswith(" B "))
    assert row.split() == ["B", "3", "108", "0", "192", "0", "0.25", "s", "0.25", "s", "no"]
    assert "failed: engine B: another answer to third" in text
