"""The client for programs on asyncio: what :func:`kvstore.connect` gives, to be awaited.

async with kvstore.aio.connect("unix:///run/kvstore.sock") as client:
    pages = await client.namespace(kvstore.Layout(model="llama", block_size=16, page_bytes=2 << 20))
    await pages.store(hashes, buffer)
    loaded = await pages.load(hashes, buffer)

Methods have the arguments, results and errors of the synchronous client's. An operation is done by a thread, which
copies without the interpreter's lock, so the loop stays free; ``operations.py`` says what a cancellation does.
"""

from kvstore.aio.client import AsyncClient
from kvstore.aio.connect import connect
from kvstore.aio.entering import Entering
from kvstore.aio.namespace import AsyncNamespace
from kvstore.aio.pending import AsyncPendingLoad, AsyncPendingStore

__all__ = ["AsyncClient", "AsyncNamespace", "AsyncPendingLoad", "AsyncPendingStore", "Entering", "connect"]
