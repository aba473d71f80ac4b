"""The compose file's Prometheus, with configuration and alerts of ``deploy/``, and what the dashboard asks it."""

from __future__ import annotations

import json
import math
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from deployment import NODES, ROOT

TARGETS = {f"{node}:9464" for node in NODES}
MAY_BE_EMPTY = {"How full the quotas are", "gRPC calls that failed"}
"""Panels of what these nodes have not: quotas; and of what need not happen."""


class Prometheus:
    """What it answers at ``http://ADDRESS``."""

    def __init__(self, address: str) -> None:
        self._url = f"http://{address}/api/v1"

    def ask(self, path: str, **parameters: str) -> Any:
        """The data of an answer; None while it does not answer yet."""
        url = f"{self._url}/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=20) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            assert error.code == 503, f"{path} {parameters}: {error.read().decode()}"  # it is starting
        except OSError:
            pass
        return None

    def values(self, query: str) -> dict[str, float]:
        """The numbers that a query returns, by instance (empty where the query sums over them)."""
        data = self.ask("query", query=query) or {"result": []}
        told = [(each["metric"].get("instance", ""), float(each["value"][1])) for each in data["result"]]
        return {instance: value for instance, value in told if math.isfinite(value)}


@pytest.fixture(scope="module")
def prometheus(hosts: Any, docker: Any) -> Iterator[Prometheus]:
    service = ("--profile", "metrics")
    hosts.compose(*service, "up", "--detach", "--build", "--no-deps", "prometheus")
    yield Prometheus(hosts.compose(*service, "port", "prometheus", "9090").strip())
    hosts.compose(*service, "rm", "--stop", "--force", "prometheus")


def queries() -> dict[str, str]:
    """Each panel's, with Grafana's variables filled in."""
    dashboard = json.loads((ROOT / "deploy/grafana/kvstore.json").read_text())
    return {
        panel["title"]: target["expr"].replace("$instance", ".*").replace("$__rate_interval", "1m")
        for panel in dashboard["panels"]
        for target in panel.get("targets", [])
    }


def test_both_nodes_are_scraped_and_every_panel_shows_something(
    prometheus: Prometheus, hosts: Any, traffic: Any, eventually: Callable[..., None]
) -> None:
    eventually(lambda: prometheus.values('up{job="kvstore"}') == dict.fromkeys(TARGETS, 1.0), "both nodes are up")
    waiting = {title: query for title, query in queries().items() if title not in MAY_BE_EMPTY}
    assert len(waiting) >= 15

    def is_shown() -> bool:
        for title in [title for title, query in waiting.items() if prometheus.values(query)]:
            del waiting[title]
        return not waiting

    with traffic():
        eventually(is_shown, waiting)  # what is left of them
    stored = 'kvstore_pages_total{tier="arena",event="stored"}'
    eventually(
        lambda: prometheus.values(stored) == {f"{node}:9464": hosts.status(node)["arena"]["stored"] for node in NODES},
        "it has what the nodes count",
    )


def test_a_node_that_is_gone_is_told_of(
    prometheus: Prometheus, hosts: Any, docker: Any, eventually: Callable[..., None], back_to_normal: Callable[[], None]
) -> None:
    def gone() -> set[str]:
        alerts = (prometheus.ask("alerts") or {"alerts": []})["alerts"]
        return {each["labels"]["instance"] for each in alerts if each["labels"]["alertname"] == "KvstoreNodeDown"}

    eventually(lambda: prometheus.values("up") == dict.fromkeys(TARGETS, 1.0), "both nodes are up")
    assert gone() == set()
    docker("kill", hosts.container("node2"))
    eventually(lambda: gone() == {"node2:9464"}, "the alert is on its way")
    docker("start", hosts.container("node2"))
    eventually(lambda: gone() == set(), "and is taken back")
    rules = [rule for group in prometheus.ask("rules")["groups"] for rule in group["rules"]]
    assert len(rules) >= 9
    assert [rule for rule in rules if rule["health"] != "ok"] == []
    back_to_normal()
