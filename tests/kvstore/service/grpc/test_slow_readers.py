"""Readers that ask for pages and take none: the node grows by next to nothing of what they asked for."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path

import grpc
import numpy as np
import pytest
from bulk_peer import Peer, frame, token_of

import kvstore
from kvstore.v1 import cache_pb2 as pb
from kvstore.wire.frame import Kind
from kvstore.wire.messages import LOAD_STREAM

PAGE_BYTES = 2 << 20
PAGES, READERS = 8, 8
ASKED = READERS * PAGES * PAGE_BYTES
MOST_GROWTH = {"bulk": ASKED // 8, "grpc": ASKED // 2}
"""Bytes: bulk connections send from the arena; of a gRPC stream a message or two of 2 MiB are under way, copied."""


def private_bytes(pid: int) -> int:
    """What a process has for itself, the arena and other shared memory left out."""
    [line] = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("RssAnon")]
    return int(line.split()[1]) << 10


@pytest.mark.parametrize("path", ["bulk", "grpc"])
def test_the_node_does_not_grow(node_process, path):
    node = node_process(arena="300MiB", disk_limit="0")
    names = kvstore.hash_blocks(np.arange(PAGES * 16), 16)
    data = np.random.default_rng(1).integers(0, 256, (PAGES, PAGE_BYTES), dtype=np.uint8)
    with ExitStack() as stack:
        client = stack.enter_context(kvstore.connect(node.kv_url, timeout=60.0))
        pages = client.namespace(kvstore.Layout(model="slow", block_size=16, page_bytes=PAGE_BYTES))
        assert pages.store(names, data).stored == PAGES
        into = np.zeros_like(data)
        assert pages.load(names, into) == PAGES
        asked = pb.PageList(fingerprint=pages.fingerprint, hashes=b"".join(names))
        channel = stack.enter_context(grpc.insecure_channel(f"127.0.0.1:{node.port}"))
        stream = channel.unary_stream(LOAD_STREAM, request_serializer=pb.LoadPages.SerializeToString)
        before = private_bytes(node.pid)
        readers = []
        for _ in range(READERS):
            if path == "bulk":
                peer = stack.enter_context(Peer(node, frame(Kind.HELLO, token_of(node))))
                assert peer.receive()[0].kind is Kind.READY
                peer.load(asked, milliseconds=50_000)
                assert peer.receive()[0].payload > PAGES * PAGE_BYTES
                readers.append(peer)
            else:
                messages = stream(pb.LoadPages(pages=asked), timeout=50.0)
                assert len(pb.PageRun.FromString(next(messages)).tiers) == PAGES
                readers.append(messages)
        grown = 0
        for _ in range(25):
            grown = max(grown, private_bytes(node.pid) - before)
            time.sleep(0.02)
        assert grown < MOST_GROWTH[path]
        into[:] = 0
        assert pages.load(names, into) == PAGES, "others are served"
        assert np.array_equal(into, data)
        for messages in readers if path == "grpc" else ():
            messages.cancel()
