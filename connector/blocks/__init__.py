"""A local block manager in the shape of vLLM V1's: which of an engine's KV blocks holds which tokens, and for whom.

``manager`` is the scheduler's only door. Behind it, from the outside in: ``attention`` keeps the blocks of a
request, ``pool`` those of the engine, ``cached_blocks`` finds one by its hash, ``free_queue`` says which goes next.
``hashing`` names full blocks, ``groups`` says how large they are, ``request`` what a request has to show.
"""

from connector.blocks.block import Block
from connector.blocks.groups import CacheConfig, FullAttentionSpec
from connector.blocks.hashing import BlockHash, BlockHashChain
from connector.blocks.manager import KVCacheBlocks, KVCacheManager, PrefixCacheStatistics
from connector.blocks.request import Request

__all__ = [
    "KVCacheManager",
    "KVCacheBlocks",
    "PrefixCacheStatistics",
    "CacheConfig",
    "FullAttentionSpec",
    "BlockHashChain",
    "BlockHash",
    "Block",
    "Request",
]
