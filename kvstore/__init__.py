"""kvstore keeps the KV cache of LLM serving engines outside the engine: in shared memory, on disk and in Redis.

client = kvstore.connect("unix:///run/kvstore.sock")
pages = client.namespace(kvstore.Layout(model="llama", block_size=16, page_bytes=2 << 20))
hashes = kvstore.hash_blocks(token_ids, 16)  # 32 bytes for each full block of 16 tokens
pages.store(hashes, buffer)  # one page of 2 MiB for each hash, back to back
loaded = pages.load(hashes, buffer)  # how many leading pages came

* ``connect`` gives a ``Client``: of a node on this host or elsewhere, or of a store inside this process.
* Its ``namespace`` gives a ``Namespace``: the pages of one ``Layout``, which says what makes page bytes
  interchangeable. ``store``, ``load`` and ``lookup`` name pages by the hashes that ``hash_blocks`` makes.
* ``prepare_store`` and ``prepare_load`` give a ``PendingStore`` and a ``PendingLoad``: pages to be written, or read, in
  the arena itself, without another copy.
* Every error that is raised on purpose is a ``KVStoreError``; ``errors`` has the tree. A page that is damaged, late or
  gone is none: it is a miss.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from kvstore import errors
from kvstore.errors import KVStoreError

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

    __version__: str
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
        if name == "__version__":
            found = import_module("kvstore.status").kvstore_version()
        elif name in _MODULES:
            found = getattr(import_module(_MODULES[name]), name)
        else:
            raise AttributeError(f"module 'kvstore' has no attribute {name!r}")
        globals()[name] = found
        return found

    def __dir__():
        return sorted({*__all__, "__version__", *(name for name in globals() if name.startswith("__"))})
