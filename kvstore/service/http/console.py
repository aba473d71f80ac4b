"""The console: read-only pages in a browser that show what a node does.

They load nothing from elsewhere and run nothing that is not in a file of theirs; the policy in their headers says
so to the browser. What it shows is of all tenants, so it is for callers who see all of them.
"""

from __future__ import annotations

import json
import math
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from http import HTTPStatus
from importlib.resources import files
from urllib.parse import parse_qs

from kvstore.errors import InvalidRequestError
from kvstore.service.http import latency_columns
from kvstore.service.http.history import History, Sampler
from kvstore.service.http.namespace_list import MOST_LISTED, Wanted, details_of, row_of
from kvstore.service.http.page_headers import PAGE_HEADERS
from kvstore.service.http.recent_errors import RecentErrors
from kvstore.service.http.server import Answer, Ask, Page
from kvstore.status import Status, by_client
from kvstore.store.store import Store

MOST_PREFIXES = 20
MOST_CLIENTS = 100
"""Most clients that are named."""
RANGE = 900.0
"""Seconds that figures are of where nothing else is asked for."""
_FILES = {
    "console.js": "text/javascript; charset=utf-8",
    "figures.js": "text/javascript; charset=utf-8",
    "console.css": "text/css; charset=utf-8",
    "uplot.js": "text/javascript; charset=utf-8",
    "uplot.css": "text/css; charset=utf-8",
    "uplot-license.txt": "text/plain; charset=utf-8",
}
_DIGITS = 12
_COUNTERS = ("evicted", "overrun")
COLUMNS = (
    *(f"{tier}_{what}" for tier in ("arena", "disk", "redis", "objects") for what in ("used", "limit")),
    *("arena", "disk", "redis", "objects", "missed", "stored", "present", "refused", "loaded_bytes", "stored_bytes"),
    *("looked_up", "found_arena", "found_disk", "found_redis", "found_objects"),
    *_COUNTERS,
    *latency_columns.COLUMNS,
)
"""What a sample of the history shows: bytes by tier, pages by where loads found them, by what became of them, by where
lookups found them; latencies of calls."""


class ConsolePages:
    """The console of one node, with the thread that takes its samples."""

    def __init__(
        self,
        store: Store,
        status: Callable[[], Status],
        bulk_connections: Callable[[], int],
        call_counts: Callable[[], Mapping[str, Sequence[int]]],
    ) -> None:
        self._store = store
        self._status = status
        self._bulk_connections = bulk_connections
        self._call_counts = call_counts
        self._errors = RecentErrors()
        self._history = History((*COLUMNS, *latency_columns.BUCKETS))
        self._buckets: dict[str, float] | None = None
        """Of the last sample."""
        self._sampler = Sampler(self._history, self._sample)
        folder = files("kvstore.service.http") / "console_files"
        self.pages: Mapping[str, Page] = {
            "/": _file((folder / "index.html").read_bytes(), "text/html; charset=utf-8"),
            "/console": _file((folder / "index.html").read_bytes(), "text/html; charset=utf-8"),
            "/console/help": _file((folder / "help.html").read_bytes(), "text/html; charset=utf-8"),
            "/console/data": self._data,
            **{f"/console/{name}": _file((folder / name).read_bytes(), kind) for name, kind in _FILES.items()},
        }

    def stop(self) -> None:
        """End the thread."""
        self._sampler.stop()
        self._errors.close()

    def _sample(self) -> dict[str, float]:
        status, activity = self._status(), self._store.activity(0)
        arena = status.tiers[0]
        buckets = latency_columns.buckets_of(self._call_counts(), self._store.lower_tiers.times.all())
        before, self._buckets = self._buckets or buckets, buckets
        return {
            **{f"{tier.name}_used": float(tier.used_bytes) for tier in status.tiers},
            **{f"{tier.name}_limit": float(tier.limit_bytes) for tier in status.tiers},
            **{name: float(pages) for name, pages in asdict(activity.total).items()},
            "loaded_bytes": float(activity.loaded_bytes),
            "stored_bytes": float(activity.stored_bytes),
            **{name: float(arena.counters[name]) for name in _COUNTERS},
            **buckets,
            **latency_columns.quantiles_between(before, buckets),
        }

    def _data(self, ask: Ask) -> Answer:
        """What the page shows, as JSON.

        Asked for by ``since`` (seconds since 1970 from which on samples are wanted), ``range`` (seconds that latencies
        are of), ``namespace`` (a fingerprint: everything of that one), and what :class:`Wanted` reads.
        """
        if not ask.caller.every:
            return _refused()
        query = parse_qs(ask.query)
        try:
            since, seconds = _number(query, "since", 0.0), _number(query, "range", RANGE)
            wanted = Wanted.parse(query)
        except InvalidRequestError as error:
            return Answer("text/plain; charset=utf-8", f"{error}\n".encode(), HTTPStatus.BAD_REQUEST)
        status, activity = self._status(), self._store.activity(MOST_PREFIXES)
        names = {each.fingerprint: each.name for each in status.namespaces}
        shared = self._store.lower_tiers.shared
        listed, matching = wanted.among(status.namespaces)
        asked = query.get("namespace", [""])[-1]
        ends = self._history.ends(seconds)
        content = {
            "node": {
                "host": socket.gethostname(),
                "version": status.version,
                "pid": status.pid,
                "instance": f"{status.instance:x}",
                "uptime": status.uptime_seconds,
                "time": status.time,
            },
            "tiers": [
                {
                    "name": tier.name,
                    "used": tier.used_bytes,
                    "limit": tier.limit_bytes,
                    "pages": tier.pages,
                    "state": tier.health.state.name.lower(),
                    "since": tier.health.since,
                    "reason": tier.health.reason,
                    "requests": dict(tier.requests),
                    "dollars": tier.requests_dollars,
                }
                for tier in status.tiers
            ],
            "history": self._history.since(since, COLUMNS),
            "latencies": latency_columns.latencies_between(*ends) if ends is not None else [],
            "prefixes": [
                {
                    "namespace": names.get(each.fingerprint, each.fingerprint.hex()[:_DIGITS]),
                    "last": each.last.hex()[:_DIGITS],
                    "pages": each.pages,
                    "loads": each.loads,
                }
                for each in activity.hottest
            ],
            "namespaces": [row_of(each) for each in listed],
            "namespaces_from": wanted.first,
            "namespaces_at_once": MOST_LISTED,
            "namespaces_matching": matching,
            "namespaces_known": len(status.namespaces),
            "namespace": next(
                map(details_of, (each for each in status.namespaces if each.fingerprint.hex() == asked)), None
            ),
            "peers": {
                "clients": status.clients,
                "bulk": self._bulk_connections(),
                "connected": [each._asdict() for each in by_client(status.connected)[:MOST_CLIENTS]],
                "servers": [each._asdict() for each in (shared.peers() if shared is not None else ())],
            },
            "errors": [each._asdict() for each in self._errors.latest()],
        }
        return Answer("application/json", json.dumps(content).encode(), headers=PAGE_HEADERS)


def _file(content: bytes, kind: str) -> Page:
    def page(ask: Ask) -> Answer:
        return Answer(kind, content, headers=PAGE_HEADERS) if ask.caller.every else _refused()

    return page


def _refused() -> Answer:
    text = b"the console shows all tenants' pages: it needs a token of every tenant\n"
    return Answer("text/plain; charset=utf-8", text, HTTPStatus.FORBIDDEN)


def _number(query: Mapping[str, Sequence[str]], name: str, default: float) -> float:
    given = query.get(name, [str(default)])[-1]
    try:
        number = float(given)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise InvalidRequestError(f"{name} is {given!r}, it is a number of seconds")
    return number
