"""A node's settings: their defaults, and addresses."""

from pathlib import Path

import pytest

from kvstore.config.node import (
    NodeConfig,
    default_arena_directory,
    default_disk,
    default_socket,
    parse_address,
)
from kvstore.errors import ConfigError, InvalidRequestError


def test_errors_are_the_callers() -> None:
    assert issubclass(ConfigError, InvalidRequestError)
    assert issubclass(ConfigError, ValueError)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("7420", ("127.0.0.1", 7420)),
        (":7420", ("127.0.0.1", 7420)),
        ("0.0.0.0:0", ("0.0.0.0", 0)),
        ("node-1.example:65535", ("node-1.example", 65535)),
        ("[::1]:7420", ("::1", 7420)),
        ("[fe80::1%eth0]:7420", ("fe80::1%eth0", 7420)),
    ],
)
def test_addresses(text: str, address: tuple[str, int]) -> None:
    assert parse_address(text) == address


@pytest.mark.parametrize(
    "text", ["", "host", "host:", "host:x", "host:65536", "host:-1", "::1", "::1:80", "h:²", "h:1 "]
)
def test_what_is_no_address_is_refused_with_its_text(text: str) -> None:
    with pytest.raises(ConfigError, match="not an address") as caught:
        parse_address(text)
    assert repr(text) in str(caught.value)


def test_defaults_follow_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/7")
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert default_socket() == Path("/run/user/7/kvstore.sock")
    assert default_disk() == Path("/cache/kvstore")
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert default_socket() == Path("/tmp/kvstore-1000/kvstore.sock")
    assert default_disk() == Path("/home/me/.cache/kvstore")


def test_a_user_without_a_home_has_a_default_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    assert default_disk().name == "disk"
    monkeypatch.setattr("os.geteuid", lambda: 0)
    assert default_socket() == Path("/run/kvstore.sock")


def test_each_socket_has_an_arena_of_its_own() -> None:
    one, other = default_arena_directory(Path("/run/a.sock")), default_arena_directory(Path("/run/b.sock"))
    assert one != other
    assert one.parent == other.parent
    assert NodeConfig(socket=Path("/run/a.sock")).arena_directory == one
