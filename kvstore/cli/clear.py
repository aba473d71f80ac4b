"""``kvstore clear``: drops a namespace with all its pages, and asks before it does."""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import nullcontext
from typing import Any

from rich.console import Console

from kvstore.cli.connect import add_url_to, connect_to_node
from kvstore.cli.exit_codes import EXIT_FAILED
from kvstore.cli.namespace_choice import add_namespace_to, choose, name_and_labels
from kvstore.errors import DeadlineError, InvalidRequestError
from kvstore.layout import Layout
from kvstore.page_codes import TIER_NAMES
from kvstore.status import NamespaceStatus
from kvstore.units import format_size

_CLEAR_SECONDS = 600.0
"""A large namespace is dropped in steps, and Redis is searched for it."""
_EPILOG = """\
On a terminal it says what would go, and asks. Anywhere else it does nothing without --yes. What is pinned goes, too;
what other nodes have in their arenas and on their disks stays there.

exit codes:
  0  dropped; with --dry-run: nothing was
  1  failed, or the answer was no: nothing was dropped; or it takes longer than ten minutes: the node goes on with it
  2  a flag or the namespace is wrong, or there is neither --yes nor a terminal to ask on

examples:
  kvstore clear my-model --dry-run
  kvstore clear my-model --yes
"""


def add_to(commands: argparse._SubParsersAction[Any]) -> None:
    """Add its parser."""
    clear = commands.add_parser(
        "clear",
        help="drop a namespace with all its pages, from every tier",
        description="Drop a namespace with all its pages, from every tier.",
        epilog=_EPILOG,
    )
    add_namespace_to(clear)
    clear.add_argument("--yes", action="store_true", help="do not ask")
    clear.add_argument("--dry-run", action="store_true", help="say what would go, and drop nothing")
    add_url_to(clear)
    clear.add_argument("--json", action="store_true", help="print one JSON object")
    clear.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Say what there is, ask, drop it, and return the exit code."""
    with connect_to_node(options.url) as client:
        known = choose(client.status().namespaces, options.namespace)
        there = {
            "namespace": known.name,
            "labels": list(known.labels),
            "fingerprint": known.fingerprint.hex(),
            "arena_pages": known.arena_pages,
            "pinned_pages": known.pinned_pages,
            "used_bytes": {tier: known.used_bytes[tier] for tier in TIER_NAMES if tier and tier in known.used_bytes},
        }
        if options.dry_run:
            print(json.dumps(there | {"dropped": 0}) if options.json else f"would drop {_described(known)}")
            return 0
        if not options.yes and not _agreed(known):
            print("kvstore clear: nothing was dropped", file=sys.stderr)
            return EXIT_FAILED
        console = Console(stderr=True)
        with console.status("kvstore clear: pages are dropped") if console.is_terminal else nullcontext():
            try:
                dropped = client.namespace(Layout.from_json(known.layout)).clear(_CLEAR_SECONDS)
            except DeadlineError as error:
                goes_on = f"{error}; it goes on with it: `kvstore namespaces` says when it is gone"
                raise DeadlineError(goes_on) from error
    freed = _sizes(known)
    print(json.dumps(there | {"dropped": dropped}) if options.json else f"{dropped} dropped{freed and f' ({freed})'}")
    return 0


def _agreed(known: NamespaceStatus) -> bool:
    """Whether a person agrees.

    Raises:
        InvalidRequestError: there is none to ask.
    """
    if sys.stdin is None or not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise InvalidRequestError(f"there is no terminal to ask on: --yes drops {_described(known)}")
    print(f"This drops {_described(known)}.\nDrop it? [y/N] ", end="", file=sys.stderr, flush=True)
    answer = sys.stdin.readline()
    if not answer.endswith("\n"):
        print(file=sys.stderr)
    return answer.strip().lower() in ("y", "yes")


def _described(known: NamespaceStatus) -> str:
    sizes = _sizes(known)
    return (
        f"{known.fingerprint.hex()[:12]} {name_and_labels(known)}: {known.arena_pages:,} pages in the arena"
        f"{sizes and f' ({sizes})'}, {known.pinned_pages:,} of them pinned"
    )


def _sizes(known: NamespaceStatus) -> str:
    """Bytes by tier, where there are any."""
    used = {tier: known.used_bytes.get(tier, 0) for tier in TIER_NAMES if tier}
    return ", ".join(f"{tier} {format_size(size)}" for tier, size in used.items() if size)
