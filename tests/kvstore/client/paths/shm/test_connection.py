"""The calls around copies over the socket in the arena's folder: what they spare, and what becomes of them when a node
dies, hangs or has no such socket."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from untold_reports import ended

import kvstore
from kvstore.client.paths.shm import preallocation, reservation
from kvstore.client.paths.shm.admission import Share, StoreAdmission
from kvstore.client.paths.shm.connection import GrpcConnection, SocketConnection
from kvstore.errors import LimitExceededError, UnavailableError
from kvstore.wire.local import SOCKET_NAME, Calls

PAGE = 5000
SLOT = 8192
PATIENCE = 60.0


@pytest.fixture
def space() -> kvstore.Layout:
    return kvstore.Layout(model="tiny", block_size=16, page_bytes=PAGE)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What goes over the sockets, and over gRPC with "gRPC" before it."""
    made: list[str] = []
    for owner, mark in ((SocketConnection, ""), (GrpcConnection, "gRPC ")):
        for name in ("post", "parts"):
            original = getattr(owner, name)

            def noted(self, request, *rest, original=original, mark=mark):
                for each in [packed.request for packed in request] if isinstance(request, list) else [request]:
                    made.append(mark + type(each).__name__.removesuffix("Request"))
                return original(self, request, *rest)

            monkeypatch.setattr(owner, name, noted)
    return made


def load(pages: kvstore.Namespace, hashes: list[bytes]) -> tuple[int, np.ndarray]:
    into = np.zeros((len(hashes), PAGE), np.uint8)
    return pages.load(hashes, into), into


def test_a_store_is_published_while_it_is_copied(start_node, hashes, payload, asked, monkeypatch, eventually):
    monkeypatch.setattr(preallocation, "LEAST_BYTES", 1)
    monkeypatch.setattr(preallocation, "_IDLE_SECONDS", 1000.0)
    monkeypatch.setattr(reservation, "LEAST_PART_BYTES", PAGE)
    copy_slots = reservation.copy_slots

    def copy(*slots: Any, **out: bool) -> None:
        asked.append("copy")
        copy_slots(*slots, **out)

    monkeypatch.setattr(reservation, "copy_slots", copy)
    node = start_node(arena=1024 * SLOT, disk_limit=0)
    with kvstore.connect(f"unix://{node.config.socket}", timeout=PATIENCE) as client:
        pages = client.namespace(kvstore.Layout(model="a", block_size=16, page_bytes=PAGE))
        for name in (0, 1):  # the second one has slots already, and asks for the next ones before it copies
            asked.clear()
            assert pages.store(hashes(8, name), payload(8, seed=name)) == kvstore.StoreResult(stored=8)
            assert asked == ["PrepareStore"] * (2 - name) + ["copy", "CompleteStore"] * 2
        asked.clear()
        more = [*hashes(8, 0)[:3], *hashes(5, 77)[3:], *hashes(8, 0)[5:6]]
        assert pages.store(more, payload(6, seed=5)) == kvstore.StoreResult(stored=2, present=4)
        assert asked == ["PrepareStore"] + ["copy", "CompleteStore"] * 2
        for name in (0, 1):
            loaded, into = load(pages, hashes(8, name))
            assert loaded == 8
            assert np.array_equal(into, payload(8, seed=name))
        _, into = load(pages, more[3:5])
        assert np.array_equal(into, payload(6, seed=5)[3:5])
        node.store.check_integrity()


@pytest.mark.parametrize(
    ("pages", "page_bytes", "ends"),
    [
        (1, 2 << 20, [1]),
        (2, 2 << 20, [1, 2]),
        (8, 2 << 20, [6, 8]),
        (32, 512 << 10, [24, 32]),
        (64, 64 << 10, [48, 64]),
        (20, 64 << 10, [4, 20]),
        (16, 64 << 10, [16]),
    ],
)
def test_the_last_part_is_small(pages, page_bytes, ends):
    assert list(reservation.part_ends(pages, page_bytes)) == ends


@pytest.mark.parametrize("socket", ["none", "dead"])
def test_without_the_socket_grpc_does_it(start_node, space, hashes, payload, asked, socket):
    node = start_node()
    node._local.stop(0.0)
    if socket == "dead":
        (node.store.arena.directory / SOCKET_NAME).write_bytes(b"")
    with kvstore.connect(f"unix://{node.config.socket}", timeout=PATIENCE) as client:
        pages = client.namespace(space)
        assert pages.store(hashes(4), payload(4)) == kvstore.StoreResult(stored=4)
        with pages.prepare_load(hashes(5)) as held:
            assert len(held.pages) == 4
            assert held.complete() == 4
        assert load(pages, hashes(5))[0] == 4
    assert asked
    assert all(name.startswith("gRPC ") for name in asked)


def test_a_request_that_fits_into_no_frame_goes_through_grpc(start_node, space, hashes, payload, asked):
    node = start_node(disk_limit=0)
    with kvstore.connect(f"unix://{node.config.socket}", timeout=PATIENCE) as client:
        pages = client.namespace(space)
        assert pages.store(hashes(4), payload(4)).stored == 4
        client._session.path._use_reports._over = ended()  # none: what was read goes with a call
        client._session.path._use_reports.note(pages.fingerprint, b"".join(hashes(4)) * 1000, read=True)
        asked.clear()
        assert pages.store(hashes(4, 1), payload(4)).stored == 4
        assert "gRPC PrepareStore" in asked
        assert "gRPC CompleteStore" not in asked


def test_the_first_page_is_copied_while_the_last_is_still_read(start_node, space, hashes, payload, monkeypatch):
    node = start_node()
    monkeypatch.setattr("kvstore.store.loads.FIRST_PART_BYTES", PAGE)
    data = payload(5)
    with kvstore.connect(f"unix://{node.config.socket}", timeout=PATIENCE) as client:
        pages = client.namespace(space)
        pages.store(hashes(5), data)
        node.store.flush()
        with node.store._state.lock:
            for each in hashes(5):
                node.store._state.residency.drop(node.store._catalog.find(pages.fingerprint + each))
        [tier] = node.store.lower_tiers.own
        read, goes_on = tier.read, threading.Event()

        def slow(keys: list[bytes], into: list[np.ndarray]) -> list[int | None]:
            if pages.fingerprint + hashes(5)[-1] in keys:
                assert goes_on.wait(PATIENCE), "nobody copied the first page"
            return read(keys, into)

        monkeypatch.setattr(tier, "read", slow)
        copy = kvstore.client.paths.shm.path.copy_slots

        def copy_and_go_on(*slots: Any, **out: bool) -> None:
            copy(*slots, **out)
            goes_on.set()

        monkeypatch.setattr("kvstore.client.paths.shm.path.copy_slots", copy_and_go_on)
        loaded, into = load(pages, hashes(5))
        assert loaded == 5
        assert np.array_equal(into, data)
        assert pages.statistics().loaded == {"disk": 5}
        assert not node.store._state.leases.loads


def test_a_guess_that_fails_costs_nothing_else(start_node, hashes, payload, monkeypatch):
    monkeypatch.setattr(preallocation, "LEAST_BYTES", 1)
    node = start_node(arena=1024 * SLOT, disk_limit=0)

    def refuse(*arguments: object, **options: object) -> None:
        raise LimitExceededError("no guesses today")

    monkeypatch.setattr(node.store, "reserve_ahead", refuse)
    with kvstore.connect(f"unix://{node.config.socket}", timeout=PATIENCE) as client:
        pages = client.namespace(kvstore.Layout(model="a", block_size=16, page_bytes=PAGE))
        attachment = client._session.path._attachment
        for name in range(3):
            assert pages.store(hashes(4, name), payload(4)).stored == 4
        assert client._session.path._attachment is attachment
        assert not attachment.is_over


def test_a_forked_child_has_connections_of_its_own(start_node, space, hashes, payload):
    node = start_node(disk_limit=0)
    with kvstore.connect(f"unix://{node.config.socket}", timeout=PATIENCE) as client:
        pages = client.namespace(space)
        assert pages.store(hashes(4), payload(4)).stored == 4
        connections = client._session.path._connections
        parents = connections._idle[0]
        child = os.fork()
        if not child:
            status = 1
            with suppress(BaseException):
                status = int(connections.take(1e9) is parents)
            os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        assert pages.store(hashes(4, 1), payload(4)).stored == 4
        assert connections._idle == [parents]


def test_two_threads_with_long_prompts_share_a_small_arena(start_node, hashes, payload):
    """Batches of both are more than a client may have in hand: one waits for the other, none is refused."""
    node = start_node(arena=64 * SLOT, disk_limit=0)
    with kvstore.connect(f"unix://{node.config.socket}", timeout=PATIENCE) as client:
        spaces = [client.namespace(kvstore.Layout(model=name, block_size=16, page_bytes=PAGE)) for name in "ab"]
        assert spaces[0].batch_pages == 16
        begin = threading.Barrier(2)

        def work(pages: kvstore.Namespace) -> None:
            for name in range(8):
                begin.wait(PATIENCE)
                pages.store(hashes(32, name), payload(32))

        threads = [threading.Thread(target=work, args=(pages,)) for pages in spaces]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        # Pages may leave again for the other thread's: nothing is refused a slot.
        counters = node.store.statistics().counters
        assert (counters["refused"], counters["stored"]) == (0, 2 * 8 * 32)


def test_a_client_that_is_closed_as_it_connects_does_not_wait_for_the_node(node_process, space, monkeypatch):
    node = node_process()
    client = kvstore.connect(node.url, timeout=PATIENCE)
    client.namespace(space)
    connections = client._session.path._connections

    def closed_meanwhile(*arguments):
        connections.close()
        return Calls(*arguments)

    monkeypatch.setattr("kvstore.client.paths.shm.connection.Calls", closed_meanwhile)
    node.pause()
    started = time.monotonic()
    with pytest.raises(UnavailableError, match="is closed"):
        connections.take(started + PATIENCE)
    assert time.monotonic() < started + PATIENCE / 2, "it waited for the node"
    node.resume()
    client.close()


def test_stores_are_admitted_as_far_as_they_fit():
    admission = StoreAdmission(10)
    shares = [Share(4) for _ in range(3)]
    admission.take(shares[0], 0.0)
    assert not admission.is_tight
    admission.take(shares[1], 0.0)
    assert admission.is_tight
    admission.take(shares[2], 0.0)  # the deadline has passed: the node decides
    waiting = threading.Thread(target=admission.take, args=(Share(100), time.monotonic() + PATIENCE))
    waiting.start()
    admission.give_back(shares[0])
    admission.give_back(shares[0])  # what was given back counts once
    assert waiting.is_alive()
    admission.give_back(shares[1])
    assert waiting.is_alive()
    del shares  # its store was interrupted before it could give it back
    waiting.join(PATIENCE)  # larger than all of it, but alone
    assert not waiting.is_alive()


class TestKilled:
    """The node is killed as each call is about to be made, in turn."""

    @pytest.fixture
    def kill_at(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Any, int], None]]:
        def arm(node: Any, call: int) -> None:
            left = [call]
            for name in ("post", "settle"):
                original = getattr(SocketConnection, name)

                def count(self, *arguments, original=original):
                    left[0] -= 1
                    if left[0] == -1:
                        node.kill()
                    return original(self, *arguments)

                monkeypatch.setattr(SocketConnection, name, count)

        return arm

    @pytest.mark.parametrize("call", [0, 1, 3, 4, 5])
    def test_in_a_store(self, node_process, hashes, payload, kill_at, monkeypatch, eventually, call):
        monkeypatch.setattr(preallocation, "LEAST_BYTES", 1)
        monkeypatch.setattr(reservation, "LEAST_PART_BYTES", PAGE)
        node = node_process(arena=str(256 * SLOT), disk_limit="0")
        with kvstore.connect(node.url, timeout=PATIENCE) as client:
            pages = client.namespace(kvstore.Layout(model="a", block_size=16, page_bytes=PAGE))
            assert pages.store(hashes(4, 9), payload(4, seed=9)).stored == 4
            data = payload(8, seed=1)
            kill_at(node, call)
            with pytest.raises(UnavailableError):
                pages.store(hashes(8), data)
            node.start()
            again: list[kvstore.StoreResult] = []

            def stored() -> bool:
                with suppress(UnavailableError):
                    again.append(pages.store(hashes(8), data))
                return bool(again)

            eventually(stored)
            assert again[0].refused == 0
            for name, of in ((9, payload(4, seed=9)), (0, data)):
                loaded, into = load(pages, hashes(len(of), name))
                assert loaded == len(of)
                assert np.array_equal(into, of)
            # What was reserved and not published is nobody's any more, and what was preallocated goes back.
            monkeypatch.setattr(preallocation, "_IDLE_SECONDS", 0.2)
            eventually(lambda: client.status().tier("arena").used_bytes == 12 * SLOT)

    @pytest.mark.parametrize("call", [0, 2])
    def test_in_a_load(self, node_process, space, hashes, payload, kill_at, monkeypatch, eventually, call):
        monkeypatch.setattr("kvstore.client.paths.shm.mapped_arena.CAN_READ", False)
        node = node_process()
        with kvstore.connect(node.url, timeout=PATIENCE) as client:
            pages = client.namespace(space)
            data = payload(4)
            pages.store(hashes(4), data)
            client.flush()
            kill_at(node, call)
            loaded = -1
            with suppress(UnavailableError):
                loaded = load(pages, hashes(4))[0]
            assert loaded in (-1, 0), "nobody can say whether the hold lasted"
            node.start()

            def comes_back() -> bool:
                with suppress(UnavailableError):
                    count, into = load(pages, hashes(4))
                    return count == 4 and bool(np.array_equal(into, data))
                return False

            eventually(comes_back)
