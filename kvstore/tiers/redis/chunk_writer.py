"""Chunks: built from pages, compressed where that pays, and admitted to their buckets. No entry shows them yet."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from kvstore.hashing import HASH_BYTES
from kvstore.tiers.redis.buckets import EvictedChunk, evicted_by
from kvstore.tiers.redis.context import Context
from kvstore.tiers.redis.format import codec, key_names
from kvstore.tiers.redis.format.chunk import ChunkHeader
from kvstore.tiers.redis.format.new_chunk import NewChunk
from kvstore.tiers.redis.net.connection import Request
from kvstore.tiers.redis.net.resp import Buffer, ServerError
from kvstore.tiers.tier import Claim, PageBytes, PageWrite

_TELLING_BYTES = 256 << 10
"""A store of less says nothing about the network's speed."""


class Admitted(NamedTuple):
    """What became of new chunks."""

    whole: list[NewChunk]
    """They are in Redis, with all their bytes."""
    evicted: list[EvictedChunk]
    """For them."""
    claims: list[Claim]
    """Others are sending these."""


class ChunkWriter:
    """Builds and admits chunks; knows which namespaces are worth compressing. Safe for threads."""

    def __init__(self, context: Context) -> None:
        self._topology = context.topology
        self._buckets = context.buckets
        self._counts = context.counts
        self._codecs = codec.CodecChoice()

    def build(self, pages: Sequence[PageWrite], position: int, parent: bytes, *, merged: bool = False) -> NewChunk:
        """A chunk of pages of one namespace.

        Args:
            pages: in the order of their chain.
            position: the first one's place in the chain.
            parent: the key of the page before it, or nothing.
            merged: these pages are in Redis, in other chunks.
        """
        namespace = pages[0].key[:-HASH_BYTES]
        payloads = self._compressed([page.payload for page in pages], namespace)
        lengths = tuple(len(page.payload) for page in pages)
        stored = tuple(len(payload) for payload in payloads)
        header = ChunkHeader(
            codec.RAW if stored == lengths else codec.BIT_SHUFFLED,
            namespace,
            os.urandom(key_names.NONCE_BYTES),
            tuple(page.key[-HASH_BYTES:] for page in pages),
            lengths,
            stored,
            tuple(page.checksum for page in pages),
            position,
            parent[-HASH_BYTES:],
        )
        bucket = self._buckets.share_of(namespace).bucket_of(pages[0].key)
        return NewChunk(bucket, header, header.encode(), payloads, merged)

    def admit(self, chunks: Sequence[NewChunk], deadline: float, looked: Collection[bytes] = ()) -> Admitted:
        """Write chunks: first each is admitted, or is another writer's to send; then bytes are sent of those that were.
        Both are one request to each server. ``looked``: pages that were looked for since another's claim ended."""
        trims = self._buckets.trims({chunk.header.namespace for chunk in chunks})
        admissions = [self._buckets.admission(chunk, again=chunk.keys[0] in looked) for chunk in chunks]
        requests = [request for _, request in trims] + admissions
        changed = {chunk.bucket for chunk in chunks}.union(bucket for bucket, _ in trims)
        replies = self._buckets.change(requests, changed, deadline, writing=True)
        trimmed = zip(trims, replies[: len(trims)], strict=True)
        evicted = [gone for (bucket, _), reply in trimmed for gone in evicted_by(bucket, reply)]
        places: dict[bytes, NewChunk] = {}
        claims: list[Claim] = []
        failed = 0
        for chunk, reply in zip(chunks, replies[len(trims) :], strict=True):
            match reply:
                case [1, gone]:
                    places[chunk.header.nonce] = chunk
                    evicted += evicted_by(chunk.bucket, gone)
                case [2, int() as left_ms]:
                    name = key_names.claim_name(chunk.bucket, chunk.claim)
                    claims.append(Claim(name, left_ms / 1000, chunk.keys))
            failed += isinstance(reply, ServerError)
        for lost in evicted:
            places.pop(lost.nonce, None)
        whole, refused = self._send(list(places.values()), deadline)
        self._counts.add(errors=failed + refused, evicted=sum(gone.pages for gone in evicted))
        return Admitted(whole, evicted, claims)

    def _send(self, chunks: Sequence[NewChunk], deadline: float) -> tuple[list[NewChunk], int]:
        """Put the bytes of chunks in their places. Returns those that are whole now, and how many a server refused."""
        requests = [
            # XX: a chunk that was evicted meanwhile must not come back uncharged.
            Request(self._topology.slot(name), [b"SET", name, value, b"XX", b"KEEPTTL"], payload_bytes=size)
            for chunk in chunks
            for name, value, size in zip(chunk.names, chunk.values(), chunk.sizes, strict=True)
        ]
        start = time.perf_counter()
        replies = iter(self._topology.exchange(requests, deadline, writing=True))
        seconds = time.perf_counter() - start
        whole: list[NewChunk] = []
        broken: dict[tuple[int, bytes], int] = {}
        refused = 0
        for chunk in chunks:
            values = [next(replies) for _ in chunk.sizes]
            if all(value == b"OK" for value in values):
                whole.append(chunk)
            else:  # its place would stay, charged and empty, until it is the oldest
                broken[chunk.bucket, chunk.header.nonce] = len(chunk.keys)
            refused += any(isinstance(value, ServerError) for value in values)
        self._buckets.release(broken, deadline)
        size = sum(sum(chunk.sizes) for chunk in chunks)
        if not refused and size >= _TELLING_BYTES:
            self._codecs.sent(size, seconds)
        return whole, refused

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
