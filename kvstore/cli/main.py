"""The ``kvstore`` command: imports the module of the command that is called, and turns errors into exit codes."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import signal
import sys
from collections.abc import Sequence
from importlib import import_module

from kvstore.cli.exit_codes import EXIT_CODES, EXIT_FAILED, EXIT_USAGE
from kvstore.cli.parser import Parser
from kvstore.cli.stdout import checked_stdout
from kvstore.errors import DeadlineError, InvalidRequestError, KVStoreError, UnauthenticatedError, UnavailableError

_COMMANDS = {
    "kvstore.cli.serve": ("serve", "config"),
    "kvstore.cli.status": ("status", "namespaces", "top"),
    "kvstore.cli.pages": ("lookup", "evict", "pin", "unpin"),
    "kvstore.cli.clear": ("clear",),
    "kvstore.cli.warm": ("warm",),
    "kvstore.cli.doctor.command": ("doctor",),
    "kvstore.cli.check": ("check",),
    "kvstore.cli.objects": ("objects",),
    "kvstore.cli.bench.command": ("bench",),
    "kvstore.cli.plan.capacity": ("plan",),
    "kvstore.cli.proxy": ("proxy",),
    "kvstore.cli.responses": ("responses",),
    "kvstore.cli.documents": ("docs",),
}
"""Module → its commands. Only the module of the command that is called is imported: probes are called often."""
_READER_HAS_GONE = 128 + signal.SIGPIPE


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns its exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        return _run(given)
    except SystemExit as end:  # the parser's, behind --help, or rich's
        if isinstance(end.__context__, BrokenPipeError):  # the reader of a table has gone
            return _READER_HAS_GONE
        raise
    except BrokenPipeError:
        return _READER_HAS_GONE


def _run(given: list[str]) -> int:
    for stream in (sys.stdin, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # names are data: a terminal may not know all of their characters
    # gRPC's core, which reads this when it is imported, has a log of its own on stderr: a line for each handshake that
    # fails, however many there are.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    options: argparse.Namespace | None = None
    try:
        serves = given[:1] in (["serve"], ["proxy"]) and not {"-h", "--help"} & set(given)
        with checked_stdout(needed=not serves):
            if given[:1] == ["demo"]:
                return _demo(given[1:])
            if given[:1] == ["_namespaces"]:  # a shell asks: see kvstore.cli.completion
                return _offer_namespaces(*given[1:])
            parser = _parser(given[0] if given else "")
            if not given:
                parser.print_help(sys.stderr)
                return EXIT_USAGE
            options = parser.parse_args(given)
            return int(options.run(options))
    except KVStoreError as error:
        with contextlib.suppress(OSError):  # of stderr
            print(f"{_called(given, options)}: {error}{_what_to_do(error, options)}", file=sys.stderr)
        return EXIT_USAGE if isinstance(error, InvalidRequestError) else EXIT_FAILED
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _called(given: list[str], options: argparse.Namespace | None) -> str:
    """The command as it was called, without its arguments."""
    if options is None:  # nothing was parsed: --help
        return " ".join(("kvstore", *(each for each in given[:1] if each[:1] != "-")))
    inner = [getattr(options, options.command)] if options.command in ("bench", "responses") else []
    return " ".join(("kvstore", options.command, *inner))


def _what_to_do(error: KVStoreError, options: argparse.Namespace | None) -> str:
    """What to add to an error about reaching a node."""
    if options is None or "url" not in options or error.advice:
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


_START = """\
start here:
  kvstore serve                     run a node with the defaults, until Ctrl-C
  kvstore doctor                    check this machine, the node and an engine
  kvstore status                    what the node holds
  kvstore COMMAND --help            flags, defaults and examples of a command
  kvstore docs operations           how to install, size, watch and mend a node

"""


def _parser(command: str = "") -> Parser:
    """The parser of one command; of all, where that is none of those that stand alone."""
    parser = Parser(
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


def _offer_namespaces(line: str = "", breaks: str = "") -> int:
    from kvstore.cli.offered import offer

    offered = offer(line, breaks, lambda words: _parser(words[0] if words else "").awaits(words))
    print("".join(f"{each}\n" for each in offered), end="")
    return 0


def _demo(arguments: list[str]) -> int:
    try:
        from kvstore.connector.reference import demo  # the one import upwards: only the demo needs an engine, and torch
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        print("kvstore demo: torch is missing; pip install 'kvstore-offload[engine]'", file=sys.stderr)
        return EXIT_FAILED
    return int(demo.main(arguments))
