"""Redis is killed, paused, full, cut off or empty, while engines and clients work on both hosts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


class Fault:
    """Redis is away for both nodes, or for one: in which way, and how it comes back."""

    def __init__(self, break_it: Callable[[], object], mend_it: Callable[[], object]) -> None:
        self.break_it = break_it
        self.mend_it = mend_it


@pytest.fixture
def killed(hosts: Any, docker: Any) -> Fault:
    redis = hosts.container("redis")
    return Fault(lambda: docker("kill", redis), lambda: docker("start", redis))


@pytest.fixture
def paused(hosts: Any, docker: Any) -> Fault:
    redis = hosts.container("redis")
    return Fault(lambda: docker("pause", redis), lambda: docker("unpause", redis))


@pytest.fixture
def out_of_memory(hosts: Any, docker: Any) -> Fault:
    def limit(size: str) -> None:
        docker("exec", hosts.container("redis"), "redis-cli", "config", "set", "maxmemory", size)

    return Fault(lambda: limit("1mb"), lambda: limit("640mb"))


@pytest.fixture
def disconnected(hosts: Any, docker: Any) -> Fault:
    where = hosts.network("storage"), hosts.container("node1")
    return Fault(
        lambda: docker("network", "disconnect", *where),
        lambda: docker("network", "connect", "--alias", "node1", *where),
    )


@pytest.fixture
def deaf(cut: Any) -> Fault:
    """Redis does not hear the first node."""
    return Fault(lambda: cut("node1", "redis"), lambda: cut.mend())


@pytest.fixture
def mute(cut: Any) -> Fault:
    """Redis is not heard by the first node."""
    return Fault(lambda: cut("redis", "node1"), lambda: cut.mend())


@pytest.mark.parametrize("what", ["killed", "paused", "out_of_memory", "disconnected", "deaf", "mute"])
def test_everything_goes_on_while_redis_is(
    what: str,
    request: pytest.FixtureRequest,
    hosts: Any,
    clients: Any,
    traffic: Any,
    eventually: Any,
    back_to_normal: Callable[[], None],
    counted_truly: Callable[[int], bool],
) -> None:
    fault: Fault = request.getfixturevalue(what)
    before = {tier: clients[0].counters(tier) for tier in ("arena", "redis")}

    def moved(tier: str, counter: str) -> int:
        return int(clients[0].counters(tier)[counter] - before[tier][counter])

    with traffic() as load:
        load.more(3)
        fault.break_it()
        try:
            load.more(10)
            eventually(lambda: moved("arena", "unshared"), "pages that can't be shared are counted")
            eventually(lambda: moved("redis", "errors") or moved("redis", "refused"), "Redis' failures are counted")
        finally:
            fault.mend_it()
        back_to_normal()
    eventually(
        # Some more than once: what Redis lost is offered again when it is used.
        lambda: moved("arena", "shared") + moved("arena", "unshared") >= moved("arena", "stored"),
        "each page was shared, or counted as unshared",
    )
    for host in (0, 1):
        eventually(lambda host=host: counted_truly(host), "what was stored is counted, and nothing else")
    assert moved("arena", "corrupt") == moved("redis", "corrupt") == 0


def test_redis_is_restarted_empty(
    hosts: Any,
    docker: Any,
    clients: Any,
    traffic: Any,
    name: str,
    eventually: Any,
    back_to_normal: Callable[[], None],
    counted_truly: Callable[[int], bool],
) -> None:
    first, second = clients
    shared = first.counters("arena")["shared"]
    first.store(name)
    eventually(lambda: first.counters("arena")["shared"] == shared + 8, "8 pages are in Redis")
    with traffic() as load:
        load.more(3)
        docker("restart", "--time", "1", hosts.container("redis"))
        back_to_normal()
        load.more(3)
    assert second.load(name)["loaded"] == 0  # it never was there, and Redis has it no more
    assert first.load(name)["loaded"] == 8
    in_redis = hosts.status("node2")["redis"]["pages"]
    entries = docker("exec", hosts.container("redis"), "redis-cli", "dbsize")
    assert 0 < in_redis <= int(entries)
    for host in (0, 1):
        eventually(lambda host=host: counted_truly(host), "what was stored is counted, and nothing else")
