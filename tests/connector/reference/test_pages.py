"""The page engine: what one engine computed, another one loads, whether kvstore is embedded or a node."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from node_process import NodeProcess

import kvstore
from kvstore.connector.reference.pages import BLOCK_SIZE, PageEngine
from kvstore.errors import InvalidRequestError

PROMPT = list(range(1000, 1100))  # 6 full pages and 4 tokens


@pytest.fixture(params=["embedded", "node"])
def client(
    request: pytest.FixtureRequest, tmp_path: Path, shm_folder: Path, node_process: Callable[..., NodeProcess]
) -> Iterator[kvstore.Client]:
    url = f"embedded://{tmp_path}/store?arena=8MiB&disk_limit=0&arena_dir={shm_folder}/arena"
    if request.param == "node":
        url = node_process(arena="8MiB").url
    with kvstore.connect(url) as client:
        yield client


def test_its_own_pages_serve_a_prompt_again(client):
    engine = PageEngine(client)
    assert engine.prefill("a", PROMPT).tolist() == PROMPT
    assert engine.hit_rate() == 0.0
    assert engine.prefill("b", PROMPT).tolist() == PROMPT
    assert engine.hit_rate() == 96 / 100
    assert engine.pages.usage == 0.0


def test_another_engine_loads_what_it_computed(client):
    PageEngine(client).prefill("a", PROMPT)
    other = PageEngine(client)
    longer = [*PROMPT, *range(50)]
    assert other.prefill("b", longer).tolist() == longer
    assert other.hit_rate() == 96 / 150
    assert other.pages.usage == 0.0


def test_pages_are_loaded_as_they_were_stored(client):
    """A page that does not hold what its hash names shows: nothing is computed again to hide it."""
    first = PageEngine(client)
    first.prefill("a", PROMPT)
    hashes = kvstore.hash_blocks(PROMPT, BLOCK_SIZE)
    first.namespace.evict(hashes[2:3])
    first.namespace.store(hashes[2:3], [np.full(BLOCK_SIZE, 7, np.int32)])
    loaded = PageEngine(client).prefill("b", PROMPT)
    assert loaded.tolist() == [*PROMPT[:32], *[7] * 16, *PROMPT[48:]]


@pytest.mark.parametrize("num_come", [0, 2])
def test_pages_that_do_not_come_are_computed(client, monkeypatch, num_come):
    PageEngine(client).prefill("a", PROMPT)
    other = PageEngine(client)
    load = other.namespace.load
    monkeypatch.setattr(other.namespace, "load", lambda hashes, into: load(hashes[:num_come], into[:num_come]))
    assert other.prefill("b", PROMPT).tolist() == PROMPT
    assert other.pages.usage == 0.0


def test_a_prompt_that_does_not_fit_is_refused_and_holds_nothing(client):
    engine = PageEngine(client, num_pages=7)
    with pytest.raises(InvalidRequestError, match="100 tokens do not fit"):
        engine.prefill("a", PROMPT)
    assert engine.pages.usage == engine.pages.num_requests == 0
    assert engine.prefill("b", PROMPT[:96]).tolist() == PROMPT[:96]
