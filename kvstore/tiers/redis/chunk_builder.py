"""Pages are made into chunks: packed where that pays, and given a name and a bucket."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

import numpy as np

from kvstore.hashing import HASH_BYTES
from kvstore.tiers.redis.buckets import Buckets
from kvstore.tiers.redis.format import codec
from kvstore.tiers.redis.format.chunk import ChunkHeader
from kvstore.tiers.redis.format.codec_choice import CodecChoice
from kvstore.tiers.redis.format.key_names import NONCE_BYTES
from kvstore.tiers.redis.format.new_chunk import NewChunk
from kvstore.tiers.redis.net.resp import Buffer
from kvstore.tiers.tier import PageBytes, PageWrite

_TELLING_BYTES = 256 << 10
"""A store of less says nothing about the network's speed."""


class ChunkBuilder:
    """Safe for threads.

    Args:
        buckets: where chunks go.
    """

    def __init__(self, buckets: Buckets) -> None:
        self._buckets = buckets
        self._codecs = CodecChoice()

    def chunk(self, pages: Sequence[PageWrite], position: int, parent: bytes) -> NewChunk:
        """A chunk of pages of one namespace.

        Args:
            pages: in the order of their chain.
            position: the first one's place in the chain.
            parent: the key of the page before it, or nothing.
        """
        namespace = pages[0].key[:-HASH_BYTES]
        payloads = self._packed([page.payload for page in pages], namespace)
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

    def sent(self, size: int, seconds: float) -> None:
        """Chunks of so many bytes went to the servers in so many seconds."""
        if size >= _TELLING_BYTES:
            self._codecs.sent(size, seconds)

    def _packed(self, payloads: Sequence[PageBytes], namespace: bytes) -> list[Buffer]:
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
