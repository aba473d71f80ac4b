"""The main job, end to end: engines come and go, a node is killed, and the pages stay.

1. The prompts without kvstore, in a process of its own: what is right, and how long it takes.
2. A node. Engine A answers first turns and stores its pages; it ends.
3. Engine B, a fresh process, gets the same and longer prompts: it misses in its own blocks and loads from the node.
4. The node is killed with SIGKILL and started again. Engine C loads again: from the arena what was in it, from disk
   what had been pushed out of it.
5. The control: a page of the shared prefix is damaged on disk. Served without verifying, it must change an answer; with
   checksums it must be a miss.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import kvstore
from kvstore.connector.reference.demo_processes import NodeProcess, run_job
from kvstore.connector.reference.jobs import (
    PROMPT_ANSWERED,
    Job,
    JobResult,
    Prompt,
)
from kvstore.connector.reference.report import (
    DamagedPage,
    EngineRun,
    Report,
    print_report,
)
from kvstore.connector.reference.workload import prompt_of, read_excerpt
from kvstore.errors import KVStoreError, UnavailableError

DISK_LIMIT = "1GiB"


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoSize:
    """How large everything is: by default such that computing a prompt takes about a second on two cores."""

    arena: str = "32MiB"
    """Less than half of the pages, so that some have to come back from disk."""
    block_tokens: int = 96
    """Tokens that each 512-token block of the trace becomes."""
    vocab_size: int = 2048
    """The model's, and hence the prompts'."""
    model: Mapping[str, Any] = field(default_factory=lambda: {"seed": 2})
    """Other fields of the model's configuration that differ from its defaults. With this seed no two best logits come
    closer than 300 times what float rounding amounts to."""


_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108
_CONTROL_PROMPTS = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo. Returns 0 when everything held, 1 when something did not, 2 for bad arguments."""
    parser = argparse.ArgumentParser(prog="kvstore demo", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    options = parser.parse_args(arguments)
    if importlib.util.find_spec("torch") is None:
        sys.stderr.write("kvstore demo: torch is missing; pip install 'kvstore-offload[engine]'\n")
        return 1
    for number in (signal.SIGTERM, signal.SIGHUP):  # or folders in shared memory, and a node, would stay behind
        signal.signal(number, signal.default_int_handler)
    try:
        report = run_demo(Console(stderr=True), DemoSize())
    except KVStoreError as error:
        sys.stderr.write(f"kvstore demo: {error}\n")
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    if options.json:
        sys.stdout.write(json.dumps(report.to_dict(), indent=2) + "\n")
    else:
        console = Console()
        print_report(report, console if console.is_terminal else Console(width=100))
    return 1 if report.failures() else 0


def make_prompts(size: DemoSize) -> tuple[tuple[Prompt, ...], ...]:
    """The prompts of engines A, B and C: one of each conversation in each engine, the latest active first.

    A gets first turns. B gets the next turn of three conversations and the same again of the others. C gets one turn
    that B had, and longer ones.
    """
    turns = {(turn.conversation, turn.number): turn for turn in read_excerpt()}

    def prompts(*chosen: tuple[int, int]) -> tuple[Prompt, ...]:
        return tuple(
            Prompt(turns[each].name, tuple(prompt_of(turns[each], size.block_tokens, size.vocab_size)))
            for each in chosen
        )

    return (
        prompts((0, 0), (1, 0), (2, 0), (3, 0), (4, 0)),
        prompts((4, 1), (3, 1), (2, 1), (1, 0), (0, 0)),
        prompts((0, 1), (1, 1), (2, 1), (3, 2), (4, 2)),
    )


def run_demo(console: Console, size: DemoSize) -> Report:
    """Everything, in temporary folders that are gone afterwards.

    Args:
        console: is told what is under way.
        size: of model, prompts and arena.

    Raises:
        KVStoreError: a process did not do its part.
    """
    started = time.monotonic()
    prompts = make_prompts(size)
    model = {"vocab_size": size.vocab_size, **size.model}
    with _temporary_folder(None) as base, _temporary_folder(_SHARED_MEMORY) as memory, _Steps(console, base) as steps:
        plain = steps.job("without kvstore", Job(runs=prompts, model=model))
        a, b, c = plain.runs

        def node(what: str, disk: Path, arena: str, *, verify: bool = True) -> NodeProcess:
            with steps.step(f"node: {what}"):
                return NodeProcess(
                    socket=memory / "node.sock",
                    arena_dir=memory / arena,
                    arena=size.arena,
                    disk=disk,
                    disk_limit=DISK_LIMIT,
                    verify_checksums=verify,
                )

        def engine(what: str, run: Sequence[Prompt], serving: NodeProcess) -> JobResult:
            return steps.job(f"engine {what}", Job(runs=(tuple(run),), url=serving.url, model=model))

        disk, unverified_disk = base / "disk", base / "unverified"
        with node(f"arena {size.arena}, disk", disk, "arena") as first:
            ran_a = engine("A: first turns, stores", prompts[0], first)
            ran_b = engine("B: the same and longer ones", prompts[1], first)
            with steps.step("node: SIGKILL"):
                first.kill()
        with node("started again", disk, "arena") as second:
            ran_c = engine("C: longer ones still", prompts[2], second)
            with steps.step("node: stopped, a page damaged on disk"):
                page = _first_page(second.url, ran_c, prompts[2][0])
                second.stop()
                _damage(page, disk)
                shutil.copytree(disk, unverified_disk)
                shutil.rmtree(memory / "arena")
        control = prompts[2][:_CONTROL_PROMPTS]
        with node("checksums off", unverified_disk, "arena-unverified", verify=False) as third:
            unverified = engine("D: as C had", control, third)
        shutil.rmtree(memory / "arena-unverified")
        with node("checksums on", disk, "arena-verified") as fourth:
            verified = engine("E: as C had", control, fourth)
            with kvstore.connect(fourth.url) as client:
                corrupt = client.status().tier("disk").counters["corrupt"]
    return Report(
        engines=(
            EngineRun("A", ran_a.runs[0], a),
            EngineRun("B", ran_b.runs[0], b),
            EngineRun("C", ran_c.runs[0], c),
        ),
        damaged=DamagedPage(unverified.runs[0], verified.runs[0], c.answers[:_CONTROL_PROMPTS], corrupt),
        dtype=str(plain.layout["dtype"]),
        seconds=time.monotonic() - started,
    )


def _first_page(url: str, engine: JobResult, prompt: Prompt) -> bytes:
    """The bytes of the first page of a prompt, when everything is on disk."""
    layout = engine.page_layout()
    page = np.empty(layout.page_bytes, np.uint8)
    with kvstore.connect(url, timeout=30.0) as client:
        client.flush()
        loaded = client.namespace(layout).load(kvstore.hash_blocks(prompt.token_ids, layout.block_size)[:1], page)
    if loaded != 1:
        raise UnavailableError("the node does not have the first page of the prompts any more")
    return page.tobytes()


def _damage(page: bytes, disk: Path) -> None:
    """Overwrite a page with zeros wherever a file of the disk tier has it."""
    found = False
    for path in sorted(disk.rglob("*")):
        if not path.is_file():
            continue
        content = path.read_bytes()
        at = content.find(page)
        while at >= 0:
            found = True
            with path.open("r+b") as file:
                file.seek(at)
                file.write(bytes(len(page)))
            at = content.find(page, at + len(page))
    if not found:
        raise UnavailableError(f"no file in {disk} has the page that is to be damaged")


@contextmanager
def _temporary_folder(parent: Path | None) -> Iterator[Path]:
    """A folder that is gone afterwards; in the system's temporary folder where the parent is not there."""
    name = tempfile.mkdtemp(prefix="kvstore-demo-", dir=parent if parent is not None and parent.is_dir() else None)
    try:
        yield Path(name)
    finally:
        shutil.rmtree(name, ignore_errors=True)


class _Steps:
    """Says what is under way: a bar for each step on a terminal, a line for each where there is none."""

    def __init__(self, console: Console, logs: Path) -> None:
        self._console = console
        self._logs = logs
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=16),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
        )

    def job(self, what: str, job: Job) -> JobResult:
        """Run an engine process, and show how many prompts it has answered."""
        total = sum(map(len, job.runs))
        with self.step(f"{what} ({total} prompts)", total) as advance:
            return run_job(job, self._logs / "engine.log", lambda line: advance() if line == PROMPT_ANSWERED else None)

    @contextmanager
    def step(self, what: str, total: int = 1) -> Iterator[Callable[[], None]]:
        """Something under way. Gives a function to be called after each of ``total`` parts."""
        if self._console.is_terminal:
            task = self._bars.add_task(what, total=total)
            yield lambda: self._bars.advance(task)
            self._bars.update(task, completed=total)
            self._bars.stop_task(task)
            return
        started = time.monotonic()
        self._console.print(f"{what} ...", end="", highlight=False)
        self._console.file.flush()
        yield lambda: None
        self._console.print(f" {time.monotonic() - started:.1f} s", highlight=False)

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bars.stop()
