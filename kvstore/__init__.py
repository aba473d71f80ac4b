"""kvstore keeps the KV cache of LLM serving engines outside the engine.

client = kvstore.connect("unix:///run/kvstore.sock")
pages = client.namespace(kvstore.Layout(model="llama", block_size=16, page_bytes=2 << 20))
hashes = kvstore.hash_blocks(token_ids, 16)  # 32 bytes for each full block of 16 tokens
pages.store(hashes, buffer)  # one page of 2 MiB for each hash, back to back
loaded = pages.load(hashes, buffer)  # how many leading pages came
"""

from importlib import import_module
from typing import TYPE_CHECKING

from kvstore import errors
from kvstore.errors import KVStoreError

if TYPE_CHECKING:
    from kvstore import aio
    from kvstore.client.client import Client
    from kvstore.client.connect import connect
    from kvstore.client.namespace import Namespace
    from kvstore.client.paths.pending import PendingLoad, PendingStore
    from kvstore.client.paths.results import Lookup, NamespaceStatistics, StoreResult
    from kvstore.hashing import hash_blocks
    from kvstore.layout import Layout
    from kvstore.status import Status
else:
    _MODULES = {
        "Client": "kvstore.client.client",
        "connect": "kvstore.client.connect",
        "Namespace": "kvstore.client.namespace",
        "PendingLoad": "kvstore.client.paths.pending",
        "PendingStore": "kvstore.client.paths.pending",
        "Lookup": "kvstore.client.paths.results",
        "NamespaceStatistics": "kvstore.client.paths.results",
        "StoreResult": "kvstore.client.paths.results",
        "hash_blocks": "kvstore.hashing",
        "Layout": "kvstore.layout",
        "Status": "kvstore.status",
    }

    def __getattr__(name):
        """Imported when first used: most commands need neither all of a client nor all of a node."""
        if name == "aio":
            return import_module("kvstore.aio")
        if name not in _MODULES:
            raise AttributeError(f"module 'kvstore' has no attribute {name!r}")
        globals()[name] = found = getattr(import_module(_MODULES[name]), name)
        return found


__all__ = [
    "connect",
    "aio",
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
