"""The router's end of the benchmark of page events: it knows what nodes have, those of the benchmark and a real one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tiny_stores import layout_of, load_pages, page_hashes, put_pages

from kvstore.arena.arena import Arena
from kvstore.service.event_publisher import EventPublisher
from kvstore.store.store import Store

zmq = pytest.importorskip("zmq", reason="pyzmq is not installed")
FRAME = 4096


def test_every_page_of_a_fleet_is_taken_in(printed_json: Callable[..., Any]) -> None:
    """Twelve nodes in two processes; the benchmark fails where its index is not what these have."""
    [found] = printed_json(
        "fleet/events", "--nodes", "12", "--publishers", "2", "--pages", "16", "--total", "5000"
    )  # four prompts come to each node, and then others for them
    assert found["messages"] == 12 * 16
    assert found["pages"] == 12 * 16 * (4 + 2 * 12)
    assert found["held"] == 12 * 4 * 16
    assert found["lost"] == 0


def test_what_a_real_node_publishes_is_taken_in(script: Callable[[str], ModuleType], shm_folder: Path) -> None:
    """Of a store whose arena is full: the index has what is there."""
    index = script("fleet.events").EventIndex(1)
    context = zmq.Context()
    subscriber = context.socket(zmq.SUB)
    subscriber.setsockopt(zmq.RCVTIMEO, 100)
    subscriber.subscribe(b"")
    try:
        with Store(Arena(shm_folder / "arena", 64 * FRAME), [], [shm_folder / "arena"]) as store:
            known = store.open_namespace(layout_of("a", FRAME))
            publisher = EventPublisher(store, "tcp://127.0.0.1:0")
            try:
                subscriber.connect(publisher.endpoint)
                for number in range(600):  # what is published before the subscriber is known goes nowhere
                    put_pages(store, known, [1_000_000 + number])
                    if subscriber.poll(100):
                        break
                for first in range(0, 400, 16):
                    put_pages(store, known, range(first, first + 16))
                put_pages(store, known, [2_000_000])
                [last] = page_hashes([2_000_000])
                subscriber.setsockopt(zmq.RCVTIMEO, 60_000)
                while last not in index.router.pages():
                    index.take_in(*subscriber.recv_multipart())
            finally:
                publisher.stop()
            wanted = [number for number in range(400) if load_pages(store, known, [number])]
        assert 0 < len(wanted) <= 64
        told = set(index.router.pages())
        assert told & set(page_hashes(range(400))) == set(page_hashes(wanted))
        assert index.lost == 0
    finally:
        context.destroy(linger=0)
