"""Checks of the lower tiers: the disk's folder and the Redis that nodes share."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvstore.cli.doctor.verdict import FAIL, OK, WARN, Verdict
from kvstore.config.node import NodeConfig
from kvstore.errors import ConfigError
from kvstore.status import Status, TierState, TierStatus
from kvstore.units import format_size

_REDIS_SECONDS = 3.0
_CLOCK_SECONDS = 2.0
_SPARE = 1.1


def check_disk(config: NodeConfig) -> list[Verdict]:
    """Room, O_DIRECT and who owns the folder."""
    if not config.disk_limit:
        return [Verdict("disk", OK, "no disk tier (disk_limit = 0)")]
    here = next(folder for folder in (config.disk, *config.disk.parents) if folder.exists())
    try:
        used = sum(path.stat().st_blocks * 512 for path in config.disk.glob("*.segment"))
        free = shutil.disk_usage(here).free
    except OSError as error:
        return [Verdict("disk", FAIL, f"{config.disk}: {error.strerror}", "run doctor as the node's user")]
    text = f"{config.disk}: {format_size(used)} used, {format_size(free)} free, limit {format_size(config.disk_limit)}"
    if free + used < config.disk_limit:
        advice = f"the tier stays at {format_size(free + used)}: lower --disk-limit, or make room"
        verdicts = [Verdict("disk", WARN, text, advice)]
    else:
        verdicts = [Verdict("disk", OK, text)]
    if not os.access(here, os.W_OK | os.X_OK):
        who = f"user {os.geteuid()} may not write to {here}"
        return [*verdicts, Verdict("disk folder", FAIL, who, "chown it to the node's user; run doctor as that user")]
    if config.disk.exists() and (mode := config.disk.stat().st_mode & 0o077):
        text = f"{config.disk} is open to others (mode {mode | 0o700:04o})"
        verdicts.append(Verdict("disk folder", WARN, text, f"chmod 700 {config.disk}"))
    verdicts.append(_check_direct_io(here))
    return verdicts


def _check_direct_io(folder: Path) -> Verdict:
    """Whether the file system reads and writes past the page cache."""
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".kvstore-doctor-") as file:
            os.close(os.open(file.name, os.O_RDWR | os.O_DIRECT))
    except OSError as error:
        advice = "pages go through the page cache, twice in memory: prefer ext4 or xfs on a local device"
        return Verdict("O_DIRECT", WARN, f"{folder}: {error.strerror}", advice)
    return Verdict("O_DIRECT", OK, f"{folder} has it")


def check_health(status: Status) -> list[Verdict]:
    """Whether the tiers of a running node serve, as it says itself."""
    return [_health_of(tier, status.time) for tier in status.tiers]


def _health_of(tier: TierStatus, now: float) -> Verdict:
    subject = f"{tier.name} tier"
    full = f"{format_size(tier.used_bytes)} of {format_size(tier.limit_bytes)} used"
    if words := tier.health.shown(now):
        level = FAIL if tier.health.state is TierState.DOWN else WARN
        return Verdict(subject, level, f"the node says: {words}", _ADVICE.get(tier.name, ""))
    if tier.health.state is TierState.UNKNOWN:
        return Verdict(subject, OK, f"{full}; the node is too old to say whether it serves")
    return Verdict(subject, OK, f"the node says that it serves; {full}")


_ADVICE = {
    "disk": "look at the kernel's log (`dmesg`), at the room there (`df`), and at disk_write_limit; docs/operations.md"
    " says more",
    "redis": "is it up, is the password right, does a firewall let the node's host through? The node goes on by itself"
    " once it answers; pages are not shared meanwhile",
    "objects": "may the node's credentials read, write, list and delete there, does a firewall let it through? The node"
    " goes on by itself once it answers; pages that are only there are misses meanwhile",
}


def check_redis(config: NodeConfig, status: Status | None = None) -> list[Verdict]:
    """Whether Redis answers from here, evicts nothing by itself, has room for the limit, and has the right time.

    A running node (``status``) does not say where its Redis is: the settings do.
    """
    if not config.redis:
        shared = status is not None and any(tier.name == "redis" for tier in status.tiers)
        if shared:
            text = "not asked from here: these settings don't name the node's Redis"
            advice = "give the node's settings (--config FILE, KVSTORE_REDIS) to check its policy, memory and clock"
            return [Verdict("redis", OK, text, advice)]
        return [Verdict("redis", OK, "the node has no shared tier" if status else "no shared tier in these settings")]
    try:
        with _servers(config.redis) as servers:
            asked = [(each.info("server"), each.info("memory"), each.time(), time.time()) for each in servers]
    except ConfigError as error:
        return [Verdict("redis", FAIL, str(error), "write the URL as `kvstore docs configuration` says")]
    except Exception as error:  # noqa: BLE001 - whatever the client raises, it can't be asked
        advice = (
            "is it up, is the password right, does a firewall let this host through? Pages are not shared meanwhile"
        )
        return [Verdict("redis", FAIL, f"can't be asked: {type(error).__name__}: {error}", advice)]
    versions = sorted({str(server.get("redis_version", "?")) for server, _, _, _ in asked})
    many = f"{len(asked)} primaries answer" if len(asked) > 1 else "answers"
    policies = sorted({str(memory.get("maxmemory_policy", "?")) for _, memory, _, _ in asked})
    off = max(abs(seconds + micros / 1e6 - now) for _, _, (seconds, micros), now in asked)
    return [
        Verdict("redis", OK, f"{many}, version {', '.join(versions)}"),
        _check_policies(policies),
        _check_memory([int(memory.get("maxmemory", 0)) for _, memory, _, _ in asked], config.redis_limit),
        Verdict("redis clock", WARN, f"{off:.1f} s off this host's", "let chrony or ntpd set both clocks")
        if off > _CLOCK_SECONDS
        else Verdict("redis clock", OK, f"agrees with this host's within {off:.1f} s"),
    ]


def _check_policies(policies: list[str]) -> Verdict:
    if policies == ["noeviction"]:
        return Verdict("redis policy", OK, "noeviction")
    advice = "CONFIG SET maxmemory-policy noeviction: nodes evict by themselves, and allkeys-* drops their books"
    level = FAIL if any(policy.startswith("allkeys") for policy in policies) else WARN
    return Verdict("redis policy", level, ", ".join(policies), advice)


def _check_memory(most: list[int], limit_bytes: int) -> Verdict:
    """``most``: of each server, 0 where it has no limit."""
    total = sum(most) if all(most) else 0
    text = f"maxmemory {format_size(total) if total else 'none'}, redis_limit {format_size(limit_bytes)}"
    if total and total < limit_bytes * _SPARE:
        return Verdict("redis memory", WARN, text, "leave Redis a tenth above redis_limit: a full server refuses pages")
    return Verdict("redis memory", OK, text)


@contextlib.contextmanager
def _servers(url: str) -> Iterator[list[Any]]:
    """A client of each server that has pages: the only one, the Sentinels' master, or a Cluster's primaries."""
    from redis import ConnectionPool, Redis  # as this: not on an engine's side
    from redis.cluster import ClusterNode, RedisCluster
    from redis.sentinel import Sentinel

    from kvstore.tiers.redis.net.address import Kind, parse_address

    address = parse_address(url)
    timeouts = {"socket_timeout": _REDIS_SECONDS, "socket_connect_timeout": _REDIS_SECONDS}
    options = timeouts | dict(address.options)
    with contextlib.ExitStack() as closing:
        if address.kind is Kind.CLUSTER:
            options.pop("db", None)
            nodes = [ClusterNode(*host) for host in address.hosts]  # type: ignore[no-untyped-call]
            cluster = RedisCluster(startup_nodes=nodes, require_full_coverage=False, **options)
            closing.callback(cluster.close)
            primaries = cluster.get_primaries()  # type: ignore[no-untyped-call]
            yield [cluster.get_redis_connection(node) for node in primaries]
            return
        if address.kind is Kind.SENTINEL:
            names = [name for name in options if name.startswith("sentinel_")]
            theirs = timeouts | {name.removeprefix("sentinel_"): options.pop(name) for name in names}
            sentinel = Sentinel(list(address.hosts), sentinel_kwargs=theirs, **options)  # type: ignore[no-untyped-call]
            client: Redis = sentinel.master_for(address.service)  # type: ignore[no-untyped-call]
        else:
            if address.hosts:
                options["host"], options["port"] = address.hosts[0]
            else:
                options.pop("socket_connect_timeout", None)
            client = Redis(connection_pool=ConnectionPool(**options))
        closing.callback(client.close)
        yield [client]
