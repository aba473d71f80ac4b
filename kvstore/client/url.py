"""Connection strings: the URL of a node, or of a store inside this process with its settings."""

from __future__ import annotations

import urllib.parse
from dataclasses import dataclass
from pathlib import Path

from kvstore.config.load import load_settings
from kvstore.config.node import DEFAULT_PORT, NodeConfig, default_arena_directory
from kvstore.errors import ConfigError, InvalidRequestError
from kvstore.wire.messages import unix_target

_FORMS = "unix:///run/kvstore.sock, kv://host:port, kvs://host:port (TLS) or embedded:///var/lib/kvstore"


@dataclass(frozen=True, slots=True)
class RemoteUrl:
    """A node that is another process."""

    target: str
    """What gRPC connects to."""
    socket: Path | None = None
    """For a Unix socket: its path here."""
    host: str = ""
    """Where bulk connections go, for a node that is no Unix socket."""
    tls: bool = False
    arena_dir: Path | None = None
    """Where the node's arena is mounted here, if the URL says so."""

    @property
    def port(self) -> int:
        """For a node that is no Unix socket."""
        return int(self.target.rpartition(":")[2])

    @property
    def local(self) -> bool:
        """Whether it is a Unix socket."""
        return self.socket is not None

    def arena_folder(self, at_node: str, from_socket: str) -> str:
        """Where the arena's folder is here: another container may have it at another place than the node.

        Args:
            at_node: where the node has it.
            from_socket: the same, relative to the folder of the node's socket; empty where it is not inside.
        """
        if self.arena_dir is not None:
            return str(self.arena_dir)
        if from_socket and self.socket is not None and (here := self.socket.parent / from_socket).is_dir():
            return str(here)
        return at_node


@dataclass(frozen=True, kw_only=True, slots=True)
class EmbeddedConfig(NodeConfig):
    """The settings of a store inside this process."""

    folder: Path
    """The path that the URL names."""
    keep_arena: bool = False
    """Whether the arena stays in shared memory, with its pages, when the store is closed."""


def socket_url(path: Path) -> str:
    """The URL of the node that serves on this socket."""
    return f"unix://{urllib.parse.quote(str(path.absolute()))}"


def parse_url(url: str) -> RemoteUrl | EmbeddedConfig:
    """A node's address, or the configuration of an embedded one.

    ``embedded:///folder?arena=256MiB&disk_limit=4GiB`` takes the keys of :class:`NodeConfig` but those of sockets,
    and ``keep_arena=true``.

    ``unix:///run/kvstore.sock?arena_dir=/mnt/arena`` says where the arena is mounted here, for the case that it is
    neither where the node has it nor in the socket's folder as it is there.

    Raises:
        InvalidRequestError: not such a URL.
        ConfigError: an unknown key behind ``?``, or a value that can't be used.
    """
    if not isinstance(url, str):
        raise InvalidRequestError(f"not a kvstore URL: {url!r:.80}; write {_FORMS}")
    try:
        parts = urllib.parse.urlsplit(url)
        port = parts.port
    except (ValueError, AttributeError) as error:
        raise InvalidRequestError(f"not a kvstore URL: {url!r}; write {_FORMS}") from error
    if parts.scheme == "embedded" and not parts.netloc and len(parts.path) > 1:
        return _embedded(Path(urllib.parse.unquote(parts.path)), parts.query)
    if parts.scheme == "unix" and not parts.netloc and len(parts.path) > 1 and not parts.fragment:
        socket = Path(urllib.parse.unquote(parts.path))
        return RemoteUrl(unix_target(socket), socket, arena_dir=_arena_dir(url, parts.query))
    if parts.query or parts.fragment or parts.username:
        raise InvalidRequestError(f"{url!r}: a {parts.scheme or 'kvstore'} URL takes no options; write {_FORMS}")
    if parts.scheme in ("kv", "kvs") and parts.hostname and parts.path in ("", "/"):
        host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
        return RemoteUrl(
            f"{host}:{port if port is not None else DEFAULT_PORT}",
            host=parts.hostname,
            tls=parts.scheme == "kvs",
        )
    raise InvalidRequestError(f"not a kvstore URL: {url!r}; write {_FORMS}")


def _arena_dir(url: str, query: str) -> Path | None:
    """The one option of a ``unix://`` URL."""
    options = _options(query)
    folder = options.pop("arena_dir", None)
    if options or folder == "":
        raise InvalidRequestError(f"{url!r}: the only option of a unix URL is arena_dir=FOLDER; write {_FORMS}")
    return Path(folder) if folder is not None else None


def _options(query: str) -> dict[str, str]:
    try:
        return dict(urllib.parse.parse_qsl(query, keep_blank_values=True, strict_parsing=True)) if query else {}
    except ValueError as error:
        raise ConfigError(f"options of a URL are key=value pairs joined by &, got {query!r}") from error


def _embedded(folder: Path, query: str) -> EmbeddedConfig:
    options = _options(query)
    keep = options.pop("keep_arena", "false")
    if keep not in ("true", "false"):
        raise ConfigError(f"keep_arena is true or false, got {keep!r}")
    for key in ("socket", "group", "listen", "metrics", "disk"):
        if key in options:
            raise ConfigError(f"{key!r} is no option of an embedded URL")
    defaults = {"arena": "256MiB", "disk": folder / "disk", "arena_dir": default_arena_directory(folder)}
    settings = load_settings(flags=defaults | options)
    return EmbeddedConfig(
        **{key: each.value for key, each in settings.items()}, folder=folder, keep_arena=keep == "true"
    )
