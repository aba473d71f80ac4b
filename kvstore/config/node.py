"""What a node is told: one validated object from file, environment and flags, each winning over the one before."""

from __future__ import annotations

import dataclasses
import grp
import hashlib
import ipaddress
import logging
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvstore.config.rules import (
    NamespaceRule,
    TenantRule,
    did_you_mean,
    parse_rules,
    parse_tenants,
)
from kvstore.errors import ConfigError
from kvstore.security.grants import EVERY_TENANT, check_name
from kvstore.security.secret_files import check_private
from kvstore.security.socket_group import SocketGroup
from kvstore.units import format_duration, format_size, parse_duration, parse_size

DEFAULT_PORT = 7420
ENVIRONMENT_PREFIX = "KVSTORE_"
CONNECT_PREFIX = "KVSTORE_CONNECT_"
"""What begins so is for clients, not for nodes."""
_SIZES_FROM = 1 << 20
"""Smaller whole numbers are ports, or nothing."""
_LAST_GROUP = (1 << 32) - 2
_LOG_LEVELS = ("debug", "info", "warning", "error")
_LOG_FORMATS = ("text", "json")
Duration = float
"""Seconds; written as ``30d`` as well."""
_log = logging.getLogger(__name__)


def default_socket() -> Path:
    """``$XDG_RUNTIME_DIR/kvstore.sock``; without one ``/run/kvstore.sock`` for root, else a private folder in /tmp."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime:
        return Path(runtime) / "kvstore.sock"
    return Path("/run/kvstore.sock") if os.geteuid() == 0 else Path(f"/tmp/kvstore-{os.geteuid()}/kvstore.sock")  # noqa: S108


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
    """A node's settings. Keys of the file and names of the environment (``KVSTORE_ARENA``) are these fields.

    Raises:
        ConfigError: a value can't be used; the message names key, value and what would be right.
    """

    socket: Path = dataclasses.field(default_factory=default_socket)
    """Unix socket to serve on."""
    group: str = ""
    """Name or number of the group whose members may use socket and arena. Empty: the node's own user alone."""
    listen: str = ""
    """``HOST:PORT`` to serve on as well, or only ``PORT``: then on the loopback address. Empty: no TCP."""
    bulk_port: int = 0
    """TCP port for bulk connections, on the address of ``listen``. 0: any free one."""
    connections: int = 512
    """Most gRPC connections by TCP that are let in at once, and four times the most bulk connections."""
    metrics: str = ""
    """``HOST:PORT``, or only ``PORT`` on the loopback address, where Prometheus finds ``/metrics`` and probes
    ``/health``. Empty: nowhere."""
    events: str = ""
    """ZeroMQ endpoint for those who want to know which pages come and go, ``tcp://127.0.0.1:5557`` or ``ipc:///path``.
    Empty: none. Needs the extra ``events``."""
    events_replay: str = ""
    """ZeroMQ endpoint where subscribers ask for events that they missed. Empty: none."""
    events_tenants: str = ""
    """Names of tenants, separated by commas, whose pages ``events`` tells of; ``*``: all. Empty: only of pages that
    are no tenant's, since ZeroMQ asks nobody who they are."""
    events_key: Path | None = None
    """File of the secret key (CURVE) that the ZeroMQ endpoints have, as ``zmq.auth.create_certificates`` writes it:
    who connects to them then needs a key as well."""
    events_clients: Path | None = None
    """Folder of the public keys of those who may connect, ``*.key``."""
    traces: str = ""
    """Where OpenTelemetry's spans of calls go: OTLP over gRPC, ``http://127.0.0.1:4317``. Empty: nowhere. Needs the
    extra ``tracing``."""
    tls_cert: Path | None = None
    """PEM file of the node's certificate, the chain behind it: TCP then is TLS."""
    tls_key: Path | None = None
    """PEM file of its private key, which nobody else may read."""
    client_ca: Path | None = None
    """PEM file of the authorities that sign clients' certificates: TCP clients then need one."""
    token_file: Path | None = None
    """File of tokens, one a line, ``token`` or ``name:token``, each with its tenant and rights behind it: TCP clients
    then need one of them."""
    insecure: bool = False
    """Whether to listen on other addresses than loopback without TLS, or for whoever comes."""
    arena: int = 1 << 30
    """Bytes of shared memory for pages."""
    arena_dir: Path | None = None
    """Folder of the arena's files, on a tmpfs. By default one in /dev/shm that belongs to the socket's path."""
    numa_node: str = ""
    """Number of the NUMA node whose memory the arena is in. Empty: wherever the system puts it."""
    disk: Path = dataclasses.field(default_factory=default_disk)
    """Folder of the disk tier."""
    disk_limit: int = 10 << 30
    """Bytes that the disk tier may take, everything counted. 0: no disk tier."""
    disk_deadline: float = 5.0
    """Seconds after which a read or write of the disk is given up: a miss, or a page that is not on disk yet."""
    disk_write_limit: int = 0
    """Most bytes written to disk a day, what carrying pages over costs included. 0: no limit."""
    disk_key_file: Path | None = None
    """File with the key (32 bytes, or 64 hexadecimal digits) that encrypts pages on disk. Needs the extra
    ``encryption``."""
    redis: str = ""
    """URL of the Redis (or Valkey) that nodes share: ``redis://host:6379``, ``rediss://`` (TLS), ``unix:///path``,
    ``redis+sentinel://``, ``redis+cluster://``. Empty: this node shares nothing."""
    redis_limit: int = 10 << 30
    """Bytes that pages may take in Redis, of all nodes together: the same on each of them."""
    namespace: tuple[NamespaceRule, ...] = ()
    """In the file only: ``[[namespace]]`` tables with ``match`` (a pattern over names), quotas in bytes for ``arena``,
    ``disk`` and ``redis``, ``durability = "disk"`` and ``expire``. The first that matches counts."""
    tenant: tuple[TenantRule, ...] = ()
    """In the file only: ``[[tenant]]`` tables with ``name``, quotas in bytes for ``arena``, ``disk`` and ``redis``,
    ``requests_per_second`` and ``bytes_per_second``."""
    expire_namespaces: Duration = 0.0
    """Seconds after which a namespace that nobody uses is dropped from arena and disk, unless its rule says otherwise.
    0: never."""
    verify_checksums: bool = True
    """Whether pages from disk are verified. Off, a damaged page is served: only for showing that this matters."""
    drain_seconds: float = 10.0
    """How long a stopping node waits for calls under way and for writing back."""
    log_level: str = "info"
    log_format: str = "text"
    """``text``, or ``json``: one JSON object a line."""

    def __post_init__(self) -> None:
        if self.arena < 1 << 16:
            raise ConfigError(f"arena is {self.arena} bytes, the least is 64KiB")
        if self.disk_limit and self.disk_limit < 1 << 20:
            raise ConfigError(f"disk_limit is {self.disk_limit} bytes, the least is 1MiB (or 0: no disk tier)")
        if not 0 < self.disk_deadline <= 3600:
            raise ConfigError(f"disk_deadline must be above 0 and at most 3600 seconds, got {self.disk_deadline}")
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


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting's value, and who gave it."""

    value: Any
    origin: str
    """``default``, the file's path, a name of the environment, or a flag."""
    duration: bool = False
    """Whether a number is a time."""

    @property
    def plain(self) -> Any:
        """The value for JSON: sizes in bytes, times in seconds, None for nothing; without passwords."""
        if isinstance(self.value, tuple):
            return [dataclasses.asdict(rule) for rule in self.value]
        if isinstance(self.value, bool | int | float):
            return self.value
        return None if self.value in (None, "") else _without_passwords(str(self.value))

    @property
    def text(self) -> str:
        """The value as one would write it, without the passwords that a URL may hold."""
        if isinstance(self.value, tuple):
            return f"{len(self.value)} rules" if self.value else "none"
        if isinstance(self.value, float):
            return (format_duration(self.value) if self.duration else f"{self.value:g}s") if self.value else "none"
        if isinstance(self.value, bool):
            return str(self.value).lower()
        if isinstance(self.value, int) and self.value >= _SIZES_FROM:
            return format_size(self.value)
        return "none" if self.value in (None, "") else _without_passwords(str(self.value))


def _warn_of_readable_passwords(file: Path, settings: Mapping[str, Setting]) -> None:
    secret = [key for key, each in settings.items() if str(each.value) != _without_passwords(str(each.value))]
    if not secret:
        return
    try:
        check_private(file, "settings file")
    except ConfigError as error:  # no reason not to start: whoever could has read it
        _log.warning("%s; it holds the password of %s", error, ", ".join(secret))


def _without_passwords(text: str) -> str:
    text = re.sub(r"(?<=://)([^/?#]*?):[^/?#]*@", r"\1:***@", text)
    return re.sub(r"(?<=password=)[^&#]*", "***", text)


def load_config(
    file: Path | None = None,
    environment: Mapping[str, str] | None = None,
    flags: Mapping[str, Any] | None = None,
) -> NodeConfig:
    """The settings of a TOML file, the environment and the flags, each winning over the one before.

    Raises:
        ConfigError: the file can't be read, a key is unknown, or a value can't be used.
    """
    return NodeConfig(**{key: each.value for key, each in load_settings(file, environment, flags).items()})


def load_settings(
    file: Path | None = None,
    environment: Mapping[str, str] | None = None,
    flags: Mapping[str, Any] | None = None,
) -> dict[str, Setting]:
    """Every setting by its key, and where its value comes from; whether they go together is not looked at.

    Raises:
        ConfigError: the file can't be read, a key is unknown, or a value can't be used alone.
    """
    given: dict[str, Setting] = {}
    if file is not None:
        given |= {key: Setting(_convert(key, value, str(file)), str(file)) for key, value in _read(file).items()}
        _warn_of_readable_passwords(file, given)
    for name, text in sorted((environment or {}).items()):
        key = name.removeprefix(ENVIRONMENT_PREFIX).lower()
        if not name.startswith(ENVIRONMENT_PREFIX) or name.startswith(CONNECT_PREFIX):
            continue
        if key in _FIELDS:
            if _FIELDS[key].startswith("tuple"):
                raise ConfigError(f"{name}: {key} is given in the file only, as [[{key}]]")
            given[key] = Setting(_convert(key, text, name), name)
        else:
            # Not an error: orchestrators set variables of their own after the name of a service.
            _log.warning("the environment's %s is not a setting of kvstore%s", name, did_you_mean(key, _FIELDS))
    for key, value in (flags or {}).items():
        flag = "--" + key.replace("_", "-")
        given[key] = Setting(_convert(key, value, flag), flag)
    return {
        field.name: dataclasses.replace(
            given.get(field.name, Setting(_default(field), "default")), duration=_FIELDS[field.name] == "Duration"
        )
        for field in dataclasses.fields(NodeConfig)
    }


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


_FIELDS = {field.name: str(field.type) for field in dataclasses.fields(NodeConfig)}


def _read(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text())
    except OSError as error:
        raise ConfigError(f"{file} can't be read: {error.strerror}") from error
    except RecursionError as error:
        raise ConfigError(f"{file} is not valid TOML: brackets in brackets, too many") from error
    except ValueError as error:  # no TOML, no UTF-8, or a number with thousands of digits
        raise ConfigError(f"{file} is not valid TOML: {error}") from error


def _convert(key: str, value: object, origin: str) -> object:
    """A setting in its field's type."""
    if key not in _FIELDS:
        near = did_you_mean(key, _FIELDS) or f"; known keys: {', '.join(_FIELDS)}"
        raise ConfigError(f"{origin}: unknown key {key!r}{near}")
    kind = _FIELDS[key]
    if isinstance(value, str | Path) and "\0" in str(value):
        raise ConfigError(f"{origin}: {key} can't be {str(value)!r}: there is a zero byte in it")
    try:
        if kind == "int" and isinstance(value, int | str):
            return parse_size(value)
        if kind == "Duration" and isinstance(value, int | float | str):
            return parse_duration(value)
        if kind.startswith("tuple"):
            return parse_tenants(value) if key == "tenant" else parse_rules(value)
        if kind.startswith("Path") and isinstance(value, str | Path) and str(value):
            return Path(value).expanduser()
        if kind == "float" and isinstance(value, int | float | str) and not isinstance(value, bool):
            return _seconds(value)
        if kind == "bool" and str(value).lower() in ("true", "false", "1", "0"):
            return str(value).lower() in ("true", "1")
        if kind == "str" and isinstance(value, str | int) and not isinstance(value, bool):
            return str(value)
    except (ValueError, RuntimeError) as error:  # RuntimeError: no such user's home
        raise ConfigError(f"{origin}: {key}: {error}") from error
    raise ConfigError(f"{origin}: {key} can't be {value!r}")


def _seconds(value: float | str) -> float:
    try:
        return float(value)
    except (ValueError, OverflowError) as error:
        raise ConfigError(f"not a number of seconds: {value!r}") from error
