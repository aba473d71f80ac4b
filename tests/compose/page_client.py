"""A client of a node that does what it is told: a line of JSON in, a line of JSON out. It lives through all faults.

``python page_client.py URL``, then requests such as ``{"do": "store", "prompt": "a", "pages": 8}``. The pages of a
prompt follow from its name, so that every host knows what is right. An answer has ``error`` where the client raised;
``load`` counts the pages that were ``loaded`` and those that were ``wrong``.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
import threading
import time
from collections import Counter
from typing import Any

import numpy as np

import kvstore
from kvstore.errors import KVStoreError

TIMEOUT = 5.0
"""Seconds: the deadline of each call."""
LAYOUT = kvstore.Layout(model="compose", block_size=16, page_bytes=128 << 10)
CROWD_ROUNDS = 4


def hashes_of(prompt: str, pages: int) -> list[bytes]:
    return [hashlib.sha256(f"{prompt}/{number}".encode()).digest() for number in range(pages)]


def page_of(block_hash: bytes) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.frombuffer(np.random.default_rng(list(block_hash)).bytes(LAYOUT.page_bytes), np.uint8)


class PageClient:
    def __init__(self, url: str) -> None:
        self.client = kvstore.connect(url, timeout=TIMEOUT)
        self.opened: kvstore.Namespace | None = None

    @property
    def namespace(self) -> kvstore.Namespace:
        if self.opened is None:
            self.opened = self.client.namespace(LAYOUT)
        return self.opened

    def store(self, prompt: str, pages: int) -> dict[str, Any]:
        hashes = hashes_of(prompt, pages)
        return dataclasses.asdict(self.namespace.store(hashes, [page_of(each) for each in hashes]))

    def load(self, prompt: str, pages: int) -> dict[str, Any]:
        hashes = hashes_of(prompt, pages)
        into = [np.zeros(LAYOUT.page_bytes, np.uint8) for _ in hashes]
        before = Counter(self.namespace.statistics().loaded)
        loaded = self.namespace.load(hashes, into)
        wrong = sum(not np.array_equal(got, page_of(each)) for got, each in zip(into[:loaded], hashes, strict=False))
        tiers = Counter(self.namespace.statistics().loaded) - before
        return {"loaded": loaded, "wrong": wrong, "tiers": dict(tiers)}

    def lookup(self, prompt: str, pages: int) -> dict[str, Any]:
        found = self.namespace.lookup(hashes_of(prompt, pages))
        return {"prefix": found.prefix, "tiers": found.tiers}

    def path(self) -> dict[str, Any]:
        """Which way pages go: ``SharedPath`` is the arena, mapped."""
        assert self.namespace is not None  # opens it
        session = getattr(self.client, "_session", None)  # the older version has none
        return {"path": type(session.path if session is not None else self.client._path).__name__}

    def status(self) -> dict[str, Any]:
        status = self.client.status()
        return {
            "instance": status.instance,
            "clients": status.clients,
            "tiers": {
                tier.name: {**tier.counters, "pages": tier.pages, "used": tier.used_bytes, "limit": tier.limit_bytes}
                for tier in status.tiers
            },
        }

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        began = time.monotonic()
        try:
            reply = getattr(self, request.pop("do"))(**request)
        except KVStoreError as error:
            reply = {"error": type(error).__name__, "why": str(error)}
        return {**reply, "seconds": time.monotonic() - began}


def crowd(url: str, name: str, clients: int) -> dict[str, Any]:
    """So many clients at once, each connected by itself, storing and loading prompts of its own and a common one."""
    replies: list[dict[str, Any]] = []
    start = threading.Barrier(clients)

    def one(number: int) -> None:
        client = PageClient(url)
        start.wait()
        for again in range(CROWD_ROUNDS):
            own = f"{name}/{number}/{again}"
            for do, prompt in (("store", own), ("load", own), ("store", "crowd"), ("load", "crowd")):
                replies.append(client.answer({"do": do, "prompt": prompt, "pages": 4}) | {"did": do})
        client.client.close()

    threads = [threading.Thread(target=one, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {"replies": replies}


def main() -> None:
    url = sys.argv[1]
    client = PageClient(url)
    for line in sys.stdin:
        request = json.loads(line)
        reply = crowd(url, **request["crowd"]) if "crowd" in request else client.answer(request)
        print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    main()
