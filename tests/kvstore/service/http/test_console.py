"""The console's data: what the page gets, who may see it, and what is kept of the last hour."""

from __future__ import annotations

import base64
import http.client
import json
import logging
import math
import time
import urllib.error
import urllib.request
from contextlib import closing
from typing import Any

import numpy as np
import pytest

import kvstore
from kvstore.node.node import Node
from kvstore.service.http.console import COLUMNS
from kvstore.service.http.history import History, Sampler
from kvstore.service.http.latency_columns import buckets_of, latencies_between
from kvstore.service.http.namespace_list import MOST_LISTED, Wanted
from kvstore.service.http.quantiles import quantile
from kvstore.service.http.recent_errors import MOST_ERRORS, RecentErrors
from kvstore.service.http.server import as_bearer
from kvstore.status import NamespaceStatus

PAGE = 5000
SECONDS = 60.0


def layout(model: str) -> kvstore.Layout:
    return kvstore.Layout(model=model, block_size=16, page_bytes=PAGE)


def get(node: Node, path: str, authorization: str = "") -> tuple[bytes, Any]:
    request = urllib.request.Request(f"http://127.0.0.1:{node.metrics_port}{path}")
    if authorization:
        request.add_header("Authorization", authorization)
    with urllib.request.urlopen(request, timeout=SECONDS) as answer:
        return answer.read(), answer.headers


def refused(node: Node, path: str, authorization: str = "") -> urllib.error.HTTPError:
    with pytest.raises(urllib.error.HTTPError) as error:
        get(node, path, authorization)
    error.value.close()
    return error.value


def data(node: Node, query: str = "") -> dict[str, Any]:
    content: dict[str, Any] = json.loads(get(node, f"/console/data{query}")[0])
    return content


@pytest.fixture
def node(start_node):
    return start_node(metrics="0")


@pytest.fixture
def pages(node):
    with kvstore.connect(f"unix://{node.config.socket}", timeout=SECONDS) as client:
        yield client.namespace(layout("m"))


def use(pages: Any, count: int = 4) -> list[bytes]:
    """Store pages, load them and as many that are nowhere."""
    hashes = kvstore.hash_blocks(list(range(32 * count)), 16)
    pages.store(hashes[:count], np.ones((count, PAGE), np.uint8))
    assert pages.prepare_load(hashes).complete() == count
    return hashes


class TestData:
    def test_what_it_says(self, node, pages):
        hashes = use(pages)
        said = data(node)
        assert said["node"]["pid"] and said["node"]["version"]
        arena, disk = said["tiers"]
        assert (arena["name"], arena["pages"], arena["limit"]) == ("arena", 4, node.config.arena)
        assert disk["limit"] == node.config.disk_limit
        name = pages.layout.name
        assert said["prefixes"] == [
            {"namespace": name, "last": hashes[3].hex()[:12], "pages": 4, "loads": 1},
            {"namespace": name, "last": hashes[0].hex()[:12], "pages": 1, "loads": 1},
        ]
        [namespace] = said["namespaces"]
        counted = {"arena": 4, "disk": 0, "redis": 0, "missed": 4, "stored": 4, "present": 0, "refused": 0}
        assert namespace["counters"] | counted == namespace["counters"]
        peers = said["peers"]
        assert (peers["clients"], peers["bulk"], peers["servers"]) == (1, 0, [])

    def test_samples_are_told_once(self, node):
        history = node._web._console._history
        later = time.time() + 1000  # than what the node samples meanwhile
        history.add(later, {"arena": 7.0})
        first = data(node)["history"]
        assert first["arena"][first["time"].index(later)] == 7 and set(first) == {"time", *COLUMNS}
        assert data(node, f"?since={later}")["history"]["time"] == []

    def test_a_tier_below_is_where_a_page_was_found(self, node, pages):
        hashes = use(pages)
        node.store.flush()
        for slot in node.store._state.catalog.find_here([pages.fingerprint + each for each in hashes[:4]]):
            node.store._state.residency.drop(slot)
        assert pages.prepare_load(hashes[:4]).complete() == 4
        [namespace] = data(node)["namespaces"]
        assert (namespace["counters"]["arena"], namespace["counters"]["disk"]) == (4, 4)

    def test_errors_are_there_newest_first_and_bounded(self, node):
        for number in range(MOST_ERRORS + 5):
            logging.getLogger("kvstore.some.part").warning("number %d %s", number, "x" * 1000)
        errors = data(node)["errors"]
        assert len(errors) == MOST_ERRORS
        assert errors[0]["message"].startswith(f"number {MOST_ERRORS + 4} ") and len(errors[0]["message"]) == 500
        assert (errors[0]["level"], errors[0]["logger"]) == ("warning", "kvstore.some.part")

    @pytest.mark.parametrize("query", ["since=soon", "since=nan", "range=week", "sort=color", "order=up", "from=-1"])
    def test_what_it_does_not_know_it_names(self, node, query):
        name, _, value = query.partition("=")
        with pytest.raises(urllib.error.HTTPError) as error:
            get(node, f"/console/data?{query}")
        assert error.value.code == 400
        assert error.value.read().decode().startswith(f"{name} is {value!r}, it is ")
        error.value.close()

    def test_who_is_connected_by_name(self, node):
        url = f"kv://127.0.0.1:{node.port}"
        with (
            kvstore.connect(f"unix://{node.config.socket}", name="one") as one,
            kvstore.connect(url, name="two") as two,
        ):
            for client in (one, two):
                use(client.namespace(layout("m")))
            [first, second] = data(node)["peers"]["connected"]
        assert (first["name"], first["way"], first["host"], first["connections"]) == ("one", "shm", "", 1)
        assert (second["name"], second["way"], second["host"]) == ("two", "bulk", "127.0.0.1")

    def test_a_tier_says_how_it_is(self, node):
        for tier in data(node)["tiers"]:
            assert tier["state"] == "ok" and tier["since"] > 0 and tier["reason"] == ""

    def test_latencies_of_the_time_that_is_asked_for(self, node, pages):
        history, sample = node._web._console._history, node._web._console._sample
        node._web._console._sampler.stop()
        now = time.time()
        for _ in range(3):
            use(pages)
        history.add(now, sample())
        with kvstore.connect(f"kv://127.0.0.1:{node.port}") as client:
            afar = client.namespace(layout("m"))
            for _ in range(5):
                afar.lookup([bytes(32)])
        history.add(now + 100, sample())
        history.add(now + 101, sample())
        assert data(node, "?range=0.5")["latencies"] == []
        calls = data(node, "?range=101")["latencies"]
        [lookup] = [
            each for each in calls if each["name"] == "lookup"
        ]  # what was looked up is reported by another call
        assert (lookup["name"], lookup["calls"], lookup["most"]) == ("lookup", 5, 10.0)
        assert 0 < lookup["p50"] <= lookup["p99"] <= 10
        by_name = {each["name"]: each for each in data(node, "?range=100000")["latencies"]}
        assert by_name["lookup"]["calls"] == 5 and by_name["store"]["calls"] >= 1
        columns = data(node)["history"]
        assert columns["lookup_p99"][-2] == pytest.approx(lookup["p99"]) and columns["lookup_p99"][-1] is None

    def test_a_tier_belows_latencies(self, node, pages):
        console = node._web._console
        console._history.add(time.time() + 1000, console._sample())
        hashes = use(pages)
        node.store.flush()
        for slot in node.store._state.catalog.find_here([pages.fingerprint + each for each in hashes[:4]]):
            node.store._state.residency.drop(slot)
        assert pages.prepare_load(hashes[:4]).complete() == 4
        console._history.add(time.time() + 1001, console._sample())
        told = {each["name"]: each["calls"] for each in data(node, "?range=1")["latencies"]}
        assert told["disk read"] >= 1 and told["disk write"] >= 1 and told["load"] >= 1


class TestNamespaces:
    """A hundred and more of them: sorted and searched where they all are, and sent in part."""

    @pytest.fixture
    def many(self, node):
        with kvstore.connect(f"unix://{node.config.socket}", timeout=SECONDS) as client:
            for number in range(60):
                client.namespace(layout(f"model-{number:02}-{'odd' if number % 2 else 'even'}"))
            use(client.namespace(layout("Model-99-big")), 4)
            yield client

    def names(self, node: Node, query: str = "") -> list[str]:
        return [each["name"].partition(" ")[0].partition("/")[0] for each in data(node, query)["namespaces"]]

    def test_the_largest_first_and_no_more_than_an_answer_has(self, node, many):
        said = data(node)
        assert said["namespaces"][0]["name"].startswith("Model-99-big")
        assert len(said["namespaces"]) == MOST_LISTED
        assert (said["namespaces_known"], said["namespaces_matching"], said["namespaces_from"]) == (61, 61, 0)

    def test_all_are_reached(self, node, many):
        found: list[str] = []
        for first in (0, MOST_LISTED, 2 * MOST_LISTED, 3 * MOST_LISTED):
            part = [each["fingerprint"] for each in data(node, f"?sort=name&order=asc&from={first}")["namespaces"]]
            assert len(part) == max(0, min(MOST_LISTED, 61 - first))
            found += part
        assert len(set(found)) == 61

    def test_a_filter_searches_all_of_them(self, node, many):
        said = data(node, "?filter=ODD&sort=name&order=desc")
        names = [each["name"] for each in said["namespaces"]]
        assert said["namespaces_matching"] == 30 and "model-59-odd" in names[0] and names == sorted(names, reverse=True)
        fingerprint = said["namespaces"][3]["fingerprint"]
        assert [each["name"] for each in data(node, f"?filter={fingerprint[:12]}")["namespaces"]] == [names[3]]
        assert data(node, "?filter=nothing-like-it")["namespaces_matching"] == 0

    @pytest.mark.parametrize("sort", ["name", "arena", "disk", "redis", "hits", "asked", "idle", "size"])
    def test_every_column_sorts_both_ways(self, node, many, sort):
        ways = [data(node, f"?sort={sort}&order={order}") for order in ("asc", "desc")]
        assert all(len(each["namespaces"]) == MOST_LISTED for each in ways)
        if sort in ("arena", "size"):
            assert "Model-99-big" in ways[1]["namespaces"][0]["name"]
            assert "Model-99-big" not in json.dumps(ways[0]["namespaces"])

    def test_what_has_no_ratio_stands_at_the_end_both_ways(self):
        def status(name: str, **counters: int) -> NamespaceStatus:
            return NamespaceStatus(name, name.encode() * 32, 1, 0, {}, {}, "", 0, "{}", counters=counters)

        low = status("low", looked_up=10, found_arena=1, found_disk=0, found_redis=0)
        high = status("high", looked_up=10, found_arena=7, found_disk=1, found_redis=1)
        none = status("none", looked_up=0, found_arena=0, found_disk=0, found_redis=0)
        older = status("older", arena=5)
        for order, expected in (("asc", [low, high]), ("desc", [high, low])):
            wanted = Wanted.parse({"sort": ["hits"], "order": [order]})
            assert wanted.among([older, low, none, high])[0] == [*expected, none, older]

    def test_one_of_them_with_everything(self, node, many):
        [listed] = data(node, "?filter=model-07")["namespaces"]
        told = data(node, f"?namespace={listed['fingerprint']}")["namespace"]
        assert told["name"] == listed["name"] and told["page_bytes"] == PAGE
        assert told["layout"]["model"] == "model-07-odd"
        assert {"used", "quota", "pinned", "age", "idle", "counters", "durability", "arena_pages"} <= set(told)
        assert data(node, "?namespace=0123")["namespace"] is None and data(node)["namespace"] is None


class TestNames:
    """A page of somebody else's, in a browser of this host, lets its own name point to 127.0.0.1."""

    def ask(self, node, name: str) -> int:
        connection = http.client.HTTPConnection("127.0.0.1", node.metrics_port, timeout=SECONDS)
        with closing(connection):
            connection.request("GET", "/console/data", headers={"Host": name})
            return connection.getresponse().status

    @pytest.mark.parametrize("name", ["localhost", "localhost:1", "127.0.0.1:1", "[::1]:1", ""])
    def test_this_hosts_are_answered(self, node, name):
        assert self.ask(node, name) == 200

    @pytest.mark.parametrize("name", ["evil.example", "evil.example:9090", "10.0.0.1", "[", "localhost.evil.example"])
    def test_others_are_not(self, node, name):
        assert self.ask(node, name) == 421


class TestAccess:
    @pytest.fixture
    def node(self, start_node, tmp_path):
        tokens = tmp_path / "tokens"
        tokens.write_text("op:the-token-of-the-operator\na:the-token-of-tenant-a tenant=a\n")
        tokens.chmod(0o600)
        return start_node(metrics="0", token_file=tokens)

    def test_as_for_metrics(self, node):
        for path in ("/", "/console", "/console/data", "/console/console.js"):
            assert refused(node, path).code == 401
            assert get(node, path, "Bearer the-token-of-the-operator")[0]

    def test_a_browser_asks_for_the_token_as_a_password(self, node):
        asked = refused(node, "/console").headers.get_all("WWW-Authenticate")
        assert any(each.startswith("Basic") for each in asked)
        given = base64.b64encode(b"anybody:the-token-of-the-operator").decode()
        assert b"kvstore" in get(node, "/console", f"Basic {given}")[0]
        assert refused(node, "/console", "Basic " + base64.b64encode(b"x:wrong").decode()).code == 401

    def test_a_tenant_does_not_see_everybodys(self, node):
        for path in ("/console", "/console/data"):
            assert refused(node, path, "Bearer the-token-of-tenant-a").code in (401, 403)

    @pytest.mark.parametrize(
        ("header", "bearer"),
        [
            ("Bearer x", "Bearer x"),
            ("basic " + base64.b64encode(b"u:p:q").decode(), "Bearer p:q"),
            ("Basic " + base64.b64encode(b"nothing").decode(), "Bearer "),
            ("Basic ???", ""),
            ("Basic /////w==", ""),
            ("", ""),
        ],
    )
    def test_headers(self, header, bearer):
        assert as_bearer(header) == bearer


class TestHistory:
    def test_it_keeps_the_latest_in_order_and_does_not_grow(self):
        history = History(("a", "b"), samples=3)
        memory = history._values.nbytes
        for number in range(5):
            history.add(number, {"a": number * 2})
        assert history.since(0, ("a", "b")) == {"time": [2, 3, 4], "a": [4, 6, 8], "b": [None, None, None]}
        assert history.since(3, ()) == {"time": [4]} and history.since(4, ("a",)) == {"time": [], "a": []}
        assert history._values.nbytes == memory

    def test_the_ends_of_a_time(self):
        history = History(("a",), samples=100)
        assert history.ends(10) is None
        history.add(1000, {"a": 1.0})
        assert history.ends(10) is None
        for when in range(1005, 1100, 5):
            history.add(when, {"a": float(when)})
        first, last = history.ends(30) or ({}, {})
        assert (first["time"], last["time"], first["a"]) == (1065, 1095, 1065)
        first, last = history.ends(1e9) or ({}, {})
        assert (first["time"], last["time"]) == (1000, 1095)
        first, last = history.ends(0) or ({}, {})  # shorter than a step: the last one
        assert (first["time"], last["time"]) == (1090, 1095)

    def test_a_sample_that_fails_does_not_end_the_samples(self, caplog):
        history, tries = History(("a",)), iter([ValueError("no"), {"a": 1.0}])

        def sample() -> dict[str, float]:
            value = next(tries, {"a": 2.0})
            if isinstance(value, Exception):
                raise value
            return value

        sampler = Sampler(history, sample, step=0.001)
        deadline = time.monotonic() + SECONDS
        while not history.since(0, "a")["a"] and time.monotonic() < deadline:
            time.sleep(0.001)
        sampler.stop()
        assert history.since(0, "a")["a"][0] == 1.0

    def test_an_error_with_its_reason(self):
        errors = RecentErrors()
        logging.getLogger("kvstore.x").error("failed", exc_info=ValueError("the reason"))
        errors.close()
        logging.getLogger("kvstore.x").warning("later")
        assert [each.message for each in errors.latest()] == ["failed: ValueError('the reason')"]


class TestQuantiles:
    @pytest.mark.parametrize(
        ("counts", "share", "expected"),
        [
            ((10, 0, 0, 0), 0.5, 0.5),
            ((0, 10, 0, 0), 0.5, 1.5),
            ((0, 10, 0, 0), 0.99, 1.99),
            ((5, 5, 0, 0), 0.5, 1.0),
            ((50, 0, 50, 0), 0.75, 3.0),
            ((1, 0, 0, 99), 0.5, math.inf),
        ],
    )
    def test_interpolated_within_the_bucket(self, counts, share, expected):
        assert quantile((1.0, 2.0, 4.0), counts, share) == pytest.approx(expected)

    def test_of_nothing_there_is_none(self):
        assert math.isnan(quantile((1.0,), (0, 0), 0.5))

    def test_between_two_samples_only_their_difference_counts(self):
        slow = {method: [0] * 16 + [1] for method in ("Cache/Lookup", "Bulk/Load")}
        fast = {method: [100] + [0] * 15 + [1] for method in ("Cache/Lookup", "Bulk/Load")}
        rows = latencies_between(buckets_of(slow, []), buckets_of(fast, []))
        assert [(row["name"], row["calls"], row["p99"]) for row in rows] == [
            ("lookup", 100, pytest.approx(0.000099)),
            ("load", 100, pytest.approx(0.000099)),
        ]
        [row, _] = latencies_between(buckets_of({}, []), buckets_of(slow, []))
        assert (row["p50"], row["most"]) == (None, 10.0)
