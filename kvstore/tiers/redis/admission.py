"""Chunks go into their buckets, where nobody finds them yet."""

from __future__ import annotations

import time
from collections.abc import Sequence

from kvstore.tiers.counters import TierCounts
from kvstore.tiers.redis.buckets import Buckets, Left, left_of
from kvstore.tiers.redis.chunk_builder import ChunkBuilder
from kvstore.tiers.redis.format.new_chunk import NewChunk
from kvstore.tiers.redis.net.resp import ServerError
from kvstore.tiers.redis.net.server import Request
from kvstore.tiers.redis.net.topology import Topology


class Admission:
    """Safe for threads.

    Args:
        servers: where chunks go.
        buckets: make room for them.
        maker: is told how fast they went.
        counts: counts what made room.
    """

    def __init__(self, servers: Topology, buckets: Buckets, maker: ChunkBuilder, counts: TierCounts) -> None:
        self._servers = servers
        self._buckets = buckets
        self._maker = maker
        self._counts = counts

    def admit(self, batch: Sequence[NewChunk], deadline: float) -> tuple[list[NewChunk], list[Left]]:
        """Write chunks. Returns those that stand, and those that made room."""
        trims = self._buckets.trims({chunk.header.namespace for chunk in batch})
        requests = [request for _, request in trims]
        for chunk in batch:
            requests.append(self._buckets.admission(chunk))
            requests += [
                Request(self._servers.slot(name), command, payload_bytes=size)
                for (name, command), size in zip(chunk.commands(), chunk.sizes, strict=True)
            ]
        changed = {chunk.bucket for chunk in batch}.union(bucket for bucket, _ in trims)
        start = time.perf_counter()
        replies = iter(self._buckets.change(requests, changed, deadline, writing=True))
        seconds = time.perf_counter() - start
        left = [gone for bucket, _ in trims for gone in left_of(bucket, next(replies))]
        standing: dict[bytes, NewChunk] = {}
        broken: dict[tuple[int, bytes], int] = {}
        failed = 0
        for chunk in batch:
            admitted = next(replies)
            values = [next(replies) for _ in chunk.sizes]
            if isinstance(admitted, list) and len(admitted) == 2:
                left += left_of(chunk.bucket, admitted[1])
                if all(value == b"OK" for value in values):
                    standing[chunk.header.nonce] = chunk
                else:  # its place would stay, charged and empty, until it is the oldest
                    broken[chunk.bucket, chunk.header.nonce] = len(chunk.keys)
            failed += any(isinstance(reply, ServerError) for reply in (admitted, *values))
        self._buckets.release(broken, deadline)
        for gone in left:
            standing.pop(gone.nonce, None)
        if not failed:
            self._maker.sent(sum(sum(chunk.sizes) for chunk in batch), seconds)
        self._counts.add(errors=failed, evicted=sum(gone.pages for gone in left))
        return list(standing.values()), left
