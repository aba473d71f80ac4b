"""What each call costs: how often the server is asked, and with which commands."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from made_pages import make_page, read_pages
from redis_servers import RedisServer

from kvstore.tiers.redis import RedisTier
from kvstore.tiers.redis.net import scripts
from kvstore.tiers.redis.net.connection import Request, ServerConnection
from kvstore.tiers.tier import PageWrite

Open = Callable[..., RedisTier]
_SCRIPTS = {
    digest: name
    for name, digest in vars(scripts).items()
    if name.isupper() and isinstance(digest, bytes) and len(digest) == 40
}
BUCKETS = 16


class Asked:
    """The round trips of calls, each by how many of which commands it carried; scripts by their names."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._trips: list[Counter[str]] = []
        real = ServerConnection.roundtrip

        def roundtrip(connection: ServerConnection, requests: Sequence[Request], deadline: float) -> Any:
            trip = Counter(map(_name, requests))
            if "SCRIPT" not in trip:  # a new connection loads them, whenever it is open
                self._trips.append(trip)
            return real(connection, requests, deadline)

        monkeypatch.setattr(ServerConnection, "roundtrip", roundtrip)

    def by(self, call: Callable[[], object], expected: object) -> list[dict[str, int]]:
        self._trips.clear()
        assert call() == expected
        return [dict(trip) for trip in self._trips]


def _name(request: Request) -> str:
    command, *arguments = request.arguments
    assert isinstance(command, bytes)
    if command != b"EVALSHA":
        return command.decode()
    assert isinstance(arguments[0], bytes)
    return _SCRIPTS[arguments[0]]


def chain(numbers: range) -> list[PageWrite]:
    """Pages of one prompt, ten to a full chunk."""
    pages = [make_page(number, 200_000) for number in range(numbers.stop)]
    linked = [page._replace(parent=pages[at - 1].key if at else b"") for at, page in enumerate(pages)]
    return linked[numbers.start :]


@pytest.fixture
def tier(server: RedisServer, open_redis: Open) -> RedisTier:
    """One that asks nothing by itself."""
    tier = open_redis(server.url, 640 << 20, refresh=1000.0)
    assert tier.contains([bytes(64)]) == [False]
    tier._refresher.close()
    return tier


def test_a_call_asks_no_more_than_it_needs(tier: RedisTier, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked(monkeypatch)
    pages, rest = chain(range(25)), chain(range(25, 30))
    keys = [page.key for page in pages]
    look = {"SET": 2, "GET": 2, "MGET": 1}
    admit = {"ADMIT": 3, "HGETALL": 2}  # three chunks in two buckets

    assert asked.by(lambda: tier.write(pages), [True] * 25) == [look, admit, {"SET": 3}, {"PLACE": 1}, {"SET": 3}]
    assert asked.by(lambda: tier.write(pages), [True] * 25) == [look, {"TOUCH": 2}]
    assert asked.by(lambda: tier.contains(keys), [True] * 25) == [{"MGET": 1}]
    assert asked.by(lambda: read_pages(tier, pages), [True] * 25) == [{"MGET": 1}, {"GETRANGE": 3, "TOUCH": 2}]
    assert asked.by(lambda: tier.touch(keys), [True] * 25) == [{"RENEW": 1}, {"TOUCH": 2}]
    assert asked.by(lambda: tier.write(rest), [True] * 5) == [
        look,
        {"ADMIT": 1, "HGETALL": 1},
        {"SET": 1},
        {"PLACE": 1},
        {"SET": 1},
        # The chain is whole up to a boundary now: its two fragments are merged.
        {"GETRANGE": 1},
        {"GETRANGE": 1, "TOUCH": 1},
        {"ADMIT": 1, "HGETALL": 1},
        {"SET": 1},
        {"REPOINT": 1},
        {"SET": 1},
        {"RELEASE": 2, "HGETALL": 2},
    ]
    assert asked.by(lambda: tier.remove(keys[:5]), 5) == [
        {"MGET": 1},
        {"FORGET": 1},
        {"RELEASE": 1, "HGETALL": 1},
        {"MGET": 1},
    ]


def test_expiry_asks_every_bucket_and_those_that_hold_something_until_they_are_empty(
    tier: RedisTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = chain(range(25))
    assert all(tier.write(pages))
    asked = Asked(monkeypatch)
    assert asked.by(lambda: tier.expire(pages[0].key[:32], 0.0, threading.Event()), 25) == [
        {"IDLE": 2},  # those that are known to have some, where use would be found
        {"IDLE": BUCKETS - 2},
        {"TIME": BUCKETS},
        {"EXPIRE": 2, "HGETALL": 2},
        {"FORGET": 3},
        {"EXPIRE": 2, "HGETALL": 2},
    ]


def test_a_lookup_asks_for_a_thousand_pages_at_once(tier: RedisTier, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [number.to_bytes(64, "big") for number in range(3000)]
    asked = Asked(monkeypatch)
    assert asked.by(lambda: tier.contains(keys), [False] * 3000) == [{"MGET": 1}] * 3
