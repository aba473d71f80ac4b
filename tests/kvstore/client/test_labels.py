"""Labels over every URL: what a namespace's model is called travels with its opening, and decides on no page."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

import kvstore
from kvstore.cli import main as cli
from kvstore.cli.offered import names_at
from kvstore.errors import InvalidRequestError
from kvstore.node.node import Node

LAYOUT = kvstore.Layout(model="LlamaForCausalLM", revision="r1", block_size=16, page_bytes=5000)
HASH = bytes(range(32))


def labels_at(client: kvstore.Client) -> list[tuple[str, ...]]:
    return [each.labels for each in client.status().namespaces]


def test_two_names_of_one_model_share_its_pages_and_are_both_listed(place: Any) -> None:
    one = place.connect().namespace(LAYOUT, label="chat")
    other = place.connect().namespace(LAYOUT, label="chat-copy", lazy=True)
    assert one.store([HASH], bytes(5000)).stored == 1
    assert other.lookup([HASH]).prefix == 1
    assert other.load([HASH], bytearray(5000)) == 1
    [status] = place.connect().status().namespaces
    assert status.name == LAYOUT.named("chat") == "chat@r1 · block 16 · group 0"
    assert status.labels == ("chat", "chat-copy")
    assert status.fingerprint == LAYOUT.fingerprint


def test_a_namespace_that_was_cleared_has_its_label_again_when_it_is_used_again(place: Any) -> None:
    pages = place.connect().namespace(LAYOUT, label="chat")
    place.connect().namespace(LAYOUT).clear()
    assert labels_at(place.connect()) == []
    assert pages.store([HASH], bytes(5000)).stored == 1
    assert labels_at(place.connect()) == [("chat",)]


@pytest.mark.parametrize(
    ("label", "words"),
    [("x" * 257, "256 characters at most, 'xxxxxxxxxxxxxxxxxxxx'... has 257"), ("a\nb", "printable"), (7, "got 7")],
)
def test_what_is_no_label_is_refused_with_the_limit(client: kvstore.Client, label: Any, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        client.namespace(LAYOUT, label=label)
    assert labels_at(client) == []


def test_a_node_refuses_what_another_client_sends_as_one(place: Any) -> None:
    for label in ("x" * 257, "a\nb"):
        with pytest.raises(InvalidRequestError, match="a namespace's label has"):
            place.connect()._session.control.open_namespace(LAYOUT, "", label, 30.0)


def test_labels_survive_the_node_as_its_namespaces_do(node_process: Callable[..., Any]) -> None:
    node = node_process()
    with kvstore.connect(node.url) as client:
        for label in ("chat", "chat-copy"):
            client.namespace(LAYOUT, label=label)
    node.kill()
    node.start()
    with kvstore.connect(node.url) as client:
        assert labels_at(client) == [("chat", "chat-copy")]


@pytest.fixture
def url(start_node: Callable[..., Node]) -> str:
    return f"unix://{start_node().config.socket}"


def test_commands_take_any_label_and_list_them_all(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    with kvstore.connect(url) as client:
        for label in ("chat", "chat-copy"):
            pages = client.namespace(LAYOUT, label=label)
        pages.store([HASH], bytes(5000))
        assert {"chat", "chat-copy"} <= set(names_at(url))
        for command in ("status", "namespaces"):
            assert cli.main([command, "--url", url]) == 0
            assert f"{LAYOUT.named('chat')} (also chat-copy)" in capsys.readouterr().out
        assert cli.main(["clear", "--url", url, "chat-copy", "--yes"]) == 0
        assert capsys.readouterr().out.startswith("1 dropped")
        assert labels_at(client) == []


def test_a_label_of_several_namespaces_is_refused_with_their_fingerprints(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    other = replace(LAYOUT, revision="r2")
    with kvstore.connect(url) as client:
        client.namespace(LAYOUT, label="chat")
        client.namespace(other, label="tuned")
        client.namespace(other, label="chat")
        assert cli.main(["clear", "--url", url, "chat", "--yes"]) == 2
        said = capsys.readouterr().err
        assert LAYOUT.fingerprint.hex()[:12] in said
        assert f"{other.fingerprint.hex()[:12]} tuned@r2" in said
        assert not {"chat"} & set(names_at(url))
        assert len(labels_at(client)) == 2
        assert cli.main(["clear", "--url", url, other.fingerprint.hex()[:12], "--yes"]) == 0
        assert labels_at(client) == [("chat",)]
