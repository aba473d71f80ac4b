"""``kvstore lookup``, ``evict``, ``pin`` and ``unpin``: act on pages, by block hash or by prompt."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvstore.arena.format import FRAME_BYTES, frames_for
from kvstore.cli.connect import add_url_to, connect_to_node
from kvstore.cli.namespace_choice import add_namespace_to, find_namespace
from kvstore.cli.prompts import read_prompt, stdin
from kvstore.cli.tables import terminal_width
from kvstore.client.client import Client
from kvstore.client.namespace import Namespace
from kvstore.errors import InvalidRequestError
from kvstore.hashing import HASH_BYTES, parse_hashes
from kvstore.namespaces.pin_table import MOST_PINNED_PAGES
from kvstore.status import Status, TierState
from kvstore.units import format_size, parse_duration, parse_named

_PINNED_SHARE = 4
_ROW = 2 * HASH_BYTES + len("  arena")
"""Columns of a page's line."""

Work = Callable[[Client, Namespace, list[bytes], argparse.Namespace], dict[str, object]]


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add their parsers."""
    _add(commands, "lookup", _lookup, "say which tier has each page")
    evict = _add(
        commands,
        "evict",
        _evict,
        "drop pages from every tier",
        epilog="Pinned pages stay, and how many they are is said on stderr. What other nodes have in arena and on disk"
        " stays there. In brackets: the bytes of the pages that left, each counted once.",
    )
    evict.add_argument("--pinned", action="store_true", help="drop pinned pages, too; their pins end with it")
    pin = _add(
        commands,
        "pin",
        _pin,
        "keep a prefix in the arena for a time, whatever else needs room",
        epilog="Pinned pages take at most a quarter of the arena, and of their namespace's quota there. Pins survive a"
        " restart of the node. Exit code 1: nothing was pinned; the line on stderr says which limit was reached."
        "\n\nexample:\n  kvstore pin my-model --for 12h - < hashes",
    )
    pin.add_argument("--for", dest="duration", metavar="TIME", required=True, help="how long, as 90s, 30m, 12h or 7d")
    _add(commands, "unpin", _unpin, "let pinned pages go again")


def _add(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    work: Work,
    text: str,
    *,
    epilog: str = "",
) -> argparse.ArgumentParser:
    command = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.", epilog=epilog)
    add_namespace_to(command)
    add_pages_to(
        command,
        "a prompt instead of hashes: a JSON array of token ids, or what vLLM's /tokenize answers; - reads standard"
        " input",
    )
    add_url_to(command)
    command.add_argument("--json", action="store_true", help="print one JSON object")
    command.set_defaults(run=_run, work=work)
    return command


def add_pages_to(command: argparse.ArgumentParser, prompts: str) -> None:
    """The arguments that name pages. ``prompts``: what is said of ``--tokens``."""
    command.add_argument(
        "hashes",
        nargs="*",
        metavar="HASH",
        help="block hashes, 64 hexadecimal digits each, first block first; - reads them from standard input",
    )
    command.add_argument("--tokens", metavar="FILE", help=prompts)
    command.add_argument(
        "--extra-key",
        metavar="KEY",
        action="append",
        default=[],
        help="with --tokens: an extra key of every block, as a salt; others stand in the file, as extra_keys",
    )


def check_pages_of(options: argparse.Namespace) -> None:
    """Whether pages are named in one way.

    Raises:
        InvalidRequestError: they are not, or in both.
    """
    if bool(options.hashes) == (options.tokens is not None):
        raise InvalidRequestError("give either block hashes or --tokens FILE")
    if options.extra_key and options.tokens is None:
        raise InvalidRequestError("--extra-key goes with --tokens FILE")


def _run(options: argparse.Namespace) -> int:
    check_pages_of(options)
    prompt = read_prompt(Path(options.tokens), options.extra_key) if options.tokens is not None else None
    hashes = parse_hashes(words_of(options.hashes))
    with connect_to_node(options.url) as client:
        namespace = find_namespace(client, options.namespace)
        if prompt is not None:
            hashes = prompt.hashes(namespace.layout.block_size)
        answer: dict[str, Any] = options.work(client, namespace, hashes, options)
    if options.json:
        print(json.dumps(answer))
    else:
        _print(answer)
    return 1 if answer.get("pinned") == 0 else 0


def _print(answer: dict[str, Any]) -> None:
    counts = {key: value for key, value in answer.items() if key not in ("pages", "freed_bytes")}
    freed = f" ({format_size(answer['freed_bytes'])})" if "freed_bytes" in answer else ""
    print(", ".join(f"{count} {what}" for what, count in counts.items()) + freed)
    width = terminal_width() or _ROW
    for each in answer.get("pages", ()):
        # On a narrow terminal a hash is cut, as fingerprints are; the tier is never on another line.
        word = each["hash"] if width >= _ROW else f"{each['hash'][:12]}…"
        print(f"{word}  {each['tier'] or '-'}")


def _lookup(
    client: Client, namespace: Namespace, hashes: list[bytes], options: argparse.Namespace
) -> dict[str, object]:
    found = namespace.lookup(hashes, counts=False)
    pages = [{"hash": h.hex(), "tier": tier} for h, tier in zip(hashes, found.tiers, strict=True)]
    return {"asked": len(hashes), "present": sum(found.present), "leading": found.prefix, "pages": pages}


def _evict(client: Client, namespace: Namespace, hashes: list[bytes], options: argparse.Namespace) -> dict[str, object]:
    if not options.pinned:
        _check_that_pinned_pages_stay(client.status())
    evicted = namespace.evict(hashes, pinned=options.pinned)
    stayed = 0 if options.pinned else sum(tier is not None for tier, _ in client.explain(namespace.fingerprint, hashes))
    if stayed:
        print(f"kvstore evict: pinned pages stay ({stayed:,} of {len(hashes):,}); --pinned drops them", file=sys.stderr)
    return {"asked": len(hashes), "evicted": evicted, "freed_bytes": evicted * namespace.layout.page_bytes}


def _check_that_pinned_pages_stay(status: Status) -> None:
    """Whether the node knows evictions that leave pinned pages: as long as nodes do, they say how their tiers are.

    Raises:
        InvalidRequestError: it does not, and would drop them, too.
    """
    if status.tier("arena").health.state is TierState.UNKNOWN:
        raise InvalidRequestError(
            f"the node is of an older version ({status.version}), which drops pinned pages, too: nothing was dropped."
            " Upgrade it, or say --pinned to drop them"
        )


def _pin(client: Client, namespace: Namespace, hashes: list[bytes], options: argparse.Namespace) -> dict[str, object]:
    pinned = namespace.pin(hashes, int(parse_named("--for", parse_duration, options.duration)))
    if pinned < len(hashes):
        why = _why_not_pinned(client, namespace, hashes[pinned])
        print(f"kvstore pin: page {pinned + 1} of {len(hashes)} {why}", file=sys.stderr)
    return {"asked": len(hashes), "pinned": pinned}


def _why_not_pinned(client: Client, namespace: Namespace, missing: bytes) -> str:
    """What limits pins, by the numbers that the node tells."""
    if not any(namespace.lookup([missing], counts=False).present):
        return "is in no tier"
    status = client.status()
    arena = status.tier("arena")
    pages = sum(each.pinned_pages for each in status.namespaces)
    pinned = sum(each.pinned_pages * frames_for(each.page_bytes) * FRAME_BYTES for each in status.namespaces)
    most = arena.limit_bytes // _PINNED_SHARE
    limits = [f"pinned pages take {format_size(pinned)} of at most {format_size(most)}, a quarter of the arena"]
    limits.append(f"they are {pages:,} of at most {MOST_PINNED_PAGES:,}")
    for each in status.namespaces:
        if each.fingerprint == namespace.fingerprint and "arena" in each.quota_bytes:
            pinned = each.pinned_pages * frames_for(each.page_bytes) * FRAME_BYTES
            quota = each.quota_bytes["arena"]
            limits.append(
                f"those of its namespace take {format_size(pinned)} of at most {format_size(quota // _PINNED_SHARE)},"
                f" a quarter of its quota there ({format_size(quota)},"
                f" of which {format_size(each.used_bytes['arena'])} are in use)"
            )
    limits.append(
        f"the arena has {format_size(arena.used_bytes)} of {format_size(arena.limit_bytes)} in use,"
        " and what is pinned, held or not on disk yet makes no room"
    )
    return (
        f"({format_size(frames_for(namespace.layout.page_bytes) * FRAME_BYTES)}) can't be pinned: {'; '.join(limits)}"
    )


def _unpin(client: Client, namespace: Namespace, hashes: list[bytes], options: argparse.Namespace) -> dict[str, object]:
    return {"asked": len(hashes), "unpinned": namespace.unpin(hashes)}


def words_of(given: Sequence[str]) -> list[str]:
    """What a person gave; ``-`` stands for the words of standard input."""
    return [word for each in given for word in (stdin().read().split() if each == "-" else [each])]
