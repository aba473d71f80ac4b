"""Two tensor-parallel ranks on two hosts, each with a node of its own: ``rank_nodes``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from node_process import NodeProcess

import kvstore
from kvstore.layout import Layout
from tests.vllm.engine import PATIENT, TWO_RANKS, transfer_config


@pytest.fixture
def nodes(short_folder: Path, shm_folder: Path) -> Iterator[list[NodeProcess]]:
    """Of the two hosts."""
    started = []
    try:
        for name in ("1", "2"):
            for folder in (short_folder, shm_folder):
                (folder / name).mkdir()
            started.append(NodeProcess(short_folder / name, shm_folder / name, **{"disk-limit": "0", "arena": "32MiB"}))
            started[-1].start()
        yield started
    finally:
        for node in started:
            node.kill()


def kept(node: NodeProcess) -> dict[tuple[int, int], int]:
    """Pages that a node has, by the rank whose part they are, of how many."""
    with kvstore.connect(node.url, timeout=60.0) as client:
        known = [(Layout.from_json(each.layout), each.arena_pages) for each in client.status().namespaces]
    return {(layout.tp_rank, layout.tp_size): pages for layout, pages in known}


def test_each_rank_keeps_its_part_at_the_node_of_its_host(
    nodes: list[NodeProcess],
    start_engine: Callable[..., Any],
    plain: Callable[..., Any],
    prompt: Callable[..., list[int]],
) -> None:
    from tests.vllm.two_hosts import OTHER_HOST, OTHER_URL

    transfer = transfer_config(nodes[0].url, rank_nodes={OTHER_HOST: nodes[1].kv_url}, **PATIENT)
    transfer |= {"kv_connector": "ConnectorOnTwoHosts", "kv_connector_module_path": "tests.vllm.two_hosts"}
    environment = {OTHER_URL: nodes[1].url}
    prompts = [prompt(200, seed) for seed in range(3)]
    expected = plain(prompts, options=TWO_RANKS).tokens
    with start_engine(transfer=transfer, environment=environment, **TWO_RANKS) as engine:
        assert engine.run(prompts).tokens == expected
        engine.forget()  # refused until everything is stored
        assert [kept(node) for node in nodes] == [{(0, 2): 3 * 6}, {(1, 2): 3 * 6}]
        again = engine.run(prompts)
        assert again.tokens == expected
        assert again.external_hits == 3 * 192
        # One part gone, or its node: a miss.
        with kvstore.connect(nodes[1].url, timeout=60.0) as client:
            (known,) = client.status().namespaces
            client.namespace(Layout.from_json(known.layout)).evict(kvstore.hash_blocks(prompts[0], 32)[2:])
        engine.forget()
        assert engine.run(prompts[:1]).external_hits == 64
        engine.forget()
        nodes[1].kill()
        alone = engine.run(prompts)
        assert alone.tokens == expected
        assert alone.external_hits == 0
