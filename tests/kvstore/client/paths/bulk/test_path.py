"""Bulk connections that are cut, garbled, refused or forgotten: nothing is lost, and every count is exact."""

from __future__ import annotations

import socket
import threading
import time

import numpy as np
import pytest
from faulty_proxy import Proxy

import kvstore
import kvstore.client.paths.bulk.path
import kvstore.client.paths.bulk.pool
import kvstore.service.grpc.pages
import kvstore.service.sockets.bulk
from kvstore.client.paths.transfer import Transfer
from kvstore.errors import UnavailableError
from kvstore.v1 import cache_pb2 as pb
from kvstore.wire.channel import Channel
from kvstore.wire.frame import CHECKSUM, HEADER_BYTES

PAGE = 5000 + CHECKSUM.size
HELLO = HEADER_BYTES + 32


@pytest.fixture
def node(start_node):
    return start_node()


@pytest.fixture
def proxy(node):
    """Before the node's bulk port: the node tells clients to go there."""
    proxy = Proxy(node._bulk.port)
    node._bulk.port = proxy.port
    yield proxy
    proxy.close()


def url_of(node) -> str:
    return f"kv://127.0.0.1:{node.port}"


def at_rest(node) -> bool:
    return not node.store._state.leases.stores and not node.store._state.leases.loads


def no_streams(monkeypatch) -> None:
    """From now on gRPC carries no pages."""

    def fail(*arguments: object) -> None:
        raise AssertionError("a payload went through gRPC")

    monkeypatch.setattr(kvstore.client.paths.grpc, "raw_messages", fail)
    monkeypatch.setattr(kvstore.service.grpc.pages, "raw_messages", fail)


def test_pages_go_over_bulk_connections(node, layout, hashes, payload, monkeypatch):
    no_streams(monkeypatch)
    with kvstore.connect(url_of(node)) as client:
        pages = client.namespace(layout)
        count = pages.batch_pages + 10
        data = payload(count)
        assert pages.store(hashes(count), data) == kvstore.StoreResult(stored=count)
        into = np.zeros_like(data)
        assert pages.load(hashes(count), into) == count
        assert np.array_equal(into, data)
        assert node._bulk.connections <= 2


def test_a_load_that_ends_early_keeps_its_connections(node, layout, hashes, payload, monkeypatch):
    """The next batch was asked for already."""
    no_streams(monkeypatch)
    with kvstore.connect(url_of(node)) as client:
        pages = client.namespace(layout)
        count = 3 * pages.batch_pages
        data = payload(pages.batch_pages + 3)
        assert pages.store(hashes(count)[: len(data)], data).stored == len(data)
        into = np.zeros((count, 5000), np.uint8)
        kept: set[object] = set()
        for asked in (count, 2 * pages.batch_pages, len(data)):
            assert pages.load(hashes(asked), into[:asked]) == len(data)
            assert np.array_equal(into[: len(data)], data)
            idle = set(pages._handle.current[1]._pool._idle)
            assert kept <= idle
            kept = idle
        assert node._bulk.connections <= 2


@pytest.mark.parametrize("at_once", [0, 4 << 20], ids=["reserved first", "at once"])
def test_a_prefix_of_many_batches_is_stored_head_first(node, hashes, payload, monkeypatch, at_once):
    """Also when a batch takes long, and the one behind it is sent meanwhile."""
    monkeypatch.setattr(kvstore.client.paths.bulk.path, "AT_ONCE_BYTES", at_once)
    published: list[bytes] = []
    residency = node.store._state.residency
    publish = residency.publish

    def note(slots, *rest):
        published.extend(map(node.store._state.slots.block_hash, slots))
        return publish(slots, *rest)

    monkeypatch.setattr(residency, "publish", note)
    waiting: list[bytes] = []
    await_parent = kvstore.client.paths.bulk.path.BulkPath._await_parent

    def note_waiting(self, namespace, transfer):
        waiting.append(transfer.parent)
        await_parent(self, namespace, transfer)

    monkeypatch.setattr(kvstore.client.paths.bulk.path.BulkPath, "_await_parent", note_waiting)
    whole: list[int] = []
    original = Channel.send_pages

    def send_slowly(self, sent, *checksums, **head):
        """The last page of a batch goes when the batch behind it waits for that, or has overtaken it."""
        if len(sent) == 1 and not at_once and len(whole) < 3:
            whole.append(len(sent))
            behind = len(whole) * pages.batch_pages
            end = time.monotonic() + 30.0
            while hashes(count)[behind - 1] not in waiting and hashes(count)[behind] not in published:
                assert time.monotonic() < end, "the batch behind it was never begun"
                time.sleep(0.001)
        yield from original(self, sent, *checksums, **head)

    monkeypatch.setattr(Channel, "send_pages", send_slowly)
    with kvstore.connect(url_of(node), timeout=30.0) as client:
        pages = client.namespace(kvstore.Layout(model="a", block_size=16, page_bytes=64 << 10))
        count = 3 * pages.batch_pages + 1
        data = payload(count, page_bytes=64 << 10)
        assert pages.store(hashes(count), data) == kvstore.StoreResult(stored=count)
        assert published == hashes(count), "a page comes behind the page before it"
        into = np.zeros_like(data)
        assert pages.load(hashes(count), into) == count
        assert np.array_equal(into, data)


def test_pages_that_two_calls_send_are_waited_for_until_both_have(
    node, layout, hashes, payload, monkeypatch, eventually
):
    """The one that ends first takes nothing away from the other."""
    monkeypatch.setattr(kvstore.client.paths.bulk.path, "AT_ONCE_BYTES", 0)
    gates = [threading.Event(), threading.Event()]
    begun: list[threading.Event] = []

    def put(self, *arguments):
        gate = gates[len(begun)]
        begun.append(gate)
        assert gate.wait(60.0)
        return kvstore.StoreResult()

    monkeypatch.setattr(kvstore.client.paths.bulk.path.BulkPath, "_put", put)
    with kvstore.connect(url_of(node)) as client:
        opened, path = client.namespace(layout)._handle.current
        finish = []
        for number in (1, 2):
            transfer = Transfer(b"".join(hashes(2)), list(payload(2)), time.monotonic() + 60.0)
            finish.append(path.begin_store(opened, transfer))
            eventually(lambda number=number: len(begun) == number)
        gates[0].set()
        finish[0]()
        eventually(lambda: sum(thread.name == "kvstore-bulk-batch" for thread in threading.enumerate()) == 1)
        assert path._under_way
        gates[1].set()
        finish[1]()
        eventually(lambda: not path._under_way)


def test_pages_behind_a_gap_are_not_taken_for_others(node, layout, hashes, payload):
    """The first batch ends at a page that is gone, and the one behind it is here, and on its way."""
    with kvstore.connect(url_of(node)) as client:
        pages = client.namespace(layout)
        count = 2 * pages.batch_pages
        data = payload(count)
        assert pages.store(hashes(count), data).stored == count
        for gone in (5, 0):
            pages.evict(hashes(count)[gone : gone + 1])
            into = np.zeros_like(data)
            assert pages.load(hashes(count), into) == gone
            assert np.array_equal(into[:gone], data[:gone])
            assert pages.load(hashes(count)[6:], into[6:]) == count - 6
            assert np.array_equal(into[6:], data[6:])


@pytest.mark.parametrize("page_bytes", [1, 7, 4096, (512 << 10) - 1, (512 << 10) + 1, 3 << 20])
def test_pages_of_any_size(start_node, hashes, payload, monkeypatch, page_bytes):
    """Smaller than a piece, larger, and beside its edges."""
    no_streams(monkeypatch)
    node = start_node(arena=64 << 20)
    with kvstore.connect(url_of(node)) as client:
        pages = client.namespace(kvstore.Layout(model="sized", block_size=16, page_bytes=page_bytes))
        count = min(pages.batch_pages, 300)
        data = payload(count, page_bytes=page_bytes)
        assert pages.store(hashes(count), data).stored == count
        into = np.zeros_like(data)
        assert pages.load(hashes(count), into) == count
        assert np.array_equal(into, data)


def around(lengths: list[int]) -> list[int]:
    """Behind each of these parts, a byte before and a byte behind."""
    ends = np.cumsum(lengths)
    return sorted({int(end) + shift for end in ends for shift in (-1, 0, 1)})


@pytest.mark.parametrize("again", [False, True], ids=["once", "for good"])
def test_a_load_is_whole_wherever_its_connection_is_cut(node, proxy, layout, hashes, payload, eventually, again):
    """For good: every connection is cut, and gRPC brings the rest. Once: the second one does."""
    data = payload(4)
    with kvstore.connect(url_of(node)) as client:
        client.namespace(layout).store(hashes(4), data)
    run = HEADER_BYTES + len(pb.PageRun(tiers=b"\1" * 4).SerializeToString())
    for cut in around([HEADER_BYTES, HEADER_BYTES, run - HEADER_BYTES] + 4 * [5000, CHECKSUM.size])[:-1]:
        proxy.heal()
        with kvstore.connect(url_of(node)) as client:
            pages = client.namespace(layout)
            proxy.cut_after = cut
            if not again:
                threading.Thread(target=heal_behind_cut, args=(proxy,)).start()
            into = np.zeros_like(data)
            assert pages.load(hashes(4), into) == 4, f"cut behind {cut} bytes"
            assert np.array_equal(into, data), f"cut behind {cut} bytes"
            assert pages.statistics().loaded == {"arena": 4}
            proxy.heal()
    eventually(lambda: at_rest(node))


def heal_behind_cut(proxy: Proxy) -> None:
    end = time.monotonic() + 60
    while proxy.cut_after or proxy.cut_up_after:
        if time.monotonic() > end:
            return
        time.sleep(0.0005)
    proxy.heal()


def cuts_of_a_store(fingerprint: bytes, at_once: bool) -> dict[str, list[int]]:
    pages = pb.PageList(fingerprint=fingerprint, hashes=bytes(4 * 32))
    request = pb.PrepareStoreRequest(pages=pages, ttl_ms=15_000)
    ticket = (1 << 62) + 1
    message = pb.StorePages(ticket=ticket, request=request) if at_once else pb.StorePages(ticket=ticket)
    put = [HEADER_BYTES, len(message.SerializeToString())] + 4 * [5000, CHECKSUM.size]
    reserved = pb.PrepareStoreReply(ticket=ticket, outcomes=bytes(4), offsets=[8192 * place for place in range(4)])
    stored = HEADER_BYTES + len(pb.StoreCounts(stored=4).SerializeToString())
    up, down = [HELLO], [HEADER_BYTES]
    if not at_once:
        up.append(HEADER_BYTES + len(request.SerializeToString()))
        down.append(HEADER_BYTES + len(reserved.SerializeToString()))
    return {"up": around(up + put)[:-1], "down": around([*down, stored])[:-1]}


@pytest.mark.parametrize("direction", ["up", "down"])
@pytest.mark.parametrize("again", [False, True], ids=["once", "for good"])
@pytest.mark.parametrize("at_once", [False, True], ids=["reserved before", "at once"])
def test_a_store_is_whole_and_told_exactly_wherever_its_connection_is_cut(
    node, proxy, layout, hashes, payload, eventually, monkeypatch, pass_deadlines, direction, again, at_once
):
    if not at_once:
        monkeypatch.setattr(kvstore.client.paths.bulk.path, "AT_ONCE_BYTES", 0)
    fingerprint = node.store.open_namespace(layout).fingerprint
    for turn, cut in enumerate(cuts_of_a_store(fingerprint, at_once)[direction]):
        proxy.heal()
        names, data = hashes(4, name=1000 * turn), payload(4, seed=turn)
        before = node.store.statistics().counters["stored"]
        with kvstore.connect(url_of(node), timeout=15.0) as client:
            pages = client.namespace(layout)
            if direction == "up":
                proxy.cut_up_after = cut
            else:
                proxy.cut_after = cut
            if not again:
                threading.Thread(target=heal_behind_cut, args=(proxy,)).start()
            assert pages.store(names, data) == kvstore.StoreResult(stored=4), f"cut behind {cut} bytes"
            assert node.store.statistics().counters["stored"] == before + 4
            proxy.heal()
            into = np.zeros_like(data)
            assert pages.load(names, into) == 4
            assert np.array_equal(into, data), f"cut behind {cut} bytes"
    pass_deadlines(node.store)
    eventually(lambda: at_rest(node), "what lost its connection lapses")
    eventually(lambda: node.store.statistics().arena_used_bytes == node.store.statistics().arena_pages * 8192)


def test_what_is_garbled_on_the_way_is_never_a_page(node, proxy, layout, hashes, payload):
    """One bit of every piece, anywhere in it: what is said to be loaded is right, and so is what is stored."""
    data = payload(64)
    choose = np.random.default_rng(3)

    def flip(piece: bytearray) -> None:
        piece[choose.integers(len(piece))] ^= 1 << int(choose.integers(8))

    loaded = 0
    for turn in range(20):
        names = hashes(64, name=1000 * turn)
        with kvstore.connect(url_of(node)) as client:
            pages = client.namespace(layout)
            assert pages.store(names, data).refused == 0
            proxy.garble = flip
            into = np.zeros_like(data)
            here = pages.load(names, into)
            assert np.array_equal(into[:here], data[:here])
            loaded += here
            proxy.heal()
            assert pages.load(names, into) == 64
            assert np.array_equal(into, data)
    assert loaded < 20 * 64, "nothing was garbled"


def test_a_page_damaged_on_its_way_to_the_node_is_sent_again(node, layout, hashes, payload, monkeypatch):
    data = payload(4)
    original = Channel._send

    def damaged(self, buffers) -> None:
        if len(buffers) == 9:  # the request, and four pages, each with its checksum
            buffers[6] = memoryview(bytes(8))
        original(self, buffers)

    with kvstore.connect(url_of(node)) as client:
        pages = client.namespace(layout)
        monkeypatch.setattr(Channel, "_send", damaged)
        assert pages.store(hashes(4), data) == kvstore.StoreResult(stored=4)
        monkeypatch.undo()
        into = np.zeros_like(data)
        assert pages.load(hashes(4), into) == 4
        assert np.array_equal(into, data)


def no_thread(self):
    raise RuntimeError("can't start new thread")


class TestFallingBack:
    def test_a_port_that_refuses_is_left_alone_for_a_while(self, node, proxy, layout, hashes, payload, caplog):
        proxy.refuse = True
        with kvstore.connect(url_of(node)) as client:
            pages = client.namespace(layout)
            for name in range(4):
                assert pages.store(hashes(4, name=name), payload(4)).stored == 4
                assert pages.load(hashes(4, name=name), np.zeros((4, 5000), np.uint8)) == 4
        assert caplog.text.count("pages go through gRPC") == 1

    def test_a_port_that_answers_nothing_costs_its_time_once(self, node, layout, hashes, payload, monkeypatch):
        monkeypatch.setattr(kvstore.client.paths.bulk.pool, "CONNECT_SECONDS", 0.3)
        tries = []
        original = kvstore.client.paths.bulk.pool.BulkPool._connect
        monkeypatch.setattr(
            kvstore.client.paths.bulk.pool.BulkPool,
            "_connect",
            lambda self, *arguments: tries.append(threading.current_thread()) or original(self, *arguments),
        )
        with socket.create_server(("127.0.0.1", 0)) as silent, kvstore.connect(url_of(node)) as client:
            node._bulk.port = silent.getsockname()[1]
            pages = client.namespace(layout)
            assert pages.store(hashes(4), payload(4)).stored == 4
            assert pages.load(hashes(4), np.zeros((4, 5000), np.uint8)) == 4
            assert len(tries) == 1
            assert tries[0].name != "kvstore-bulk-connect", "the first one is made for the call that needs it"

    def test_bulk_connections_come_back_by_themselves(
        self, node, proxy, layout, hashes, payload, monkeypatch, eventually
    ):
        monkeypatch.setattr(kvstore.client.paths.bulk.pool, "SHORTEST_BACKOFF", 0.01)
        proxy.refuse = True
        with kvstore.connect(url_of(node)) as client:
            pages = client.namespace(layout)
            pages.store(hashes(4), payload(4))
            proxy.heal()
            into = np.zeros((4, 5000), np.uint8)
            pool = pages._handle.current[1]._pool
            eventually(lambda: pages.load(hashes(4), into) == 4 and pool._idle)
            no_streams(monkeypatch)
            assert pages.load(hashes(4), into) == 4

    def test_without_a_thread_to_be_had_pages_go_another_way(self, node, proxy, layout, hashes, payload, monkeypatch):
        monkeypatch.setattr(kvstore.client.paths.bulk.pool, "SHORTEST_BACKOFF", 1e-9)  # so the next call tries again
        proxy.refuse = True
        with kvstore.connect(url_of(node)) as client:
            pages = client.namespace(layout)
            assert pages.store(hashes(4), payload(4)).stored == 4
            with monkeypatch.context() as patched:
                patched.setattr(kvstore.client.paths.bulk.pool.threading.Thread, "start", no_thread)
                with pages._handle.current[1]._pool.lent(time.monotonic() + 1.0) as requests:
                    assert requests is None
            assert pages.load(hashes(4), np.zeros((4, 5000), np.uint8)) == 4

    def test_a_connection_closed_while_idle_costs_nothing(self, node, layout, hashes, payload, monkeypatch, eventually):
        no_streams(monkeypatch)
        with kvstore.connect(url_of(node)) as client:
            pages = client.namespace(layout)
            for name in range(3):
                assert pages.store(hashes(4, name=name), payload(4)).stored == 4
                with node._bulk._lock:
                    for channel in node._bulk._channels:
                        channel.cut()
                eventually(lambda: node._bulk.connections == 0)

    def test_threads_have_connections_of_their_own(self, node, layout, hashes, payload):
        failures = []
        with kvstore.connect(url_of(node)) as client:
            pages = client.namespace(layout)

            def work(number: int) -> None:
                try:
                    for turn in range(20):
                        names, data = hashes(8, name=number * 10_000 + turn), payload(8, seed=number)
                        assert pages.store(names, data).stored == 8
                        into = np.zeros_like(data)
                        assert pages.load(names, into) == 8
                        assert np.array_equal(into, data)
                except BaseException as error:
                    failures.append(error)
                    raise

            threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert not failures


class TestKilledNode:
    LARGE = kvstore.Layout(model="large", block_size=16, page_bytes=2 << 20)

    def test_in_the_middle_of_a_load(self, node_process, hashes, payload, monkeypatch, eventually):
        node = node_process(arena="64MiB", disk_limit="0")
        data = payload(8, page_bytes=2 << 20)
        with kvstore.connect(node.kv_url) as client:
            pages = client.namespace(self.LARGE)
            assert pages.store(hashes(8), data).stored == 8
            original = Channel.receive_pages

            def killed(self, into):
                for place, checksum in enumerate(original(self, into)):
                    if place == 2:
                        node.kill()
                    yield checksum

            monkeypatch.setattr(Channel, "receive_pages", killed)
            into = np.zeros_like(data)
            loaded = pages.load(hashes(8), into)
            assert 3 <= loaded <= 8
            assert np.array_equal(into[:loaded], data[:loaded])
            monkeypatch.undo()
            node.start()
            eventually(lambda: reached(client))
            into[:] = 0
            assert pages.load(hashes(8), into) == 8
            assert np.array_equal(into, data)

    def test_in_the_middle_of_a_store(self, node_process, hashes, payload, monkeypatch, eventually):
        node = node_process(arena="64MiB", disk_limit="0")
        data = payload(8, page_bytes=2 << 20)
        with kvstore.connect(node.kv_url) as client:
            pages = client.namespace(self.LARGE)
            original = Channel.send_pages

            def killed(self, *arguments, **head):
                for sent in original(self, *arguments, **head):
                    if sent == 2:
                        node.kill()
                    yield sent

            monkeypatch.setattr(Channel, "send_pages", killed)
            with pytest.raises(UnavailableError):
                pages.store(hashes(8), data)
            monkeypatch.undo()
            node.start()
            eventually(lambda: reached(client))
            assert pages.lookup(hashes(8)).prefix == 0
            assert client.status().tier("arena").used_bytes == 0
            assert pages.store(hashes(8), data) == kvstore.StoreResult(stored=8)


def reached(client: kvstore.Client) -> bool:
    try:
        return bool(client.status())
    except UnavailableError:
        return False
