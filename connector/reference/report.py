"""The demo's report: what the engines did, and whether what had to hold did. No processes, no torch."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from kvstore.connector.reference.jobs import Answered, RunResult

ROUNDING = 1e-4
"""Logits closer than this could be told apart differently by float rounding: ten times what it amounts to."""


@dataclass(frozen=True, slots=True)
class EngineRun:
    """One engine process of the demo, beside the same prompts without kvstore."""

    name: str
    run: RunResult
    plain: RunResult

    @property
    def different(self) -> list[str]:
        """Prompts whose answers are not the same in both."""
        return differences(self.plain.answers, self.run.answers)

    def total(self, count: str) -> int:
        """The sum of one of the counts of :class:`Answered`."""
        return sum(getattr(answer, count) for answer in self.run.answers)


@dataclass(frozen=True, slots=True)
class DamagedPage:
    """The same prompts when a page of the prefix that they share was damaged on disk."""

    unverified: RunResult
    """Served by a node that does not verify checksums."""
    verified: RunResult
    """Served by one that does."""
    plain: Sequence[Answered]
    """The right answers."""
    corrupt_counted: int
    """Pages that the verifying node counted as damaged."""


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that the demo found out."""

    engines: Sequence[EngineRun]
    """A, B, C."""
    damaged: DamagedPage
    dtype: str
    """Element type that the engines computed in."""
    seconds: float

    @property
    def tokens_compared(self) -> int:
        """Generated tokens of engines A, B and C."""
        return sum(len(answer.token_ids) for each in self.engines for answer in each.run.answers)

    @property
    def answers_vary(self) -> bool:
        """Whether the answers could tell a wrong page: no two prompts have the same one, none repeats one token."""
        by_prompt = {answer.name: answer.token_ids for each in self.engines for answer in each.plain.answers}
        varied = all(len(set(answer)) > len(answer) // 2 for answer in by_prompt.values())
        return bool(by_prompt) and varied and len(set(by_prompt.values())) == len(by_prompt)

    @property
    def smallest_gap(self) -> float:
        """The smallest distance between the two best logits at any token that was compared."""
        return min((answer.smallest_gap for each in self.engines for answer in each.plain.answers), default=0.0)

    @property
    def identical(self) -> bool:
        """Whether every token equals that of a run without kvstore, in a comparison that could have failed."""
        compared = bool(self.engines) and all(each.run.answers for each in self.engines)
        return compared and self.answers_vary and self.dtype == "float32" and not any(e.different for e in self.engines)

    @property
    def changed_by_damage(self) -> list[str]:
        """Prompts that the damaged page gave another answer."""
        return differences(self.damaged.plain, self.damaged.unverified.answers)

    def failures(self) -> list[str]:
        """What did not hold, in words; empty when all of it did."""
        failed = [f"engine {e.name}: another answer to {', '.join(e.different)}" for e in self.engines if e.different]
        if not self.identical and not failed:
            failed.append("the answers do not vary, or were not made in float32: comparing them shows nothing")
        if self.smallest_gap < ROUNDING:
            failed.append(f"two logits are {self.smallest_gap:.1e} apart: rounding could decide between them")
        first, *later = self.engines
        if first.total("tokens_loaded"):
            failed.append(f"engine {first.name} loaded {first.total('tokens_loaded')} tokens that no one had stored")
        if not first.run.pages_stored:
            failed.append(f"engine {first.name} stored nothing")
        failed += [f"engine {each.name} loaded nothing" for each in later if not each.total("tokens_loaded")]
        failed += [
            f"engine {later[-1].name} loaded nothing from the {tier}"
            for tier in ("arena", "disk")
            if not later[-1].run.loaded_by_tier.get(tier)
        ]
        if not self.changed_by_damage:
            failed.append("the damaged page, served without verifying, changed no answer")
        if wrong := differences(self.damaged.plain, self.damaged.verified.answers):
            failed.append(f"the damaged page, with checksums verified, changed the answer to {', '.join(wrong)}")
        if not self.damaged.corrupt_counted:
            failed.append("the verifying node did not count the damaged page")
        return failed

    def to_dict(self) -> dict[str, Any]:
        """For JSON: lengths in tokens, times in seconds."""
        return {
            "identical": self.identical,
            "ok": not self.failures(),
            "failures": self.failures(),
            "engines": [_engine_dict(each) for each in self.engines],
            "answers": {
                "compared_tokens": self.tokens_compared,
                "vary": self.answers_vary,
                "dtype": self.dtype,
                "sampling": "greedy",
                "smallest_logit_gap": self.smallest_gap,
            },
            "damaged_page": {
                "unverified_answers_changed": self.changed_by_damage,
                "verified_answers_identical": not differences(self.damaged.plain, self.damaged.verified.answers),
                "verified_pages_counted_corrupt": self.damaged.corrupt_counted,
            },
            "seconds": round(self.seconds, 1),
        }


def differences(expected: Sequence[Answered], answers: Sequence[Answered]) -> list[str]:
    """The prompts whose answers differ; those that only one side has differ, too."""
    wanted = {answer.name: answer.token_ids for answer in expected}
    got = {answer.name: answer.token_ids for answer in answers}
    return [name for name in {**wanted, **got} if wanted.get(name) != got.get(name)]


def median_first_token(run: RunResult) -> float:
    """Seconds to the first token, the median over a run's prompts; 0.0 when it had none."""
    return statistics.median([answer.time_to_first_token for answer in run.answers] or [0.0])


def print_report(report: Report, console: Console) -> None:
    """The same for people."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    table.add_column("engine", no_wrap=True, vertical="bottom")
    for header in ("prompts", "tokens\ncomputed", "own\nblocks", "from\narena", "from\ndisk"):
        table.add_column(header, justify="right", no_wrap=True, vertical="bottom")
    for header in ("1st token\nwithout", "1st token\nwith"):
        table.add_column(header, justify="right", no_wrap=True, vertical="bottom")
    table.add_column("same\nanswers", justify="right", no_wrap=True, vertical="bottom")
    for each in report.engines:
        table.add_row(
            each.name,
            f"{len(each.run.answers)}",
            f"{each.total('tokens_computed'):,}",
            f"{each.total('tokens_hit'):,}",
            f"{each.run.loaded_by_tier.get('arena', 0):,}",
            f"{each.run.loaded_by_tier.get('disk', 0):,}",
            f"{median_first_token(each.plain):.2f} s",
            f"{median_first_token(each.run):.2f} s",
            "[bold red]no[/]" if each.different else "[green]yes[/]",
        )
    console.print(table)
    damaged = report.damaged
    prompts = len(damaged.plain)
    right = prompts - len(differences(damaged.plain, damaged.verified.answers))
    console.print(
        f"Compared with a run without kvstore: {report.tokens_compared} generated tokens, {report.dtype}, greedy.\n"
        f"The two best logits are never closer than {report.smallest_gap:.1e}.\n"
        "First token: median over prompts, given two at a time.\n"
        "Control: a page that all prompts share, damaged on disk. Without checksums\n"
        f"{len(report.changed_by_damage)} of {prompts} answers change; with them it is a miss (counted:"
        f" {damaged.corrupt_counted}),\nand {right} of {prompts} are right.",
        highlight=False,
    )
    for failure in report.failures():
        console.print(f"[bold red]failed:[/] {failure}", highlight=False)


def _engine_dict(each: EngineRun) -> Mapping[str, Any]:
    return {
        "name": each.name,
        "prompts": len(each.run.answers),
        "prompt_tokens": each.total("prompt_tokens"),
        "tokens_computed": each.total("tokens_computed"),
        "tokens_hit": each.total("tokens_hit"),
        "tokens_loaded": {tier: each.run.loaded_by_tier.get(tier, 0) for tier in ("arena", "disk")},
        "time_to_first_token": {
            "with_kvstore": round(median_first_token(each.run), 4),
            "without_kvstore": round(median_first_token(each.plain), 4),
        },
        "identical": not each.different,
    }
