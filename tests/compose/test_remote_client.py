"""A client on another host, over TCP, is cut off from its node."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture
def disconnected(hosts: Any, docker: Any) -> tuple[Callable[[], object], Callable[[], object]]:
    where = hosts.network("clients"), hosts.container("node1")
    return (
        lambda: docker("network", "disconnect", *where),
        lambda: docker("network", "connect", "--alias", "node1", *where),
    )


@pytest.fixture
def deaf(cut: Any) -> tuple[Callable[[], object], Callable[[], object]]:
    """The node does not hear the client."""
    return lambda: cut("remote", "node1", "clients"), cut.mend


@pytest.fixture
def mute(cut: Any) -> tuple[Callable[[], object], Callable[[], object]]:
    """The node is not heard by the client."""
    return lambda: cut("node1", "remote", "clients"), cut.mend


@pytest.mark.parametrize("how", ["disconnected", "deaf", "mute"])
def test_a_client_is_cut_off_from_its_node(
    how: str,
    request: pytest.FixtureRequest,
    clients: Any,
    page_client: Any,
    name: str,
    eventually: Any,
    back_to_normal: Callable[[], None],
) -> None:
    break_it, mend_it = request.getfixturevalue(how)
    remote = page_client("remote", "kv://node1:7420")
    assert remote.store(name)["stored"] == 8
    assert clients[0].load(name)["loaded"] == 8
    stored = clients[0].counters("arena")["stored"]
    break_it()
    try:
        for do, prompt in (("load", name), ("store", f"{name}/away"), ("load", name)):
            assert remote.call(do=do, prompt=prompt, pages=8)["error"] in ("DeadlineError", "UnavailableError")
        assert clients[0].load(name)["loaded"] == 8  # its own host is not concerned
    finally:
        mend_it()
    # What nobody confirmed may be there or not, but as a whole, and right.
    assert clients[0].load(f"{name}/away")["loaded"] in (0, 8)
    assert clients[0].counters("arena")["stored"] - stored in (0, 8)
    eventually(lambda: remote.call(do="load", prompt=name, pages=8).get("loaded") == 8, "it finds its node again")
    back_to_normal()
