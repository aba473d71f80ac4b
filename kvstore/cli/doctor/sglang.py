"""Checks of SGLang's flags: is kvstore HiCache's third level, and does it name this node?"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kvstore.cli.doctor.verdict import FAIL, OK, WARN, Verdict
from kvstore.client.url import socket_url
from kvstore.errors import ConfigError, ResourceError

SUBJECT = "SGLang's flags"
_MODULE, _CLASS = "kvstore.connector.sglang", "KVStoreBackend"
_HICACHE, _BACKEND, _EXTRA = (
    "--enable-hierarchical-cache",
    "--hicache-storage-backend",
    "--hicache-storage-backend-extra-config",
)
_POLICY, _LAYOUT, _WRITE = "--hicache-storage-prefetch-policy", "--hicache-mem-layout", "--hicache-write-policy"
_TRUST = "--trust-mm-content-hashes"
_EXAMPLE = f'{{"backend_name": "kvstore", "module_path": "{_MODULE}", "class_name": "{_CLASS}", "interface_v1": 1}}'


def is_sglang(command: Sequence[str]) -> bool:
    """Whether a process's command line is a server of SGLang's."""
    return any("sglang" in Path(word).name for word in command[:4]) or _flag(command, _BACKEND) is not None


def check_version(version: str | None) -> list[Verdict]:
    """Whether the release of SGLang in an engine's Python is one that kvstore is for; None: there is none."""
    if version is None:
        return []
    from kvstore.connector.hicache import versions  # upwards: only where SGLang is looked at

    try:
        versions.check_version(version)
    except ConfigError as error:
        return [Verdict("SGLang", FAIL, str(error), "`kvstore docs sglang` says which releases")]
    return [Verdict("SGLang", OK, f"{version} is supported")]


def check_flags(command: str | Sequence[str], socket: Path) -> list[Verdict]:
    """SGLang's flags.

    Args:
        command: SGLang's command line, or the value of ``--hicache-storage-backend-extra-config`` alone.
        socket: the node's, where it is known.
    """
    if isinstance(command, str) and command.lstrip().startswith("{"):
        return _check_extra(command, socket)
    try:
        words = shlex.split(command) if isinstance(command, str) else command
    except ValueError as error:
        return [Verdict(SUBJECT, FAIL, f"can't be read as a command: {error}", "quote it as for a shell")]
    verdicts = []
    if _flag(words, _HICACHE) is None:
        verdicts.append(Verdict(SUBJECT, FAIL, f"{_HICACHE} is not among them", f"add {_HICACHE}"))
    if (backend := _flag(words, _BACKEND)) != "dynamic":
        text = f"{_BACKEND} is not among them" if backend is None else f"{_BACKEND} is {backend!r}"
        verdicts.append(Verdict(SUBJECT, FAIL, text, f"{_BACKEND} dynamic {_EXTRA} '{_EXAMPLE}'"))
    elif (extra := _flag(words, _EXTRA)) is None:
        verdicts.append(Verdict(SUBJECT, FAIL, f"{_EXTRA} is not among them", f"add {_EXTRA} '{_EXAMPLE}'"))
    elif extra.startswith("@"):
        text = f"{_EXTRA} is in the file {extra[1:]}, which is not looked at"
        verdicts.append(Verdict(SUBJECT, WARN, text, "give --sglang what is in it"))
    else:
        verdicts += _check_extra(extra, socket)
    return verdicts + _check_others(words)


def _check_extra(text: str, socket: Path) -> list[Verdict]:
    try:
        given = json.loads(text)
        if not isinstance(given, dict):
            raise TypeError("not an object")  # noqa: TRY301
    except (ValueError, TypeError) as error:
        return [Verdict(SUBJECT, FAIL, f"{_EXTRA} is not a JSON object: {error}", f"write it as '{_EXAMPLE}'")]
    wanted = {"module_path": _MODULE, "class_name": _CLASS}
    verdicts = [
        Verdict(SUBJECT, FAIL, f"{key} must be {value!r}, is {given.get(key)!r}", f"write it as '{_EXAMPLE}'")
        for key, value in wanted.items()
        if given.get(key) != value
    ]
    if not given.get("backend_name"):
        verdicts.append(Verdict(SUBJECT, FAIL, "'backend_name' is missing", f"write it as '{_EXAMPLE}'"))
    verdicts += _check_options(given)
    url = str(given.get("url", ""))
    if url.startswith("unix://") and url.partition("?")[0] != socket_url(socket):
        text = f"the engine asks {url}, the node looked at is {socket_url(socket)}"
        verdicts.append(Verdict(SUBJECT, WARN, text, "is it the right node? Paths in containers may differ"))
    where = url or "the node that it finds by itself, as this command does with the engine's user and environment"
    return verdicts or [Verdict(SUBJECT, OK, f"{_CLASS} at {where}")]


def _check_options(given: Mapping[str, Any]) -> list[Verdict]:
    from kvstore.connector.hicache.options import Options  # upwards: an engine's side

    try:
        Options.parse(given)
    except ConfigError as error:
        return [Verdict(SUBJECT, FAIL, str(error), "`kvstore docs sglang` has every key")]
    return []


def _check_others(words: Sequence[str]) -> list[Verdict]:
    from kvstore.connector.hicache.supported import LAYOUTS

    verdicts = []
    if (layout := _flag(words, _LAYOUT)) is not None and layout not in LAYOUTS:
        verdicts.append(Verdict(SUBJECT, FAIL, f"{_LAYOUT} {layout} is not kept", f"one of {', '.join(LAYOUTS)}"))
    if _flag(words, _POLICY) == "best_effort":
        advice = "timeout, SGLang's default, or wait_complete: an idle server waits for no page otherwise"
        verdicts.append(Verdict(SUBJECT, WARN, f"{_POLICY} best_effort", advice))
    if _flag(words, _WRITE) == "write_back":
        advice = "write_through: pages are stored as they leave the device, and are lost with the server"
        verdicts.append(Verdict(SUBJECT, WARN, f"{_WRITE} write_back", advice))
    if _flag(words, _TRUST) is not None:
        advice = "leave it out, unless no caller ever sends the same hash for different pictures"
        verdicts.append(Verdict(SUBJECT, WARN, f"{_TRUST}: keys are what callers say", advice))
    return verdicts + _check_weights(words)


def _check_weights(words: Sequence[str]) -> list[Verdict]:
    from kvstore.connector.hicache.identity import OTHER_WEIGHTS, check_folder_decides

    names = (*OTHER_WEIGHTS, "load_format", "speculative_draft_load_format")
    values = {name: _flag(words, f"--{name.replace('_', '-')}") for name in names}
    given = {name: value or True for name, value in values.items() if value is not None}
    try:
        check_folder_decides(SimpleNamespace(**given))
    except ResourceError as error:
        return [Verdict(SUBJECT, FAIL, str(error), "SGLang runs without kvstore so: `kvstore docs sglang` says why")]
    return []


def _flag(words: Sequence[str], flag: str) -> str | None:
    """What stands behind a flag, or behind its equals sign. Empty: it is the last one. None: it is not there."""
    for place, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name == flag:
            return value if equals else words[place + 1] if place + 1 < len(words) else ""
    return None
