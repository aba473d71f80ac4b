"""The settings of a node, one frozen object: each field declares a setting and all that people read of it."""

from __future__ import annotations

import grp
import hashlib
import ipaddress
import os
from dataclasses import dataclass
from pathlib import Path

from kvstore.config.kinds import (
    DURATION,
    NAMESPACE_RULES,
    NUMBER,
    PATH,
    SECONDS,
    SIZE,
    SWITCH,
    TENANT_RULES,
    TEXT,
)
from kvstore.config.rules import NamespaceRule, TenantRule
from kvstore.config.setting import Flag, declared, settings_of
from kvstore.errors import ConfigError
from kvstore.security.bucket_url import check_bucket_url
from kvstore.security.grants import EVERY_TENANT, check_name
from kvstore.security.socket_group import SocketGroup

DEFAULT_PORT = 7420
_LAST_GROUP = (1 << 32) - 2
_ADMITTED = ("used", "all")
_LOG_LEVELS = ("debug", "info", "warning", "error")
_LOG_FORMATS = ("text", "json")


SYSTEM_SOCKETS = (Path("/run/kvstore/kvstore.sock"), Path("/run/kvstore.sock"))
"""Where nodes of the whole machine serve: that of the systemd unit and of containers, and one that root has started."""


def default_socket() -> Path:
    """``$XDG_RUNTIME_DIR/kvstore.sock``; without one ``/run/kvstore.sock`` for root, else a private folder in /tmp."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return Path(runtime) / "kvstore.sock" if runtime else user_sockets()[-1]


def user_sockets() -> tuple[Path, Path]:
    """Where :func:`default_socket` may be for this user in another environment: within a login, and without one."""
    user = os.geteuid()
    alone = Path("/run/kvstore.sock") if user == 0 else Path(f"/tmp/kvstore-{user}/kvstore.sock")  # noqa: S108
    return Path(f"/run/user/{user}/kvstore.sock"), alone


def default_disk() -> Path:
    """``$XDG_CACHE_HOME/kvstore``, by default ``~/.cache/kvstore``; for a user without a home a folder in /tmp."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvstore"
    except RuntimeError:
        return Path(f"/tmp/kvstore-{os.geteuid()}/disk")  # noqa: S108


def default_arena_directory(name: Path) -> Path:
    """A private folder in shared memory for the node with this socket (or embedded folder)."""
    digest = hashlib.sha256(os.fsencode(name.absolute())).hexdigest()[:12]
    return Path(f"/dev/shm/kvstore-{os.geteuid()}") / digest  # noqa: S108


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeConfig:
    """A node's settings, in the order in which they are shown. Sizes are bytes, times seconds; empty text is none.

    A new setting is one more field, declared, and then ``make docs``.

    Raises:
        ConfigError: a value can't be used; the message names key, value and what would be right.
    """

    socket: Path = declared(
        default_socket,
        PATH,
        "Unix socket to serve on, private to its user",
        flag=Flag("PATH", "Unix socket to serve on (default: {default})"),
        default_place="`$XDG_RUNTIME_DIR/kvstore.sock`; without one `/run/kvstore.sock` for root, else"
        " `/tmp/kvstore-UID/kvstore.sock`",
    )
    group: str = declared(
        "",
        TEXT,
        "name or number of a group whose members may use socket and arena as well; the node's user must be in"
        " it. See below",
        flag=Flag("GROUP", "let members of this group use socket and arena (default: this user only)"),
    )
    listen: str = declared(
        "",
        TEXT,
        "`HOST:PORT` to serve on as well; only `PORT` is the loopback address",
        flag=Flag("HOST:PORT", "serve on TCP as well; PORT alone is on the loopback address (default: no TCP)"),
    )
    bulk_port: int = declared(
        0,
        NUMBER,
        "TCP port for bulk connections, on the address of `listen`",
        flag=Flag("PORT", "TCP port for the pages themselves, with --listen (default: any free port)"),
        zero="any free one",
    )
    connections: int = declared(
        512,
        NUMBER,
        "most gRPC connections by TCP at once, 16 to 16384; a quarter of it is the most bulk connections, and"
        " the most connections that have not shown a token yet. One tenant has at most half. Fewer where the"
        " process's descriptors are few: the log says so",
    )
    metrics: str = declared(
        "",
        TEXT,
        "`HOST:PORT` of HTTP with `/metrics` and `/health`; only `PORT` is the loopback address. With `tls_cert`"
        " it is HTTPS, with `token_file` it wants a token",
        flag=Flag(
            "HOST:PORT", "HTTP: /metrics for Prometheus, /health, /console; as 9464, on loopback (default: none)"
        ),
    )
    events: str = declared(
        "",
        TEXT,
        "ZeroMQ endpoint that tells which pages come and go, `tcp://127.0.0.1:5557` or `ipc:///path`; needs the"
        " extra `events`, see [observability](observability.md)",
        flag=Flag("URL", "publish page events over ZeroMQ, as tcp://127.0.0.1:5557 (default: none)"),
    )
    events_replay: str = declared(
        "",
        TEXT,
        "ZeroMQ endpoint where subscribers ask for events that they missed",
        flag=Flag("URL", "ZeroMQ endpoint that replays missed events (default: none)"),
    )
    events_tenants: str = declared(
        "",
        TEXT,
        "tenants whose pages `events` tells of, as `search,chat`, or `*` for all: pages of tenants are left out"
        " otherwise",
    )
    events_key: Path | None = declared(
        None,
        PATH,
        "file of the secret key (CURVE) of both ZeroMQ endpoints, which nobody else may read: then they may be"
        " on other addresses than loopback, and who connects needs a [key](observability.md#page-events) as well",
    )
    events_clients: Path | None = declared(
        None,
        PATH,
        "folder of the public keys, `*.key`, of those who may connect",
    )
    traces: str = declared(
        "",
        TEXT,
        "where OpenTelemetry's spans of calls go, as OTLP over gRPC: `http://127.0.0.1:4317`; needs the extra"
        " `tracing`, see [observability](observability.md#traces)",
    )
    tls_cert: Path | None = declared(
        None,
        PATH,
        "PEM file of the node's certificate, followed by its chain; TCP then uses TLS",
        flag=Flag("FILE", "use TLS on TCP, with this certificate and its chain (PEM)"),
    )
    tls_key: Path | None = declared(
        None,
        PATH,
        "PEM file of its private key, which nobody else may read",
        flag=Flag("FILE", "the certificate's private key (PEM); only its owner may be able to read it"),
    )
    client_ca: Path | None = declared(
        None,
        PATH,
        "PEM file of the authorities that sign clients' certificates; TCP clients then need one",
        flag=Flag("FILE", "TCP clients must show a certificate signed by one of these authorities (PEM)"),
    )
    token_file: Path | None = declared(
        None,
        PATH,
        "tokens, one per line, `TOKEN` or `NAME:TOKEN`, optionally followed by [tenant and"
        " rights](security.md#tokens); TCP clients then need one",
        flag=Flag("FILE", "TCP clients must show a token from this file; one per line, TOKEN or NAME:TOKEN"),
    )
    insecure: bool = declared(
        False,
        SWITCH,
        "allow addresses other than loopback without TLS, tokens or client certificates",
        flag=Flag("", "allow addresses other than loopback without TLS, tokens or client certificates"),
    )
    arena: int = declared(
        1 << 30,
        SIZE,
        "bytes of shared memory for pages; at least 64 KiB",
        flag=Flag("SIZE", "shared memory for pages, as 512MiB or 64GiB (default: {default})"),
    )
    arena_dir: Path | None = declared(
        None,
        PATH,
        "folder of the arena's files, on a tmpfs",
        flag=Flag("DIR", "folder of the arena, on a tmpfs (default: one in /dev/shm, named after the socket)"),
        default_place="`/dev/shm/kvstore-UID/…`, by socket",
    )
    numa_node: str = declared(
        "",
        TEXT,
        "number of the NUMA node to put the arena's memory on: that of the engine's GPU or cores. Without it,"
        " wherever the system puts it",
        flag=Flag("N", "put the arena into the memory of this NUMA node (default: any)", behind="redis_limit"),
    )
    disk: Path = declared(
        default_disk,
        PATH,
        "folder of the disk tier",
        flag=Flag("DIR", "folder of the disk tier (default: {default})"),
        default_place="`$XDG_CACHE_HOME/kvstore`, without one `~/.cache/kvstore`",
    )
    disk_limit: int = declared(
        10 << 30,
        SIZE,
        "most bytes on disk, at least 1 MiB; `0` turns the disk tier off",
        flag=Flag("SIZE", "size of the disk tier; 0 turns it off (default: {default})"),
        reloaded=True,
    )
    disk_deadline: float = declared(
        5.0,
        SECONDS,
        "seconds after which a read or write of the disk is given up: the page is a miss, or is not on disk yet",
    )
    disk_write_limit: int = declared(
        0,
        SIZE,
        "most bytes written to disk per day, including pages that are carried over",
        flag=Flag("SIZE", "bytes written to disk per day at most, to spare an SSD (default: no limit)"),
        zero="none",
        reloaded=True,
    )
    disk_key_file: Path | None = declared(
        None,
        PATH,
        "key (32 bytes, or 64 hexadecimal digits) that encrypts pages on disk; needs the extra `encryption`",
        flag=Flag("FILE", "encrypt pages on disk with the key in this file (default: not encrypted)"),
    )
    redis: str = declared(
        "",
        TEXT,
        "the Redis or Valkey that nodes share: `redis://`, `rediss://` (TLS), `unix:///path`,"
        " `redis+sentinel://`, `redis+cluster://`",
        flag=Flag("URL", "share pages with other nodes through this Redis, as redis://10.0.0.5:6379 (default: none)"),
    )
    redis_limit: int = declared(
        10 << 30,
        SIZE,
        "most bytes in Redis, of all nodes together: the same on each of them",
        flag=Flag("SIZE", "size of the Redis tier, of all nodes together; the same on each (default: {default})"),
        reloaded=True,
    )
    objects: str = declared(
        "",
        TEXT,
        "the object storage that nodes share: `s3://bucket/prefix`, `gs://`, `az://`; needs the extra `objects`."
        " Credentials, endpoint and region are the environment's, see [below](#object-storage)",
        flag=Flag("URL", "keep pages in object storage, shared by all nodes, as s3://bucket/prefix (default: none)"),
    )
    objects_limit: int = declared(
        100 << 30,
        SIZE,
        "most bytes that this node takes in object storage, index included; at least 4MiB",
        flag=Flag("SIZE", "bytes that this node takes in object storage (default: {default})"),
        reloaded=True,
    )
    objects_prefix_limit: int = declared(
        0,
        SIZE,
        "most bytes of all nodes together in object storage. Soft: nodes know of each other after up to 30 s",
        zero="none but each node's own",
        reloaded=True,
    )
    objects_admit: str = declared(
        "used",
        TEXT,
        "which pages go to object storage: `used`, those that were read and are [likely to be wanted once"
        " more](#object-storage); `all`",
        flag=Flag("used|all", "to object storage go pages likely to be read again, or all (default: {default})"),
    )
    objects_write_limit: int = declared(
        0,
        SIZE,
        "most bytes that this node writes to object storage per day (UTC), since it started",
        zero="none",
        reloaded=True,
    )
    objects_deadline: float = declared(
        5.0,
        SECONDS,
        "seconds after which a read from object storage is given up: the page is a miss",
    )
    objects_key_file: Path | None = declared(
        None,
        PATH,
        "keys that encrypt pages in object storage, the same on all nodes: 64 hexadecimal digits a line; the first one"
        " writes, all of them read. Needs the extra `encryption`",
    )
    namespace: tuple[NamespaceRule, ...] = declared(
        (),
        NAMESPACE_RULES,
        "what namespaces are granted, see below; in the file only",
        reloaded=True,
    )
    tenant: tuple[TenantRule, ...] = declared(
        (),
        TENANT_RULES,
        "what tenants are granted, see below; in the file only",
        reloaded=True,
    )
    expire_namespaces: float = declared(
        0.0,
        DURATION,
        "how long a namespace may be unused, as `30d`, before it is dropped; in Redis, unused by every node. A"
        " rule's `expire` wins. Time in which the node does not run does not count",
        flag=Flag("TIME", "drop namespaces that nobody has used for this long, as 30d (default: never)"),
        zero="never",
        reloaded=True,
    )
    verify_checksums: bool = declared(
        True,
        SWITCH,
        "`false` serves damaged pages from disk; only for demonstrating that checksums matter",
    )
    drain_seconds: float = declared(
        10.0,
        SECONDS,
        "how long a stopping node waits for calls under way and for writing back; service managers must wait longer",
        reloaded=True,
    )
    log_level: str = declared(
        "info",
        TEXT,
        "`debug`, `info`, `warning` or `error`",
        flag=Flag("LEVEL", "debug, info, warning or error (default: {default})"),
        reloaded=True,
    )
    log_format: str = declared(
        "text",
        TEXT,
        "`json`: one JSON object a line, with `time` (UTC), `level`, `logger`, `thread`, `message` and `exception`",
        flag=Flag("FORMAT", "text, or json: one JSON object per line (default: {default})"),
        reloaded=True,
    )

    def __post_init__(self) -> None:
        if self.arena < 1 << 16:
            raise ConfigError(f"arena is {self.arena} bytes, the least is 64KiB")
        if self.disk_limit and self.disk_limit < 1 << 20:
            raise ConfigError(f"disk_limit is {self.disk_limit} bytes, the least is 1MiB (or 0: no disk tier)")
        if not 0 < self.disk_deadline <= 3600:
            raise ConfigError(f"disk_deadline must be above 0 and at most 3600 seconds, got {self.disk_deadline}")
        if self.objects and self.objects_limit < 4 << 20:
            raise ConfigError(f"objects_limit is {self.objects_limit} bytes, the least is 4MiB")
        if self.objects_admit not in _ADMITTED:
            raise ConfigError(f"objects_admit must be one of {', '.join(_ADMITTED)}, got {self.objects_admit!r}")
        if not 0 < self.objects_deadline <= 3600:
            raise ConfigError(f"objects_deadline must be above 0 and at most 3600 seconds, got {self.objects_deadline}")
        if self.objects:
            check_bucket_url(self.objects)
        if not 0 <= self.drain_seconds <= 3600:
            raise ConfigError(f"drain_seconds must lie between 0 and 3600, got {self.drain_seconds}")
        if self.log_level not in _LOG_LEVELS:
            raise ConfigError(f"log_level must be one of {', '.join(_LOG_LEVELS)}, got {self.log_level!r}")
        if self.log_format not in _LOG_FORMATS:
            raise ConfigError(f"log_format must be one of {', '.join(_LOG_FORMATS)}, got {self.log_format!r}")
        if self.numa_node and not (self.numa_node.isascii() and self.numa_node.isdigit() and len(self.numa_node) < 5):
            raise ConfigError(f"numa_node must be the number of a NUMA node, as 0, got {self.numa_node!r}")
        if len(os.fsencode(self.socket)) > 100:
            raise ConfigError(f"socket: {str(self.socket)!r} has more than the 100 bytes that a Unix socket's path may")
        if not 0 <= self.bulk_port <= 65535:
            raise ConfigError(f"bulk_port must lie between 0 and 65535, got {self.bulk_port}")
        if not 16 <= self.connections <= 16384:
            raise ConfigError(f"connections must lie between 16 and 16384, got {self.connections}")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigError("tls_cert and tls_key are given together, or neither")
        if self.client_ca is not None and self.tls_cert is None:
            raise ConfigError("client_ca needs TLS: give tls_cert and tls_key as well")
        for key, address in (("listen", self.listen), ("metrics", self.metrics)):
            if address:
                self._check_address(key, address)
        if self.traces and not self.traces.startswith(("http://", "https://")):
            raise ConfigError(f"traces: {self.traces!r} is not an http:// or https:// URL")
        if self.events_replay and not self.events:
            raise ConfigError("events_replay needs events: there is nothing to ask for again without it")
        if self.events_tenants and not self.events:
            raise ConfigError("events_tenants needs events: nobody is told anything without it")
        if (self.events_key is None) != (self.events_clients is None):
            raise ConfigError("events_key and events_clients are given together, or neither")
        if self.events_key is not None and not self.events:
            raise ConfigError("events_key needs events: there is nothing to connect to without it")
        for name in self.published_tenants - {EVERY_TENANT}:
            check_name("events_tenants", name)
        for key, endpoint in (("events", self.events), ("events_replay", self.events_replay)):
            if endpoint:
                self._check_endpoint(key, endpoint)

    def _check_address(self, key: str, address: str) -> None:
        host, _ = parse_address(address)
        if is_loopback(host) or self.insecure:
            return
        missing = []
        if self.tls_cert is None:
            missing.append("TLS (tls_cert and tls_key)")
        if self.token_file is None and self.client_ca is None:
            missing.append("a token_file or a client_ca")
        if missing:
            raise ConfigError(
                f"{key}: {address!r} can be reached from other hosts, which needs {' and '.join(missing)};"
                f" with insecure, whoever reaches it can read {'and write pages' if key == 'listen' else 'metrics'}"
            )

    def _check_endpoint(self, key: str, endpoint: str) -> None:
        scheme, _, rest = endpoint.partition("://")
        if scheme == "ipc" and rest.startswith("/"):
            return
        if scheme != "tcp":
            raise ConfigError(f"{key}: {endpoint!r} is neither tcp://HOST:PORT nor ipc:///path")
        host, _ = parse_address(rest)
        if not is_loopback(host) and self.events_key is None and not self.insecure:
            raise ConfigError(
                f"{key}: {endpoint!r} can be reached from other hosts, and ZeroMQ without keys asks nobody who they"
                " are: whoever reaches it would learn of every page; give events_key and events_clients, listen on"
                " loopback or ipc://, or say insecure"
            )

    @property
    def bulk_connections(self) -> int:
        """Most bulk connections at once."""
        return self.connections // 4

    @property
    def published_tenants(self) -> frozenset[str]:
        """The names in ``events_tenants``."""
        return frozenset(name.strip() for name in self.events_tenants.split(",") if self.events_tenants)

    @property
    def events_keys(self) -> tuple[Path, Path] | None:
        """``events_key`` and ``events_clients``, where there are such."""
        if self.events_key is None or self.events_clients is None:
            return None
        return self.events_key, self.events_clients

    @property
    def sharers(self) -> SocketGroup:
        """Who besides the node's own user may use socket and arena.

        Raises:
            ConfigError: there is no such group here.
        """
        if not self.group:
            return SocketGroup()
        try:
            number = int(self.group) if self.group.isdecimal() else grp.getgrnam(self.group).gr_gid
        except (KeyError, ValueError) as error:
            raise ConfigError(f"group: there is no group {self.group!r} on this host") from error
        if number > _LAST_GROUP:
            raise ConfigError(f"group: a group's number is at most {_LAST_GROUP}, got {number}")
        return SocketGroup(number)

    @property
    def arena_directory(self) -> Path:
        """Where the arena's files are."""
        return self.arena_dir or default_arena_directory(self.socket)


SETTINGS = settings_of(NodeConfig)
"""By key."""


def parse_address(text: str) -> tuple[str, int]:
    """Host and port of ``HOST:PORT``, ``[IPv6]:PORT``, ``:PORT`` or ``PORT``; no host is the loopback address.

    Raises:
        ConfigError: no such address.
    """
    host, _, port = text.rpartition(":")
    if (
        not (port.isascii() and port.isdigit())
        or not 0 <= int(port) <= 65535
        or (":" in host and not host.startswith("["))
    ):
        raise ConfigError(f"not an address: {text!r}; write it as HOST:PORT, [::1]:PORT or PORT (0 to 65535)")
    return host.strip("[]") or "127.0.0.1", int(port)


def is_loopback(host: str) -> bool:
    """Whether a host is this one, whatever a name server says."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
