"""Ranks on several hosts: a page is there when the node of each rank has its part."""

from __future__ import annotations

import itertools
import json
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from node_process import NodeProcess

import kvstore
from kvstore.connector.blocks.extra_keys import PrefixKeys
from kvstore.connector.blocks.hashing import BlockHashChain
from kvstore.connector.disagg.handover import Handover, Prompt
from kvstore.connector.disagg.ticket import Ticket, fingerprint_of, sign
from kvstore.connector.engine.page_parts import Part, parts_of
from kvstore.connector.rank_nodes import RankNodes
from kvstore.connector.scheduler import SchedulerConnector
from kvstore.errors import ResourceError

PAGE_BYTES = 4096
HASHES = kvstore.hash_blocks(list(range(5 * 16)), 16)
LAYOUTS = [
    kvstore.Layout(model="m", block_size=16, page_bytes=PAGE_BYTES, tp_size=4, tp_rank=rank) for rank in range(4)
]
HERE = socket.gethostname()


@pytest.fixture
def nodes(short_folder: Path, shm_folder: Path) -> Iterator[list[NodeProcess]]:
    """Of two hosts, without disks: what they have is in shared memory."""
    started = []
    try:
        for name in ("1", "2"):
            for folder in (short_folder, shm_folder):
                (folder / name).mkdir()
            started.append(NodeProcess(short_folder / name, shm_folder / name, **{"disk-limit": "0", "arena": "4MiB"}))
            started[-1].start()
        yield started
    finally:
        for node in started:
            node.kill()


@pytest.fixture
def engine(nodes: list[NodeProcess]) -> Iterator[tuple[SchedulerConnector, list[list[kvstore.Namespace]]]]:
    """The scheduler's half, and where each of four ranks, two a host, stores: at its own host's node."""
    with kvstore.connect(nodes[0].url) as own, kvstore.connect(nodes[1].kv_url) as other:
        asked = RankNodes(own, {"host 2": other})
        ranks = [asked.namespaces("host 2" if rank > 1 else "", [LAYOUTS[rank]]) for rank in range(4)]
        scheduler = SchedulerConnector(asked, ranks[0], other_ranks=ranks[1:], lookup_budget=30.0)
        with kvstore.connect(nodes[1].url) as beside:
            stores = [*(each for (each,) in ranks[:2]), *map(beside.namespace, LAYOUTS[2:])]
            yield scheduler, [[each] for each in stores]
        scheduler.shutdown()
        asked.close()


def presence(scheduler: SchedulerConnector, name: str, eventually: Callable[..., None]) -> tuple[bool, ...]:
    known: list[dict[int, tuple[bool, ...]]] = []

    def is_answered() -> bool:
        known.extend(filter(None, [scheduler.get_presence(name, [HASHES])]))
        return bool(known)

    eventually(is_answered)
    return known[0][0]


def store(namespace: kvstore.Namespace, count: int) -> None:
    assert namespace.store(HASHES[:count], np.zeros(count * PAGE_BYTES, np.uint8)).stored == count


def test_a_page_is_there_when_the_node_of_each_rank_has_its_part(engine, eventually, monkeypatch):
    scheduler, ranks = engine
    for (namespace,), count in zip(ranks, (5, 4, 3, 5), strict=True):
        store(namespace, count)
    # Each node is asked once for all of its ranks.
    asked = []

    def lookup(client, queries, *, counts, really=kvstore.Client.lookup):
        asked.append((client.url.partition(":")[0], [namespace.layout.tp_rank for namespace, _ in queries]))
        return really(client, queries, counts=counts)

    monkeypatch.setattr(kvstore.Client, "lookup", lookup)
    assert presence(scheduler, "r", eventually) == (True, True, True, False, False)
    assert sorted(asked) == [("kv", [2, 3]), ("unix", [0, 1])]


def test_what_this_host_lacks_is_a_miss_without_a_call(engine, nodes):
    scheduler, ranks = engine
    for (namespace,) in ranks:
        namespace.lookup(HASHES)  # opens it
    scheduler.get_presence("opened", [HASHES])
    nodes[1].pause()
    try:
        assert scheduler.get_presence("r", [HASHES]) == {0: (False,) * 5}
    finally:
        nodes[1].resume()


def test_a_node_that_is_gone_is_a_miss(engine, nodes, eventually):
    scheduler, ranks = engine
    for (namespace,) in ranks:
        store(namespace, 5)
    nodes[1].kill()
    assert presence(scheduler, "r", eventually) == (False,) * 5
    nodes[1].start()
    names = map(str, itertools.count())
    eventually(lambda: presence(scheduler, next(names), eventually) == (True,) * 5)  # its arena has outlived it


def test_ranks_with_several_nodes_give_no_tickets(client, namespace):
    scheduler = SchedulerConnector(client, [namespace])
    handover = Handover(scheduler, bytes(32), None, LAYOUTS, ["host 9"], now=lambda: 0.0)
    chain = BlockHashChain(16, PrefixKeys())
    prompt = Prompt(list(range(80)), chain, 16)
    chain.extend(prompt.token_ids)
    assert handover.give("r", prompt, [[1, 2, 3, 4, 5]]) is None
    ticket = sign(Ticket("host 1", bytes(16), fingerprint_of(LAYOUTS), LAYOUTS[0].to_json(), 80, 60.0), bytes(32))
    assert not handover.take("r", ticket, prompt)
    assert handover.statistics().refused == {"unknown": 1}
    scheduler.shutdown()


def told(*ranks: int) -> list[list[str]]:
    return [[LAYOUTS[rank].to_json()] for rank in ranks]


def test_who_has_which_part_where():
    workers = [(HERE, told(0)), (HERE, told(0)), ("host 2", told(1, 2)), ("host 2", told(1, 2)), ("host 3", told(0))]
    url = "unix:///run/kvstore.sock"
    assert parts_of(workers, 5, url, {"host 2", "host 3"}) == [
        Part("", (LAYOUTS[0],), 0),
        Part("host 2", (LAYOUTS[1],), 2),  # of the two there that hold the same, one stores
        Part("host 2", (LAYOUTS[2],), 2),
        Part("host 3", (LAYOUTS[0],), 4),  # and at each node, since each needs it
    ]
    with pytest.raises(ResourceError, match=r"workers on host 3, and unix:///run/kvstore.sock is a socket"):
        parts_of(workers, 5, url, {"host 2"})
    with pytest.raises(ResourceError, match="5 of 6 workers"):
        parts_of(workers, 6, url, {"host 2", "host 3"})
    assert [part.host for part in parts_of(workers, 5, "kv://10.0.0.1:7420", ())] == [""] * 3
    assert json.loads(workers[0][1][0][0])["tp_rank"] == 0
