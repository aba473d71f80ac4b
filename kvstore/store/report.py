"""The status of a node, as ``kvstore status`` and the console show it, made of its store's statistics."""

from __future__ import annotations

import dataclasses
import os
import time

from kvstore.core import choice
from kvstore.hashing import hash_check
from kvstore.security.certificate import Validity
from kvstore.status import (
    LookupTotals,
    NamespaceStatus,
    Status,
    TierHealth,
    TierState,
    TierStatus,
    kvstore_version,
)
from kvstore.store.store import Store
from kvstore.tiers.prices import dollars_of


def status_of(
    store: Store, instance: int, uptime_seconds: float, disk_directory: str, certificate: Validity | None = None
) -> Status:
    """The status of a node that serves this store. ``certificate``: when the one holds that it shows, if any."""
    statistics = store.statistics()
    now = time.time()
    arena = TierStatus(
        "arena",
        statistics.arena_used_bytes,
        statistics.arena_limit_bytes,
        statistics.arena_pages,
        statistics.counters | {"dirty": statistics.dirty_pages},
        TierHealth(TierState.OK, float(round(now - uptime_seconds))),
    )
    healths = {tier.name: tier.health() for tier in store.lower_tiers.all()}
    lower = []
    for name, tier in statistics.lower_tiers.items():
        counters = dataclasses.asdict(tier)
        used, limit, pages = (counters.pop(gauge) for gauge in ("used_bytes", "limit_bytes", "pages"))
        objects = store.lower_tiers.objects
        requests = objects.traffic().requests if objects is not None and objects.name == name else {}
        dollars = sum(dollars_of(requests).values())
        lower.append(TierStatus(name, used, limit, pages, counters, healths[name], requests, dollars))
    return Status(
        version=kvstore_version(),
        instance=instance,
        pid=os.getpid(),
        uptime_seconds=uptime_seconds,
        tiers=(arena, *lower),
        namespaces=tuple(
            NamespaceStatus(
                each.name,
                each.layout.fingerprint,
                each.layout.page_bytes,
                each.arena_pages,
                each.used_bytes,
                each.quota_bytes,
                each.durability,
                each.pinned_pages,
                each.layout.to_json(),
                each.age_seconds,
                each.idle_seconds,
                each.counters,
                each.labels,
            )
            for each in statistics.namespaces
        ),
        clients=statistics.clients,
        arena_directory=str(store.arena.directory),
        disk_directory=disk_directory,
        time=now,
        hash_check=hash_check(),
        certificate_begins=certificate.begins if certificate is not None else 0.0,
        certificate_ends=certificate.ends if certificate is not None else 0.0,
        connected=statistics.connected,
        lookups=LookupTotals.of(statistics.total),
        core=choice.CHOSEN.name,
        gone=statistics.gone,
        numbers={each.layout.fingerprint: each.number for each in statistics.namespaces},
    )
