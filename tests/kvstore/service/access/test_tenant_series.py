"""What is kept of each tenant is bounded, however many there are."""

from __future__ import annotations

import contextlib

from prometheus_client import CollectorRegistry, generate_latest

from kvstore.errors import LimitExceededError
from kvstore.security.grants import Grant
from kvstore.service.access.rate_limits import MOST_NAMED, LimitsCollector, TenantLimits


def one_too_many(limits: TenantLimits, tenant: str) -> None:
    """A tenant has a call open, and begins another one."""
    grant = Grant(name=tenant, tenant=tenant)
    with limits.call(grant), contextlib.suppress(LimitExceededError), limits.call(grant):
        raise AssertionError("it was let in")


def test_a_thousand_tenants_are_sixty_four_series_and_one() -> None:
    limits = TenantLimits()
    for number in range(1000):
        for _ in range(2):
            one_too_many(limits, f"tenant {number}")
    registry = CollectorRegistry()
    registry.register(LimitsCollector(limits))
    series = [line for line in generate_latest(registry).decode().splitlines() if line.startswith("kvstore_tenant")]
    assert len(series) == MOST_NAMED + 1
    assert 'kvstore_tenant_refused_total{limit="calls",tenant="tenant 63"} 2.0' in series
    assert f'kvstore_tenant_refused_total{{limit="calls",tenant="(others)"}} {2.0 * (1000 - MOST_NAMED)}' in series
    assert sum(limits.refused().values()) == 2000
    assert not limits._open, "what is over is kept"
