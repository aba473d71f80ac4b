"""Connection strings."""

from __future__ import annotations

import urllib.parse
from dataclasses import dataclass
from pathlib import Path

from kvstore.config import DEFAULT_PORT, NodeConfig, default_arena_directory, load_config
from kvstore.errors import ConfigError, InvalidRequestError
from kvstore.wire import unix_target

_FORMS = "unix:///run/kvstore.sock, kv://host:port, kvs://host:port (TLS) or embedded:///var/lib/kvstore"


@dataclass(frozen=True, slots=True)
class RemoteUrl:
    """A node that is another process."""

    target: str
    """What gRPC connects to."""
    local: bool
    """Whether it is a Unix socket."""
    host: str = ""
    """Where bulk connections go, for a node that is no Unix socket."""
    tls: bool = False


def socket_url(path: Path) -> str:
    """The URL of the node that serves on this socket."""
    return f"unix://{urllib.parse.quote(str(path.absolute()))}"


def parse_url(url: str) -> RemoteUrl | NodeConfig:
    """A node's address, or the configuration of an embedded one.

    ``embedded:///folder?arena=256MiB&disk_limit=4GiB`` takes the keys of :class:`NodeConfig` but those of sockets.

    Raises:
        InvalidRequestError: not such a URL.
        ConfigError: an unknown key behind ``?``, or a value that can't be used.
    """
    try:
        parts = urllib.parse.urlsplit(url)
        port = parts.port
    except (ValueError, AttributeError) as error:
        raise InvalidRequestError(f"not a kvstore URL: {url!r}; write {_FORMS}") from error
    if parts.scheme == "embedded" and not parts.netloc and len(parts.path) > 1:
        return _embedded(Path(urllib.parse.unquote(parts.path)), parts.query)
    if parts.query or parts.fragment or parts.username:
        raise InvalidRequestError(f"{url!r}: a {parts.scheme or 'kvstore'} URL takes no options; write {_FORMS}")
    if parts.scheme == "unix" and not parts.netloc and len(parts.path) > 1:
        return RemoteUrl(unix_target(Path(urllib.parse.unquote(parts.path))), local=True)
    if parts.scheme in ("kv", "kvs") and parts.hostname and parts.path in ("", "/"):
        host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
        return RemoteUrl(
            f"{host}:{port if port is not None else DEFAULT_PORT}",
            local=False,
            host=parts.hostname,
            tls=parts.scheme == "kvs",
        )
    raise InvalidRequestError(f"not a kvstore URL: {url!r}; write {_FORMS}")


def _embedded(folder: Path, query: str) -> NodeConfig:
    try:
        options = dict(urllib.parse.parse_qsl(query, keep_blank_values=True, strict_parsing=True)) if query else {}
    except ValueError as error:
        raise ConfigError(f"options of an embedded URL are key=value pairs joined by &, got {query!r}") from error
    for key in ("socket", "listen", "metrics", "disk"):
        if key in options:
            raise ConfigError(f"{key!r} is no option of an embedded URL")
    defaults = {"arena": "256MiB", "disk": folder / "disk", "arena_dir": default_arena_directory(folder)}
    return load_config(flags=defaults | options)
