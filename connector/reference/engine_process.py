"""``python -m kvstore.connector.reference.engine_process``: an engine as a process of its own.

Reads one :class:`~kvstore.connector.reference.jobs.Job` from standard input, a line of JSON. Writes ``answered`` to
standard output for each prompt, then the :class:`~kvstore.connector.reference.jobs.JobResult`.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack

import torch

import kvstore
from kvstore.connector.reference.engine import Engine
from kvstore.connector.reference.jobs import (
    PROMPT_ANSWERED,
    Answered,
    Job,
    JobResult,
    Prompt,
    RunResult,
)
from kvstore.connector.reference.model import Llama, LlamaConfig
from kvstore.connector.reference.request import Answer
from kvstore.errors import KVStoreError

_LOOKUP_BUDGET = 0.5
_LOAD_DEADLINE = _STORE_DEADLINE = 30.0
# Seconds, far more than a serving engine would wait: here a slow machine must not turn hits into misses.


def main() -> int:
    """Do the job on standard input. Returns the exit code."""
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    try:
        job = Job.from_json(sys.stdin.readline())
        model = Llama(LlamaConfig(**job.model))
        runs = tuple(_run(job, run, model) for run in job.runs)
    except KVStoreError as error:
        sys.stderr.write(f"engine process: {error}\n")
        return 1
    layout = model.config.layouts(model.config.cache_groups(job.block_size))[0]
    _say(JobResult(os.getpid(), dataclasses.asdict(layout), runs).to_json())
    return 0


def _run(job: Job, prompts: Sequence[Prompt], model: Llama) -> RunResult:
    """Answer prompts with a new engine."""
    with ExitStack() as stack:
        client = stack.enter_context(kvstore.connect(job.url)) if job.url else None
        engine = Engine(
            model,
            num_blocks=job.num_blocks,
            block_size=job.block_size,
            token_budget=job.token_budget,
            client=client,
            lookup_budget=_LOOKUP_BUDGET,
            load_deadline=_LOAD_DEADLINE,
            store_deadline=_STORE_DEADLINE,
        )
        stack.callback(engine.close)
        answers = _answer(engine, prompts, job)
        engine.close()
    if engine.worker is None:
        return RunResult(answers, {}, 0, 0)
    moved = engine.worker.statistics()
    by_tier = {tier: pages * job.block_size for tier, pages in moved.pages_loaded.items()}
    return RunResult(answers, by_tier, moved.pages_not_loaded, moved.pages_stored)


def _answer(engine: Engine, prompts: Sequence[Prompt], job: Job) -> tuple[Answered, ...]:
    """Give the prompts to the engine, so many at a time. Returns the answers in the order of the prompts."""
    answers: dict[str, Answer] = {}
    waiting = list(prompts)
    under_way = 0
    while waiting or under_way:
        while waiting and under_way < job.concurrency:
            prompt = waiting.pop(0)
            engine.add_request(prompt.name, prompt.token_ids, job.max_tokens)
            under_way += 1
        for answer in engine.step():
            answers[answer.request_id] = answer
            under_way -= 1
            _say(PROMPT_ANSWERED)
    return tuple(
        Answered(
            name=answer.request_id,
            token_ids=answer.token_ids,
            prompt_tokens=answer.prompt_tokens,
            tokens_computed=answer.tokens_computed,
            tokens_hit=answer.tokens_hit,
            tokens_loaded=answer.tokens_loaded,
            time_to_first_token=answer.time_to_first_token,
            smallest_gap=answer.smallest_gap,
        )
        for answer in (answers[prompt.name] for prompt in prompts)
    )


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
