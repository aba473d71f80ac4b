"""The ``kvstore`` command."""

from __future__ import annotations

import argparse
import io
import os
import signal
import sys
from collections.abc import Sequence

from kvstore import (
    check_command,
    completion_command,
    doctor_command,
    page_commands,
    proxy_command,
    serve_command,
    status_command,
    warm_command,
)
from kvstore.bench import command as bench_command
from kvstore.bench import plan
from kvstore.errors import InvalidRequestError, KVStoreError, UnauthenticatedError, UnavailableError
from kvstore.exit_codes import EXIT_CODES, EXIT_FAILED, EXIT_USAGE
from kvstore.status import kvstore_version


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
        print(f"{command}: {error}{_what_to_do(error, options)}", file=sys.stderr)
        return EXIT_USAGE if isinstance(error, InvalidRequestError) else EXIT_FAILED
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _what_to_do(error: KVStoreError, options: argparse.Namespace) -> str:
    """Some words more for whoever wants to talk to a node."""
    if "url" not in options:
        return ""
    if isinstance(error, UnavailableError):
        return "; start the node (`kvstore serve`), or name another one by --url; `kvstore doctor` looks for the reason"
    if isinstance(error, UnauthenticatedError):
        return "; write the token into a file of yours alone (chmod 600), and name it in KVSTORE_CONNECT_TOKEN_FILE"
    return ""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvstore",
        description="Keeps the KV cache of LLM serving engines outside the engine.",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"kvstore {kvstore_version()}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    serve_command.add_to(commands)
    status_command.add_to(commands)
    page_commands.add_to(commands)
    warm_command.add_to(commands)
    doctor_command.add_to(commands)
    check_command.add_to(commands)
    bench_command.add_to(commands)
    plan.add_to(commands)
    proxy_command.add_to(commands)

    completion_command.add_to(commands, parser)
    commands.add_parser("demo", help="the main job, end to end, in about a minute (needs kvstore-offload[engine])")
    return parser


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
