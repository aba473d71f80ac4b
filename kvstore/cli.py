"""The ``kvstore`` command."""

from __future__ import annotations

import argparse
import dataclasses
import io
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Table

from kvstore import check_command, page_commands
from kvstore.answers import TIER_NAMES
from kvstore.bench import command as bench_command
from kvstore.bench import plan
from kvstore.bytesize import format_size
from kvstore.client.environment import add_url_to, connect_to_node
from kvstore.client.url import socket_url
from kvstore.config import NodeConfig, default_disk, default_socket, load_config
from kvstore.errors import InvalidRequestError, KVStoreError
from kvstore.node import Node
from kvstore.status import NamespaceStatus, Status, kvstore_version

EXIT_FAILED, EXIT_USAGE, EXIT_UNCLEAN = 1, 2, 3
_EXIT_CODES = """\
exit codes:
  0  done; serve: stopped by SIGTERM or SIGINT, everything written back
  1  failed; the line on stderr says why
  2  a flag, a configuration key or a URL can't be used
  3  serve: stopped, but not everything was written back in time
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns its exit code."""
    try:
        code = _run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        return _stdout_is_closed()
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):  # a table's: rich ends the process then
            return _stdout_is_closed()
        raise
    return code


def _stdout_is_closed() -> int:
    """Whoever reads stdout has enough, as ``head`` does: nothing more goes there, at the interpreter's end neither."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 128 + signal.SIGPIPE


def _run(arguments: Sequence[str] | None) -> int:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # names are data: a terminal may not know all of their characters
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["demo"]:
        return _demo(given[1:])
    options = _parser().parse_args(given)
    try:
        return int(options.run(options))
    except KVStoreError as error:
        command = " ".join(("kvstore", options.command, *([options.bench] if "bench" in options else [])))
        print(f"{command}: {error}", file=sys.stderr)
        return EXIT_USAGE if isinstance(error, InvalidRequestError) else EXIT_FAILED
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvstore",
        description="Keeps the KV cache of LLM serving engines outside the engine.",
        epilog=_EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"kvstore {kvstore_version()}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    serve = commands.add_parser(
        "serve",
        help="run a node",
        description="Run a node: pages in shared memory and on disk, served to engines on this host and, where asked,"
        " on others. Every flag is optional; the same settings can be given in a TOML file (--config) and in the"
        " environment (KVSTORE_ARENA=4GiB), and those without a flag there only: quotas and durability of namespaces,"
        " disk_deadline, drain_seconds, log_level; docs/configuration.md has them all. Flags win over the environment,"
        " the environment over the file.",
        epilog="example:\n  kvstore serve --arena 4GiB --disk /var/lib/kvstore --disk-limit 100GiB\n\n" + _EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    serve.add_argument("--socket", metavar="PATH", help=f"Unix socket to serve on (here: {default_socket()})")
    serve.add_argument(
        "--listen", metavar="HOST:PORT", help="serve on TCP as well; only a PORT means the loopback address"
    )
    serve.add_argument(
        "--bulk-port", metavar="PORT", help="TCP port for bulk connections beside --listen (default: any free one)"
    )
    serve.add_argument("--tls-cert", metavar="FILE", help="TLS on TCP with this certificate (PEM, its chain behind it)")
    serve.add_argument("--tls-key", metavar="FILE", help="the certificate's private key (PEM), its owner's alone")
    serve.add_argument(
        "--client-ca", metavar="FILE", help="TCP clients need a certificate that these authorities signed (PEM)"
    )
    serve.add_argument("--token-file", metavar="FILE", help="TCP clients need a token: one a line, TOKEN or NAME:TOKEN")
    serve.add_argument(
        "--insecure",
        action="store_true",
        default=None,
        help="listen on other addresses than loopback without TLS, or for whoever comes",
    )
    serve.add_argument("--arena", metavar="SIZE", help="shared memory for pages, as 512MiB or 64GiB (default: 1GiB)")
    serve.add_argument(
        "--arena-dir", metavar="DIR", help="tmpfs folder of the arena (default: one in /dev/shm, by socket)"
    )
    serve.add_argument("--disk", metavar="DIR", help=f"folder of the disk tier (here: {default_disk()})")
    serve.add_argument("--disk-limit", metavar="SIZE", help="most bytes on disk; 0: no disk tier (default: 10GiB)")
    serve.add_argument(
        "--disk-write-limit", metavar="SIZE", help="most bytes written to disk a day, for an SSD's sake (default: any)"
    )
    serve.add_argument("--disk-key-file", metavar="FILE", help="encrypt what is on disk with the key in this file")
    serve.add_argument("--redis", metavar="URL", help="the Redis that nodes share, as redis://10.0.0.5:6379")
    serve.add_argument(
        "--redis-limit", metavar="SIZE", help="most bytes in Redis, the same on every node (default: 10GiB)"
    )
    serve.add_argument("--config", metavar="FILE", help="TOML file of settings; docs/configuration.md has all of them")
    serve.set_defaults(run=_serve)

    status = commands.add_parser(
        "status",
        help="what a node holds and has done",
        epilog="For TLS and tokens, KVSTORE_CONNECT_CA, _CERT, _KEY and _TOKEN_FILE in the environment name files.",
        allow_abbrev=False,
    )
    add_url_to(status)
    status.add_argument("positional_url", nargs="?", metavar="URL", help="the same as --url URL")
    status.add_argument("--json", action="store_true", help="print one JSON object")
    status.set_defaults(run=_status)

    page_commands.add_to(commands)
    check_command.add_to(commands)
    bench_command.add_to(commands)
    plan.add_to(commands)

    commands.add_parser("demo", help="the main job, end to end, in about a minute (needs kvstore-offload[engine])")
    return parser


def _serve(options: argparse.Namespace) -> int:
    names = [
        "socket",
        "listen",
        "bulk_port",
        "tls_cert",
        "tls_key",
        "client_ca",
        "token_file",
        "insecure",
        "arena",
        "arena_dir",
        "disk",
        "disk_limit",
        "disk_write_limit",
        "disk_key_file",
        "redis",
        "redis_limit",
    ]
    flags = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    config = load_config(Path(options.config) if options.config is not None else None, os.environ, flags)
    logging.basicConfig(
        level=config.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
    stop = threading.Event()

    def on_signal(number: int, frame: FrameType | None) -> None:
        stop.set()

    # Set before anything is opened: a stop that comes during start is a stop, too.
    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGINT, on_signal)
    try:
        with _ArenaProgress(stop) as progress:
            node = Node(config, progress.update)
    except _StoppedError:
        print("kvstore: stopped before it was ready", file=sys.stderr)
        return 0
    print(_ready_line(node), flush=True)
    stop.wait()
    print("kvstore: stopping", file=sys.stderr)
    clean = node.stop()
    print(
        f"kvstore: stopped; the arena's pages stay in {config.arena_directory} for the next start"
        f" (remove the folder to free its {format_size(config.arena)})",
        file=sys.stderr,
    )
    if not clean:
        print(
            f"kvstore: not every page was written back to disk within {config.drain_seconds:g} s;"
            " those that were not are in the arena only",
            file=sys.stderr,
        )
    sys.stdout.flush()
    sys.stderr.flush()
    # Not by returning: the interpreter would wait for threads that hang in the disk, with nothing left for them to do.
    os._exit(0 if clean else EXIT_UNCLEAN)


def _ready_line(node: Node) -> str:
    config: NodeConfig = node.config
    where = socket_url(config.socket)
    if node.port:
        where += f" and port {node.port} (bulk: {node.bulk_port})"
    kept = f", {node.store.kept_pages} pages kept" if node.store.arena.taken_over else ""
    disk = f"disk {format_size(config.disk_limit)} in {config.disk}" if config.disk_limit else "no disk tier"
    arena = f"arena {format_size(node.store.arena.arena_bytes)}{kept}"
    shared = f"; shares {format_size(config.redis_limit)} of Redis" if config.redis else ""
    return f"kvstore: ready on {where} (pid {os.getpid()}; {arena}; {disk}{shared})"


class _StoppedError(Exception):
    """A signal came during start."""


class _ArenaProgress:
    """A bar on stderr while the arena's memory is populated; plain lines where stderr is no terminal.

    Args:
        stop: set when the node is to be stopped; populating a large arena takes minutes.
    """

    def __init__(self, stop: threading.Event) -> None:
        self._stop = stop
        self._console = Console(stderr=True)
        self._bar = Progress(
            TextColumn("kvstore: populating the arena"),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TransferSpeedColumn(),
            console=self._console,
            transient=True,
        )
        self._task = self._bar.add_task("arena", total=None)
        self._tenth = 0

    def update(self, done: int, size: int) -> None:
        """So many bytes of so many are done.

        Raises:
            _StoppedError: no more are wanted.
        """
        if self._stop.is_set():
            raise _StoppedError
        if self._console.is_terminal:
            self._bar.update(self._task, completed=done, total=size)
        elif size >= 1 << 30 and done * 10 // size > self._tenth:
            self._tenth = done * 10 // size
            print(f"kvstore: populating the arena: {self._tenth * 10} %", file=sys.stderr, flush=True)

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._console.is_terminal:
            self._bar.stop()


def _status(options: argparse.Namespace) -> int:
    if options.url is not None and options.positional_url is not None:
        raise InvalidRequestError("name one node: --url URL or URL, not both")
    with connect_to_node(options.url if options.url is not None else options.positional_url) as client:
        status = client.status()
    if options.json:
        print(json.dumps(_plain(dataclasses.asdict(status)), indent=2))
    else:
        _print_status(status)
    return 0


def _print_status(status: Status) -> None:
    console = Console()
    console.print(
        f"kvstore {status.version}, pid {status.pid}, up {status.uptime_seconds:.0f} s, {status.clients} clients"
    )
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("tier", "used", "limit", "pages", "hit", "asked", "stored", "evicted", "overrun", "refused"):
        table.add_column(column, justify="left" if column == "tier" else "right")
    for tier in status.tiers:
        counters = [
            f"{tier.counters[name]:,}" if name in tier.counters else "–"
            for name in ("hit", "asked", "stored", "evicted", "overrun", "refused")
        ]
        sizes = (format_size(tier.used_bytes), format_size(tier.limit_bytes), f"{tier.pages:,}")
        table.add_row(tier.name, *sizes, *counters)
    console.print(table)
    for namespace in status.namespaces:
        console.print(
            _namespace_line(namespace),
            highlight=False,
            markup=False,  # a name is data: brackets in it mean nothing
            soft_wrap=True,
        )


def _namespace_line(namespace: NamespaceStatus) -> str:
    parts = [f"{namespace.arena_pages:,} pages of {format_size(namespace.page_bytes)} in the arena"]
    if namespace.pinned_pages:
        parts.append(f"{namespace.pinned_pages:,} pinned")
    for tier in [name for name in TIER_NAMES if name and name in namespace.used_bytes]:
        quota = namespace.quota_bytes.get(tier)
        of = f" of {format_size(quota)}" if quota else ""
        parts.append(f"{tier} {format_size(namespace.used_bytes[tier])}{of}")
    if namespace.durability:
        parts.append(f"durability {namespace.durability}")
    return f"{namespace.fingerprint.hex()[:12]} {namespace.name}: {', '.join(parts)}"


def _plain(value: Any) -> Any:
    """The same with bytes as hexadecimal text, for JSON."""
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value


def _demo(arguments: list[str]) -> int:
    try:
        from connector.reference import demo  # the one import upwards: only the demo needs an engine, and torch
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        print("kvstore demo: torch is missing; pip install 'kvstore-offload[engine]'", file=sys.stderr)
        return EXIT_FAILED
    return int(demo.main(arguments))


if __name__ == "__main__":
    sys.exit(main())
