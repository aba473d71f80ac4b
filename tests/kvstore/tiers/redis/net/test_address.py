"""URLs of Redis: which forms are read, and that no password shows."""

from __future__ import annotations

import pytest

from kvstore.errors import ConfigError
from kvstore.tiers.redis.net.address import Kind, parse_address


@pytest.mark.parametrize(
    ("url", "kind", "hosts", "service", "some"),
    [
        ("redis://127.0.0.1:7000/3", Kind.SINGLE, [("127.0.0.1", 7000)], "", {"db": 3}),
        ("redis://127.0.0.1", Kind.SINGLE, [("127.0.0.1", 6379)], "", {}),
        ("redis://me:se%20cret@[::1]:1/", Kind.SINGLE, [("::1", 1)], "", {"username": "me", "password": "se cret"}),
        ("unix:///run/redis.sock?db=2", Kind.SINGLE, [], "", {"path": "/run/redis.sock", "db": 2}),
        ("unix://:secret@/run/redis.sock", Kind.SINGLE, [], "", {"path": "/run/redis.sock", "password": "secret"}),
        ("redis+cluster://a:1,b:2", Kind.CLUSTER, [("a", 1), ("b", 2)], "", {}),
        ("rediss+cluster://u:p@a", Kind.CLUSTER, [("a", 6379)], "", {"ssl": True, "username": "u", "password": "p"}),
        ("redis+sentinel://a,b:2/ours/4", Kind.SENTINEL, [("a", 26379), ("b", 2)], "ours", {"db": 4}),
        ("rediss+sentinel://a/ours?ssl_ca_certs=/x", Kind.SENTINEL, [("a", 26379)], "ours", {"ssl_ca_certs": "/x"}),
    ],
)
def test_addresses(url: str, kind: Kind, hosts: list[object], service: str, some: dict[str, object]) -> None:
    address = parse_address(url)
    assert (address.kind, list(address.hosts), address.service) == (kind, hosts, service)
    assert some.items() <= dict(address.options).items()
    assert "secret" not in repr(address)
    assert "se cret" not in repr(address)


@pytest.mark.parametrize(
    "url",
    [
        "127.0.0.1:6379",
        "http://a",
        "redis+ring://a",
        "unix+cluster:///a",
        "redis://",
        "redis://a:b",
        "redis://a:0",
        "redis://a:99999",
        "redis+cluster://a:1,",
        "redis+cluster://a/3",
        "redis+sentinel://a",
        "redis://a?db=x",
    ],
)
def test_what_is_no_address(url: str) -> None:
    with pytest.raises(ConfigError, match="redis"):
        parse_address(url.replace("//", "//me:geheim@", 1) if "://a" in url else url)
    try:
        parse_address(url.replace("//", "//me:geheim@", 1))
    except ConfigError as error:
        assert "geheim" not in str(error)
