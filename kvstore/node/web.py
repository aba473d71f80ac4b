"""A node's metrics and web pages: what each caller may see of ``/metrics``, and the console."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from kvstore.config.node import parse_address
from kvstore.logs import LeftOutCollector
from kvstore.security.grants import READ, Grant
from kvstore.service.access.gate import Access, Tls
from kvstore.service.access.rate_limits import LimitsCollector, TenantLimits
from kvstore.service.call_times import CallTimes
from kvstore.service.http.console import ConsolePages
from kvstore.service.http.metrics import Labels, NodeCollector, TierTimesCollector, node_registry
from kvstore.service.http.server import Answer, Ask, WebServer
from kvstore.status import Status, seen_by
from kvstore.store.store import Store
from kvstore.tiers.latencies import Latencies


class NodeWeb:
    """Collects metrics from the moment it is made, and serves them and the console between ``start`` and ``stop``."""

    def __init__(
        self, status: Callable[[], Status], limits: TenantLimits, tier_times: Callable[[], Sequence[Latencies]]
    ) -> None:
        self._status = status
        self._limits = limits
        self._labels: dict[tuple[str, frozenset[str]], Labels] = defaultdict(Labels)
        """By tenant and what it shares: those see the same namespaces."""
        self._registry = node_registry(status, Labels())
        for collector in (LimitsCollector(limits), LeftOutCollector(), TierTimesCollector(tier_times)):
            self._registry.register(collector)
        self.times = CallTimes(self._registry)
        """Told of all calls, by whatever way they come."""
        self._server: WebServer | None = None
        self._console: ConsolePages | None = None

    @property
    def port(self) -> int:
        """The TCP port, 0 before ``start``."""
        return self._server.port if self._server is not None else 0

    def register(self, collector: Collector) -> None:
        """Show another part's metrics, to callers who see all tenants."""
        self._registry.register(collector)

    def start(
        self,
        address: str,
        store: Store,
        access: Access,
        tls: Tls | None,
        healthy: Callable[[], bool],
        bulk_connections: Callable[[], int],
    ) -> None:
        """Serve at ``address``, host and port; port 0 is any free one.

        Raises:
            ResourceError: the address can't be listened on.
        """

        def reader(authorization: str) -> Grant | None:
            grant = access.accept(authorization)
            return grant if grant is not None and READ in grant.rights else None

        self._console = ConsolePages(store, self._status, bulk_connections, self.times.counts)
        pages = {"/metrics": self._metrics, **self._console.pages}

        def troubles() -> list[str]:
            told = [(tier.name, tier.health().shown(time.time())) for tier in store.lower_tiers.all()]
            return [f"{name}: {words}" for name, words in told if words]

        self._server = WebServer(parse_address(address), pages, healthy, troubles, tls, reader if access.asks else None)

    def stop(self) -> None:
        """Close the port, and end the console's thread."""
        if self._server is not None:
            self._server.stop()
        if self._console is not None:
            self._console.stop()

    def _metrics(self, ask: Ask) -> Answer:
        try:
            encode, kind = choose_encoder(ask.accept)
        except (TypeError, ValueError):  # it wants a version that is no number
            encode, kind = choose_encoder("")
        return Answer(kind, encode(self._registry if ask.caller.every else self._registry_of(ask.caller)))

    def _registry_of(self, grant: Grant) -> CollectorRegistry:
        """The metrics that are a tenant's own: nothing of calls and of the process, which are everybody's."""
        registry = CollectorRegistry()
        labels = self._labels[grant.tenant, grant.shares]
        registry.register(NodeCollector(lambda: seen_by(self._status(), grant), labels))
        registry.register(LimitsCollector(self._limits, grant))
        return registry
