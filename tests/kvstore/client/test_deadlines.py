"""A node that hangs: every method gives up in time, and all is well when the node goes on."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

import numpy as np
import pytest

import kvstore
from kvstore.client.paths.bulk.requests import BulkRequests
from kvstore.client.paths.control import Connection
from kvstore.client.paths.shm.connection import SocketConnection
from kvstore.errors import DeadlineError, UnavailableError

Prepared = TypeVar("Prepared")
TIMEOUT = 0.3
"""Of calls that a hanging node lets wait. Whatever is to succeed has more time: the machine may be busy."""
PATIENT = 90.0
MUCH_LATER = 45.0
"""Less than anything that waits for the node, or with a timeout of other calls."""


@pytest.fixture(params=["unix", "kv"])
def hanging(request, node_process) -> Iterator[tuple[object, str]]:
    """A node process that a test may pause, and its URL."""
    node = node_process()
    yield node, node.url if request.param == "unix" else node.kv_url
    node.resume()


def hastily(client: kvstore.Client, prepare: Callable[[], Prepared]) -> Prepared:
    """With a short timeout, which what is prepared keeps; with a longer one where the machine is too slow for that."""
    patient, client.timeout = client.timeout, TIMEOUT
    try:
        while True:
            with suppress(DeadlineError):
                return prepare()
            client.timeout *= 4
    finally:
        client.timeout = patient


def methods(client: kvstore.Client, pages: kvstore.Namespace, hashes, payload) -> dict[str, Callable[[], object]]:
    into = np.zeros((4, 5000), np.uint8)
    return {
        "namespace": lambda: client.namespace(pages.layout),
        "client.lookup": lambda: client.lookup([(pages, hashes(4)), (pages, hashes(2))]),
        "status": client.status,
        "flush": client.flush,
        "lookup": lambda: pages.lookup(hashes(4)),
        "load": lambda: pages.load(hashes(4), into),
        "store": lambda: pages.store(hashes(4, name=1), payload(4)),
        "prepare_load": lambda: pages.prepare_load(hashes(4)),
        "prepare_store": lambda: pages.prepare_store(hashes(4, name=2)),
        "touch": lambda: pages.touch(hashes(4)),
        "evict": lambda: pages.evict(hashes(4, name=3)),
        "clear": client.namespace(kvstore.Layout(model="doomed", block_size=16, page_bytes=64)).clear,
    }


def test_every_method_raises_in_time_and_works_again(hanging, layout, hashes, payload, eventually):
    node, url = hanging
    with kvstore.connect(url, timeout=PATIENT) as patient, kvstore.connect(url, timeout=PATIENT) as client:
        pages = patient.namespace(layout)
        pages.store(hashes(4), payload(4))
        hasty = client.namespace(layout)
        hasty.lookup(hashes(4))
        calls = methods(client, hasty, hashes, payload)
        node.pause()
        if url.startswith("unix:"):  # what is in the arena needs no node
            assert [answer.prefix for answer in calls.pop("client.lookup")()] == [4, 2]
            assert calls.pop("lookup")().prefix == 4
            assert calls.pop("load")() == 4
        client.timeout = TIMEOUT
        for name, call in calls.items():
            started = time.monotonic()
            with pytest.raises(DeadlineError):
                call()
            assert time.monotonic() - started < MUCH_LATER, name
        node.resume()
        client.timeout = patient.timeout
        into = np.zeros((4, 5000), np.uint8)
        assert pages.load(hashes(4), into) == 4
        assert np.array_equal(into, payload(4))
        # What the late calls reserved is nobody's: it goes back by itself.
        eventually(lambda: client.status().tier("arena").used_bytes == client.status().tier("arena").pages * 8192)
        assert hasty.store(hashes(4, name=9), payload(4, seed=9)).stored == 4
        assert hasty.load(hashes(4, name=9), into) == 4


def test_pending_pages_of_a_hanging_node(hanging, layout, hashes, payload, eventually):
    node, url = hanging
    with kvstore.connect(url, timeout=PATIENT) as client, kvstore.connect(url, timeout=PATIENT) as patient:
        pages = client.namespace(layout)
        pages.store(hashes(4), payload(4))
        storing, giving_up, loading = hastily(
            client,
            lambda: (
                pages.prepare_store(hashes(4, name=1)),
                pages.prepare_store(hashes(4, name=2)),
                pages.prepare_load(hashes(4)),
            ),
        )
        node.pause()
        with pytest.raises(DeadlineError):
            storing.complete()
        with pytest.raises(DeadlineError):
            giving_up.abort()
        expected = 0 if url.startswith("unix:") else 4
        assert loading.complete() == expected, "nobody can say whether the hold lasted"
        node.resume()
        theirs = patient.namespace(layout)
        assert theirs.lookup(hashes(4, name=2)).prefix == 0
        # Published late or not at all, never in part.
        assert theirs.lookup(hashes(4, name=1)).prefix in (0, 4)
        eventually(lambda: patient.status().tier("arena").used_bytes == patient.status().tier("arena").pages * 8192)
        assert pages.load(hashes(4), np.zeros((4, 5000), np.uint8)) == 4


def test_threads_do_not_wait_for_each_others_deadlines(hanging, layout, hashes, payload):
    node, url = hanging
    with kvstore.connect(url, timeout=PATIENT) as client:
        pages = client.namespace(layout)
        client.timeout = TIMEOUT
        node.pause()
        with pytest.raises(DeadlineError):  # over the mapping the client must attach again from now on
            pages.store(hashes(1), payload(1))
        start = threading.Barrier(30)

        def store(number: int) -> float:
            start.wait(60)
            started = time.monotonic()
            with pytest.raises(DeadlineError):
                pages.store(hashes(1, name=number), payload(1))
            return time.monotonic() - started

        with ThreadPoolExecutor(30) as pool:
            assert max(pool.map(store, range(30))) < MUCH_LATER
        node.resume()


def test_a_fresh_client_of_a_hanging_node_waits_no_longer(hanging, layout):
    node, url = hanging
    node.pause()
    with kvstore.connect(url, timeout=TIMEOUT) as client:
        for call in (client.status, lambda: client.namespace(layout)):
            started = time.monotonic()
            with pytest.raises(DeadlineError):
                call()
            assert time.monotonic() - started < MUCH_LATER


def test_closing_does_not_wait_for_a_hanging_node(hanging, layout, hashes, payload):
    node, url = hanging
    client = kvstore.connect(url, timeout=PATIENT)
    pages = client.namespace(layout)
    node.pause()
    with ThreadPoolExecutor(1) as pool:
        storing = pool.submit(pages.store, hashes(1), payload(1))
        started = time.monotonic()
        client.close()
        with pytest.raises(UnavailableError):
            storing.result(timeout=MUCH_LATER)
        assert time.monotonic() - started < MUCH_LATER


@pytest.mark.parametrize("scheme", ["unix", "kv", "grpc"])
def test_one_deadline_for_both_halves_of_a_call(start_node, scheme, layout, hashes, payload, monkeypatch):
    """What the first call over the wire used up, the second one does not get again."""
    monkeypatch.setattr("kvstore.client.paths.shm.mapped_arena.CAN_READ", False)
    for path in ("bulk.path", "grpc"):  # as stores of many bytes are made
        monkeypatch.setattr(f"kvstore.client.paths.{path}.AT_ONCE_BYTES", 0)
    node = start_node()
    if scheme == "grpc":
        node._bulk.stop(0.0)
    url = f"unix://{node.config.socket}" if scheme == "unix" else f"kv://127.0.0.1:{node.port}"
    given: list[float] = []
    original = Connection.call

    def call(self, method, request, timeout):
        given.append(timeout)
        return original(self, method, request, timeout)

    with kvstore.connect(url, timeout=20.0) as client:
        pages = client.namespace(layout)
        path = pages._handle.current[1]
        pages.store(hashes(1, name=7), payload(1))  # its connection is made
        if scheme == "kv":
            head = BulkRequests._head

            def asked(self, kind, message, deadline, *payload):
                given.append(deadline - time.monotonic())
                return head(self, kind, message, deadline, *payload)

            monkeypatch.setattr(BulkRequests, "_head", asked)
        if scheme == "grpc":
            connection = path._connection
            send = connection.store
            connection.store = lambda sent, **how: given.append(how["timeout"]) or send(sent, **how)
        if scheme == "unix":
            for name in ("post", "parts"):
                ask_line = getattr(SocketConnection, name)

                def asked_line(self, *arguments, ask_line=ask_line):
                    given.append(arguments[-1] - time.monotonic())
                    return ask_line(self, *arguments)

                monkeypatch.setattr(SocketConnection, name, asked_line)
        monkeypatch.setattr(Connection, "call", call)
        pages.store(hashes(4), payload(4))
        assert len(given) == 2
        assert given[1] < given[0] <= 20.0
        if scheme == "unix":
            pages.load(hashes(4), np.zeros((4, 5000), np.uint8))
            assert len(given) == 4
            assert given[3] < given[2] <= 20.0


def test_one_deadline_for_all_batches_of_a_call(hanging, layout, hashes, payload):
    """A store of many batches stops at its one deadline, and says what it did not do."""
    node, url = hanging
    with kvstore.connect(url, timeout=PATIENT) as client:
        pages = client.namespace(layout)
        count = 3 * pages.batch_pages
        path = pages._handle.current[1]
        original, calls = path.begin_store, []
        first: list[Callable[[], kvstore.StoreResult]] = []

        def begin_store(*arguments: object) -> Callable[[], kvstore.StoreResult]:
            calls.append((arguments[1].deadline, time.monotonic()))
            if len(calls) == 2:
                first[0]()  # it is published
                node.pause()
            first.append(functools.cache(original(*arguments)))
            return first[-1]

        path.begin_store = begin_store
        result = kvstore.StoreResult()
        for name in range(
            3
        ):  # with a longer timeout where the machine is too slow to store the first batch in this one
            client.timeout = 4.0**name
            calls.clear()
            first.clear()
            with suppress(DeadlineError):
                result = pages.store(hashes(count, name=1000 * name), payload(count, seed=name))
            node.resume()
            if result.stored:
                break
        assert result == kvstore.StoreResult(stored=pages.batch_pages, refused=2 * pages.batch_pages)
        assert 2 <= len(calls) <= 3, "slots that were reserved ahead are filled without a call"
        assert len({deadline for deadline, _ in calls}) == 1
        assert calls[0][0] <= calls[0][1] + client.timeout
