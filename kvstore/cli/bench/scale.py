"""``kvstore bench scale``: measures one node under many clients at once, with many small pages."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvstore.cli.bench.flags import add_output_flags, parse_numbers
from kvstore.cli.bench.machine import this_machine
from kvstore.cli.bench.node_process import serving, without_settings
from kvstore.cli.bench.plot import line_plot, write_plot
from kvstore.cli.progress import Progress
from kvstore.cli.tables import figures_table, print_table
from kvstore.errors import ConfigError, ResourceError

INDEXED = (10_000, 100_000, 1_000_000)
CLIENTS = (1, 2, 4, 8)
WORKS = ("lookup", "load", "store")
_EPILOG = """\
A node in a process of its own holds pages of 4 KiB; each client is a process too, on the same host. All of them do the
same work at once for a while: "lookup" asks for a prompt of 512 pages, "load" takes 64 pages a call, "store" brings 64
new ones, for which as many others leave. "speedup" is what all clients did together over what the fewest of the table
did (one, if it was asked for): it can't pass the number of cores, of which the node needs some too.

exit codes:
  0  done
  1  the node or a client did not start
  2  a flag can't be used
"""


@dataclass(frozen=True, slots=True)
class Figure:
    """What so many clients did at once."""

    indexed: int
    clients: int
    work: str
    pages_a_second: float
    """Of all clients: found by lookups, loaded, or stored."""
    speedup: float
    """That, over what the fewest clients of this table did."""
    p50_us: float
    """Of a call."""
    p99_us: float


def add(group: argparse._SubParsersAction[Any]) -> None:
    """Add its parser."""
    parser = group.add_parser(
        "scale",
        help="1 to 8 clients at once, with up to a million pages indexed",
        description="Measure one node under several clients, each a process of the same host.",
        epilog=_EPILOG,
    )
    for name, default, what in (("indexed", INDEXED, "pages indexed"), ("clients", CLIENTS, "clients at once")):
        parser.add_argument(
            f"--{name}", default=",".join(map(str, default)), metavar="N,N", help=f"{what} (default: %(default)s)"
        )
    parser.add_argument(
        "--seconds", type=float, default=3.0, metavar="S", help="how long each work is done (default: %(default)s)"
    )
    add_output_flags(parser, "write a plot of the loads, as SVG")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Measure, print, and return the exit code."""
    from kvstore.cli.bench.prompts import PROMPT_PAGES

    indexed = sorted(set(parse_numbers("--indexed", options.indexed, PROMPT_PAGES, 10_000_000)))
    clients = sorted(set(parse_numbers("--clients", options.clients, 1, 64)))
    if not 0 < options.seconds <= 600:
        raise ConfigError(f"--seconds is {options.seconds:g}, it must be above 0 and at most 600")
    machine = this_machine()
    progress = Progress("kvstore bench scale", sum(indexed) + len(indexed) * len(clients) * len(WORKS) * PROMPT_PAGES)
    figures = [figure for size in indexed for figure in measure(size, clients, options.seconds, progress.advance)]
    progress.end()
    if options.json:
        print(json.dumps({"machine": asdict(machine), "scale": [asdict(figure) for figure in figures]}, indent=2))
    else:
        print(machine.line())
        _print(figures)
    if options.plot is not None:
        _write_plot(Path(options.plot), clients, figures)
    return 0


def measure(indexed: int, clients: Sequence[int], seconds: float, progress: Callable[[int], None]) -> list[Figure]:
    """Fill a node with so many pages, and let each number of clients work on it.

    Raises:
        ResourceError: the node or a client does not start, or a client ends early.
    """
    import kvstore
    from kvstore.cli.bench.prompts import PROMPT_PAGES, arena_for, prompt_layout, store_prompts
    from kvstore.cli.bench.timing import percentile

    prompts = max(1, indexed // PROMPT_PAGES)
    figures: list[Figure] = []
    alone: dict[str, float] = {}
    with serving(arena_for(indexed)) as url:
        with kvstore.connect(url, timeout=60.0) as client:
            store_prompts(client.namespace(prompt_layout()), prompts, progress)
        for work in WORKS:  # stores come last: for them stored prompts leave
            for count in clients:
                with started(url, count, prompts, seconds) as processes:
                    results = _answers(processes, work)
                times = [each * 1e6 for result in results for each in result["times"]]
                rate = sum(result["pages"] for result in results) / seconds
                alone.setdefault(work, rate)
                figures.append(
                    Figure(
                        indexed,
                        count,
                        work,
                        round(rate, 1),
                        round(rate / alone[work], 2) if alone[work] else 0.0,
                        round(percentile(times, 50), 1),
                        round(percentile(times, 99), 1),
                    )
                )
                progress(PROMPT_PAGES)
    return figures


@contextmanager
def started(url: str, count: int, prompts: int, seconds: float) -> Iterator[list[subprocess.Popen[str]]]:
    """So many clients, connected; ended behind it.

    Raises:
        ResourceError: one of them does not start.
    """
    with ExitStack() as stack:
        processes = []
        for number in range(count):
            arguments = [url, str(number + count * 1000), str(prompts), str(seconds)]
            process = subprocess.Popen(  # noqa: S603 - this very program
                [sys.executable, "-m", "kvstore.cli.bench.scale_client", *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=without_settings(),
            )
            stack.enter_context(process)
            stack.callback(process.terminate)
            processes.append(process)
        for process in processes:
            _line(process)
        yield processes


def _answers(processes: Sequence[subprocess.Popen[str]], work: str) -> list[dict[str, Any]]:
    for process in processes:
        assert process.stdin is not None
        process.stdin.write(work + "\n")
        process.stdin.flush()
    return [json.loads(_line(process)) for process in processes]


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise ResourceError("a client of the benchmark ended early")
    return line


def _print(figures: Sequence[Figure]) -> None:
    columns = ("pages indexed", "work", "clients", "pages/s", "speedup", "p50 µs", "p99 µs")
    table = figures_table(*columns, left=("work",))
    for figure in figures:
        table.add_row(
            f"{figure.indexed:,}",
            figure.work,
            str(figure.clients),
            f"{figure.pages_a_second:,.0f}",
            f"{figure.speedup:.2f}",
            f"{figure.p50_us:,.0f}",
            f"{figure.p99_us:,.0f}",
        )
    print_table(table)


def _write_plot(path: Path, clients: Sequence[int], figures: Sequence[Figure]) -> None:
    lines: dict[str, list[tuple[float, float]]] = {}
    for figure in figures:
        if figure.work == "load":
            points = lines.setdefault(f"{figure.indexed:,} pages", [])
            points.append((float(clients.index(figure.clients)), figure.pages_a_second))
    plot = line_plot("Loads by clients", "clients at once", "pages of 4 KiB a second", [*map(str, clients)], lines)
    write_plot(path, plot)
