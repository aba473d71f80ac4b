"""``kvstore responses``: what a proxy's cache of responses holds, what it would tell, and how to remove from it."""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvstore.cli import embedding_flags
from kvstore.cli.exit_codes import EXIT_CODES
from kvstore.cli.responses_store import SQLITE, StoreFlags, read_secret
from kvstore.errors import ConfigError, InvalidRequestError, UnavailableError
from kvstore.responses.embedding.failure import EmbeddingError
from kvstore.responses.explain import Explanation, explain_similar
from kvstore.responses.names import entry_name, key_digest
from kvstore.responses.policy import CacheControl, Caller, refusal
from kvstore.responses.request import CHAT, COMPLETIONS, NotCacheable, read_request
from kvstore.responses.similar import Similar
from kvstore.responses.store import Choice, Label, Limits
from kvstore.units import format_duration, format_size

_FLAGS = StoreFlags.with_prefix("")
_WHERE = (
    "the store, as the proxy's --responses names it: sqlite, a file's path, or the URL of a Redis (default: sqlite)"
)
_EMBEDDING = "--"
_MOST_BOUND = 50.0
_SHOWN_NAME, _SHOWN_GROUP, _SHOWN_PROMPT = 16, 8, 60
"""Characters in a table."""


def add_to(commands: argparse._SubParsersAction[Any]) -> None:
    """Add its parser, and one for each thing that it does."""
    responses = commands.add_parser(
        "responses",
        help="look into the responses that a proxy keeps, and remove some",
        description="Look into the responses that a proxy keeps (its --responses), and remove some.",
        epilog="`kvstore docs responses` says what is kept.\n\n" + EXIT_CODES,
    )
    group = responses.add_subparsers(dest="responses", required=True, metavar="WHAT")
    for name, words, run in (
        ("status", "how many there are, and how many similar prompts may find", _status),
        ("list", "each of them: its name, model, tenant, group of similar prompts, age", _list),
        ("delete", "remove some; every proxy that shares the store finds them gone", _delete),
        ("explain", "whether a request is looked up, what it would find, and what a similar one was told", _explain),
    ):
        each = group.add_parser(name, help=words, description=words[0].upper() + words[1:] + ".", epilog=_EPILOGS[name])
        _FLAGS.add_to(each, _WHERE, SQLITE)
        each.add_argument("--json", action="store_true", help="print JSON")
        each.set_defaults(run=run)
        if name in ("delete", "explain"):
            _FLAGS.add_key_to(each)
            each.add_argument(
                "--api-key-file", metavar="FILE", type=Path, help="holds the API key by which they were asked for"
            )
            each.add_argument("--tenant", metavar="NAME", help="of this tenant")
        if name == "delete":
            each.add_argument("--entry", metavar="NAME", help="as X-KVStore-Cache and `list --json` say it")
            each.add_argument("--model", metavar="NAME", help="of this model, as requests name it")
            each.add_argument("--all", action="store_true", help="all of them")
        if name == "explain":
            each.add_argument("request", metavar="REQUEST", help="the request's body, JSON; - reads it from stdin")
            each.add_argument(
                "--cache-control", metavar="VALUE", default="", help="the request's header of this name, as max-age=60"
            )
            each.add_argument(
                "--similar",
                metavar="PERCENT",
                type=float,
                default=2.0,
                help="the bound on wrong answers, as the proxy's --responses-similar (default: 2)",
            )
            embedding_flags.add_to(each, _EMBEDDING)


_EPILOGS = {
    "status": "example:\n  kvstore responses status",
    "list": "example:\n  kvstore responses list --store sqlite",
    "delete": "What is given must all be so of an entry that is removed. The key file is for --api-key-file.\n\n"
    "example:\n  kvstore responses delete --model my-model --tenant search",
    "explain": "Without --api-key-file and --tenant: for a caller who shows no key.\n\n"
    'example:\n  kvstore responses explain \'{"model": "m", "prompt": "Hi", "temperature": 0}\''
    " --key-file /etc/kvstore/responses.key",
}


def _status(options: argparse.Namespace) -> int:
    store = _FLAGS.open(options, Limits())
    try:
        usage = store.usage()
    finally:
        store.close()
    if options.json:
        print(json.dumps(asdict(usage)))
    else:
        print(f"{usage.entries} responses, {format_size(usage.bytes)} with prompts and outcomes")
        print(f"{usage.prompts} of them may be found by similar prompts; {usage.outcomes} outcomes of comparisons")
    return 0


def _list(options: argparse.Namespace) -> int:
    from kvstore.cli.tables import figures_table, print_table, shown

    store = _FLAGS.open(options, Limits())
    now = time.time()
    columns = ("entry", "model", "tenant", "group")
    table = figures_table(*columns, "age", "ends in", left=columns)
    try:
        groups = store.groups()
        for label in sorted(store.labels(), key=lambda label: label.stored_at):
            if options.json:
                print(json.dumps(asdict(label) | {"group": groups.get(label.entry)}))
            else:
                age, left = (format_duration(each) for each in (now - label.stored_at, label.expires_at - now))
                group = groups.get(label.entry, "-")[:_SHOWN_GROUP]
                table.add_row(label.entry[:_SHOWN_NAME], shown(label.model), shown(label.tenant), group, age, left)
    finally:
        store.close()
    if not options.json:
        print_table(table)
    return 0


def _delete(options: argparse.Namespace) -> int:
    key = None if options.api_key_file is None else key_digest(_FLAGS.sealing(options), _api_key(options))
    choice = Choice(options.entry, options.tenant, key, options.model)
    if (choice == Choice()) != options.all:
        raise InvalidRequestError("say which: --entry, --api-key-file, --tenant, --model, or --all alone")
    store = _FLAGS.open(options, Limits())
    try:
        gone = store.delete(choice)
    finally:
        store.close()
    print(json.dumps({"deleted": gone}) if options.json else f"{gone} deleted")
    return 0


def _explain(options: argparse.Namespace) -> int:
    if not 0 < options.similar <= _MOST_BOUND:
        raise ConfigError(f"--similar must be above 0 and at most {_MOST_BOUND:g} percent, got {options.similar:g}")
    text = sys.stdin.read() if options.request == "-" else options.request
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"the request is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise InvalidRequestError("the request is not a JSON object")
    sealing, embedding = _FLAGS.sealing(options), embedding_flags.read(options, _EMBEDDING)
    request = read_request(CHAT if "messages" in fields else COMPLETIONS, fields)
    refused = (
        request if isinstance(request, NotCacheable) else refusal(request, CacheControl.read(options.cache_control))
    )
    if isinstance(request, NotCacheable) or refused is not None:
        assert refused is not None, "one of both"
        said = {"looked_up": False, "reason": refused.reason, "words": refused.words}
        print(json.dumps(said) if options.json else f"computed, and not kept: {refused.words}")
        return 0
    caller = Caller("" if options.api_key_file is None else _api_key(options), options.tenant or "")
    entry = entry_name(sealing, request, caller)
    store = _FLAGS.open(options, Limits())
    try:
        found = store.get(entry)
        how = Similar(None, options.similar / 100, vector=embedding.vector, vectors=embedding.vectors)
        similar = explain_similar(store, sealing, how, time.time, request, caller)
    except EmbeddingError as error:
        raise UnavailableError(f"the prompt has no embedding: {error}") from error
    finally:
        embedding.close()
        store.close()
    readable = found is not None and sealing.open(found.label, found.sealed) is not None
    if options.json:
        label = None if found is None else asdict(found.label)
        said = {"looked_up": True, "entry": entry, "found": label, "readable": readable, "similar": asdict(similar)}
        print(json.dumps(said))
    else:
        print(f"looked up as {entry}: {_found(None if found is None else found.label, readable)}")
        _print_similar(similar)
    return 0


def _print_similar(similar: Explanation) -> None:
    from kvstore.cli.tables import figures_table, print_table, shown

    if similar.told:
        print(
            f"where nothing equal is kept, and --responses-similar is given and not shut by its checks: told what"
            f" {similar.told} was told: {similar.why}; while these runs of instances go on: {similar.weights}"
        )
    else:
        print(f"where nothing equal is kept, it is computed: {similar.why}")
    if not similar.candidates:
        return
    columns = ("entry", "prompt", "guards")
    table = figures_table(*columns, "similarity", "wrong", "outcomes", left=columns)
    for each in similar.candidates:
        outcomes = f"{each.right_before} right, {each.wrong_before} wrong"
        wrong = "" if each.wrong is None else f"{100 * each.wrong:.2g} %"
        guards = f"refused: {each.guard}" if each.guard else each.likeness.replace("_", " ")
        name = each.entry[:_SHOWN_NAME]
        table.add_row(name, shown(each.text[:_SHOWN_PROMPT]), guards, f"{each.similarity:.3f}", wrong, outcomes)
    print_table(table)


def _found(label: Label | None, readable: bool) -> str:
    if label is None:
        return "no such response is kept"
    if not readable:
        return "one is kept, but it is damaged or of another key: the request is computed"
    now = time.time()
    age, left = (format_duration(each) for each in (now - label.stored_at, label.expires_at - now))
    return f"one is kept, {age} old, for {left} more; it is told while these runs of instances go on: {label.weights}"


def _api_key(options: argparse.Namespace) -> str:
    return read_secret(options.api_key_file, "API key file")
