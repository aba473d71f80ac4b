"""The block manager: which of an engine's KV blocks holds which tokens, and for whom, in the shape of vLLM V1's.

- ``manager``: a scheduler's calls, from the lookup of a request to its end.
- ``page_manager``: the same for engines that speak of pages and keep no hashes.
- ``coordinators``: which of the coordinators a model needs.
- ``coordinator``: what all cache groups of a model do together; without prefix caching, and for one group.
- ``hybrid``: the same for several groups, and the hit that they agree on.
- ``single_type_manager``: the block tables of one group.
- ``full_attention``, ``sliding_window``, ``chunked_local_attention``, ``cross_attention``, ``mamba``: what each kind
  holds, and what a hit is to it.
- ``sources``: where a hit's blocks are found: cached, in kvstore, or held by the request.
- ``pool``: all blocks: given out, shared, freed, and found by hash.
- ``copies``: copies of blocks that a step has to make first.
- ``cached_blocks``: from a block hash to the blocks that carry it.
- ``free_queue``: the free blocks in order of eviction.
- ``block``: one block, and blocks by group.
- ``request``: what the manager reads of a request.
- ``hashing``: the block hashes of a request.
- ``extra_keys``: what besides its tokens a block's KV depends on.
- ``specs``: what one layer keeps in a block.
- ``grouping``: which layers share a block table.
- ``cache_config``: the number of blocks and the groups that share them.
- ``events``: changes of the prefix cache, for those who route requests by it.
- ``statistics``: tokens looked up and tokens hit.
"""

from kvstore.connector.blocks.block import KVCacheBlock, KVCacheBlocks
from kvstore.connector.blocks.cache_config import KVCacheConfig, KVCacheGroupSpec
from kvstore.connector.blocks.copies import KVCacheBlockCopy
from kvstore.connector.blocks.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVCacheEvent,
)
from kvstore.connector.blocks.extra_keys import MultimodalInput, PrefixKeys, SharedPrefix
from kvstore.connector.blocks.hashing import BlockHash, BlockHashChain
from kvstore.connector.blocks.manager import KVCacheManager
from kvstore.connector.blocks.page_manager import PageManager
from kvstore.connector.blocks.request import Request
from kvstore.connector.blocks.sources import Presence
from kvstore.connector.blocks.specs import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from kvstore.connector.blocks.statistics import PrefixCacheStats

__all__ = [
    "KVCacheManager",
    "PageManager",
    "KVCacheBlocks",
    "KVCacheBlock",
    "KVCacheBlockCopy",
    "BlockHash",
    "BlockHashChain",
    "PrefixKeys",
    "MultimodalInput",
    "SharedPrefix",
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
    "UniformTypeKVCacheSpecs",
    "KVCacheEvent",
    "BlockStored",
    "BlockRemoved",
    "AllBlocksCleared",
    "PrefixCacheStats",
]
