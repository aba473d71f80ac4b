"""The ``kvstore`` command: imports the module of the command that is called, and turns errors into exit codes."""

from __future__ import annotations

import argparse
import io
import os
import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NoReturn

from kvstore.cli.exit_codes import EXIT_CODES, EXIT_FAILED, EXIT_USAGE
from kvstore.errors import DeadlineError, InvalidRequestError, KVStoreError, UnauthenticatedError, UnavailableError

_COMMANDS = {
    "kvstore.cli.serve": ("serve", "config"),
    "kvstore.cli.status": ("status", "namespaces", "top"),
    "kvstore.cli.pages": ("lookup", "evict", "clear", "pin", "unpin"),
    "kvstore.cli.warm": ("warm",),
    "kvstore.cli.doctor.command": ("doctor",),
    "kvstore.cli.check": ("check",),
    "kvstore.cli.bench.command": ("bench",),
    "kvstore.cli.bench.capacity_plan": ("plan",),
    "kvstore.cli.proxy": ("proxy",),
    "kvstore.cli.documents": ("docs",),
}
"""Module → its commands. Only the module of the command that is called is imported: probes are called often."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns its exit code."""
    try:
        try:
            code = _run(arguments)
        except SystemExit as end:  # the parser's, behind --help, or rich's
            if isinstance(end.__context__, BrokenPipeError):  # the reader of a table has gone
                return _stdout_is_closed()
            sys.stdout.flush()
            raise
        sys.stdout.flush()
    except BrokenPipeError:
        return _stdout_is_closed()
    return code


def _stdout_is_closed() -> int:
    """The reader of stdout has closed it, as ``head`` does: nothing more goes there, nor at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 128 + signal.SIGPIPE


def _run(arguments: Sequence[str] | None) -> int:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # names are data: a terminal may not know all of their characters
    given = list(sys.argv[1:] if arguments is None else arguments)
    # gRPC's core, which reads this when it is imported, has a log of its own on stderr: a line for each handshake that
    # fails, however many there are.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    options: argparse.Namespace | None = None
    try:
        if given[:1] == ["demo"]:
            return _demo(given[1:])
        parser = _parser(given[0] if given else "")
        if not given:
            parser.print_help(sys.stderr)
            return EXIT_USAGE
        options = parser.parse_args(given)
        return int(options.run(options))
    except KVStoreError as error:
        assert options is not None, "commands raise these, not the parser"
        command = " ".join(("kvstore", options.command, *([options.bench] if "bench" in options else [])))
        print(f"{command}: {error}{_what_to_do(error, options)}", file=sys.stderr)
        return EXIT_USAGE if isinstance(error, InvalidRequestError) else EXIT_FAILED
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _what_to_do(error: KVStoreError, options: argparse.Namespace) -> str:
    """What to add to an error about reaching a node."""
    if "url" not in options or error.advice:
        return ""
    if isinstance(error, UnavailableError) and "handshake failed" in str(error):
        return (
            "; the node is there, but its certificate is not accepted, or yours: check their dates, and the files that"
            " KVSTORE_CONNECT_CA, _CERT and _KEY name"
        )
    if isinstance(error, UnavailableError):
        return "; `kvstore doctor` looks for the cause"
    if isinstance(error, DeadlineError):
        return "; the node, or the network to it, hangs or is overloaded: `kvstore doctor` on its host says more"
    if isinstance(error, UnauthenticatedError):
        return (
            "; put the token into a file that only you can read (chmod 600), and name it in KVSTORE_CONNECT_TOKEN_FILE"
        )
    return ""


class _Help(argparse.HelpFormatter):
    """Wraps paragraphs to the terminal; those with indented lines (lists, examples) stay as they are."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        wrap = super()._fill_text
        paragraphs = text.strip("\n").split("\n\n")
        return "\n\n".join(each if "\n " in each else wrap(each, width, indent) for each in paragraphs)


class _Parser(argparse.ArgumentParser):
    """No abbreviations; a command that gets an argument it does not know says so itself, with the nearest it knows."""

    def __init__(self, **options: Any) -> None:
        settings: dict[str, Any] = {"formatter_class": _Help, "allow_abbrev": False} | options
        super().__init__(**settings)

    # Typed as the base class is, whose overloads tell namespaces apart.
    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As the base class; what it does not know is an error here, where the command is known."""
        options, unknown = super().parse_known_args(args, namespace)
        if unknown:
            from kvstore.config.rules import did_you_mean

            near = did_you_mean(unknown[0].partition("=")[0], self._option_string_actions)
            self.error(f"unrecognized arguments: {' '.join(unknown)}{near}")
        return options, unknown

    def _print_message(self, message: str, file: Any = None) -> None:
        """As the base class, but an error of stdout is one here."""
        if file is sys.stdout:
            file.write(message)
        else:
            super()._print_message(message, file)

    def error(self, message: str) -> NoReturn:
        """Print usage, message and where there is more, and end with 2."""
        self.print_usage(sys.stderr)
        self.exit(EXIT_USAGE, f"{self.prog}: error: {message} (`{self.prog} --help` says more)\n")


_START = """\
start here:
  kvstore serve                     run a node with the defaults, until Ctrl-C
  kvstore doctor                    check this machine, the node and an engine
  kvstore status                    what the node holds
  kvstore COMMAND --help            flags, defaults and examples of a command
  kvstore docs operations           how to install, size, watch and mend a node

"""


def _parser(command: str = "") -> argparse.ArgumentParser:
    """The parser of one command; of all, where that is none of those that stand alone."""
    parser: argparse.ArgumentParser = _Parser(
        prog="kvstore",
        description="Keeps the KV cache of LLM engines outside the engine: in shared memory, on disk and in Redis.",
        epilog=_START + EXIT_CODES,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    alone = [module for module, names in _COMMANDS.items() if command in names]
    for module in alone or _COMMANDS:
        import_module(module).add_to(commands)
    if alone:
        return parser
    from kvstore.status import kvstore_version

    parser.add_argument("--version", action="version", version=f"kvstore {kvstore_version()}")
    import_module("kvstore.cli.completion").add_to(commands, parser)
    commands.add_parser("demo", help="engines come and go, the pages stay: a minute (needs kvstore-offload[engine])")
    return parser


def _demo(arguments: list[str]) -> int:
    try:
        from kvstore.connector.reference import demo  # the one import upwards: only the demo needs an engine, and torch
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        print("kvstore demo: torch is missing; pip install 'kvstore-offload[engine]'", file=sys.stderr)
        return EXIT_FAILED
    return int(demo.main(arguments))
