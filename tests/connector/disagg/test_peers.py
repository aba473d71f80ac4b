"""Nodes that pages may be loaded from besides the engine's own."""

from __future__ import annotations

from dataclasses import replace

import pytest

import kvstore
from kvstore.connector.disagg.handover import default_node_id
from kvstore.connector.disagg.peers import Peers, foreign
from kvstore.connector.engine.options import Options
from kvstore.errors import ConfigError
from kvstore.layout import Layout

LAYOUT = Layout(model="m", block_size=4, page_bytes=64)


def test_peers_are_asked_nothing_before_somebody_does():
    peers = Peers({"host 1": "kv://127.0.0.1:1", "host 2": "unix:///nowhere"}, {})
    assert peers.names == ["host 1", "host 2"]
    assert [namespace.layout for namespace in peers.namespaces([LAYOUT])["host 2"]] == [LAYOUT]
    client, ranks = peers.ranks([[LAYOUT], [LAYOUT]])["host 1"]
    assert (client.url, [len(of_rank) for of_rank in ranks]) == ("kv://127.0.0.1:1", [1, 1])
    peers.close()


@pytest.mark.parametrize(
    "urls", [{"": "kv://h:1"}, {"a": "embedded:///x"}, {"a": "http://h:1"}, {"a": ""}, {"a": "kv://h:x"}]
)
def test_what_is_no_node_is_refused_by_name(urls):
    with pytest.raises(ConfigError, match=r"^peers: "):
        Peers(urls, {})


@pytest.mark.parametrize(
    ("theirs", "words"),
    [
        ([], ""),
        ([LAYOUT], ""),
        ([replace(LAYOUT, tp_size=2), LAYOUT], ""),
        (
            [replace(LAYOUT, tp_size=2), replace(LAYOUT, tp_size=2, tp_rank=1)],
            "tp_size 2 there, 1 here; pages of another",
        ),
        ([replace(LAYOUT, block_size=8)], "block_size 8 there, 4 here"),
        ([replace(LAYOUT, model="another")], ""),
        ([replace(LAYOUT, tenant="another")], ""),
    ],
)
def test_what_engines_at_a_peer_keep_otherwise_is_said(theirs, words):
    said = foreign(["{}", *(layout.to_json() for layout in theirs)], LAYOUT)
    assert said.startswith(words)
    assert bool(said) == bool(words)


def test_it_is_said_at_start_and_a_peer_that_is_away_is_too(start_node, caplog, eventually):
    node = start_node()
    urls = {"here": f"kv://127.0.0.1:{node.port}", "away": "kv://127.0.0.1:1"}
    peers = Peers(urls, {})
    with kvstore.connect(urls["here"]) as client:
        client.namespace(replace(LAYOUT, tp_size=2))
    peers.compare([LAYOUT])
    eventually(lambda: "tickets of engines at here will be refused" in caplog.text)
    eventually(lambda: "peer away can't be asked yet" in caplog.text)
    peers.close()


def test_engines_that_share_a_node_agree_on_its_name():
    assert default_node_id("unix:///run/a.sock") == default_node_id("unix:///run/a.sock")
    assert default_node_id("unix:///run/a.sock") != default_node_id("unix:///run/b.sock")
    assert default_node_id("kv://host:7420") == "kv://host:7420"


def test_the_key_of_tickets_is_a_private_file(tmp_path):
    path = tmp_path / "key"
    path.write_text("0a" * 32)
    path.chmod(0o640)
    options = Options.parse({"url": "unix:///run/a.sock", "ticket_key_file": str(path)})
    with pytest.raises(ConfigError, match="only its owner may read it"):
        _ = options.ticket_key
    path.chmod(0o600)
    assert options.ticket_key == b"\n" * 32
    assert Options.parse({"url": "unix:///run/a.sock"}).ticket_key is None
