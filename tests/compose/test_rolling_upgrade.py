"""Nodes of an older version, and clients and engines of both, at work while the nodes are exchanged one by one."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from deployment import NODES, ROOT, wait_until
from relays import EngineClient, PageClient
from traffic import Traffic, check_back_to_normal

OLD = "806abf7"
"""The commit whose code is the older version: before clients reserved slots ahead, and before nodes had metrics."""
OLD_CODE = {"PYTHONPATH": "/other"}


class OldEngine(EngineClient):
    """An engine of the older version."""

    script = "../other/tests/compose/engine_client.py"


@pytest.fixture(scope="module")
def old_code(hosts: Any, docker: Any) -> None:
    """The code of the older version, where containers see it."""
    what = ["kvstore", "connector", "gpu", "tests/compose/engine_client.py"]
    packed = subprocess.run(["git", "archive", OLD, *what], cwd=ROOT, capture_output=True, timeout=60)
    if packed.returncode:
        pytest.skip(f"needs the project's history: {packed.stderr.decode().strip()}")
    subprocess.run(["tar", "-x", "-C", hosts.variable("OTHER_CODE")], input=packed.stdout, check=True, timeout=60)


@pytest.fixture
def exchange(hosts: Any, old_code: None) -> Iterator[Callable[[str, str], None]]:
    """``exchange("node1", "old")``: the node goes on with that version's code, over its arena and disk."""

    def run(node: str, version: str) -> None:
        hosts.recreate(node, **{f"{node.upper()}_CODE": "/other" if version == "old" else ""})

    yield run
    for node in NODES:
        run(node, "new")


def test_nodes_are_exchanged_one_by_one_under_clients_of_both_versions(
    exchange: Callable[[str, str], None], hosts: Any, clients: Any, engines: Any, right_answers: Any, name: str
) -> None:
    """Down to the older version and up again: each pairing of client and node, and of the nodes that share."""
    old_clients = [PageClient(hosts, f"engine{host}", environment=OLD_CODE) for host in (1, 2)]
    old_engine = OldEngine(hosts, "engine1", environment=OLD_CODE)
    at_work = [old_clients[0], clients[1], clients[0], old_clients[1]]
    answering = [old_engine, engines[1], old_engine, engines[1]]
    steps = [("node1", "old"), ("node2", "old"), ("node1", "new"), ("node2", "new")]
    versions = dict.fromkeys(NODES, "new")
    with Traffic(at_work, answering, right_answers, name, breaking=range(4)) as load:
        load.more(2)
        for place, (node, version) in enumerate(steps):
            both = [(clients, old_clients)[old][NODES.index(node)] for old in (False, True)]
            kept = f"{name}/{place}"
            both[place % 2].store(kept, 16)
            exchange(node, version)
            versions[node] = version
            for client in both:
                wait_until(
                    lambda client=client, kept=kept: client.call(do="load", prompt=kept, pages=16).get("loaded") == 16,
                    f"{node} has its pages as the {version} version",
                )
                assert client.ok(do="path")["path"] == "SharedPath"
            measured = [each for each in NODES if versions[each] == "new"]
            for pair in (clients, old_clients):
                check_back_to_normal(hosts, pair, f"{name}/{place}/{pair[0].where}/{pair is clients}", measured)
            load.more(2)
    for node in NODES:
        tiers = hosts.status(node)
        assert all(tiers[tier]["corrupt"] == 0 for tier in ("arena", "disk", "redis"))


def test_an_older_client_on_another_host(
    exchange: Callable[[str, str], None],
    hosts: Any,
    clients: Any,
    page_client: Any,
    name: str,
    back_to_normal: Callable[[], None],
) -> None:
    """Over TCP, in both directions: what one version stores the other one loads."""
    old = page_client("decode2", "kv://node1:7420", environment=OLD_CODE)
    new = page_client("remote", "kv://node1:7420")
    tries = iter(range(1 << 20))

    def goes_over(here: Any, there: Any) -> bool:
        prompt = f"{name}/{next(tries)}"
        return bool(
            here.call(do="store", prompt=prompt, pages=8).get("stored") == 8
            and there.call(do="load", prompt=prompt, pages=8).get("loaded") == 8
        )

    for version in ("old", "new"):
        exchange("node1", version)
        for one in (old, new, clients[0]):  # back behind the restart
            wait_until(lambda one=one: goes_over(one, one), f"{one.where}, {version} node")
        for here, there in ((old, new), (new, old), (old, clients[0]), (clients[0], old)):
            assert goes_over(here, there), f"{here.where} → {there.where}, {version} node"
    back_to_normal()
