"""``kvstore status``, ``namespaces`` and ``top``: print what a node holds and what it is doing."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import sys
import time
from contextlib import ExitStack
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kvstore.cli.connect import add_url_to, connect_to_node
from kvstore.cli.namespace_choice import name_and_labels
from kvstore.cli.tables import Fitted, figures_table, print_line, print_table, print_wide, shown
from kvstore.errors import ConfigError, DeadlineError, InvalidRequestError, UnavailableError
from kvstore.page_codes import TIER_NAMES
from kvstore.status import (
    ConnectedClient,
    LookupTotals,
    NamespaceStatus,
    Status,
    TierState,
    TierStatus,
    by_client,
)
from kvstore.units import format_duration, format_size, parse_duration, parse_named

_COLUMNS = """\
counted in pages:
  loaded    loaded from this tier, of those asked of it
  asked     asked of this tier by loads: engines load what lookups found, so this is no hit ratio
  stored    put into this tier
  evicted   dropped to make room
  overrun   evicted from the arena before a tier below had them
  refused   not stored, for want of room, a quota or a limit
The hit ratio is that of lookups, over all tiers: pages found of those that engines asked for.
"""


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add their parsers."""
    status = commands.add_parser(
        "status",
        help="what a node holds and has done",
        description="Show what a node holds, by tier and by namespace, and what it has counted.",
        epilog=_COLUMNS,
    )
    add_url_to(status)
    status.add_argument("positional_url", nargs="?", metavar="URL", help="the same as --url URL")
    status.add_argument("--json", action="store_true", help="print one JSON object")
    status.set_defaults(run=_status)

    namespaces = commands.add_parser(
        "namespaces",
        help="a node's namespaces: size, age, idle time",
        description="List namespaces, those that have been idle longest first. `kvstore clear` drops one;"
        " `serve --expire-namespaces` (or `expire` in a rule) drops those that nobody uses.",
    )
    add_url_to(namespaces)
    namespaces.add_argument("--idle", metavar="TIME", help="only namespaces idle for at least this long, as 7d")
    namespaces.add_argument("--json", action="store_true", help="print one JSON array")
    namespaces.set_defaults(run=_namespaces)

    top = commands.add_parser(
        "top",
        help="a node's tiers and rates, live",
        description="Show what a node is doing, until Ctrl-C. Rates are per second, over the last interval.",
        epilog=_COLUMNS,
    )
    add_url_to(top)
    top.add_argument(
        "--interval",
        type=float,
        default=2.0,
        metavar="SECONDS",
        help="time between two tables, 0.2 to 3600 (default: 2)",
    )
    top.add_argument("--count", type=int, metavar="N", help="stop after N tables (default: never)")
    top.add_argument("--json", action="store_true", help="print one JSON object per line and interval")
    top.set_defaults(run=_top)


def _status(options: argparse.Namespace) -> int:
    if options.url is not None and options.positional_url is not None:
        raise InvalidRequestError("name one node: URL or --url URL, not both")
    with connect_to_node(options.url if options.url is not None else options.positional_url) as client:
        status = client.status()
    if options.json:
        told = {name: each for name, each in dataclasses.asdict(status).items() if name not in ("gone", "numbers")}
        print(json.dumps(_plain(told), indent=2))
    else:
        _print_status(status)
    return 0


def _namespaces(options: argparse.Namespace) -> int:
    least = 0.0 if options.idle is None else parse_named("--idle", parse_duration, options.idle)
    with connect_to_node(options.url) as client:
        known = client.status().namespaces
    chosen = sorted((each for each in known if each.idle_seconds >= least), key=lambda each: -each.idle_seconds)
    if options.json:
        print(json.dumps([_plain(dataclasses.asdict(each)) for each in chosen], indent=2))
        return 0
    tiers = [tier for tier in TIER_NAMES if tier and any(tier in each.used_bytes for each in chosen)]
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("fingerprint", no_wrap=True)
    for column in ("unused", "age", *tiers, "pages", "pinned"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("name", overflow="fold")
    for each in chosen:
        sizes = [format_size(each.used_bytes.get(tier, 0)) for tier in tiers]
        ages = (format_duration(each.idle_seconds), format_duration(each.age_seconds))
        counts = (f"{each.arena_pages:,}", f"{each.pinned_pages:,}")
        table.add_row(each.fingerprint.hex()[:12], *ages, *sizes, *counts, Text(name_and_labels(each)))
    if chosen:
        print_table(table)
    else:
        print("no namespaces")
    return 0


def _print_status(status: Status) -> None:
    print_line(_head(status))
    counted = ("hit", "asked", "stored", "evicted", "overrun", "refused")
    print(f"lookups: {_lookups(status.lookups)}")
    headings = ("loaded", *counted[1:])
    table = figures_table("tier", "used", "limit", "pages", *headings, left=("tier",))
    for tier in status.tiers:
        counters = [f"{tier.counters[name]:,}" if name in tier.counters else "–" for name in counted]
        sizes = (format_size(tier.used_bytes), format_size(tier.limit_bytes), f"{tier.pages:,}")
        table.add_row(tier.name, *sizes, *counters)
    print_table(table)
    for tier in status.tiers:
        if tier.requests:
            print_line(_requests(tier))
    for trouble in status.troubles():
        print_line(shown(trouble))
    if status.connected:
        print_line(f"connected: {', '.join(map(_client, by_client(status.connected)))}")
    largest = sorted(status.namespaces, key=lambda each: -sum(each.used_bytes.values()))
    for namespace in largest[:_MOST_NAMESPACES]:
        print_line(_namespace_line(namespace))
    if len(largest) > _MOST_NAMESPACES:
        print(f"… {len(largest) - _MOST_NAMESPACES:,} more: kvstore namespaces")


def _client(each: ConnectedClient) -> str:
    how = [each.way if not each.host else f"{each.way} from {each.host}"]
    if each.connections > 1:
        how.append(f"{each.connections} connections")
    return f"{shown(each.name) or 'no name'} ({', '.join(how)})"


def _head(status: Status) -> str:
    up = format_duration(status.uptime_seconds)
    core = f"{status.core} core, " if status.core else ""
    return f"kvstore {status.version}, {core}pid {status.pid}, up {up}, {_count(status.clients, 'client')}"


def _lookups(lookups: LookupTotals) -> str:
    """What lookups asked for and found."""
    if not lookups.asked:
        return "none yet"
    tiers = {tier: getattr(lookups, tier) for tier in TIER_NAMES if tier}
    where = ", ".join(f"{tier} {pages:,}" for tier, pages in tiers.items() if pages)
    return f"{_count(lookups.asked, 'page')} asked, {_hits(lookups)}" + (f": {where}" if where else "")


def _requests(tier: TierStatus) -> str:
    """What was asked of object storage, and what that costs."""
    asked = ", ".join(f"{count:,} {request}" for request, count in tier.requests.items())
    return f"requests to {tier.name}: {asked}; about {tier.requests_dollars:.2f} USD at S3's prices"


def _hits(lookups: LookupTotals) -> str:
    return f"{lookups.found:,} found ({lookups.found / max(1, lookups.asked):.0%})"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}" + ("" if number == 1 else "s")


def _namespace_line(namespace: NamespaceStatus) -> str:
    parts = [f"{_count(namespace.arena_pages, 'page')} of {format_size(namespace.page_bytes)} in the arena"]
    lookups = LookupTotals.of(namespace.counters)
    if lookups.asked:
        parts.append(f"{_hits(lookups)} of {_count(lookups.asked, 'page')} looked up")
    if namespace.pinned_pages:
        parts.append(f"{namespace.pinned_pages:,} pinned")
    for tier in [name for name in TIER_NAMES if name and name in namespace.used_bytes]:
        quota = namespace.quota_bytes.get(tier)
        of = f" of {format_size(quota)}" if quota else ""
        parts.append(f"{tier} {format_size(namespace.used_bytes[tier])}{of}")
    if namespace.idle_seconds >= _LONG_IDLE_SECONDS:
        parts.append(f"unused for {format_duration(namespace.idle_seconds)}")
    if namespace.durability:
        parts.append(f"durability {namespace.durability}")
    return f"{namespace.fingerprint.hex()[:12]} {name_and_labels(namespace)}: {', '.join(parts)}"


def _plain(value: Any) -> Any:
    """The same with bytes as hexadecimal text, and states by name, for JSON."""
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, TierState):
        return value.name.lower()
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value


_LONG_IDLE_SECONDS = 60.0
_MOST_NAMESPACES = 10
"""``status`` has a line for so many of them, the largest."""
_RATES = ("asked", "stored", "evicted", "overrun", "refused")


def _top(options: argparse.Namespace) -> int:
    if not 0.2 <= options.interval <= 3600:
        raise ConfigError(f"--interval is {options.interval:g}, it must lie between 0.2 and 3600 seconds")
    if options.count is not None and options.count < 1:
        raise ConfigError(f"--count is {options.count}, the least is 1")
    console = Console()
    with connect_to_node(options.url) as client, ExitStack() as stack:
        before = client.status()
        taken = time.monotonic()
        shows = console.is_terminal and not options.json
        live = stack.enter_context(Live(console=console, auto_refresh=False)) if shows else None
        for _ in itertools.count() if options.count is None else range(options.count):
            time.sleep(options.interval)
            shown: RenderableType
            try:
                now = client.status()
            except (UnavailableError, DeadlineError) as error:
                shown = Text(f"{error}; trying again")
            else:
                passed, taken = time.monotonic() - taken, time.monotonic()
                if now.instance != before.instance:
                    before = now  # it was restarted: what it counted before is no rate
                shown = (
                    Text(json.dumps(_plain_rates(before, now, passed))) if options.json else _rates(before, now, passed)
                )
                before = now
            if live is not None:
                live.update(shown, refresh=True)
            elif isinstance(shown, Text):
                print(shown.plain, file=sys.stderr if options.json and shown.plain[:1] != "{" else None, flush=True)
            else:
                print_wide(shown)
                sys.stdout.flush()
    return 0


def _plain_rates(before: Status, now: Status, seconds: float) -> dict[str, Any]:
    """What happened between two looks at a node, for programs: per second."""
    earlier = {tier.name: tier for tier in before.tiers}
    lookups = now.lookups.since(before.lookups)
    return {
        "time": now.time,
        "seconds": seconds,
        "clients": now.clients,
        "lookups": {
            "hit_ratio": lookups.found / lookups.asked if lookups.asked else None,
            "rates": {name: pages / seconds for name, pages in dataclasses.asdict(lookups).items()},
        },
        "tiers": {
            tier.name: {
                "used_bytes": tier.used_bytes,
                "limit_bytes": tier.limit_bytes,
                "pages": tier.pages,
                "health": _plain(dataclasses.asdict(tier.health)),
                "rates": {
                    name: (count - earlier.get(tier.name, tier).counters.get(name, 0)) / seconds
                    for name, count in tier.counters.items()
                },
            }
            for tier in now.tiers
        },
    }


def _rates(before: Status, now: Status, seconds: float) -> Group:
    """What happened between two looks at a node."""
    rates = [f"{name}/s" for name in _RATES]
    table = figures_table("tier", "used", "pages", "loaded", *rates, left=("tier",))
    earlier = {tier.name: tier for tier in before.tiers}
    for tier in now.tiers:
        table.add_row(*_rates_of(earlier.get(tier.name, tier), tier, seconds))
    dirty = now.tier("arena").counters.get("dirty", 0)
    return Group(
        Text(_head(now)),
        Text(f"lookups: {_lookup_rates(now.lookups.since(before.lookups), seconds)}"),
        Text(f"{_count(len(now.namespaces), 'namespace')}, {dirty:,} pages wait for a tier below"),
        Fitted(table),
        *map(Text, map(shown, now.troubles())),
    )


def _lookup_rates(lookups: LookupTotals, seconds: float) -> str:
    if not lookups.asked:
        return "none in this interval"
    return f"{lookups.asked / seconds:,.0f} pages/s asked, {lookups.found / lookups.asked:.0%} of them found"


def _rates_of(before: TierStatus, now: TierStatus, seconds: float) -> list[str]:
    def moved(counter: str) -> int:
        return now.counters.get(counter, 0) - before.counters.get(counter, 0)  # of a tenant's there are fewer

    asked = moved("asked")
    return [
        now.name,
        f"{now.used_bytes / max(1, now.limit_bytes):.0%}",
        f"{now.pages:,}",
        f"{moved('hit') / asked:.0%}" if asked else "–",
        *(f"{moved(name) / seconds:,.0f}" if name in now.counters else "–" for name in _RATES),
    ]
