"""The status of a node: its tiers, namespaces and counters, as ``kvstore status`` prints them."""

from __future__ import annotations

import dataclasses
import enum
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

from kvstore.layout import Layout
from kvstore.security.certificate import Urgency, Validity, urgency_of, words_of
from kvstore.security.grants import Grant
from kvstore.units import format_duration


class TierState(enum.IntEnum):
    """Whether a tier serves."""

    UNKNOWN = 0
    """An older node, which does not say."""
    OK = 1
    DEGRADED = 2
    """It serves less than it should: some of its servers are away, or it only reads."""
    DOWN = 3
    """Nothing can be read from it, or written to it, now."""

    @classmethod
    def of(cls, number: int) -> TierState:
        """The state that a message names by number; one that a newer node has is unknown here."""
        return cls(number) if number in cls._value2member_map_ else cls.UNKNOWN


@dataclass(frozen=True, slots=True)
class TierHealth:
    """Whether a tier serves, since when, and why not."""

    state: TierState = TierState.UNKNOWN
    since: float = 0.0
    """When this began: seconds since 1970, on the node's clock. Where some of several servers fail: when the first of
    those did."""
    reason: str = ""
    """In words; empty when it is well."""

    def shown(self, now: float) -> str:
        """For people, where the tier does not serve as it should: ``down for 2m: …``; else empty."""
        if self.state in (TierState.OK, TierState.UNKNOWN):
            return ""
        return f"{self.state.name.lower()} for {format_duration(now - self.since)}: {self.reason}"


@dataclass(frozen=True, slots=True)
class ClientStatus:
    """A client that is connected now."""

    name: str
    """What it calls itself; empty: it does not say."""
    way: str
    """How it reaches the node: ``shm`` or ``bulk``."""
    seconds: float
    """Since it connected."""
    host: str = ""
    """The address that it comes from; empty: it is on the node's host."""


class ConnectedClient(NamedTuple):
    """The connections of one client, and of others of its name and host, if there are any."""

    name: str
    way: str
    host: str
    connections: int
    seconds: float
    """Since the oldest of them."""


def by_client(connected: Iterable[ClientStatus]) -> list[ConnectedClient]:
    """Who is connected, by name: a client that has several connections is told once."""
    seconds: dict[tuple[str, str, str], list[float]] = {}
    for each in connected:
        seconds.setdefault((each.name, each.way, each.host), []).append(each.seconds)
    return [ConnectedClient(*who, len(since), max(since)) for who, since in sorted(seconds.items())]


@dataclass(frozen=True, slots=True)
class TierStatus:
    """One tier: bytes and pages now, and counters of pages by what happened to them."""

    name: str
    used_bytes: int
    """Everything that counts against the limit, padding included."""
    limit_bytes: int
    pages: int
    counters: Mapping[str, int]
    health: TierHealth = TierHealth()
    requests: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Object storage: requests since the node started, by class. Empty: another tier, or an older node's."""
    requests_dollars: float = 0.0
    """What these cost, about, in US dollars (:mod:`kvstore.tiers.prices`)."""


@dataclass(frozen=True, slots=True)
class LookupTotals:
    """What lookups asked for and found since the node started, in pages: the hit ratio. As clients told of it."""

    asked: int = 0
    arena: int = 0
    """Found there; likewise the others."""
    disk: int = 0
    redis: int = 0
    objects: int = 0

    @property
    def found(self) -> int:
        """In whatever tier."""
        return self.arena + self.disk + self.redis + self.objects

    @classmethod
    def of(cls, counters: Mapping[str, int]) -> LookupTotals:
        """From the counters of a namespace; an older node's have none."""
        names = ("looked_up", "found_arena", "found_disk", "found_redis", "found_objects")
        return cls(*(counters.get(name, 0) for name in names))

    def since(self, before: LookupTotals) -> LookupTotals:
        """What was added to an earlier look's."""
        return LookupTotals(
            self.asked - before.asked,
            self.arena - before.arena,
            self.disk - before.disk,
            self.redis - before.redis,
            self.objects - before.objects,
        )


@dataclass(frozen=True, slots=True)
class NamespaceStatus:
    """One namespace at one moment."""

    name: str
    """Its layout's (:attr:`kvstore.layout.Layout.name`), with its first label in the model's place."""
    fingerprint: bytes
    page_bytes: int
    arena_pages: int
    used_bytes: Mapping[str, int]
    """Tier → bytes that its pages take there, padding included."""
    quota_bytes: Mapping[str, int]
    """Tier → most bytes that they may take; only where there is a quota."""
    durability: str
    """``disk``: a store is refused rather than a page lost that is not on disk yet."""
    pinned_pages: int
    layout: str
    """As JSON: :meth:`kvstore.layout.Layout.from_json` reads it."""
    age_seconds: float = 0.0
    """Since it was opened first."""
    idle_seconds: float = 0.0
    """How long nobody has used it; time in which the node did not run is left out."""
    counters: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Pages by what happened to them since the node started; see :class:`kvstore.namespaces.usage.NamespaceCounts`."""
    labels: tuple[str, ...] = ()
    """What people call its model, as it was opened (:mod:`kvstore.labels`): the first one first, the others last used
    first. Empty: the layout's own name alone."""


@dataclass(frozen=True, slots=True)
class Status:
    """A node at one moment."""

    version: str
    instance: int
    """Another number after each start."""
    pid: int
    uptime_seconds: float
    tiers: tuple[TierStatus, ...]
    """The arena first."""
    namespaces: tuple[NamespaceStatus, ...]
    clients: int
    """Clients that share the arena."""
    arena_directory: str
    disk_directory: str
    """Empty without a disk tier."""
    time: float = 0.0
    """The node's clock: seconds since 1970. 0: an older node, which does not say."""
    hash_check: bytes = b""
    """What the node computes for :func:`kvstore.hashing.hash_check`. Empty: an older node, which does not say."""
    connected: tuple[ClientStatus, ...] = ()
    """Those that share the arena, and those with a bulk connection."""
    certificate_begins: float = 0.0
    """From when on the certificate holds that the node shows to its callers: seconds since 1970. 0: it has none, or an
    older node does not say."""
    certificate_ends: float = 0.0
    """When the certificate ends that the node shows to its callers: seconds since 1970. 0: it has none."""
    lookups: LookupTotals = LookupTotals()
    """Of all namespaces, those included that were dropped."""
    core: str = ""
    """Which core the node runs (:mod:`kvstore.core`): ``native`` or ``python``. Empty: an older node does not say."""
    gone: Mapping[str, Mapping[str, int]] = dataclasses.field(default_factory=dict)
    """What the node counted of namespaces that were dropped since, by tenant. Not told to clients."""
    numbers: Mapping[bytes, int] = dataclasses.field(default_factory=dict)
    """Fingerprint → a number that is another one when the namespace is opened again after it was dropped. Not told to
    clients."""

    def troubles(self) -> list[str]:
        """A line for each tier that does not serve as it should (``redis: down for 2m: …``), and for a certificate that
        ends soon, has ended or does not hold yet (:func:`kvstore.security.certificate.urgency_of`); for people."""
        told = [(tier.name, tier.health.shown(self.time)) for tier in self.tiers]
        validity = self.certificate
        if validity is not None and urgency_of(validity, self.time) is not Urgency.NONE:
            told.append(("certificate", words_of(validity, self.time)))
        return [f"{name}: {words}" for name, words in told if words]

    @property
    def certificate(self) -> Validity | None:
        """When the certificate holds; None: the node has none."""
        return Validity(self.certificate_begins, self.certificate_ends) if self.certificate_ends else None

    def tier(self, name: str) -> TierStatus:
        """The tier of this name.

        Raises:
            KeyError: the node has none.
        """
        for tier in self.tiers:
            if tier.name == name:
                return tier
        raise KeyError(name)


def seen_by(status: Status, grant: Grant) -> Status:
    """What of a status a caller may see.

    Whoever has one tenant's token is told of that tenant's pages, and of tiers only what these take of the arena, and
    what became of them since the node started.
    """
    if grant.every:
        return status
    own = tuple(each for each in status.namespaces if grant.sees(Layout.from_json(each.layout).tenant))
    arena = status.tiers[0]
    used, pages = sum(each.used_bytes.get(arena.name, 0) for each in own), sum(each.arena_pages for each in own)
    counts: Counter[str] = Counter()
    gone = {tenant: counted for tenant, counted in status.gone.items() if grant.sees(tenant)}
    for counted in (*(each.counters for each in own), *gone.values()):  # a total never falls
        counts.update(counted)
    hit = counts["arena"] + counts["disk"] + counts["redis"] + counts["objects"]
    counters = {name: counts[name] for name in ("missed", "stored", "present", "refused")}
    counters |= {"asked": hit + counts["missed"], "hit": hit}
    tiers = (TierStatus(arena.name, used, arena.limit_bytes, pages, counters, arena.health),)
    return dataclasses.replace(
        status,
        tiers=tiers,
        namespaces=own,
        lookups=LookupTotals.of(counts),
        gone=gone,
        clients=0,
        connected=(),
        arena_directory="",
        disk_directory="",
    )


def kvstore_version() -> str:
    """The installed version of the distribution, ``0`` for a checkout that is not installed."""
    try:
        return version("kvstore-offload")
    except PackageNotFoundError:
        return "0"
