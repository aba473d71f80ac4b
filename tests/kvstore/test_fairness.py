"""Two engines beside one node: neither can take the arena from the other."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

import kvstore
from kvstore.node import Node
from kvstore.rules import NamespaceRule

PAGE = 64 << 10
TIMEOUT = 30.0


def layout(model: str) -> kvstore.Layout:
    return kvstore.Layout(model=model, block_size=16, page_bytes=PAGE)


def hashes(*numbers: int) -> list[bytes]:
    return [number.to_bytes(32, "big") for number in numbers]


def test_one_that_reserves_and_never_writes_leaves_half_of_the_arena(start_node: Callable[..., Node]) -> None:
    node = start_node(arena=64 * PAGE, disk_limit=0)
    url = f"unix://{node.config.socket}"
    with kvstore.connect(url, timeout=TIMEOUT) as greedy, kvstore.connect(url, timeout=TIMEOUT) as other:
        mine = greedy.namespace(layout("greedy"))
        pending = [mine.prepare_store(hashes(*range(at, at + 8))) for at in range(0, 64, 8)]
        assert sum(page is not None for each in pending for page in each.pages) <= 32
        pages = other.namespace(layout("other"))
        assert pages.store(hashes(*range(16)), np.full((16, PAGE), 7, np.uint8)).stored == 16
        into = np.zeros((16, PAGE), np.uint8)
        assert pages.load(hashes(*range(16)), into) == 16
        assert (into == 7).all()
        for each in pending:
            each.abort()


def test_one_that_holds_pages_for_ever_leaves_half_of_the_arena(start_node: Callable[..., Node]) -> None:
    node = start_node(arena=64 * PAGE, disk_limit=0)
    url = f"unix://{node.config.socket}"
    with kvstore.connect(url, timeout=TIMEOUT) as greedy, kvstore.connect(url, timeout=TIMEOUT) as other:
        mine = greedy.namespace(layout("greedy"))
        for at in range(0, 60, 4):
            mine.store(hashes(*range(at, at + 4)), np.ones((4, PAGE), np.uint8))
        held = [mine.prepare_load(hashes(*range(at, at + 4))) for at in range(0, 60, 4)]
        assert sum(len(each.pages) for each in held) <= 32
        pages = other.namespace(layout("other"))
        assert pages.store(hashes(*range(16)), np.full((16, PAGE), 7, np.uint8)).stored == 16
        assert pages.lookup(hashes(*range(16))).prefix == 16
        for load in held:
            load.complete()


def test_a_flood_takes_its_quota_and_no_more(start_node: Callable[..., Node]) -> None:
    node = start_node(arena=64 * PAGE, disk_limit=0, namespace=(NamespaceRule(match="greedy*", arena=32 * PAGE),))
    url = f"unix://{node.config.socket}"
    with kvstore.connect(url, timeout=TIMEOUT) as greedy, kvstore.connect(url, timeout=TIMEOUT) as other:
        pages = other.namespace(layout("other"))
        assert pages.store(hashes(*range(16)), np.full((16, PAGE), 7, np.uint8)).stored == 16
        mine = greedy.namespace(layout("greedy"))
        for at in range(0, 400, 8):  # six times the arena, and nobody reads the others' pages meanwhile
            mine.store(hashes(*range(at, at + 8)), np.ones((8, PAGE), np.uint8))
        assert pages.lookup(hashes(*range(16))).prefix == 16
        used = {each.name.split()[0]: each.used_bytes["arena"] for each in other.status().namespaces}
        assert used["greedy"] <= 32 * PAGE
