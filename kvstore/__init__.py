"""kvstore keeps the KV cache of LLM serving engines outside the engine.

client = kvstore.connect("unix:///run/kvstore.sock")
pages = client.namespace(kvstore.Layout(model="llama", block_size=16, page_bytes=2 << 20))
hashes = kvstore.hash_blocks(token_ids, 16)
pages.store(hashes, buffer)
loaded = pages.load(hashes, buffer)
"""

from kvstore import errors
from kvstore.client.client import Client
from kvstore.client.connecting import connect
from kvstore.client.namespace import Namespace
from kvstore.client.pending import PendingLoad, PendingStore
from kvstore.client.results import Lookup, NamespaceStatistics, StoreResult
from kvstore.errors import KVStoreError
from kvstore.hashing import hash_blocks
from kvstore.layout import Layout
from kvstore.status import Status

__all__ = [
    "connect",
    "Client",
    "Namespace",
    "Layout",
    "hash_blocks",
    "Lookup",
    "StoreResult",
    "PendingStore",
    "PendingLoad",
    "NamespaceStatistics",
    "Status",
    "KVStoreError",
    "errors",
]
