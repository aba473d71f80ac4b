"""Streams from a node that sends something else than the pages: in doubt it is a miss."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import grpc
import numpy as np
import pytest

import kvstore
import kvstore.client.paths.grpc
import kvstore.service.grpc.pages
from kvstore.client.paths.grpc import GrpcPath
from kvstore.errors import UnavailableError
from kvstore.hashing import checksum_of
from kvstore.v1 import cache_pb2 as pb


@pytest.fixture
def node(start_node):
    node = start_node()
    node._bulk.stop(0.0)  # then a client has only the streams
    return node


@pytest.fixture
def far_pages(node, layout) -> Iterator[kvstore.Namespace]:
    with kvstore.connect(f"kv://127.0.0.1:{node.port}") as client:
        yield client.namespace(layout)


def test_a_store_is_sent_anew_when_tokens_were_rotated_behind_its_reservation(
    start_node, hashes, payload, monkeypatch, tmp_path
):
    """Through the node's socket: a tenant's pages do not go through the mapped arena."""
    tokens, mine = tmp_path / "tokens", tmp_path / "mine"

    def rotate(token: str) -> None:
        for file, text in ((tokens, f"{token} tenant=mine\n"), (mine, token)):
            file.write_text(text)
            file.chmod(0o600)

    rotate("a-token-of-some-length")
    node = start_node(token_file=tokens)
    begin, rotated = GrpcPath._begin_send, threading.Event()

    def begin_behind_a_rotation(*given):
        if not rotated.is_set():
            rotated.set()
            rotate("another-token-of-some-length")
            node.reload(node.config)
        return begin(*given)

    monkeypatch.setattr(GrpcPath, "_begin_send", begin_behind_a_rotation)
    monkeypatch.setattr(kvstore.client.paths.grpc, "AT_ONCE_BYTES", 0)
    monkeypatch.setattr(node.store, "batch_pages", lambda known: 2)
    data = payload(6)
    layout = kvstore.Layout(model="m", tenant="mine", block_size=16, page_bytes=data.shape[1])
    with kvstore.connect(f"unix://{node.config.socket}", token_file=mine) as client:
        pages = client.namespace(layout)
        assert pages.store(hashes(6), data).stored == 6
        assert rotated.is_set()
        into = np.zeros_like(data)
        assert pages.load(hashes(6), into) == 6
        assert np.array_equal(into, data)


@pytest.mark.parametrize("damaged", [0, 1, 3])
def test_a_page_damaged_on_the_way_ends_the_prefix(far_pages, hashes, payload, monkeypatch, damaged):
    data = payload(4)
    far_pages.store(hashes(4), data)
    original = kvstore.service.grpc.pages.raw_messages

    def flipped(pages) -> Iterator[bytes]:
        pages = [page.copy() for page in pages]
        pages[damaged][2500] ^= 1
        return original(pages)

    monkeypatch.setattr(kvstore.service.grpc.pages, "raw_messages", flipped)
    into = np.zeros_like(data)
    assert far_pages.load(hashes(4), into) == damaged
    assert np.array_equal(into[:damaged], data[:damaged])
    with far_pages.prepare_load(hashes(4)) as loading:
        assert len(loading.pages) == damaged
        assert loading.complete() == damaged
    monkeypatch.undo()
    assert far_pages.load(hashes(4), into) == 4
    assert far_pages.statistics().loaded["arena"] == 2 * damaged + 4


def run_of(data: np.ndarray, **changed: object) -> bytes:
    values = {"tiers": b"\1" * len(data), "checksums": [checksum_of(page) for page in data]} | changed
    return pb.PageRun(**values).SerializeToString()


NONSENSE = {
    "garbage": lambda data: [b"\xff" * 50],
    "an empty header": lambda data: [b"", data.tobytes()],
    "fewer tiers": lambda data: [run_of(data, tiers=b"\1"), data.tobytes()],
    "no tiers": lambda data: [run_of(data, tiers=b""), data.tobytes()],
    "no checksums": lambda data: [run_of(data, checksums=[]), data.tobytes()],
    "more pages than asked for": lambda data: [run_of(np.vstack([data, data])), data.tobytes(), data.tobytes()],
    "an unknown tier": lambda data: [run_of(data, tiers=b"\7" * len(data)), data.tobytes()],
    "one byte": lambda data: [run_of(data), data.tobytes()[:1]],
    "too many bytes": lambda data: [run_of(data), data.tobytes() + b"x"],
    "no payload": lambda data: [run_of(data)],
    "other pages": lambda data: [run_of(data), data[::-1].tobytes()],
}


@pytest.mark.parametrize("nonsense", NONSENSE)
def test_an_answer_that_makes_no_sense_is_a_miss(far_pages, hashes, payload, monkeypatch, nonsense):
    data = payload(4)
    far_pages.store(hashes(4), data)
    answer = NONSENSE[nonsense](data)
    monkeypatch.setattr(kvstore.service.grpc.pages.PagesHandler, "_runs", lambda self, request, seconds: iter(answer))
    assert far_pages.load(hashes(4), np.zeros_like(data)) == 0
    assert far_pages.prepare_load(hashes(4)).complete() == 0


def test_pages_that_came_whole_before_the_stream_ended_are_kept(far_pages, hashes, payload, monkeypatch):
    data = payload(4)
    answer = [run_of(data), data.tobytes()[:-1]]
    monkeypatch.setattr(kvstore.service.grpc.pages.PagesHandler, "_runs", lambda self, request, seconds: iter(answer))
    into = np.zeros_like(data)
    assert far_pages.load(hashes(4), into) == 3
    assert np.array_equal(into[:3], data[:3])


def test_what_came_before_the_stream_broke_is_kept(far_pages, hashes, payload, monkeypatch):
    data = payload(4)

    def broken(self, request, seconds) -> Iterator[bytes]:
        yield run_of(data)
        yield data[:2].tobytes()
        yield data[2].tobytes()[:-1]
        raise UnavailableError("the node is stopping")

    monkeypatch.setattr(kvstore.service.grpc.pages.PagesHandler, "_runs", broken)
    into = np.zeros_like(data)
    assert far_pages.load(hashes(4), into) == 2
    assert np.array_equal(into[:2], data[:2])


def test_a_node_without_room_for_a_stream_is_unavailable(node, far_pages, hashes, payload, monkeypatch):
    def refused(self, request, seconds) -> Iterator[bytes]:
        raise UnavailableError("64 payload streams are open, the limit is 64")
        yield

    monkeypatch.setattr(kvstore.service.grpc.pages.PagesHandler, "_runs", refused)
    with pytest.raises(UnavailableError, match="limit is 64"):
        far_pages.load(hashes(1), bytearray(5000))


def test_counts_that_do_not_add_up_are_no_answer(far_pages, hashes, payload, monkeypatch):
    monkeypatch.setattr(
        kvstore.service.grpc.pages.PagesHandler,
        "_receive",
        lambda self, messages, context: kvstore.store.results.Published(1, 0, 0),
    )
    with pytest.raises(UnavailableError, match="lost the reservation"):
        far_pages.store(hashes(4), payload(4))


def test_a_layout_of_a_stream_is_checked_by_both_ends(node, far_pages, hashes, payload):
    """A raw stream under this client's ticket with pages of another size stores nothing, and the client can go on."""
    storing = far_pages.prepare_store(hashes(2))
    [ticket] = list(node.store._state.leases.stores)
    with grpc.insecure_channel(f"127.0.0.1:{node.port}") as channel:
        header = pb.StorePages(ticket=ticket, checksums=[1, 2]).SerializeToString()
        with pytest.raises(grpc.RpcError, match="after 4 of 10000 bytes"):
            channel.stream_unary("/kvstore.v1.Pages/Store")(iter([header, b"tiny"]), timeout=10)
    assert storing.complete() == kvstore.StoreResult(refused=2)
    assert far_pages.store(hashes(2), payload(2)).stored == 2
