"""A client on another host, over TCP, is cut off from its node."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def test_a_client_is_cut_off_from_its_node(
    hosts: Any,
    docker: Any,
    clients: Any,
    page_client: Any,
    name: str,
    eventually: Any,
    back_to_normal: Callable[[], None],
) -> None:
    remote = page_client("remote", "kv://node1:7420")
    assert remote.store(name)["stored"] == 8
    assert clients[0].load(name)["loaded"] == 8
    where = hosts.network("clients"), hosts.container("node1")
    docker("network", "disconnect", *where)
    try:
        for do in ("load", "store", "load"):
            assert remote.call(do=do, prompt=name, pages=8)["error"] in ("DeadlineError", "UnavailableError")
        assert clients[0].load(name)["loaded"] == 8  # its own host is not concerned
    finally:
        docker("network", "connect", "--alias", "node1", *where)
    eventually(lambda: remote.call(do="load", prompt=name, pages=8).get("loaded") == 8, "it finds its node again")
    back_to_normal()
