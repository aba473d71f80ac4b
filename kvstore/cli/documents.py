"""``kvstore docs``: prints the documents, the files for deploying and the protos that are installed with kvstore."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from kvstore.cli.exit_codes import EXIT_CODES
from kvstore.config.rules import did_you_mean
from kvstore.errors import InvalidRequestError

_PACKAGE = Path(__file__).parents[1]
_FOLDERS = ("docs", "deploy", "proto")
"""Below the package. In a checkout they are links, as ``connector`` and ``gpu`` are."""
_PICTURES = (".png",)


def add_to(commands: argparse._SubParsersAction[Any]) -> None:
    """Add its parser."""
    docs = commands.add_parser(
        "docs",
        help="print a document, or a file for deploying",
        description="Print a document, a file for deploying, or a proto, as it was installed with this kvstore. Without"
        " NAME: the names of all of them.",
        epilog="examples:\n  kvstore docs operations | less\n"
        "  kvstore docs deploy/kvstore.service >/etc/systemd/system/kvstore.service\n\n" + EXIT_CODES,
    )
    docs.add_argument("name", metavar="NAME", nargs="?", help="as configuration, security or deploy/prometheus.yml")
    docs.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print, and return the exit code."""
    there = documents()
    if options.name is None:
        width = max(map(len, there))
        for name, path in there.items():
            print(f"{name:{width}}  {_title(path)}".rstrip())
        return 0
    found = there.get(options.name.removeprefix("docs/").removesuffix(".md")) or there.get(options.name)
    if found is None:
        near = did_you_mean(options.name, there) or "; `kvstore docs` lists all of them"
        raise InvalidRequestError(f"there is no document {options.name!r}{near}")
    sys.stdout.write(found.read_text(encoding="utf-8"))
    return 0


def documents() -> dict[str, Path]:
    """By name: a document's is its path below docs/, without the suffix; that of any other file its whole path."""
    found = {}
    for folder in _FOLDERS:
        for path in sorted((_PACKAGE / folder).rglob("*")):
            if path.is_file() and path.suffix not in _PICTURES:
                name = path.relative_to(_PACKAGE).as_posix()
                found[name.removeprefix("docs/").removesuffix(".md") if folder == "docs" else name] = path
    return found


def _title(path: Path) -> str:
    """A document's first heading."""
    if path.suffix != ".md":
        return ""
    with path.open(encoding="utf-8") as file:
        return file.readline().removeprefix("# ").strip()
