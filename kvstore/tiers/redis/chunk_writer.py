"""Chunks: built from pages, compressed where that pays, and admitted to their buckets. No entry shows them yet."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

import numpy as np

from kvstore.hashing import HASH_BYTES
from kvstore.tiers.redis.buckets import EvictedChunk, evicted_by
from kvstore.tiers.redis.context import Context
from kvstore.tiers.redis.format import codec
from kvstore.tiers.redis.format.chunk import ChunkHeader
from kvstore.tiers.redis.format.key_names import NONCE_BYTES
from kvstore.tiers.redis.format.new_chunk import NewChunk
from kvstore.tiers.redis.net.resp import Buffer, ServerError
from kvstore.tiers.redis.net.server import Request
from kvstore.tiers.tier import PageBytes, PageWrite

_TELLING_BYTES = 256 << 10
"""A store of less says nothing about the network's speed."""


class ChunkWriter:
    """Builds and admits chunks; knows which namespaces are worth compressing. Safe for threads."""

    def __init__(self, context: Context) -> None:
        self._topology = context.topology
        self._buckets = context.buckets
        self._counts = context.counts
        self._codecs = codec.CodecChoice()

    def build(self, pages: Sequence[PageWrite], position: int, parent: bytes) -> NewChunk:
        """A chunk of pages of one namespace.

        Args:
            pages: in the order of their chain.
            position: the first one's place in the chain.
            parent: the key of the page before it, or nothing.
        """
        namespace = pages[0].key[:-HASH_BYTES]
        payloads = self._compressed([page.payload for page in pages], namespace)
        lengths = tuple(len(page.payload) for page in pages)
        stored = tuple(len(payload) for payload in payloads)
        header = ChunkHeader(
            codec.RAW if stored == lengths else codec.BIT_SHUFFLED,
            namespace,
            os.urandom(NONCE_BYTES),
            tuple(page.key[-HASH_BYTES:] for page in pages),
            lengths,
            stored,
            tuple(page.checksum for page in pages),
            position,
            parent[-HASH_BYTES:],
        )
        return NewChunk(self._buckets.share_of(namespace).bucket_of(pages[0].key), header, header.encode(), payloads)

    def admit(self, chunks: Sequence[NewChunk], deadline: float) -> tuple[list[NewChunk], list[EvictedChunk]]:
        """Write chunks, in one request to each server. Returns those that are whole in Redis, and those evicted."""
        trims = self._buckets.trims({chunk.header.namespace for chunk in chunks})
        requests = [request for _, request in trims]
        for chunk in chunks:
            requests.append(self._buckets.admission(chunk))
            requests += [
                # XX: a chunk that was evicted meanwhile must not come back uncharged.
                Request(self._topology.slot(name), [b"SET", name, value, b"XX", b"KEEPTTL"], payload_bytes=size)
                for name, value, size in zip(chunk.names, chunk.values(), chunk.sizes, strict=True)
            ]
        changed = {chunk.bucket for chunk in chunks}.union(bucket for bucket, _ in trims)
        start = time.perf_counter()
        replies = iter(self._buckets.change(requests, changed, deadline, writing=True))
        seconds = time.perf_counter() - start
        evicted = [gone for bucket, _ in trims for gone in evicted_by(bucket, next(replies))]
        admitted: dict[bytes, NewChunk] = {}
        broken: dict[tuple[int, bytes], int] = {}
        failed = 0
        for chunk in chunks:
            admission = next(replies)
            values = [next(replies) for _ in chunk.sizes]
            if isinstance(admission, list) and len(admission) == 2:
                evicted += evicted_by(chunk.bucket, admission[1])
                if all(value == b"OK" for value in values):
                    admitted[chunk.header.nonce] = chunk
                else:  # its place would stay, charged and empty, until it is the oldest
                    broken[chunk.bucket, chunk.header.nonce] = len(chunk.keys)
            failed += any(isinstance(reply, ServerError) for reply in (admission, *values))
        self._buckets.release(broken, deadline)
        for gone in evicted:
            admitted.pop(gone.nonce, None)
        size = sum(sum(chunk.sizes) for chunk in chunks)
        if not failed and size >= _TELLING_BYTES:
            self._codecs.sent(size, seconds)
        self._counts.add(errors=failed, evicted=sum(gone.pages for gone in evicted))
        return list(admitted.values()), evicted

    def _compressed(self, payloads: Sequence[PageBytes], namespace: bytes) -> list[Buffer]:
        """What to store of pages: their compressed forms, if that pays."""
        choice = self._codecs
        if choice.wants_sample(namespace):
            page = payloads[0]
            start = time.perf_counter()
            packed = codec.compress(page)
            if packed is not None:
                codec.decompress(np.frombuffer(packed, np.uint8), np.empty_like(page))
            size = len(page) if packed is None else len(packed)
            choice.sampled(namespace, len(page), size, time.perf_counter() - start)
        if not choice.pays(namespace):
            return [page.data for page in payloads]
        return [codec.compress(page) or page.data for page in payloads]
