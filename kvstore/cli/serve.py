"""``kvstore serve`` and ``kvstore config show``: run a node, and print the settings that it would have."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import signal
import sys
import threading
import time
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from kvstore.cli.exit_codes import EXIT_CODES, EXIT_FAILED, EXIT_UNCLEAN, EXIT_USAGE
from kvstore.cli.logs import log_the_rest, log_to_stderr, say
from kvstore.cli.stdout import print_ready
from kvstore.client.url import socket_url
from kvstore.config.load import load_config, load_settings
from kvstore.config.node import SETTINGS, NodeConfig, parse_address
from kvstore.config.setting import ENVIRONMENT_PREFIX, in_order_of_flags
from kvstore.core.choice import check_choice
from kvstore.errors import InvalidRequestError, KVStoreError
from kvstore.host.malloc import keep_giving_back, keep_memory_for_messages, limit_malloc_arenas
from kvstore.host.service_manager import ServiceManager
from kvstore.node.node import Node
from kvstore.service.access.descriptor_budget import raise_limit
from kvstore.units import format_size

_MOST_SILENT_SECONDS = 90.0
"""How long the next step of the arena's memory may take before a service manager gives the start up."""
_DISK_SECONDS = 900.0
"""The same for what comes behind the arena: segments without a sound footer are read from their beginning."""
_BEHIND_DRAINING_SECONDS = 10.0
_log = logging.getLogger(__name__)


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add their parsers."""
    serve = commands.add_parser(
        "serve",
        help="run a node",
        description="Run a node: it keeps pages in shared memory and on disk, and serves them to the engines of this"
        " host and, with --listen, of others. Every flag is optional. Each can also be set in the environment"
        " (KVSTORE_ARENA=4GiB) or in a TOML file (--config); a flag wins over the environment, the environment over the"
        " file. Some settings have no flag, and the rules for namespaces and tenants are in the file only:"
        " `kvstore docs configuration` lists everything. `kvstore config show` prints the result without starting a"
        " node.",
        epilog="examples:\n  kvstore serve --arena 4GiB --disk ~/kvstore --disk-limit 100GiB\n"
        "  kvstore serve --config /etc/kvstore.toml\n\n" + EXIT_CODES,
    )
    _add_settings(serve)
    serve.set_defaults(run=_serve)

    config = commands.add_parser("config", help="print the settings that a node would use")
    group = config.add_subparsers(dest="config_command", required=True, metavar="WHAT")
    show = group.add_parser(
        "show",
        help="every setting, its value, and where the value comes from",
        description="Print every setting that `kvstore serve` would use with the same flags, environment and file, and"
        " where its value comes from. No node is started.",
        epilog=EXIT_CODES,
    )
    _add_settings(show)
    show.add_argument("--json", action="store_true", help="print one JSON object")
    show.set_defaults(run=_show)


def _add_settings(command: argparse.ArgumentParser) -> None:
    """The flags of settings, as they are declared, and that of the file."""
    for each in in_order_of_flags(SETTINGS):
        if each.flag is not None and each.flag.metavar:
            command.add_argument(each.flag_name, metavar=each.flag.metavar, help=each.flag_help)
        else:
            command.add_argument(each.flag_name, action="store_true", default=None, help=each.flag_help)
    command.add_argument(
        "--config", metavar="FILE", help="TOML file with settings; `kvstore docs configuration` lists them"
    )


def _sources(options: argparse.Namespace) -> tuple[Path | None, dict[str, str], dict[str, Any]]:
    """File, environment and flags."""
    given = {each.key: getattr(options, each.key) for each in in_order_of_flags(SETTINGS)}
    flags = {key: value for key, value in given.items() if value is not None}
    return Path(options.config) if options.config is not None else None, dict(os.environ), flags


def _show(options: argparse.Namespace) -> int:
    settings = load_settings(*_sources(options))
    NodeConfig(**{key: each.value for key, each in settings.items()})  # says what can't be used together
    if options.json:
        print(
            json.dumps({key: {"value": each.plain, "origin": each.origin} for key, each in settings.items()}, indent=2)
        )
        return 0
    width = max(map(len, settings))
    values = max(len(each.text) for each in settings.values())
    for key, each in settings.items():
        print(f"{key:{width}}  {each.text:{values}}  {each.origin}")
    return 0


def _serve(options: argparse.Namespace) -> int:
    sources = _sources(options)
    form = _format_asked_for(*sources)
    if form == "json":
        _log_as("info", form)  # until the settings are read: what is wrong with them is a line of the log, too
    try:
        check_choice()
        return _run_node(options, load_config(*sources))
    except KVStoreError as error:
        if form != "json":
            raise
        _log.error("the node does not start: %s", error)
        return EXIT_USAGE if isinstance(error, InvalidRequestError) else EXIT_FAILED


def _log_as(level: str, form: str) -> None:
    log_to_stderr(level, form)
    if form == "json":
        log_the_rest()


def _format_asked_for(file: Path | None, environment: Mapping[str, str], flags: Mapping[str, Any]) -> str:
    """The log's format, also where other settings are wrong."""
    form = flags.get("log_format") or environment.get(f"{ENVIRONMENT_PREFIX}LOG_FORMAT")
    if form is None and file is not None:
        with contextlib.suppress(OSError, ValueError):  # ``load_config`` says what is wrong
            form = tomllib.loads(file.read_text()).get("log_format")
    return "json" if form == "json" else "text"


def _run_node(options: argparse.Namespace, config: NodeConfig) -> int:
    limit_malloc_arenas()  # before there are threads
    raise_limit()
    keep_memory_for_messages()
    _log_as(config.log_level, config.log_format)
    manager = ServiceManager(os.environ)
    stop = threading.Event()
    reload = stopping = False

    def on_signal(number: int, frame: FrameType | None) -> None:
        nonlocal reload, stopping
        if number == signal.SIGHUP:
            reload = True
        elif not stopping:  # or it may be this that a second signal interrupts
            stopping = True
            stop.set()  # its lock must not be this thread's now: nothing here waits for it, or clears it

    def is_called_away() -> bool:
        return stopping or reload

    # Set before anything is opened: a stop that comes during start is a stop, too.
    arrived = _wake_by_signals()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, on_signal)
    try:
        with _ArenaProgress(stop, config.log_format, manager) as progress:
            node = Node(config, progress.update)
    except _StoppedError:
        say(config.log_format, logging.INFO, "stopped before it was ready")
        return 0
    keep_giving_back()
    if config.log_format == "json":
        say(config.log_format, logging.INFO, _status_line(node))
    print_ready(_ready_line(node))
    manager.ready(_status_line(node))
    while not stop.is_set():
        if reload:
            reload = False  # before: a signal that comes meanwhile counts again, and nothing of this one is waited for
            manager.reloading()
            wrong = _reload(node, options, is_called_away)
            manager.ready(_status_line(node) + (f"; the last reload failed: {wrong}" if wrong else ""))
        else:
            os.read(arrived, 1024)
    manager.stopping("writing back", node.config.drain_seconds + _BEHIND_DRAINING_SECONDS)
    say(node.config.log_format, logging.INFO, "stopping")
    clean = node.stop()
    _say_how_it_ended(node, clean=clean)
    # Not by returning: the interpreter would wait for threads that hang in the disk, with nothing left for them to do.
    os._exit(0 if clean else EXIT_UNCLEAN)


def _wake_by_signals() -> int:
    """A pipe's end that can be read once a signal has come, whichever thread the system gave it to.

    A main thread that waits for anything else is not woken by a signal that another thread got: Python's handlers run
    in the main thread, when it goes on.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    return reading


def _say_how_it_ended(node: Node, *, clean: bool) -> None:
    config = node.config
    say(
        config.log_format,
        logging.INFO,
        f"stopped; the arena's pages stay in {config.arena_directory} for the next start"
        f" (remove the folder to free its {format_size(config.arena)})",
    )
    if not clean:
        say(
            config.log_format,
            logging.ERROR,
            f"{node.left_pages} pages were not written back to disk within {config.drain_seconds:g} s;"
            " they are in the arena only, and are written when a node takes it over",
        )
    with contextlib.suppress(OSError):
        sys.stderr.flush()


def _reload(node: Node, options: argparse.Namespace, leave: Callable[[], bool] = lambda: False) -> str:
    """Read the settings again, and take over what a running node can change; a wrong setting changes nothing.

    Once ``leave`` says so, what takes long is not waited for: a token that the next SIGHUP takes away can't wait.

    Returns:
        What was wrong; it is logged as well.
    """
    try:
        config = load_config(*_sources(options))
        taken, ignored = node.reload(config, leave)
    except KVStoreError as error:
        _log.error("SIGHUP: nothing was reloaded: %s", error)
        return str(error)
    except Exception as error:  # noqa: BLE001 - a node that serves must not end by a mistake in a file
        _log.error("SIGHUP: not everything was reloaded, the node goes on: %r", error)
        _log.debug("SIGHUP", exc_info=True)
        return repr(error)
    _log_as(config.log_level, config.log_format)
    _log.info(
        "SIGHUP: log level, limits, quotas, certificates and tokens were reloaded%s",
        f"; changed: {', '.join(taken)}" if taken else "",
    )
    if ignored:
        _log.warning("SIGHUP: only a restart changes %s", ", ".join(ignored))
    return ""


def _status_line(node: Node) -> str:
    """What ``systemctl status`` shows of a node that serves."""
    return _ready_line(node).removeprefix("kvstore: ")


def _ready_line(node: Node) -> str:
    config: NodeConfig = node.config
    where = socket_url(config.socket)
    if node.port:
        where += f" and port {node.port} (bulk: {node.bulk_port})"
    if node.metrics_port:
        where += f", metrics on port {node.metrics_port}, console at {_console_url(node)}"
    kept = f", {node.store.kept_pages} pages kept" if node.store.arena.taken_over else ""
    disk = f"disk {format_size(config.disk_limit)} in {config.disk}" if config.disk_limit else "no disk tier"
    arena = f"arena {format_size(node.store.arena.arena_bytes)}{kept}"
    shared = f"; shares {format_size(config.redis_limit)} of Redis" if config.redis else ""
    objects = f"; {format_size(config.objects_limit)} in object storage" if config.objects else ""
    return f"kvstore: ready on {where} (pid {os.getpid()}; {arena}; {disk}{shared}{objects})"


def _console_url(node: Node) -> str:
    """Where a browser on this host finds the console."""
    host, _ = parse_address(node.config.metrics)
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - no address that is listened on
    scheme = "https" if node.config.tls_cert else "http"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{node.metrics_port}/console"


class _StoppedError(Exception):
    """A signal came during start."""


class _ArenaProgress:
    """A bar on stderr while the arena's memory is populated; lines where stderr is no terminal, or the log is JSON.

    Args:
        stop: set when the node is to be stopped; populating a large arena takes minutes.
        form: of the log.
        manager: told as well, and what else may take long.
    """

    def __init__(self, stop: threading.Event, form: str, manager: ServiceManager) -> None:
        self._stop = stop
        self._form = form
        self._manager = manager
        self._told_at = float("-inf")
        self._console = Console(stderr=True)
        self._shows = self._console.is_terminal and form != "json"
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
        self._tell(done, size)
        if self._shows:
            self._bar.update(self._task, completed=done, total=size)
        elif size >= 1 << 30 and done * 10 // size > self._tenth:
            self._tenth = done * 10 // size
            say(self._form, logging.INFO, f"populating the arena: {self._tenth * 10} %")

    def _tell(self, done: int, size: int) -> None:
        now = time.monotonic()
        if done == size:
            self._manager.starting("opening the disk", _DISK_SECONDS)
        elif now - self._told_at >= 1.0:
            self._told_at = now
            self._manager.starting(f"populating the arena: {100 * done // size} %", _MOST_SILENT_SECONDS)

    def __enter__(self) -> Self:
        if self._shows:
            self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._shows:
            self._bar.stop()
