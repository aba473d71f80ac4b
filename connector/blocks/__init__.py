"""A local block manager in the shape of vLLM V1's: which of an engine's KV blocks holds which tokens, and for whom.

``manager`` is the scheduler's only door (``page_manager`` the same for engines that speak of pages). Behind it, from
the outside in: ``coordinator`` finds what all groups agree on; ``full_attention``, ``sliding_window``,
``chunked_local``, ``mamba`` and ``cross_attention`` keep a request's blocks by the rule of their kind
(``single_type``), from what ``sources`` find; ``pool`` keeps those of the engine, ``cached_blocks`` finds one by its
hash, and ``free_queue`` says which goes next.

``hashing`` and ``extra_keys`` name full blocks, ``request`` is what a request has to show. ``specs`` say what a layer
keeps, ``grouping`` puts layers into groups, ``sizing`` memory into blocks, and ``config`` is what comes of it.
``events``, ``statistics`` and ``residency`` tell what happened.
"""

from kvstore.connector.blocks.block import Block
from kvstore.connector.blocks.cache_config import KVCacheConfig, KVCacheGroupSpec
from kvstore.connector.blocks.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVCacheEvent,
)
from kvstore.connector.blocks.extra_keys import MultimodalInput, PrefixKeys
from kvstore.connector.blocks.hashing import BlockHash, BlockHashChain
from kvstore.connector.blocks.kv_cache_blocks import KVCacheBlocks
from kvstore.connector.blocks.manager import KVCacheManager
from kvstore.connector.blocks.page_manager import PageManager
from kvstore.connector.blocks.request import Request
from kvstore.connector.blocks.residency_sampler import BlockResidency, ResidencySampler
from kvstore.connector.blocks.sources import Presence
from kvstore.connector.blocks.specs import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    Limits,
    MambaSpec,
    SlidingWindowSpec,
    UniformTypeSpecs,
)
from kvstore.connector.blocks.statistics import HitRate, PrefixCacheStats

__all__ = [
    "KVCacheManager",
    "PageManager",
    "KVCacheBlocks",
    "Block",
    "BlockHash",
    "BlockHashChain",
    "PrefixKeys",
    "MultimodalInput",
    "Request",
    "Presence",
    "KVCacheConfig",
    "KVCacheGroupSpec",
    "KVCacheSpec",
    "AttentionSpec",
    "FullAttentionSpec",
    "SlidingWindowSpec",
    "ChunkedLocalAttentionSpec",
    "MambaSpec",
    "CrossAttentionSpec",
    "UniformTypeSpecs",
    "Limits",
    "KVCacheEvent",
    "BlockStored",
    "BlockRemoved",
    "AllBlocksCleared",
    "PrefixCacheStats",
    "HitRate",
    "ResidencySampler",
    "BlockResidency",
]
