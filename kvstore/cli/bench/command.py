"""``kvstore bench``: the group of benchmarks, each a module of this folder that is named in ``BENCHES``.

Such a module has ``add(group)``, which adds its parser to the group and sets ``run`` on it: a function from the parsed
options to the exit code. What is heavy is imported in ``run``, since help and completion import all of them.
"""

from __future__ import annotations

import argparse
from typing import Any

from kvstore.cli.bench import arena, disk, eviction, lookup, objects, path, redis, scale

BENCHES = (arena, disk, eviction, lookup, objects, path, redis, scale)


def add_to(commands: argparse._SubParsersAction[Any]) -> None:
    """The command and its benchmarks."""
    bench = commands.add_parser("bench", help="measure one part of kvstore on this machine")
    group = bench.add_subparsers(dest="bench", required=True, metavar="WHAT")
    for each in BENCHES:
        each.add(group)
