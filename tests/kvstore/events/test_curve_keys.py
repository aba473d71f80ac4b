"""Page events over ZeroMQ with keys (CURVE), by real sockets: who has a known key reads, nobody else does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvstore
from kvstore.config.node import NodeConfig
from kvstore.errors import ConfigError
from kvstore.layout import Layout

zmq = pytest.importorskip("zmq", reason="pyzmq is not installed")
if not zmq.has("curve"):
    pytest.skip("libzmq has no CURVE here", allow_module_level=True)
import zmq.auth  # noqa: E402 - of pyzmq
from zmq.utils.monitor import recv_monitor_message  # noqa: E402 - of pyzmq

PATIENCE_MS = 60_000
_HANDSHAKES = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_DISCONNECTED
)
LAYOUT = Layout(model="m", block_size=16, page_bytes=5000)


class Keys:
    def __init__(self, folder: Path) -> None:
        self.known = folder / "known"
        self.known.mkdir()
        self.node = self._made(folder, "node")
        self.router = self._made(self.known, "router")
        self.unknown = self._made(folder, "unknown")
        self.settings = {"events_key": self.node, "events_clients": self.known}

    def _made(self, folder: Path, name: str) -> Path:
        _, secret = zmq.auth.create_certificates(folder, name)
        Path(secret).chmod(0o600)
        return Path(secret)


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return Keys(tmp_path)


class Peers:
    """Sockets that live as long as the test."""

    def __init__(self) -> None:
        self._context = zmq.Context()
        self._sockets: list[Any] = []

    def connect(self, kind: int, endpoint: str, own: Path | None, node: Path) -> tuple[Any, Any]:
        """A socket with these keys, and what tells of its handshakes."""
        made = self._context.socket(kind)
        made.setsockopt(zmq.RCVTIMEO, PATIENCE_MS)
        if own is not None:
            made.curve_publickey, made.curve_secretkey = zmq.auth.load_certificate(own)
            made.curve_serverkey, _ = zmq.auth.load_certificate(node)
        if kind == zmq.SUB:
            made.subscribe(b"")
        monitor = made.get_monitor_socket(_HANDSHAKES)
        monitor.setsockopt(zmq.RCVTIMEO, PATIENCE_MS)
        self._sockets += [monitor, made]
        made.connect(endpoint)
        return made, monitor

    def close(self) -> None:
        for each in self._sockets:
            if each.type != zmq.PAIR:
                each.disable_monitor()
            each.close(linger=0)
        self._context.term()


@pytest.fixture
def peers() -> Iterator[Peers]:
    peers = Peers()
    yield peers
    peers.close()


@pytest.fixture
def node(start_node, keys):
    return start_node(events="tcp://127.0.0.1:0", events_replay="tcp://127.0.0.1:0", **keys.settings)


def test_who_has_a_known_key_is_told_and_asks_again(peers, node, keys):
    subscriber, monitor = peers.connect(zmq.SUB, node.publisher.endpoint, keys.router, keys.node)
    assert recv_monitor_message(monitor)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED
    asking, _ = peers.connect(zmq.DEALER, node.publisher.replay, keys.router, keys.node)
    with kvstore.connect(f"unix://{node.config.socket}", timeout=60.0) as client:
        pages = client.namespace(LAYOUT)
        subscriber.setsockopt(zmq.RCVTIMEO, 100)
        for number in range(600):  # until the subscription has arrived
            assert pages.store([number.to_bytes(32, "big")], np.ones((1, 5000), np.uint8)).stored == 1
            try:
                topic, *_ = subscriber.recv_multipart()
            except zmq.Again:
                continue
            break
    assert topic.startswith(b"kv@")
    asking.send_multipart((b"", bytes(8)))
    assert asking.recv_multipart()[1].startswith(b"kv@")


@pytest.mark.parametrize("who", ["without a key", "with a foreign key", "mistaken about the node"])
def test_nobody_else_gets_through_the_handshake(peers, node, keys, who):
    own = {"without a key": None, "with a foreign key": keys.unknown, "mistaken about the node": keys.router}[who]
    of_node = keys.unknown if who == "mistaken about the node" else keys.node
    for kind, endpoint in ((zmq.SUB, node.publisher.endpoint), (zmq.DEALER, node.publisher.replay)):
        _, monitor = peers.connect(kind, endpoint, own, of_node)
        assert recv_monitor_message(monitor)["event"] != zmq.EVENT_HANDSHAKE_SUCCEEDED


def test_keys_are_read_again_by_a_reload(peers, node, keys):
    (keys.known / "router.key").unlink()
    with pytest.raises(ConfigError, match="holds no public key"):
        node.reload(node.config)
    (keys.known / "unknown.key").write_bytes(keys.unknown.with_suffix(".key").read_bytes())
    node.reload(node.config)
    _, monitor = peers.connect(zmq.SUB, node.publisher.endpoint, keys.unknown, keys.node)
    assert recv_monitor_message(monitor)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED
    _, monitor = peers.connect(zmq.SUB, node.publisher.endpoint, keys.router, keys.node)
    assert recv_monitor_message(monitor)["event"] != zmq.EVENT_HANDSHAKE_SUCCEEDED


@pytest.mark.parametrize("wrong", ["gone", "public", "readable", "no key", "no pair", "no folder", "empty folder"])
def test_files_that_cannot_be_used_are_named(start_node, keys, tmp_path, wrong):
    bad = tmp_path / "bad"
    bad.touch(mode=0o600)
    lines = keys.node.read_text().splitlines()
    if wrong == "public":
        bad.write_bytes(keys.node.with_suffix(".key").read_bytes())
    elif wrong == "readable":
        bad = keys.node
        bad.chmod(0o644)
    elif wrong == "no key":
        bad.write_text("nothing")
    elif wrong == "no pair":
        foreign = keys.unknown.read_text().splitlines()
        bad.write_text("\n".join([foreign[i] if "secret-key" in line else line for i, line in enumerate(lines)]))
    elif wrong == "gone":
        bad = tmp_path / "gone"
    settings = {"events_key": bad}
    if wrong.endswith("folder"):
        settings = {"events_clients": tmp_path / wrong}
        if wrong == "empty folder":
            (tmp_path / wrong).mkdir()
    name, path = next(iter(settings.items()))
    with pytest.raises(ConfigError, match=f"{name} {path}"):
        start_node(events="tcp://127.0.0.1:0", **keys.settings | settings)


def test_beyond_loopback_it_takes_keys(keys):
    with pytest.raises(ConfigError, match="give events_key and events_clients"):
        NodeConfig(events="tcp://*:5557")
    assert NodeConfig(events="tcp://*:5557", events_replay="tcp://0.0.0.0:5558", **keys.settings).events_keys
    assert NodeConfig(events="tcp://*:5557", insecure=True).events_keys is None
    with pytest.raises(ConfigError, match="given together"):
        NodeConfig(events="tcp://*:5557", events_key=keys.node)
    with pytest.raises(ConfigError, match="events_key needs events"):
        NodeConfig(**keys.settings)
