"""The client for programs on asyncio: what :func:`kvstore.connect` gives, to be awaited.

async with kvstore.aio.connect("unix:///run/kvstore.sock") as client:
    pages = await client.namespace(kvstore.Layout(model="llama", block_size=16, page_bytes=2 << 20))
    await pages.store(hashes, buffer)
    loaded = await pages.load(hashes, buffer)

``connect(url)`` → ``AsyncClient`` → ``AsyncNamespace`` → ``Operations`` → what they are called after in
:mod:`kvstore.client`, on a thread: arguments, results and errors are the same. What waits for nothing is no coroutine.

* ``operations.py``: threads, turns, and what becomes of an operation whose task is cancelled.
* ``pending.py``: pages that are reserved or lent. ``entering.py``: ``await`` and ``async with`` of one call.
"""

from kvstore.aio.client import AsyncClient
from kvstore.aio.connect import connect
from kvstore.aio.entering import Entering
from kvstore.aio.namespace import AsyncNamespace
from kvstore.aio.pending import AsyncPendingLoad, AsyncPendingStore

__all__ = ["AsyncClient", "AsyncNamespace", "AsyncPendingLoad", "AsyncPendingStore", "Entering", "connect"]
