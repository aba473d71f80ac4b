"""What a node publishes, read by vLLM's own classes for block events."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import kvstore

SECONDS = 60.0
LAYOUT = kvstore.Layout(model="m", block_size=16, page_bytes=5000, group=1)


@pytest.fixture
def subscriber() -> Iterator[Callable[..., Any]]:
    import zmq

    context = zmq.Context()
    sockets: list[Any] = []

    def subscribe(endpoint: str) -> Any:
        sockets.append(context.socket(zmq.SUB))
        sockets[-1].setsockopt(zmq.RCVTIMEO, 200)
        sockets[-1].subscribe(f"kv@{socket.gethostname()}@m".encode())
        sockets[-1].connect(endpoint)
        return sockets[-1]

    yield subscribe
    for each in sockets:
        each.close(linger=0)
    context.term()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_vllm_reads_what_a_node_publishes(node_process: Callable[..., Any], subscriber: Callable[..., Any]) -> None:
    import msgspec
    import zmq
    from vllm.distributed.kv_events import MEDIUM_CPU, MEDIUM_STORAGE, BlockRemoved, BlockStored, KVEventBatch

    endpoint = f"tcp://127.0.0.1:{free_port()}"
    node = node_process(events=endpoint)
    listener = subscriber(endpoint)
    # Strict: every field has vLLM's type; and what vLLM itself would have sent is the same, byte for byte.
    decoder = msgspec.msgpack.Decoder(KVEventBatch)
    hashes = kvstore.hash_blocks(list(range(48)), 16)
    told: list[Any] = []
    stored: set[tuple[str, bytes]] = set()
    removed: set[tuple[str, bytes]] = set()
    evicted = False
    with kvstore.connect(node.url, timeout=SECONDS) as client:
        pages = client.namespace(LAYOUT)
        deadline = time.monotonic() + SECONDS
        wanted = {(medium, each) for medium in (MEDIUM_CPU, MEDIUM_STORAGE) for each in hashes}
        while not removed >= wanted:
            assert time.monotonic() < deadline, (stored, removed)
            if not stored >= wanted:
                if not stored:  # whoever subscribes is heard by the publisher a moment later
                    pages.evict(hashes)
                pages.store(hashes, np.ones((3, LAYOUT.page_bytes), np.uint8))
                client.flush()
            elif not evicted:
                evicted = bool(pages.evict(hashes))
            try:
                _, _, payload = listener.recv_multipart()
            except zmq.Again:
                continue
            batch = decoder.decode(payload)
            assert batch.data_parallel_rank == 0 and abs(batch.ts - time.time()) < SECONDS
            assert decoder.decode(msgspec.msgpack.encode(batch)) == batch
            for event in batch.events:
                told.append(event)
                pairs = {(event.medium, each) for each in event.block_hashes}
                if isinstance(event, BlockStored):
                    stored |= pairs
                elif isinstance(event, BlockRemoved) and evicted:
                    removed |= pairs
    first = next(event for event in told if isinstance(event, BlockStored) and event.medium == MEDIUM_CPU)
    assert first.block_hashes == hashes
    assert (first.parent_block_hash, first.block_size, first.group_idx) == (None, 16, 1)
    assert (first.locality, first.ownership, first.token_ids) == ("LOCAL", "kvstore", [])
