"""The hit ratio through each path: pages that lookups asked for and found, wherever a node shows them."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forked import in_child
from ports import free_port
from prometheus_client.parser import text_string_to_metric_families
from unclosed_client import look_up_and_end
from untold_reports import ended

import kvstore
from kvstore.client.paths.use_reports import UseReports
from kvstore.errors import DeadlineError, InvalidRequestError, LimitExceededError, UnavailableError
from kvstore.limits import MOST_LOOKED_UP
from kvstore.namespaces.usage import NamespaceCounts
from kvstore.status import LookupTotals
from kvstore.v1 import cache_pb2 as pb

ROOT = Path(__file__).parents[3]
PATIENCE = 60.0
PAGE = 4096
LAYOUT = kvstore.Layout(model="ratio", block_size=16, page_bytes=PAGE)


def hashes(first: int, count: int = 1) -> list[bytes]:
    return [(first + number).to_bytes(32, "big") for number in range(count)]


def payload(count: int) -> np.ndarray:
    return np.ones((count, PAGE), np.uint8)


def load(pages: kvstore.Namespace, wanted: list[bytes], **how: bool) -> int:
    return pages.load(wanted, np.empty((len(wanted), PAGE), np.uint8), **how)


def told(place: Any) -> LookupTotals:
    """What the store was told so far, with what its clients still had to tell."""
    return LookupTotals(*(place.snapshot().total[name] for name in ("looked_up", *FOUND)))


FOUND = ("found_arena", "found_disk", "found_redis")


@pytest.fixture
def pages(client: kvstore.Client) -> kvstore.Namespace:
    return client.namespace(LAYOUT)


class TestPlain:
    """On every path."""

    def test_of_fifty_prompts_four_are_there(self, place, pages):
        pages.store(hashes(0, 4), payload(4))
        for prompt in range(50):
            found = pages.lookup(hashes(prompt))
            if found.prefix:
                assert load(pages, hashes(prompt)) == 1
        assert told(place) == LookupTotals(50, 4)

    def test_a_page_behind_a_missing_one_was_found(self, place, client, pages):
        pages.store(hashes(5, 2), payload(2))
        client.lookup([(pages, hashes(0, 10)), (pages, [])])
        assert told(place) == LookupTotals(10, 2)
        assert client.status().namespaces[0].counters.items() >= {"looked_up": 10, "found_arena": 2}.items()

    def test_a_load_without_a_lookup_counts_as_one_and_behind_one_it_does_not(self, place, pages):
        pages.store(hashes(0, 10), payload(10))
        assert load(pages, hashes(0, 12)) == 10
        assert told(place) == LookupTotals(12, 10)
        pages.lookup(hashes(0, 12))
        for start in range(0, 12, 3):
            load(pages, hashes(start, 3))
        assert told(place) == LookupTotals(24, 20)
        assert load(pages, hashes(0, 2)) == 2
        assert told(place) == LookupTotals(26, 22)

    def test_one_lookup_of_many_requests_and_their_loads_count_once(self, place, client, pages):
        prompt = hashes(0, 4)
        requests = [[*prompt, *hashes(100 + 10 * number, 4)] for number in range(64)]
        for request in requests[:16]:
            pages.store(request, payload(8))
        found = client.lookup([(pages, request) for request in requests])
        for request, each in zip(requests, found, strict=True):
            assert load(pages, request[: each.prefix]) == each.prefix
        assert told(place) == LookupTotals(64 * 8, 64 * 4 + 16 * 4)

    @pytest.mark.parametrize("way", ["prepare_load", "borrow"])
    def test_a_load_in_two_calls_counts_likewise(self, place, pages, way):
        pages.store(hashes(0, 4), payload(4))

        def load_all() -> None:
            with getattr(pages, way)(hashes(0, 5)) as pending:
                assert len(pending.pages) == 4
            if pending.more:  # what is behind them is asked for by another call
                with pages.prepare_load(hashes(4)) as pending:
                    assert not pending.pages

        load_all()
        assert told(place) == LookupTotals(5, 4)
        pages.lookup(hashes(0, 5))
        load_all()
        assert told(place) == LookupTotals(10, 8)

    def test_who_counts_alone_is_not_counted_beside(self, place, client, pages):
        pages.store(hashes(0, 4), payload(4))
        client.lookup([(pages, hashes(0, 4))], counts=False)
        client.lookup_here([(pages, hashes(0, 4))], counts=False)
        pages.lookup(hashes(0, 4), counts=False)
        load(pages, hashes(0, 4), counts=False)
        for way in (pages.prepare_load, pages.borrow):
            with way(hashes(0, 4), counts=False):
                pass
        assert told(place) == LookupTotals()
        pages.count_lookup(50, {"arena": 3, "redis": 1})
        pages.count_lookup(0, {})
        assert told(place) == LookupTotals(50, 3, 0, 1)

    @pytest.mark.parametrize("found", [{"arena": 5}, {"ram": 1}, {"disk": -1}])
    def test_what_can_not_have_been_found_is_refused(self, pages, found):
        with pytest.raises(InvalidRequestError, match="found of 4 pages"):
            pages.count_lookup(4, found)

    @pytest.mark.parametrize(
        ("asked", "found", "words"),
        [
            (5.5, {"arena": 1}, "not {'arena': 1} found of 5.5 pages"),
            ("5", {}, "not {} found of 5 pages"),
            (5, {"arena": 0.5}, "not {'arena': 0.5} found of 5 pages"),
            (2**70, {}, f"0 to 16777216 pages, not of {2**70}"),
            (-1, {}, "0 to 16777216 pages, not of -1"),
        ],
    )
    def test_what_is_no_number_of_pages_is_refused_and_counting_goes_on(self, place, pages, asked, found, words):
        with pytest.raises(InvalidRequestError, match=words):
            pages.count_lookup(asked, found)
        assert pages.store(hashes(0, 4), payload(4)).stored == 4
        pages.count_lookup(np.int64(4), {"arena": np.int32(4)})
        assert told(place) == LookupTotals(4, 4)

    def test_what_was_counted_of_a_dropped_namespace_stays(self, place, pages):
        pages.store(hashes(0, 4), payload(4))
        pages.lookup(hashes(0, 8))
        assert told(place) == LookupTotals(8, 4)
        pages.clear()
        assert told(place) == LookupTotals(8, 4)

    def test_by_tier(self, make_place):
        place = make_place(arena=1 << 20)
        pages = place.connect().namespace(LAYOUT)
        pages.store(hashes(0, 50), payload(50))
        place.store.flush()
        for first in range(1000, 1400, 50):  # pushes them out
            pages.store(hashes(first, 50), payload(50))
            place.store.flush()
        pages.lookup(hashes(0, 60))
        counted = told(place)
        assert (counted.asked, counted.found) == (60, 50)
        assert counted.disk > 0

    def test_a_child_tells_of_its_own_lookups_alone(self, place, client, pages):
        if place.url.startswith("embedded:"):
            pytest.skip("a forked child has no store of its parent's")
        pages.store(hashes(0, 4), payload(4))
        told(place)
        client._session.control.reports._over = ended()  # nothing is told yet
        pages.lookup(hashes(0, 4))

        def work() -> bool:
            pages.lookup(hashes(2, 4))
            client.close()
            return True

        assert in_child(work)
        assert place.store.statistics().total["looked_up"] == 4
        assert told(place) == LookupTotals(8, 6)


class TestShortLives:
    @pytest.fixture(params=["unix", "kv", "grpc"])
    def node(self, request, start_node) -> Any:
        node = start_node(arena=4 << 20, disk_limit=0)
        if request.param == "grpc":
            node._bulk.stop(0.0)
        node.url = f"unix://{node.config.socket}" if request.param == "unix" else f"kv://127.0.0.1:{node.port}"
        return node

    def test_a_hundred_clients_that_load_ten_pages_each_are_counted(self, node):
        with kvstore.connect(node.url, timeout=PATIENCE) as client:
            client.namespace(LAYOUT).store(hashes(0, 10), payload(10))
        for _ in range(100):
            with kvstore.connect(node.url, timeout=PATIENCE) as client:
                assert load(client.namespace(LAYOUT), hashes(0, 10)) == 10
        total = node.store.statistics().total
        assert {name: total[name] for name in ("arena", "missed", "looked_up", "found_arena")} == {
            "arena": 1000,
            "missed": 0,
            "looked_up": 1000,
            "found_arena": 1000,
        }

    def test_what_they_used_outlives_what_nobody_used(self, node):
        with kvstore.connect(node.url, timeout=PATIENCE) as client:
            pages = client.namespace(LAYOUT)
            for first in range(0, 900, 100):
                pages.store(hashes(first, 100), payload(100))
        for _ in range(3):
            with kvstore.connect(node.url, timeout=PATIENCE) as client:
                assert load(client.namespace(LAYOUT), hashes(0, 50)) == 50
        with kvstore.connect(node.url, timeout=PATIENCE) as client:
            pages = client.namespace(LAYOUT)
            for first in range(2000, 2500, 100):
                pages.store(hashes(first, 100), payload(100))
            assert sum(pages.lookup(hashes(0, 50)).present) == 50
            assert sum(pages.lookup(hashes(100, 800)).present) < 800


_ENDS_WITHOUT_CLOSE = """
import sys, numpy as np, kvstore
pages = kvstore.connect(sys.argv[1]).namespace(kvstore.Layout(model="ratio", block_size=16, page_bytes=4096))
print(pages.lookup([bytes(32)]).prefix, flush=True)
"""


class TestEnds:
    """Of a client, of its process, of its node."""

    @pytest.fixture
    def node(self, start_node) -> Any:
        return start_node(disk_limit=0)

    def test_a_process_that_ends_without_close_tells_what_it_looked_up(self, node):
        url = f"unix://{node.config.socket}"
        command = [sys.executable, "-c", _ENDS_WITHOUT_CLOSE, url]
        assert subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout == "0\n"
        assert node.store.statistics().total["looked_up"] == 1

    @pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
    def test_a_child_of_multiprocessing_tells_before_it_ends(self, node, method):
        context = multiprocessing.get_context(method)
        url = f"unix://{node.config.socket}"
        child = context.Process(target=look_up_and_end, args=(url, LAYOUT, hashes(0, 3), PATIENCE))
        child.start()
        child.join(PATIENCE)
        assert child.exitcode == 0
        assert node.store.statistics().total["looked_up"] == 3

    def test_a_forked_child_of_multiprocessing_tells_by_its_parents_client(self, node):
        with kvstore.connect(f"unix://{node.config.socket}", timeout=PATIENCE) as client:
            pages = client.namespace(LAYOUT)
            pages.lookup(hashes(0, 5))
            child = multiprocessing.get_context("fork").Process(target=pages.lookup, args=(hashes(0, 3),))
            child.start()
            child.join(PATIENCE)
            assert child.exitcode == 0
        assert node.store.statistics().total["looked_up"] == 8

    def test_an_interrupted_close_has_told(self, node, monkeypatch):
        monkeypatch.setattr("kvstore.client.paths.use_reports.LAST_SECONDS", PATIENCE)
        client = kvstore.connect(f"unix://{node.config.socket}", timeout=PATIENCE)
        reports = client._session.control.reports
        reports._over = ended()  # none: nothing is told before
        client.namespace(LAYOUT).lookup(hashes(0, 3))
        send = reports._report

        def interrupted(report: pb.UseReport, timeout: float) -> object:
            signal.raise_signal(signal.SIGINT)
            return send(report, timeout)

        reports._report = interrupted
        before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
        try:
            with pytest.raises(KeyboardInterrupt):
                client.close()
        finally:
            signal.signal(signal.SIGINT, before)
        assert node.store.statistics().total["looked_up"] == 3

    def test_close_does_not_fail_for_a_node_that_is_gone_or_hangs(self, node_process):
        node = node_process()
        for stop in (node.pause, node.kill):
            client = kvstore.connect(node.url, timeout=PATIENCE)
            client.namespace(LAYOUT).lookup(hashes(0, 3))
            stop()
            client.close()
            if stop == node.pause:
                node.resume()

    def test_counts_wait_for_a_node_that_comes_back(self, node_process, eventually):
        node = node_process()
        with kvstore.connect(node.url, timeout=PATIENCE) as client:
            pages = client.namespace(LAYOUT)
            pages.store(hashes(0, 4), payload(4))
            reports = client._session.control.reports
            reports._over = ended()  # none: nothing is told yet
            node.kill()
            pages.count_lookup(50, {"arena": 4})
            assert not reports._send(reports.take(), PATIENCE)
            node.start()
            reports._over = None
            pages.count_lookup(10, {})
            with kvstore.connect(node.url, timeout=PATIENCE) as other:
                eventually(lambda: other.status().lookups == LookupTotals(60, 4))


class TestReports:
    def test_counts_are_merged_and_none_is_lost_for_pages(self):
        reports = UseReports(lambda report, timeout: None)
        reports._over = ended()
        for _ in range(5000):
            reports.note(b"f" * 32, bytes(1024 * 32), read=True)
            reports.note_lookup(b"f" * 32, 50, 3, 1, 0)
        [count] = reports.take().lookups
        assert (count.asked, count.arena, count.disk, count.redis) == (250_000, 15_000, 5000, 0)
        assert reports.take() is None

    def test_no_more_waits_than_a_node_counts_at_once(self):
        reports = UseReports(lambda report, timeout: None)
        reports._over = ended()
        for _ in range(3):
            reports.note_lookup(b"f" * 32, MOST_LOOKED_UP // 2, 1, 0, 0)
        [count] = reports.take().lookups
        assert (count.asked, count.arena) == (MOST_LOOKED_UP, 2)

    @pytest.mark.parametrize(("error", "kept"), [(UnavailableError("away"), 50), (DeadlineError("late"), 0)])
    def test_what_a_node_was_not_told_waits_and_what_it_may_have_been_told_does_not(self, error, kept):
        def fail(report: pb.UseReport, timeout: float) -> None:
            raise error

        reports = UseReports(fail)
        reports._over = ended()
        reports.note_lookup(b"f" * 32, 50, 4, 0, 0)
        assert not reports._send(reports.take(), 1.0)
        again = reports.take()
        assert (sum(each.asked for each in again.lookups) if again is not None else 0) == kept


class _Hurried(threading.Event):
    """Nobody waits for it; how long they would have is in ``waits``, and it is set behind so many of these."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.waits: list[float] = []
        self._most = most

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        self.waits.append(timeout)
        return len(self.waits) == self._most or self.is_set()


class TestThread:
    """Of the reports."""

    @pytest.mark.parametrize("error", [LimitExceededError("too many"), UnavailableError("away")])
    def test_it_asks_ever_less_often_while_it_fails_and_what_waits_is_told_in_the_end(self, error):
        failures, sent = 60, []

        def report(report: pb.UseReport, timeout: float) -> None:
            sent.append(report)
            if len(sent) <= failures:
                raise error

        reports = UseReports(report)
        reports._over = ended()
        reports._closed = hurried = _Hurried(70)
        reports.note_lookup(b"f" * 32, 50, 4, 0, 0)
        reports._run(threading.Event())
        assert hurried.waits[:8] == [0.2, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
        assert len(sent) == failures + 1
        assert [each.asked for each in sent[-1].lookups] == [50]
        assert hurried.waits[failures : failures + 3] == [30.0, 0.2, 0.2]

    def test_an_error_in_a_report_ends_it_no_more_than_one_in_sending_it(self, caplog):
        sent: list[pb.UseReport] = []
        reports = UseReports(lambda report, timeout: sent.append(report))
        reports._over = ended()
        reports._closed = _Hurried(4)
        reports.note(b"f" * 32, bytes(32), read=True, missed=-1)  # no such number
        take = reports.take

        def take_and_note() -> pb.UseReport | None:
            try:
                return take()
            finally:
                if not sent:
                    reports.note_lookup(b"f" * 32, 50, 4, 0, 0)

        reports.take = take_and_note
        reports._run(threading.Event())
        assert [each.asked for each in sent[0].lookups] == [50]
        assert "can't be told" in caplog.text
        assert reports._over is None

    def test_it_leaves_its_place_to_another_one_however_it_ends(self):
        class Ended(BaseException):
            """Nothing catches it."""

        def end(report: pb.UseReport, timeout: float) -> None:
            raise Ended

        reports = UseReports(end)
        reports._over = ended()
        reports._closed = _Hurried(4)
        reports.note_lookup(b"f" * 32, 50, 4, 0, 0)
        with pytest.raises(Ended):
            reports._run(threading.Event())
        assert reports._over is None


class TestNode:
    """What a client can make a node count."""

    @pytest.fixture
    def node(self, start_node) -> Any:
        return start_node(disk_limit=0)

    @pytest.fixture
    def client(self, node) -> Iterator[kvstore.Client]:
        with kvstore.connect(f"unix://{node.config.socket}", timeout=PATIENCE) as client:
            yield client

    def test_no_more_than_was_asked_for_is_found_and_unknown_namespaces_are_passed_over(self, node, client):
        pages = client.namespace(LAYOUT)
        most = (1 << 64) - 1
        lookups = [
            pb.LookupCount(fingerprint=pages.fingerprint, asked=10, arena=6, disk=most, redis=most),
            pb.LookupCount(fingerprint=bytes(32), asked=10, arena=6),
            pb.LookupCount(fingerprint=b"short", asked=10),
        ]
        client._session.control.reports._report(pb.UseReport(lookups=lookups), PATIENCE)
        assert client.status().lookups == LookupTotals(10, 6, 4, 0)
        huge = pb.LookupCount(fingerprint=pages.fingerprint, asked=most, arena=most)
        client._session.control.reports._report(pb.UseReport(lookups=[huge] * 4096), PATIENCE)
        assert client.status().lookups == LookupTotals(10 + (4096 << 24), 6 + (4096 << 24), 4, 0)

    def test_counts_stay_within_what_a_message_can_carry(self, node):
        usage = node.store._state.usage
        for _ in range(8):
            usage.looked_up(1, 1 << 61, (1 << 61, 0, 0))
        assert usage.of(1) == NamespaceCounts(looked_up=1 << 62, found_arena=1 << 62)


def shown(node: Any, ask: Callable[..., str]) -> dict[str, float]:
    """The hit ratio, by where a node shows it."""
    ratios: dict[str, float] = {}
    status = json.loads(ask("status", "--json"))
    ratios["status --json"] = (
        sum(status["lookups"][tier] for tier in ("arena", "disk", "redis")) / (status["lookups"]["asked"])
    )
    counters = status["namespaces"][0]["counters"]
    ratios["its namespace"] = sum(counters[name] for name in FOUND) / counters["looked_up"]
    [line] = [line for line in ask("status").splitlines() if line.startswith("lookups:")]
    assert line == "lookups: 50 pages asked, 4 found (8%): arena 4"
    with urllib.request.urlopen(f"{node.web}/metrics") as answer:
        families = {each.name: each for each in text_string_to_metric_families(answer.read().decode())}
    counted: dict[str, float] = {}
    for sample in families["kvstore_namespace_lookups"].samples:
        found = sample.labels["found"]
        counted[found] = counted.get(found, 0.0) + sample.value * (sample.name.endswith("_total"))
    ratios["metrics"] = 1 - counted["missed"] / sum(counted.values())
    with urllib.request.urlopen(f"{node.web}/console/data") as answer:
        data = json.load(answer)
    counters = data["namespaces"][0]["counters"]
    ratios["console"] = sum(counters[name] for name in FOUND) / counters["looked_up"]
    assert data["history"].keys() >= {"looked_up", *FOUND}
    return ratios


@pytest.mark.parametrize("way", ["unix", "kv"])
def test_every_place_of_a_node_shows_the_same_ratio(node_process, way):
    port = free_port()
    node = node_process(metrics=f"127.0.0.1:{port}")
    node.web = f"http://127.0.0.1:{port}"
    url = node.url if way == "unix" else node.kv_url

    def ask(*arguments: str) -> str:
        command = [sys.executable, "-m", "kvstore.cli", arguments[0], "--url", node.url, *arguments[1:]]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("KVSTORE_")}
        return subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True, timeout=PATIENCE
        ).stdout

    command = [sys.executable, "-m", "kvstore.cli", "top", "--url", node.url, "--interval=0.2", "--json"]
    with kvstore.connect(url, timeout=PATIENCE) as client:
        pages = client.namespace(LAYOUT)
        pages.store(hashes(0, 4), payload(4))
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as top:
            assert top.stdout is not None
            assert json.loads(top.stdout.readline())["lookups"]["hit_ratio"] is None
            for prompt in range(50):
                client.lookup([(pages, hashes(prompt))], counts=False)
            pages.count_lookup(50, {"arena": 4})
            ratios: list[float] = []
            while not ratios:
                ratio = json.loads(top.stdout.readline())["lookups"]["hit_ratio"]
                ratios += [ratio] if ratio is not None else []
            top.terminate()
        assert ratios == [0.08]
        assert {where: round(ratio, 9) for where, ratio in shown(node, ask).items()} == dict.fromkeys(
            ("status --json", "its namespace", "metrics", "console"), 0.08
        )
