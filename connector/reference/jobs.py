"""Jobs and results of an engine process, as JSON lines. No torch here."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvstore.errors import FormatError
from kvstore.layout import Layout

PROMPT_ANSWERED = "answered"
"""The line that an engine process writes for each prompt, on its way to the result."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request."""

    name: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """Everything an engine process does. Each of its runs has an engine of its own, with nothing cached."""

    runs: tuple[tuple[Prompt, ...], ...]
    url: str = ""
    """The node's; empty: without kvstore."""
    max_tokens: int = 12
    """Length of each answer."""
    concurrency: int = 2
    """Prompts under way at once: the next one is given when one is answered."""
    block_size: int = 16
    num_blocks: int = 640
    token_budget: int = 512
    model: Mapping[str, Any] = field(default_factory=dict)
    """Fields of :class:`kvstore.connector.reference.model.LlamaConfig` that differ from its defaults."""

    def to_json(self) -> str:
        """One line."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, line: str) -> Job:
        """The job that :meth:`to_json` wrote.

        Raises:
            FormatError: no such job.
        """
        try:
            fields = json.loads(line)
            runs = tuple(
                tuple(Prompt(prompt["name"], tuple(map(int, prompt["token_ids"]))) for prompt in run)
                for run in fields.pop("runs")
            )
            return cls(runs=runs, **fields)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise FormatError(f"not a job for an engine process: {error!r}") from error


@dataclass(frozen=True, slots=True)
class Answered:
    """One prompt's answer and what it took."""

    name: str
    token_ids: tuple[int, ...]
    prompt_tokens: int
    tokens_computed: int
    tokens_hit: int
    """Found in the engine's own blocks."""
    tokens_loaded: int
    """Loaded from kvstore."""
    time_to_first_token: float
    """Seconds."""
    smallest_gap: float
    """See :class:`kvstore.connector.reference.request.Answer`."""


@dataclass(frozen=True, slots=True)
class RunResult:
    """What one run of a job gave."""

    answers: tuple[Answered, ...]
    loaded_by_tier: Mapping[str, int]
    """Tokens whose pages came from each of the node's tiers. Where layers are of several kinds, a token has a page in
    each of their groups and counts as often."""
    pages_not_loaded: int
    """Pages that were to be loaded and did not come."""
    pages_stored: int


@dataclass(frozen=True, slots=True)
class JobResult:
    """What an engine process gave."""

    pid: int
    layout: Mapping[str, Any]
    """Fields of the :class:`kvstore.Layout` of its pages; where layers are of several kinds, of the first group's."""
    runs: Sequence[RunResult]

    def page_layout(self) -> Layout:
        """The layout of its pages, or of those of its first group."""
        return Layout(**self.layout)

    def to_json(self) -> str:
        """One line."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, line: str) -> JobResult:
        """The result that :meth:`to_json` wrote.

        Raises:
            FormatError: no such result.
        """
        try:
            fields = json.loads(line)
            runs = []
            for run in fields["runs"]:
                answers = [Answered(**answer | {"token_ids": tuple(answer["token_ids"])}) for answer in run["answers"]]
                runs.append(RunResult(**run | {"answers": tuple(answers)}))
            return cls(fields["pid"], fields["layout"], runs)
        except (ValueError, TypeError, KeyError) as error:
            raise FormatError(f"not the result of an engine process: {error!r}") from error
