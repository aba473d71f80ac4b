"""What a subscriber gets over ZeroMQ, read as msgpack alone: vLLM's own classes read it in tests/vllm."""

from __future__ import annotations

import socket
import stat
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest

import kvstore
from kvstore.config.node import NodeConfig
from kvstore.errors import ConfigError, ResourceError
from kvstore.layout import Layout
from kvstore.node.node import Node
from kvstore.service import event_publisher as publisher
from kvstore.store.store import Store

zmq = pytest.importorskip("zmq", reason="pyzmq is not installed")
PAGE = 5000
LAYOUT = Layout(model="m", block_size=16, page_bytes=PAGE, group=2)
DIVIDED: dict[str, Any] = {"model": "m", "block_size": 16, "page_bytes": PAGE}
PATIENCE_MS = 60_000


def hashes(count: int, first: int = 0) -> list[bytes]:
    return [bytes([1]) + number.to_bytes(31, "big") for number in range(first, first + count)]


class Subscriber:
    """Reads until it has what a test waits for."""

    def __init__(self, context: Any, node: Node, topic: str = "") -> None:
        assert node.publisher is not None
        self.socket = context.socket(zmq.SUB)
        self.socket.setsockopt(zmq.RCVTIMEO, PATIENCE_MS)
        self.socket.subscribe(topic.encode())
        self.socket.connect(node.publisher.endpoint)
        self.messages: list[tuple[bytes, int, list[Any]]] = []
        self._unseen: list[dict[str, Any]] = []

    def _read(self) -> None:
        topic, number, batch = self.socket.recv_multipart()
        time, events, rank = msgpack.unpackb(batch)
        assert time > 1e9 and rank == 0
        self.messages.append((topic, int.from_bytes(number, "big"), events))
        self._unseen += events

    def until(self, found: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """The next event like this."""
        while True:
            while self._unseen:
                event = self._unseen.pop(0)
                if found(event):
                    return event
            self._read()


class Sockets:
    """A context whose sockets live as long as it does."""

    def __init__(self) -> None:
        self._context = zmq.Context()
        self._opened: list[Any] = []

    def socket(self, kind: int) -> Any:
        self._opened.append(self._context.socket(kind))
        return self._opened[-1]

    def close(self) -> None:
        for each in self._opened:
            each.close(linger=0)
        self._context.term()


@pytest.fixture
def context() -> Iterator[Sockets]:
    context = Sockets()
    yield context
    context.close()


@pytest.fixture
def node(start_node: Callable[..., Node]) -> Node:
    return start_node(events="tcp://127.0.0.1:0", events_replay="tcp://127.0.0.1:0")


@pytest.fixture
def pages(node: Node) -> Iterator[Any]:
    with kvstore.connect(f"unix://{node.config.socket}", timeout=60.0) as client:
        yield client.namespace(LAYOUT)


def store(pages: Any, count: int, first: int = 0, parent: bytes = b"") -> None:
    stored = pages.store(hashes(count, first), np.ones((count, PAGE), np.uint8), parent=parent)
    assert stored.stored == count


def subscribe(context: Any, node: Node, pages: Any, topic: str = "") -> Subscriber:
    """A subscriber that is known to listen: it has seen an event of a page that is stored for it."""
    subscriber = Subscriber(context, node, topic)
    subscriber.socket.setsockopt(zmq.RCVTIMEO, 100)
    for number in range(1000, 2000):
        store(pages, 1, number)
        try:
            subscriber.until(lambda event: hashes(1, number)[0] in event.get("block_hashes", ()))  # noqa: B023
        except zmq.Again:
            continue
        subscriber.socket.setsockopt(zmq.RCVTIMEO, PATIENCE_MS)
        return subscriber
    raise AssertionError("nothing was ever heard")


def replay(context: Any, node: Node, start: int) -> list[tuple[bytes, int, list[Any]]]:
    """What the replay endpoint answers, up to its end."""
    assert node.publisher is not None
    asking = context.socket(zmq.DEALER)
    asking.setsockopt(zmq.RCVTIMEO, PATIENCE_MS)
    asking.connect(node.publisher.replay)
    asking.send_multipart((b"", start.to_bytes(8, "big")))
    answers = []
    while True:
        _, topic, number, batch = asking.recv_multipart()
        if number == b"\xff" * 8:
            assert not topic and not batch
            return answers
        answers.append((topic, int.from_bytes(number, "big"), msgpack.unpackb(batch)[1]))


def test_pages_are_told_as_vllm_tells_of_blocks(context, node, pages):
    subscriber = subscribe(context, node, pages)
    store(pages, 3, parent=hashes(1, 77)[0])
    told = subscriber.until(lambda event: event.get("medium") == "CPU" and hashes(1)[0] in event["block_hashes"])
    assert told == {
        "type": "BlockStored",
        "block_hashes": hashes(3),
        "parent_block_hash": hashes(1, 77)[0],
        "token_ids": [],
        "block_size": 16,
        "lora_id": None,
        "lora_name": None,
        "medium": "CPU",
        "group_idx": 2,
        "locality": "LOCAL",
        "ownership": "kvstore",
    }
    on_disk = subscriber.until(lambda event: event.get("medium") == "STORAGE" and hashes(1)[0] in event["block_hashes"])
    assert on_disk["type"] == "BlockStored" and on_disk["locality"] == "LOCAL"
    pages.evict(hashes(1))
    gone = [
        subscriber.until(lambda event: event["type"] == "BlockRemoved" and event["medium"] == medium)  # noqa: B023
        for medium in ("CPU", "STORAGE")
    ]
    assert [event["block_hashes"] for event in gone] == [hashes(1)] * 2
    assert set(gone[0]) == {"type", "block_hashes", "medium", "group_idx", "locality", "ownership"}
    topics, numbers, _ = zip(*subscriber.messages, strict=True)
    assert set(topics) == {f"kv@{socket.gethostname()}@{LAYOUT.name}".encode()}
    assert list(numbers) == list(range(numbers[0], numbers[0] + len(numbers))), "a gap, though nothing was lost"


def test_a_subscriber_chooses_a_model_by_its_topic(context, node, pages):
    with kvstore.connect(f"unix://{node.config.socket}", timeout=60.0) as client:
        other = client.namespace(Layout(model="other", block_size=16, page_bytes=PAGE))
        subscriber = subscribe(context, node, pages, f"kv@{socket.gethostname()}@m")
        store(other, 1, 5)
        store(pages, 1, 6)
        subscriber.until(lambda event: hashes(1, 6)[0] in event["block_hashes"])
    told = [event["block_hashes"] for _, _, events in subscriber.messages for event in events]
    assert told and hashes(1, 5) not in told


def test_what_was_missed_can_be_asked_for_again(context, node, pages):
    subscriber = subscribe(context, node, pages)
    store(pages, 1)
    subscriber.until(lambda event: hashes(1)[0] in event["block_hashes"])
    numbers = [number for _, number, _ in subscriber.messages]
    again = replay(context, node, numbers[0])
    assert again[: len(numbers)] == subscriber.messages
    last = again[-1][1]
    assert replay(context, node, last + 1) == [] or replay(context, node, last + 1)[0][1] > last


def test_what_is_sent_can_be_asked_for_already(context, node, pages, monkeypatch):
    """Or who began to listen a moment later would have it neither way."""
    subscriber = subscribe(context, node, pages)
    publishing = node.publisher
    send, early = publishing._publisher.send_multipart, []

    class Looking:
        def send_multipart(self, frames: tuple[bytes, ...]) -> None:
            early.append(int.from_bytes(frames[1], "big") in [message.number for message in publishing._sent])
            send(frames)

    monkeypatch.setattr(publishing, "_publisher", Looking())
    store(pages, 1)
    subscriber.until(lambda event: hashes(1)[0] in event["block_hashes"])
    assert early and all(early)


def test_who_comes_later_gets_what_is_there(context, node, pages, monkeypatch):
    monkeypatch.setattr(publisher, "REPLAY_BYTES", 0)  # as if it had been long ago
    subscriber = subscribe(context, node, pages)
    store(pages, 3)
    pages.evict(hashes(1, 1))
    subscriber.until(lambda event: event["type"] == "BlockRemoved" and event["medium"] == "CPU")
    first, *rest = replay(context, node, 0)
    assert first[2] == [{"type": "AllBlocksCleared"}]
    there = {
        block_hash
        for _, _, events in rest
        for event in events
        if event["type"] == "BlockStored" and event["medium"] == "CPU"
        for block_hash in event["block_hashes"]
    }
    assert set(hashes(3)) & there == {hashes(3)[0], hashes(3)[2]}


@pytest.mark.parametrize(
    ("named", "told"), [("", {""}), ("a", {"", "a"}), (" a , shared", {"", "a"}), ("*", {"", "a", "b"})]
)
def test_tenants_pages_are_left_out_unless_they_are_named(context, start_node, named, told):
    """In what changes, in what is there, and in what is void."""
    node = start_node(events="tcp://127.0.0.1:0", events_replay="tcp://127.0.0.1:0", events_tenants=named)
    hosts = f"kv@{socket.gethostname()}@"
    names = {tenant: f"{hosts}{Layout(**DIVIDED, tenant=tenant).name}".encode() for tenant in ("", "a", "b")}
    with kvstore.connect(f"unix://{node.config.socket}", timeout=60.0) as client:
        of = {tenant: client.namespace(Layout(**DIVIDED, tenant=tenant)) for tenant in names}
        subscriber = subscribe(context, node, of[""])
        for pages in (of["a"], of["b"], of[""]):
            store(pages, 1)
        subscriber.until(lambda event: hashes(1)[0] in event["block_hashes"])
        store(of[""], 1, 1)  # behind all of it
        subscriber.until(lambda event: hashes(1, 1)[0] in event["block_hashes"])
    assert {topic for topic, _, _ in subscriber.messages} == {names[tenant] for tenant in told}
    asked = replay(context, node, 0)
    assert {topic for topic, _, _ in asked} == {names[tenant] for tenant in told}
    void = {topic for topic, _, events in asked if events == [{"type": "AllBlocksCleared"}]}
    assert void == {names[tenant] for tenant in told}


def test_what_a_node_said_before_it_started_again_is_void(context, start_node, tmp_path):
    settings = {"events": f"ipc://{tmp_path}/events", "events_replay": f"ipc://{tmp_path}/replay"}
    node = start_node(**settings)
    for name in ("events", "replay"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) & 0o077 == 0, "others may connect"
    with kvstore.connect(f"unix://{node.config.socket}", timeout=60.0) as client:
        subscriber = subscribe(context, node, client.namespace(LAYOUT))
        store(client.namespace(LAYOUT), 2)
        subscriber.until(lambda event: hashes(1)[0] in event["block_hashes"])
    known = subscriber.messages[-1][1]
    node.stop()
    node = start_node(**settings, socket=node.config.socket)
    first, *rest = replay(context, node, known + 1)
    assert first[1] > known
    assert first[2] == [{"type": "AllBlocksCleared"}]
    told = {block_hash for _, _, events in rest for event in events for block_hash in event.get("block_hashes", ())}
    assert set(hashes(2)) <= told


def test_a_replay_that_takes_long_holds_up_no_subscriber(context, node, pages, monkeypatch):
    monkeypatch.setattr(publisher, "REPLAY_BYTES", 0)
    subscriber = subscribe(context, node, pages)
    monkeypatch.setattr(publisher, "REPLAY_BYTES", 16 << 20)
    contents, walked, published = Store.contents, threading.Event(), threading.Event()

    def slowly(store: Store) -> Any:
        walked.set()
        assert published.wait(60.0), "the stream waited for the replay"
        yield from contents(store)

    monkeypatch.setattr(Store, "contents", slowly)
    with ThreadPoolExecutor(1) as thread:
        asked = thread.submit(replay, context, node, 0)
        assert walked.wait(60.0)
        store(pages, 1, 9)
        subscriber.until(lambda event: hashes(1, 9)[0] in event["block_hashes"])
        published.set()
        assert any(hashes(1, 9)[0] in event.get("block_hashes", ()) for _, _, told in asked.result() for event in told)


@pytest.mark.parametrize("outrun", [1, 2, 3])
def test_a_replay_that_is_outrun_begins_anew_or_does_not_end(context, node, pages, monkeypatch, outrun):
    """More is published during the walk than is remembered: who took that for all would miss pages for good."""
    subscriber = subscribe(context, node, pages)
    store(pages, 3)
    subscriber.until(lambda event: hashes(3)[2] in event["block_hashes"])
    node.store.flush()
    contents, walks = Store.contents, 0

    def walked(store_: Store) -> Any:
        nonlocal walks
        walks += 1
        yield from list(contents(store_))
        if walks <= outrun:
            monkeypatch.setattr(publisher, "REPLAY_BYTES", 0)
            pages.evict(hashes(1, walks - 1))
            left = subscriber.until(lambda event: event["type"] == "BlockRemoved" and event["medium"] == "STORAGE")
            assert left["block_hashes"] == hashes(1, walks - 1)
            store(pages, 1, 500 + walks)  # what was published before this one is forgotten when this one is seen
            subscriber.until(lambda event: hashes(1, 500 + walks)[0] in event["block_hashes"])
            monkeypatch.setattr(publisher, "REPLAY_BYTES", 16 << 20)

    monkeypatch.setattr(Store, "contents", walked)
    *answers, last = node.publisher._replay(0)
    assert walks == min(outrun + 1, publisher._MOST_WALKS)
    assert (last == (b"", b"\xff" * 8, b"")) == (outrun < publisher._MOST_WALKS)
    there: set[bytes] = set()
    for _, _, batch in answers:
        for event in msgpack.unpackb(batch)[1]:
            match event["type"], event.get("medium"):
                case "AllBlocksCleared", _:
                    there.clear()
                case "BlockStored", "CPU":
                    there.update(event["block_hashes"])
                case "BlockRemoved", "CPU":
                    there.difference_update(event["block_hashes"])
    if outrun < publisher._MOST_WALKS:
        assert there & set(hashes(3)) == set(hashes(3 - outrun, outrun))
        numbers = [int.from_bytes(number, "big") for _, number, _ in answers]
        assert numbers == sorted(numbers)


def test_garbage_at_the_replay_endpoint_is_passed_over(context, node, pages):
    asking = context.socket(zmq.DEALER)
    asking.connect(node.publisher.replay)
    for frames in ((b"",), (b"", b"short"), (b"x", b"12345678"), (b"",) * 5):
        asking.send_multipart(frames)
    store(pages, 1)
    assert replay(context, node, 0)


def test_an_endpoint_that_is_taken_is_told(start_node, node):
    with pytest.raises(ResourceError, match=r"can't listen on tcp://127\.0\.0\.1:\d+ for events"):
        start_node(
            events=node.publisher.endpoint,
            socket=node.config.socket.with_name("t"),
            disk_limit=0,
            arena_dir=node.config.arena_directory.with_name("other"),
        )


@pytest.mark.parametrize("endpoint", ["tcp://*:5557", "tcp://0.0.0.0:5557", "tcp://10.0.0.1:5557"])
def test_other_hosts_only_when_told_so(endpoint):
    with pytest.raises(ConfigError, match=r"events: .* can be reached from other hosts"):
        NodeConfig(events=endpoint)
    assert NodeConfig(events=endpoint, insecure=True).events == endpoint


@pytest.mark.parametrize("endpoint", ["127.0.0.1:5557", "pgm://x", "ipc://relative", "inproc://x"])
def test_no_endpoint(endpoint):
    with pytest.raises(ConfigError, match="events: "):
        NodeConfig(events=endpoint)


def test_replays_need_events():
    with pytest.raises(ConfigError, match="events_replay needs events"):
        NodeConfig(events_replay="tcp://127.0.0.1:1")


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"events_tenants": "a"}, "events_tenants needs events"),
        ({"events": "tcp://127.0.0.1:1", "events_tenants": "a,b c"}, "events_tenants=b c: a name has"),
        ({"events": "tcp://127.0.0.1:1", "events_tenants": "a,"}, "events_tenants=: a name has"),
    ],
)
def test_whose_events_are_tenants(settings, says):
    with pytest.raises(ConfigError, match=says):
        NodeConfig(**settings)


def test_without_pyzmq_it_says_what_to_install(start_node, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "zmq", None)
    with pytest.raises(ConfigError, match=r"kvstore-offload\[events\]"):
        start_node(events=f"ipc://{Path('/nowhere')}")
