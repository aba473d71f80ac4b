"""A node is killed, paused, restarted, while engines and clients work on both hosts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.mark.parametrize(("break_it", "mend_it"), [("kill", "start"), ("pause", "unpause")], ids=["killed", "paused"])
def test_engines_go_on_while_a_node_is(
    break_it: str,
    mend_it: str,
    hosts: Any,
    docker: Any,
    clients: Any,
    traffic: Any,
    name: str,
    eventually: Any,
    back_to_normal: Callable[[], None],
    counted_truly: Callable[[int], bool],
) -> None:
    kept = f"{name}/before"
    clients[0].store(kept, 16)
    before = hosts.status("node1")["arena"]
    with traffic(0) as load:
        load.more(3)
        docker(break_it, hosts.container("node1"))
        load.more(1)  # each call may take its whole deadline
        docker(mend_it, hosts.container("node1"))
        eventually(lambda: clients[0].call(do="load", prompt=kept, pages=16).get("loaded") == 16, "its pages are there")
        back_to_normal()
        load.more(3)
    after = hosts.status("node1")["arena"]
    assert after["corrupt"] == before["corrupt"]
    # What the node confirmed to its clients; a confirmation may have been lost with it.
    assert after["stored"] - before["stored"] >= load.total(0, "stored")
    assert any("error" in reply for reply in load.replies[0])
    eventually(lambda: counted_truly(1), "on the other host what was stored is counted, and nothing else")


def test_a_rolling_restart(
    hosts: Any,
    traffic: Any,
    clients: Any,
    name: str,
    eventually: Any,
    back_to_normal: Callable[[], None],
) -> None:
    with traffic(0, 1) as load:
        for node, client in zip(("node1", "node2"), clients, strict=True):
            kept = f"{name}/{node}"
            client.store(kept, 16)
            instance = client.ok(do="status")["instance"]

            def is_back(client: Any = client, instance: int = instance) -> bool:
                return bool(client.call(do="status").get("instance", instance) != instance)

            hosts.compose("restart", node)
            eventually(is_back, "it is back")
            assert client.load(kept, 16)["loaded"] == 16
            back_to_normal()
        load.more(3)
