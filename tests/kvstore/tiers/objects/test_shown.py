"""What a node says of its object storage: metrics, ``kvstore status`` and the console."""

from __future__ import annotations

import json
import urllib.request
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families
from s3_server import URL, Faults, S3Server

import kvstore
from kvstore.cli.main import main
from kvstore.node.node import Node
from kvstore.tiers.objects.bucket import Bucket, GoneError
from kvstore.tiers.prices import DOLLARS

PAGE = 50_000
PAGES = 4


@pytest.fixture
def node(start_node: Callable[..., Node], server: S3Server) -> Node:
    """One that has written pages, and has asked for others in vain."""
    node = start_node(
        objects=URL, objects_limit=64 << 20, objects_admit="all", objects_deadline=20.0, disk_limit=0, metrics="0"
    )
    with kvstore.connect(f"unix://{node.config.socket}", timeout=60.0) as client:
        namespace = client.namespace(kvstore.Layout(model="m", block_size=16, page_bytes=PAGE))
        hashes = kvstore.hash_blocks(list(range(16 * PAGES)), 16)
        assert namespace.store(hashes, np.ones((PAGES, PAGE), np.uint8)).stored == PAGES
        client.flush()
    return node


def get(node: Node, path: str) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{node.metrics_port}{path}", timeout=60) as answer:
        content: str = answer.read().decode()
    return content


def samples(node: Node, name: str) -> dict[str, float]:
    """By the one label that these have."""
    families = text_string_to_metric_families(get(node, "/metrics"))
    found = [sample for family in families for sample in family.samples if sample.name == name]
    return {next(iter(sample.labels.values())): sample.value for sample in found}


def test_metrics_tell_requests_by_class_and_what_they_cost(node: Node, server: S3Server) -> None:
    requests = samples(node, "kvstore_objects_requests_total")
    assert requests.keys() == {"get", "put", "list", "delete"}
    assert requests["put"] >= 3, "a heartbeat, a pack, an index object"
    dollars = samples(node, "kvstore_objects_request_dollars_total")
    after = samples(node, "kvstore_objects_requests_total")
    for request in requests:
        assert requests[request] * DOLLARS[request] <= dollars[request] <= after[request] * DOLLARS[request], request
    assert dollars["put"] >= 1.5e-5
    assert all(samples(node, "kvstore_objects_request_seconds_total")[request] > 0 for request in ("put", "list"))
    assert samples(node, "kvstore_objects_bytes_total")["sent"] > PAGES * PAGE


def test_each_request_counts_once(server: S3Server) -> None:
    """Of a long list each page is one; of many deletions a thousand are."""
    bucket = Bucket(URL, 20.0)
    for number in range(2500):
        server.put(f"fleet/x/{number:04}", b"")
    assert len(bucket.list("x/")) == 2500
    assert bucket.list("y/") == []
    bucket.put("z", b"bytes")
    assert bucket.get("z") == b"bytes"
    assert bucket.get_range("z", 1, 2) == b"yt"
    with pytest.raises(GoneError):
        bucket.get("y")
    bucket.delete([f"x/{number:04}" for number in range(2500)])
    traffic = bucket.traffic()
    assert traffic.requests == {"get": 3, "put": 1, "list": 4, "delete": 3}
    assert traffic.errors == {"get": 0, "put": 0, "list": 0, "delete": 0}
    methods = Counter("LIST" if method == "GET" and not name else method for method, name in server.requests)
    assert methods == {"GET": 3, "PUT": 1, "LIST": 4, "POST": 3}
    bucket.close()


def test_metrics_tell_which_requests_failed(node: Node, server: S3Server) -> None:
    assert samples(node, "kvstore_objects_request_errors_total")["put"] == 0
    server.faults = Faults(status=403)
    with kvstore.connect(f"unix://{node.config.socket}", timeout=60.0) as client:
        namespace = client.namespace(kvstore.Layout(model="other", block_size=16, page_bytes=PAGE))
        namespace.store(kvstore.hash_blocks(list(range(16)), 16), np.ones((1, PAGE), np.uint8))
        client.flush()
    assert samples(node, "kvstore_objects_request_errors_total")["put"] > 0


def test_status_tells_requests_and_what_they_cost(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    url = f"unix://{node.config.socket}"
    assert main(["status", "--url", url, "--json"]) == 0
    tiers = {tier["name"]: tier for tier in json.loads(capsys.readouterr().out)["tiers"]}
    assert tiers["arena"]["requests"] == {}
    told = tiers["objects"]
    assert told["requests"]["put"] >= 3
    cost = sum(count * DOLLARS[request] for request, count in told["requests"].items())
    assert told["requests_dollars"] == pytest.approx(cost)
    assert main(["status", "--url", url]) == 0
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("requests to objects: ")]
    assert line.endswith("about 0.00 USD at S3's prices")


def test_the_console_tells_them_too(node: Node) -> None:
    [tier] = [tier for tier in json.loads(get(node, "/console/data"))["tiers"] if tier["name"] == "objects"]
    assert tier["requests"]["put"] >= 3
    assert tier["dollars"] > 0
