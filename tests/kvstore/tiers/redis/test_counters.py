"""What a node counts of Redis outlives the node, though what is in Redis is everybody's."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from node_process import NodeProcess
from redis_servers import RedisServer

import kvstore

LAYOUT = kvstore.Layout(model="tiny", block_size=16, page_bytes=5000)
HASHES = [bytes([number]) * 32 for number in range(20)]


def test_the_counters_of_redis_survive_a_kill(
    node_process: Callable[..., NodeProcess],
    server: RedisServer,
    eventually: Callable[[Callable[[], bool]], None],
) -> None:
    def counted(name: str) -> int:
        with kvstore.connect(node.url, timeout=30.0) as client:
            return client.status().tier("redis").counters[name]

    node = node_process(arena="1MiB", disk_limit="0", redis=server.url, redis_limit="64MiB")
    with kvstore.connect(node.url, timeout=30.0) as client:
        client.namespace(LAYOUT).store(HASHES, np.ones((20, 5000), np.uint8))
        client.flush()
    eventually(lambda: counted("stored") == 20)
    written = counted("written_bytes")
    node.kill()
    node.start()
    assert (counted("stored"), counted("written_bytes")) == (20, written)
