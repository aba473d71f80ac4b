"""The dashboard and the alerts, against a real Prometheus that scrapes a real node under load."""

from __future__ import annotations

import json
import math
import re
import shutil
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

import kvstore
from kvstore.config.rules import NamespaceRule
from kvstore.v1 import cache_pb2, cache_pb2_grpc

DEPLOY = Path(__file__).parents[4] / "deploy"
DASHBOARD = json.loads((DEPLOY / "grafana/kvstore.json").read_text())
ALERTS = DEPLOY / "prometheus-alerts.yml"
PROMETHEUS, PROMTOOL = shutil.which("prometheus"), shutil.which("promtool")
PAGE = 5000
SECONDS = 100.0


def panels() -> list[dict[str, Any]]:
    return [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def queries() -> dict[str, list[str]]:
    """The expressions of each panel, with Grafana's variables filled in."""
    values = {"$instance": ".*", "$__rate_interval": "30s"}
    return {
        panel["title"]: [
            re.sub(r"\$\w+", lambda match: values[match.group()], target["expr"]) for target in panel["targets"]
        ]
        for panel in panels()
    }


def test_each_panel_has_a_position_and_a_name_of_its_own():
    assert len(queries()) == len(panels()) >= 15
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {(at["x"] + dx, at["y"] + dy) for dx in range(at["w"]) for dy in range(at["h"])}
        assert not cells & taken and max(x for x, _ in cells) < 24, panel["title"]
        taken |= cells
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


def test_it_asks_for_metrics_that_are_documented():
    documents = "".join((DEPLOY.parent / "docs" / name).read_text() for name in ("metrics.md", "responses.md"))
    documented = set(re.findall(r"`(kvstore_\w+|process_\w+)", documents))
    text = " ".join(each for some in queries().values() for each in some) + ALERTS.read_text()
    asked = set(re.findall(r"\bkvstore_[a-z_]+(?=[\[{ \n>])", text))
    assert asked and {re.sub(r"_(bucket|count|sum)$", "", name) for name in asked} <= documented


@pytest.mark.skipif(PROMTOOL is None, reason="no promtool is installed")
def test_the_configuration_is_one_and_the_alerts_are_rules():
    command = [str(PROMTOOL), "check", "config", str(DEPLOY / "prometheus.yml")]
    checked = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert checked.returncode == 0, checked.stderr
    assert "1 rule files found" in checked.stdout


@pytest.mark.skipif(PROMTOOL is None, reason="no promtool is installed")
def test_the_alert_of_similar_answers_comes_when_checks_shut_them_and_goes_when_they_are_opened(tmp_path: Path):
    series = 'kvstore_responses_similar_shut{instance="proxy:8000"}'
    alert = {"exp_labels": {"severity": "warning", "instance": "proxy:8000"}}
    text = "proxy:8000: too many answers to similar prompts were wrong, and all are computed now"

    def at(minutes: int, alerts: list[dict[str, Any]]) -> dict[str, Any]:
        return {"eval_time": f"{minutes}m", "alertname": "KvstoreSimilarAnswersShut", "exp_alerts": alerts}

    rule = ALERTS.read_text().split("alert: KvstoreSimilarAnswersShut")[1].split("- alert:")[0]
    description = " ".join(rule.split("description: >-")[1].split())
    shown = alert | {"exp_annotations": {"summary": text, "description": description}}
    tests = {
        "rule_files": [str(ALERTS)],
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": "1m",
                "input_series": [{"series": series, "values": "0 0 1 1 0"}],
                "alert_rule_test": [at(1, []), at(3, [shown]), at(4, [])],
            }
        ],
    }
    (tmp_path / "tests.yml").write_text(json.dumps(tests))
    command = [str(PROMTOOL), "test", "rules", str(tmp_path / "tests.yml")]
    checked = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert checked.returncode == 0, checked.stdout + checked.stderr


class Prometheus:
    """A server of its own, which scrapes one node every second."""

    def __init__(self, folder: Path, port: int) -> None:
        assert PROMETHEUS is not None
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(ALERTS)],
            "scrape_configs": [{"job_name": "kvstore", "static_configs": [{"targets": [f"127.0.0.1:{port}"]}]}],
        }
        (folder / "prometheus.yml").write_text(json.dumps(config))
        self._log = (folder / "log").open("w")
        self._process = subprocess.Popen(
            [
                *(PROMETHEUS, f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"),
                f"--web.listen-address=127.0.0.1:{self._port}",
            ],
            stdout=self._log,
            stderr=self._log,
        )

    def ask(self, path: str, **parameters: str) -> Any:
        """The data of an answer; None while it does not answer yet."""
        url = f"http://127.0.0.1:{self._port}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=20) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            if error.code == 503:  # it is starting
                return None
            raise AssertionError(f"{parameters}: {error.read().decode()}") from error
        except OSError:
            return None

    def says(self, query: str) -> bool:
        """Whether a query returns something that is a number."""
        data = self.ask("query", query=query)
        return data is not None and any(math.isfinite(float(each["value"][1])) for each in data["result"])

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()
        self._log.close()


@pytest.fixture
def loaded(start_node: Callable[..., Any]) -> Iterator[Any]:
    """A node with a quota, that is used all the time, also wrongly."""
    node = start_node(metrics="0", namespace=(NamespaceRule(match="m*", arena=1 << 20),), arena=2 << 20)
    stopping = threading.Event()
    data = np.ones((8, PAGE), np.uint8)

    def use() -> None:
        first = 0
        with (
            kvstore.connect(f"unix://{node.config.socket}", timeout=60.0) as client,
            grpc.insecure_channel(f"unix:{node.config.socket}") as channel,
        ):
            stub = cache_pb2_grpc.CacheStub(channel)
            pages = client.namespace(kvstore.Layout(model="m", block_size=16, page_bytes=PAGE))
            while not stopping.wait(0.02):
                first += 4
                hashes = [number.to_bytes(32, "big") for number in range(first, first + 8)]
                pages.store(hashes, data)
                pages.prepare_load([*hashes, b"x" * 32]).complete()
                client.flush()
                with pytest.raises(grpc.RpcError):
                    stub.Touch(cache_pb2.PageList(fingerprint=b"x" * 32), timeout=60.0)

    thread = threading.Thread(target=use)
    thread.start()
    yield node
    stopping.set()
    thread.join()


@pytest.mark.skipif(PROMETHEUS is None, reason="no prometheus is installed")
@pytest.mark.timeout(240)
def test_every_panel_shows_something_and_every_alert_can_be_evaluated(loaded, tmp_path):
    prometheus = Prometheus(tmp_path, loaded.metrics_port)
    try:
        deadline = time.monotonic() + SECONDS
        waiting = {(title, query) for title, some in queries().items() for query in some}
        while waiting:
            assert time.monotonic() < deadline, f"nothing is shown for {waiting}"
            time.sleep(0.5)
            waiting = {each for each in waiting if not prometheus.says(each[1])}
        rules: list[dict[str, Any]] = []
        while not rules or any(rule["health"] == "unknown" for rule in rules):
            assert time.monotonic() < deadline, rules
            told = prometheus.ask("rules") or {"groups": []}
            rules = [rule for group in told["groups"] for rule in group["rules"]]
        assert [rule for rule in rules if rule["health"] != "ok"] == []
    finally:
        prometheus.stop()
