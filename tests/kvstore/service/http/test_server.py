"""What the web server answers beside pages: methods, and paths that are not there."""

from __future__ import annotations

import http.client
from contextlib import closing
from typing import NamedTuple

import pytest

from kvstore.node.node import Node

SECONDS = 60.0
METHODS = "GET, HEAD, OPTIONS"


class Answered(NamedTuple):
    status: int
    headers: http.client.HTTPMessage
    body: bytes


def ask(node: Node, method: str, path: str, token: str = "") -> Answered:
    connection = http.client.HTTPConnection("127.0.0.1", node.metrics_port, timeout=SECONDS)
    with closing(connection):
        connection.request(method, path, headers={"Authorization": f"Bearer {token}"} if token else {})
        answer = connection.getresponse()
        if method == "HEAD":  # http.client would pass over a body that must not be there
            assert answer.fp.read() == b""
        return Answered(answer.status, answer.headers, answer.read())


@pytest.fixture
def node(start_node):
    return start_node(metrics="0")


@pytest.mark.parametrize("path", ["/health", "/console", "/console/console.js", "/console/help", "/nothing"])
def test_head_is_get_without_the_page(node, path):
    whole, head = ask(node, "GET", path), ask(node, "HEAD", path)
    assert (head.status, head.body) == (whole.status, b"")
    assert int(head.headers["Content-Length"]) == len(whole.body) > 0
    for name in ("Content-Type", "X-Content-Type-Options", "Content-Security-Policy"):
        assert head.headers[name] == whole.headers[name]


@pytest.mark.parametrize("path", ["/metrics", "/console/data"])
def test_head_of_what_changes(node, path):
    head = ask(node, "HEAD", path)
    assert (head.status, head.body) == (200, b"") and int(head.headers["Content-Length"]) > 100


@pytest.mark.parametrize("path", ["/health", "/metrics", "/console", "/console/data?since=1", "*"])
def test_options_says_what_may_be_asked(node, path):
    answer = ask(node, "OPTIONS", path)
    assert (answer.status, answer.headers["Allow"], answer.body) == (204, METHODS, b"")
    assert answer.headers["Content-Length"] is None  # a 204 has none
    assert ask(node, "OPTIONS", "/nothing").status == 404


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "TRACE", "NONSENSE"])
def test_other_methods_are_refused_with_those_that_there_are(node, method):
    answer = ask(node, method, "/metrics")
    assert (answer.status, answer.headers["Allow"]) == (405, METHODS)
    assert answer.body == b"everything here is only read: GET, HEAD or OPTIONS\n"


def test_what_is_not_there_is_told_what_is(node):
    answer = ask(node, "GET", "/consol")
    assert answer.status == 404
    for path in ("/health", "/metrics", "/console", "/console/help", "/console/data"):
        assert path in answer.body.decode().rstrip().removeprefix("not found; there are ").split(", ")


def test_head_needs_the_token_that_get_needs(start_node, tmp_path):
    tokens = tmp_path / "tokens"
    tokens.write_text("op:the-token-of-the-operator\na:the-token-of-tenant-a tenant=a\n")
    tokens.chmod(0o600)
    node = start_node(metrics="0", token_file=tokens)
    for path in ("/metrics", "/console", "/console/data"):
        assert ask(node, "HEAD", path).status == 401
        assert ask(node, "HEAD", path, "wrong-token-wrong-token").status == 401
        assert ask(node, "HEAD", path, "the-token-of-the-operator").status == 200
        assert ask(node, "OPTIONS", path).status == 204  # of the page it says nothing
    for method in ("GET", "HEAD"):
        assert ask(node, method, "/console", "the-token-of-tenant-a").status == 403
    assert ask(node, "HEAD", "/health").status == 200
