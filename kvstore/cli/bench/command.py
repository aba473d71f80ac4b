"""The command group ``kvstore bench``.

Each benchmark is a module with ``add(group)``, which adds its parser to the group of subparsers and sets ``run`` on it
(a function from the parsed options to the exit code), and with its flags in it. It imports what is heavy in ``run``:
every ``kvstore`` command imports this module. A new benchmark is one more name in ``BENCHES``.
"""

from __future__ import annotations

import argparse
from typing import Any

from kvstore.cli.bench import (
    arena,
    disk,
    eviction,
    lookup,
    path,
    redis,
    scale,
)

BENCHES = (arena, disk, eviction, lookup, path, redis, scale)


def add_to(commands: argparse._SubParsersAction[Any]) -> None:
    """The command and its benchmarks."""
    bench = commands.add_parser("bench", help="measure one part of kvstore on this machine")
    group = bench.add_subparsers(dest="bench", required=True, metavar="WHAT")
    for each in BENCHES:
        each.add(group)
