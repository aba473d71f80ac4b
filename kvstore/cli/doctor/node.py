"""Checks of the node: who may reach it, whether both ends agree, and what its counters say."""

from __future__ import annotations

import os
import pwd
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from kvstore.cli.doctor import hash_probe
from kvstore.cli.doctor.verdict import FAIL, OK, WARN, Verdict
from kvstore.config.node import NodeConfig
from kvstore.errors import KVStoreError
from kvstore.layout import Layout
from kvstore.namespaces.registry import MOST_NAMESPACES
from kvstore.security.certificate import Urgency, urgency_of, words_of
from kvstore.status import Status, kvstore_version

_CLOCK_SECONDS = 2.0
_OTHER_SEED = "12345"


def check_socket(socket: Path) -> Verdict:
    """Whether this user may connect."""
    me = _user(os.geteuid())
    try:
        status = socket.stat()
    except FileNotFoundError:
        return Verdict("socket", FAIL, f"{socket} is not there", "start the node, or name its socket: --url unix:///…")
    except OSError as error:
        return Verdict("socket", FAIL, f"{socket}: {error.strerror} for user {me}", _SAME_USER)
    if not stat.S_ISSOCK(status.st_mode):
        return Verdict("socket", FAIL, f"{socket} is no socket", "name the node's socket: --url unix:///…")
    what = f"{socket} is {_user(status.st_uid)}'s, mode {status.st_mode & 0o777:04o}; this is user {me}"
    if not os.access(socket, os.R_OK | os.W_OK):
        return Verdict("socket", FAIL, what, _SAME_USER)
    if status.st_mode & 0o007:
        return Verdict(
            "socket", WARN, what, "everybody may read and write pages: restart the node, which makes it 0600"
        )
    return Verdict("socket", OK, what)


_SAME_USER = "run the engine as the node's user, or give both a group (--group)"


def check_arena(directory: Path) -> Verdict:
    """Whether this user may map the arena, without which pages go through the socket."""
    if not directory.is_dir():
        return Verdict(
            "arena",
            WARN,
            f"{directory} is not there (or not to be seen by user {_user(os.geteuid())})",
            "on the node's host, mount its folder here and name it: unix:///…?arena_dir=/…; without it pages go through"
            " the socket, slower",
        )
    pages = directory / "pages"
    if not os.access(pages, os.R_OK | os.W_OK):
        text = f"{pages} is {_user(pages.stat().st_uid)}'s" if pages.exists() else f"{pages} is not there"
        return Verdict("arena", FAIL, f"{text}; this is user {_user(os.geteuid())}", _SAME_USER)
    return Verdict("arena", OK, f"{directory} can be mapped")


def check_version(status: Status) -> Verdict:
    """Whether the node is of this version."""
    mine = kvstore_version()
    if status.version != mine:
        advice = "both work together as long as doctor says nothing else; upgrade the older one"
        return Verdict("node", WARN, f"version {status.version}, here is {mine}", advice)
    return Verdict("node", OK, f"version {mine}, pid {status.pid}, {status.clients} clients")


def check_clock(status: Status, asked: float, answered: float) -> Verdict:
    """Whether the node's clock is this host's. ``asked``, ``answered``: ``time.time()`` around the call."""
    if not status.time:
        return Verdict("clock", WARN, "the node is too old to say what time it has", "upgrade the node")
    off = max(0.0, asked - status.time, status.time - answered)
    if off > _CLOCK_SECONDS:
        advice = "let chrony or ntpd set both: tickets between prefill and decode, pins and TLS go by the clock"
        return Verdict("clock", WARN, f"the node's is {off:.1f} s off", advice)
    return Verdict("clock", OK, f"the node's agrees within {off + answered - asked:.1f} s")


def check_certificate(status: Status) -> list[Verdict]:
    """When the certificate of a node with TLS ends."""
    validity = status.certificate
    if validity is None:
        return []
    words, urgency = f"it {words_of(validity, status.time)}", urgency_of(validity, status.time)
    if urgency is Urgency.NONE:
        return [Verdict("certificate", OK, words)]
    advice = "put a new one in place under the same names (tls_cert, tls_key), and `systemctl reload kvstore`"
    if urgency in (Urgency.ENDED, Urgency.NOT_YET):
        return [Verdict("certificate", FAIL, f"{words}: clients that verify it can't connect", advice)]
    return [Verdict("certificate", WARN, words, advice)]


def check_hashes(status: Status | None) -> Verdict:
    """Whether processes agree on hashes, whatever PYTHONHASHSEED they have, and the node with them."""
    mine = hash_probe.hashes_of_this_process()
    path = os.pathsep.join(filter(None, (str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH"))))
    try:
        environment = os.environ | {"PYTHONHASHSEED": _OTHER_SEED, "PYTHONPATH": path}
        other = hash_probe.hashes_of(sys.executable, environment)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        return Verdict("hashes", WARN, f"a second process could not be asked: {error}")
    if other != mine:
        return Verdict("hashes", FAIL, "two processes of this host compute different hashes", _REPORT)
    if status is None:
        return Verdict("hashes", OK, "two processes with different PYTHONHASHSEEDs agree")
    if status.hash_check and status.hash_check != mine[0]:
        return Verdict("hashes", FAIL, "the node computes other hashes than this process", "upgrade the older one")
    for each in status.namespaces:
        try:
            agreed = Layout.from_json(each.layout).fingerprint == each.fingerprint
        except KVStoreError as error:
            return Verdict(
                "hashes", FAIL, f"namespace {each.name!r} can't be read here: {error}", "upgrade kvstore here"
            )
        if not agreed:
            text = f"the node names namespace {each.name!r} otherwise than this process"
            return Verdict("hashes", FAIL, text, "upgrade the older one: neither finds the other's pages")
    return Verdict(
        "hashes",
        OK,
        f"two processes with different PYTHONHASHSEEDs and the node agree ({len(status.namespaces)} namespaces)",
    )


_REPORT = "this must not be: install kvstore anew, and report it if it stays"


def check_counters(status: Status) -> list[Verdict]:
    """What a node has counted that somebody should know."""
    verdicts = []
    arena = status.tier("arena").counters
    if stored := arena.get("stored", 0):
        for name, advice in (
            (
                "overrun",
                "the disk is slower than stores come: a faster one, a larger arena, or `durability` where it counts",
            ),
            ("refused", "the arena is too small for what is stored and held at once: make it larger"),
        ):
            if count := arena.get(name, 0):
                verdicts.append(Verdict(name, WARN, f"{count:,} pages, beside {stored:,} stored", advice))
    for tier in status.tiers:
        bad = {name: tier.counters.get(name, 0) for name in ("corrupt", "errors", "late")}
        if any(bad.values()):
            said = ", ".join(f"{count:,} {name}" for name, count in bad.items() if count)
            advice = "see the node's log and, for a disk, the kernel's (`dmesg`); `kvstore docs operations` says more"
            verdicts.append(Verdict(f"{tier.name} counters", WARN, f"{said} since the arena was made", advice))
    names = len(status.namespaces)
    if names > 0.9 * MOST_NAMESPACES:
        advice = "`kvstore namespaces` shows which nobody uses; --expire-namespaces 30d drops them"
        verdicts.append(Verdict("namespaces", WARN, f"{names} of {MOST_NAMESPACES}", advice))
    else:
        verdicts.append(Verdict("namespaces", OK, f"{names} of {MOST_NAMESPACES}"))
    return verdicts


def node_config_of(config: NodeConfig, status: Status, *, here: bool) -> NodeConfig:
    """The settings that a running node shows, in place of those that a file would give it. ``here``: on this host."""
    changed: dict[str, object] = {"arena": status.tier("arena").limit_bytes}
    if here:
        changed["arena_dir"] = Path(status.arena_directory)
    for tier in status.tiers:
        if tier.name == "disk":
            changed |= {"disk_limit": tier.limit_bytes, "disk": Path(status.disk_directory)}
        if tier.name == "redis":
            changed["redis_limit"] = tier.limit_bytes
        if tier.name == "objects":
            changed["objects_limit"] = tier.limit_bytes
    return replace(config, **changed)  # type: ignore[arg-type]


def _user(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)
