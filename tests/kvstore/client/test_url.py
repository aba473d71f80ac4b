"""Connection strings, right and wrong."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import kvstore
from kvstore.client.url import RemoteUrl, parse_url, socket_url
from kvstore.config.node import NodeConfig
from kvstore.errors import ConfigError, InUseError, InvalidRequestError, ResourceError


@pytest.mark.parametrize(
    ("url", "target", "host"),
    [
        ("unix:///run/kvstore.sock", "unix:/run/kvstore.sock", ""),
        ("unix:///run/a%20b/%C3%BC.sock", "unix:/run/a%20b/%C3%BC.sock", ""),
        ("kv://localhost:7421", "localhost:7421", "localhost"),
        ("kv://cache-1.example.net", "cache-1.example.net:7420", "cache-1.example.net"),
        ("kv://10.0.0.7:80/", "10.0.0.7:80", "10.0.0.7"),
        ("kv://[::1]:7421", "[::1]:7421", "::1"),
        ("kv://[fe80::1]", "[fe80::1]:7420", "fe80::1"),
    ],
)
def test_nodes(url, target, host):
    where = parse_url(url)
    assert isinstance(where, RemoteUrl)
    assert (where.target, where.local, where.host, where.tls) == (target, not host, host, False)
    if host:
        assert parse_url(url.replace("kv:", "kvs:")) == RemoteUrl(target, host=host, tls=True)


def test_embedded_stores(tmp_path):
    config = parse_url("embedded:///var/lib/k%20v?arena=1GiB&disk_limit=0&verify_checksums=false")
    assert isinstance(config, NodeConfig)
    assert (config.arena, config.disk_limit, config.verify_checksums) == (1 << 30, 0, False)
    assert config.disk == Path("/var/lib/k v/disk")
    plain, other = parse_url("embedded:///a"), parse_url("embedded:///b")
    assert plain.arena == 256 << 20
    assert plain.arena_directory != other.arena_directory


@pytest.mark.parametrize(
    "url",
    [
        "",
        "kvstore",
        "/run/kvstore.sock",
        "unix://",
        "unix:///",
        "unix://run/kvstore.sock",
        "unix:///run/kvstore.sock?arena=1GiB",
        "unix:///run/kvstore.sock#here",
        "kv://",
        "kv://:7420",
        "kv://host:port",
        "kv://host:70000",
        "kv://host/path",
        "kv://user@host:7420",
        "kv://host:7420#here",
        "kv://[::1",
        "http://host:7420",
        "embedded://",
        "embedded:///",
        "embedded://var/lib",
        None,
        7,
        b"unix:///run/kvstore.sock",
    ],
)
def test_what_is_no_url(url):
    forms = r"unix:///run/kvstore.sock, kv://host:port, kvs://host:port \(TLS\) or embedded:///"
    with pytest.raises(InvalidRequestError, match=forms):
        kvstore.connect(url)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("arema=1GiB", "unknown key 'arema'; did you mean 'arena'"),
        ("arena=much", "not a size: 'much'"),
        ("arena=1KiB", "the least is 64KiB"),
        ("socket=/x", "'socket' is no option"),
        ("listen=80", "'listen' is no option"),
        ("disk=/x", "'disk' is no option"),
        ("arena", "key=value"),
        ("arena=", "not a size: ''"),
    ],
)
def test_options_that_cannot_be_right(options, words):
    with pytest.raises(ConfigError, match=words):
        kvstore.connect(f"embedded:///nowhere/at/all?{options}")


def test_an_embedded_folder_has_one_owner(short_folder, shm_folder):
    url = f"embedded://{short_folder}/e?arena=1MiB&disk_limit=0&arena_dir={shm_folder}/a"
    with kvstore.connect(url), pytest.raises(InUseError, match=r"in use by process \d+"):
        kvstore.connect(url)
    kvstore.connect(url).close()


def test_an_embedded_store_is_given_up_behind_the_last_call_under_way(short_folder, shm_folder, layout, eventually):
    """What this process still does to the arena must not happen in another one's."""
    url = f"embedded://{short_folder}/e?arena=1MiB&disk_limit=0&arena_dir={shm_folder}/a"
    client = kvstore.connect(url)
    pages = client.namespace(layout)
    under_way, go_on = threading.Event(), threading.Event()
    store = client._session.control._store
    original = store.evict

    def slow(*arguments: object, **options: object) -> int:
        under_way.set()
        assert go_on.wait(60)
        return original(*arguments, **options)

    store.evict = slow
    pages.store([b"x" * 32], bytes(5000))
    with ThreadPoolExecutor(1) as pool:
        evicting = pool.submit(pages.evict, [b"x" * 32])
        assert under_way.wait(60)
        client.close()
        with pytest.raises(InUseError):
            kvstore.connect(url)
        go_on.set()
        assert evicting.result() == 1
    with kvstore.connect(url) as again:
        assert again.namespace(layout).lookup([b"x" * 32]).prefix == 0


def test_an_embedded_folder_that_cannot_be_used(short_folder, shm_folder):
    (short_folder / "file").touch()
    with pytest.raises(ResourceError, match=str(short_folder)):
        kvstore.connect(f"embedded://{short_folder}/file?arena=1MiB&arena_dir={shm_folder}/a")
    with pytest.raises(ResourceError, match="/proc/none"):
        kvstore.connect("embedded:///x?arena=1MiB&disk_limit=0&arena_dir=/proc/none")


@pytest.mark.parametrize("name", ["plain", "with space", "ü", "a%41b", "q?x", "h#x", "s;t", "a&b=c", "[1]"])
def test_any_path_can_be_a_socket(start_node, short_folder, name, layout):
    node = start_node(socket=short_folder / name / "s", listen="")
    assert (short_folder / name / "s").is_socket()
    with kvstore.connect(socket_url(short_folder / name / "s")) as client:
        assert client.namespace(layout).store([b"x" * 32], bytes(5000)).stored == 1
    assert node.stop()
