"""``kvstore doctor``: checks the machine, the node and an engine, or explains why a prompt missed."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from kvstore.cli.connect import add_url_to, connect_to_node, default_url
from kvstore.cli.doctor import engine, machine, node, objects, sglang, tiers
from kvstore.cli.doctor.verdict import FAIL, OK, WARN, Verdict
from kvstore.cli.doctor.why import Known, Why, compare, why_missed
from kvstore.cli.namespace_choice import NAMESPACE, listing, unknown_namespace
from kvstore.cli.prompts import Prompt, read_prompt
from kvstore.cli.tables import print_line, print_table, shown
from kvstore.client.client import Client
from kvstore.client.url import EmbeddedConfig, parse_url, socket_url
from kvstore.config.load import load_config
from kvstore.config.node import NodeConfig, default_socket
from kvstore.errors import DeadlineError, InvalidRequestError, UnavailableError
from kvstore.layout import Layout
from kvstore.status import Status

_CODES = """\
exit codes:
  0  everything can work (warnings count as 0); with --why: every block is there
  1  something can't work as it is; with --why: a block is missing
  2  a flag or a file is wrong

examples:
  kvstore doctor --config /etc/kvstore.toml --engine-pid $(pgrep -f vllm | head -1)
  curl -s localhost:8000/tokenize -d '{"model": "M", "prompt": "..."}' | kvstore doctor --why - --namespace M
"""
_COLOURS = {OK: "green", WARN: "yellow", FAIL: "red"}
_LEAST_DIGITS = 6


def add_to(commands: argparse._SubParsersAction[Any]) -> None:
    """The command's flags."""
    doctor = commands.add_parser(
        "doctor",
        help="check machine, node and engine; explain why a prompt missed",
        description="Check what kvstore needs: shared memory, limits, users, versions, clocks, disk, Redis and, if you"
        " name one, an engine's flags and process. Nothing is changed. Run it on the node's host, as the engine's user."
        "\n\nWith --why FILE it explains why a prompt missed: it names the first missing block and the field of its key"
        " that differs. FILE holds a JSON array of token ids, what vLLM's /tokenize answers, or an object with tokens"
        " or hashes and, optionally, layout or namespace, and extra_keys.",
        epilog=_CODES,
    )
    add_url_to(doctor)
    doctor.add_argument(
        "--config", metavar="FILE", help="the node's settings file: needed to check Redis, and a node that is down"
    )
    doctor.add_argument(
        "--vllm", metavar="FLAGS", help="check these flags of vLLM: a command line, or --kv-transfer-config's value"
    )
    doctor.add_argument(
        "--sglang",
        metavar="FLAGS",
        help="check these flags of SGLang: a command line, or --hicache-storage-backend-extra-config's value",
    )
    doctor.add_argument(
        "--engine-pid", metavar="PID", type=int, help="check the flags and the user of this running engine"
    )
    doctor.add_argument(
        "--engine-python",
        metavar="PATH",
        help="check the packages of this Python, the engine's, and the hashes that it computes",
    )
    doctor.add_argument("--why", metavar="FILE", help="explain why this prompt missed; - reads standard input")
    doctor.add_argument(
        "--namespace", metavar=NAMESPACE, help="with --why: the namespace to ask, or the beginning of its name"
    )
    doctor.add_argument(
        "--extra-key",
        metavar="KEY",
        action="append",
        default=[],
        help="with --why: an extra key of every block, as a salt",
    )
    doctor.add_argument(
        "--against", metavar="FILE", help="with --why: compare with this prompt instead of asking a node"
    )
    doctor.add_argument("--json", action="store_true", help="print one JSON object")
    doctor.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Check, print, and return the exit code."""
    if options.why is not None:
        return _why(options)
    if options.namespace or options.extra_key or options.against:
        raise InvalidRequestError("--namespace, --extra-key and --against go with --why FILE")
    verdicts = _check_all(options)
    if options.json:
        counts = {level: sum(each.level == level for each in verdicts) for level in (OK, WARN, FAIL)}
        print(json.dumps({"findings": [dataclasses.asdict(each) for each in verdicts], "counts": counts}, indent=2))
    else:
        _print(verdicts)
    return 1 if any(each.level == FAIL for each in verdicts) else 0


def _check_all(options: argparse.Namespace) -> list[Verdict]:
    config = load_config(Path(options.config) if options.config else None, os.environ)
    # Without a socket in file or environment it looks for the node as every other command does.
    url = options.url or (default_url() if config.socket == default_socket() else socket_url(config.socket))
    address = parse_url(url)
    if isinstance(address, EmbeddedConfig):
        raise InvalidRequestError(f"{url}: an embedded store has no node to look at")
    if address.socket is not None:
        config = dataclasses.replace(config, socket=address.socket, arena_dir=address.arena_dir or config.arena_dir)
    verdicts = [node.check_socket(config.socket)] if address.local else []
    status: Status | None = None
    try:
        with connect_to_node(url) as client:
            asked = time.time()
            status = client.status()
            answered = time.time()
    except (UnavailableError, DeadlineError) as error:
        advice = error.advice or "start it (`kvstore serve`); if it exits, read its log"
        verdicts.append(Verdict("node", FAIL, str(error).removesuffix(f"; {error.advice}"), advice))
    except PermissionError as error:
        verdicts.append(Verdict("node", FAIL, str(error), "set KVSTORE_CONNECT_TOKEN_FILE to a file with a token"))
    else:
        verdicts += [node.check_version(status), node.check_clock(status, asked, answered)]
        config = node.node_config_of(config, status, here=address.local and address.arena_dir is None)
        if address.local:
            verdicts.append(node.check_arena(config.arena_directory))
    verdicts.append(node.check_hashes(status))
    if address.local:
        verdicts += _check_machine(config, None if status is None else status.pid, options.engine_pid)
    if status is not None:
        verdicts += node.check_certificate(status)
        verdicts += tiers.check_health(status)
    verdicts += tiers.check_redis(config, status)
    verdicts += objects.check_objects(config, status)
    verdicts += engine.check_versions(options.engine_python)
    verdicts.append(engine.check_core(options.engine_python))
    if options.engine_python is not None:
        verdicts.append(engine.check_hashes(options.engine_python))
    verdicts += _check_engine(options, config)
    if status is not None:
        verdicts += node.check_counters(status)
    return verdicts


def _check_machine(config: NodeConfig, pid: int | None, engine_pid: int | None) -> list[Verdict]:
    return [
        machine.check_shared_memory(config),
        machine.check_unused_arenas(config),
        *machine.check_memory(config, pid),
        *machine.check_limits(config, pid, engine_pid),
        machine.check_numa(config),
        *tiers.check_disk(config),
    ]


def _check_engine(options: argparse.Namespace, config: NodeConfig) -> list[Verdict]:
    verdicts = []
    if options.vllm is not None:
        verdicts += engine.check_flags(options.vllm, config.socket)
        if options.engine_pid is None:
            verdicts += engine.check_plugins(options.vllm, None, os.environ)
    if options.sglang is not None:
        verdicts += sglang.check_flags(options.sglang, config.socket)
    if options.engine_pid is not None:
        command = engine.command_of(options.engine_pid)
        if sglang.is_sglang(command):
            verdicts += sglang.check_flags(command, config.socket)
        else:
            verdicts += engine.check_flags(command, config.socket)
            verdicts += engine.check_plugins(command, options.engine_pid, os.environ)
        verdicts.append(engine.check_process(options.engine_pid, config.socket))
    return verdicts


def _print(verdicts: list[Verdict]) -> None:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column("level", no_wrap=True)
    table.add_column("subject", no_wrap=True)
    table.add_column("text", overflow="fold")
    for each in verdicts:
        advice = f"\n→ {escape(each.advice)}" if each.advice else ""
        level = f"[{_COLOURS[each.level]}]{each.level}[/]"
        table.add_row(level, each.subject, escape(each.text) + advice)
    print_table(table)
    warn, fail = (sum(each.level == level for each in verdicts) for level in (WARN, FAIL))
    print_line(f"{len(verdicts)} checks: {len(verdicts) - warn - fail} ok, {warn} to improve, {fail} that can't work")


# -- why did this prompt miss? -------------------------------------------------------------------------------------


def _why(options: argparse.Namespace) -> int:
    prompt = read_prompt(Path(options.why), options.extra_key)
    if options.against is not None:
        why = compare(prompt, read_prompt(Path(options.against)))
        namespace: Known | None = None
    else:
        with connect_to_node(options.url) as client:
            known = _known(client)
            namespace = _namespace(options.namespace or prompt.namespace, prompt, known)
            why = why_missed(prompt, namespace, known, client.explain)
    if options.json:
        name = namespace.shown_name if namespace is not None else None
        print(json.dumps({"namespace": name} | dataclasses.asdict(why), indent=2))
    else:
        _print_why(why, namespace)
    return 0 if why.block is None and why.present == why.asked else 1


def _known(client: Client) -> list[Known]:
    return [
        Known(Layout.from_json(each.layout), each.fingerprint, each.name, each.labels)
        for each in client.status().namespaces
    ]


def _namespace(wanted: str, prompt: Prompt, known: list[Known]) -> Known | None:
    """The namespace that is asked; None: the prompt has a layout that the node does not know."""
    if not wanted and prompt.layout is not None:
        return next((each for each in known if each.layout == prompt.layout), None)
    found = [each for each in known if each.shown_name == wanted]
    if not found and wanted:
        digits = len(wanted) >= _LEAST_DIGITS
        found = [
            each
            for each in known
            if wanted in each.labels
            or each.shown_name.startswith(wanted)
            or (digits and each.fingerprint.hex().startswith(wanted.lower()))
        ]
    if not found and not wanted:
        found = known
    if len(found) == 1:
        return found[0]
    if not found:
        raise InvalidRequestError(unknown_namespace(wanted, [(each.fingerprint, each.shown_name) for each in known]))
    listed = listing([(each.fingerprint, each.shown_name) for each in found])
    raise InvalidRequestError(f"more than one namespace fits: name one with --namespace:{listed}")


def _print_why(why: Why, namespace: Known | None) -> None:
    if namespace is not None:
        print_line(f"namespace {namespace.fingerprint.hex()[:12]} {shown(namespace.shown_name)}")
    tiers = f" ({', '.join(f'{count} in {tier}' for tier, count in why.tiers.items())})" if why.tiers else ""
    print_line(f"{why.present} of {why.asked} leading blocks are there{tiers}")
    if why.block is not None:
        size = namespace.layout.block_size if namespace is not None else 0
        tokens = f" (tokens {why.block * size} to {why.block * size + size - 1})" if size else ""
        print_line(f"first missing: block {why.block}{tokens}")
    if why.key_field:
        print_line(f"differs in: {why.key_field}")
    print_line(f"because: {why.reason}")
    if why.advice:
        print_line(f"→ {why.advice}")
    sys.stdout.flush()
