"""The nodes of ``docker-compose.cluster.yml`` share pages through a Redis Cluster of six, also when a server dies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from traffic import check_metrics


def test_nodes_share_through_a_cluster_that_loses_a_server(
    cluster: Any, cluster_clients: Any, docker: Any, eventually: Callable[..., None], name: str
) -> None:
    first, second = cluster_clients

    def share(prompt: str) -> bool:
        """Whether all pages of a new prompt come over. All servers have some of 64 pages' entries."""
        assert first.store(prompt, 64)["stored"] == 64
        eventually(lambda: waiting(first) == 0, "all pages were offered")
        return bool(second.load(prompt, 64)["tiers"] == {"redis": 64})

    def waiting(client: Any) -> int:
        counters = client.counters("arena")
        return int(counters["stored"] - counters["shared"] - counters["unshared"])

    tries = iter(range(1000))
    eventually(lambda: share(f"{name}/before/{next(tries)}"), "pages come over")
    masters = docker("exec", cluster.container("redis1"), "redis-cli", "cluster", "nodes")
    assert sum("master" in line for line in masters.splitlines()) == 3
    docker("kill", cluster.container("redis2"))
    eventually(lambda: share(f"{name}/after/{next(tries)}"), "its replica takes its place")
    docker("start", cluster.container("redis2"))
    eventually(lambda: share(f"{name}/again/{next(tries)}"), "the server is back")
    for node in ("node1", "node2"):
        check_metrics(cluster, node)
    assert first.counters("redis")["corrupt"] == second.counters("redis")["corrupt"] == 0
