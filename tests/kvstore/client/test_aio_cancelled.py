"""Operations of the asyncio client that are cancelled at any moment: no page is ever wrong, and nothing is left."""

from __future__ import annotations

import asyncio
import os
import random
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from aio_clients import with_client

import kvstore
import kvstore.aio
from kvstore.aio import operations as aio_operations
from kvstore.errors import KVStoreError

CANCELLATIONS = int(os.environ.get("CANCELLATIONS", "200"))
"""Of each of three tasks."""
PAGE = 96 << 10
MOST_PAGES = 16
PROMPTS = 24
OVERWRITTEN = 0xEE
SPACE = kvstore.Layout(model="cancelled", block_size=16, page_bytes=PAGE)


def keys_of(prompt: int) -> list[bytes]:
    return kvstore.hash_blocks(np.arange(MOST_PAGES * 16) % 1000 + 1000 * prompt, 16)


KEYS = [keys_of(prompt) for prompt in range(PROMPTS)]


def content(key: bytes) -> int:
    return key[0] % 0xE0  # never what a buffer is overwritten with


class Work:
    """Random operations over one namespace, each of which may be cancelled. The buffer is written over as soon as the
    await has ended: what a thread still reads of it then, or writes to it, shows."""

    def __init__(self, pages: kvstore.aio.AsyncNamespace, seed: int) -> None:
        self.pages = pages
        self.dice = random.Random(seed)
        self.buffer = np.full((MOST_PAGES, PAGE), OVERWRITTEN, np.uint8)
        self.counts: Counter[str] = Counter()

    async def cancelled(self) -> None:
        """One operation, cancelled somewhere, or behind its end."""
        task = asyncio.create_task(self.once())
        for _ in range(self.dice.randrange(4)):
            await asyncio.sleep(0)
        if self.dice.randrange(4) == 0:
            await asyncio.wait([task])
        elif self.dice.randrange(4):
            await asyncio.sleep(self.dice.expovariate(1 / self.dice.choice([2e-4, 2e-3])))
        task.cancel()
        if self.dice.randrange(3) == 0:
            await asyncio.sleep(0)
            task.cancel()
        try:
            await task
        except asyncio.CancelledError:
            self.counts["cancelled"] += 1
        except KVStoreError as error:
            self.counts[type(error).__name__] += 1
        self.buffer[:] = OVERWRITTEN
        await asyncio.sleep(self.dice.choice([0, 0, 1e-3]))
        self.counts["written behind the end"] += not (self.buffer == OVERWRITTEN).all()

    async def once(self) -> None:
        prompt = self.dice.randrange(PROMPTS)
        keys = KEYS[prompt][: self.dice.randrange(1, MOST_PAGES + 1)]
        rows = self.buffer[: len(keys)]
        await self.dice.choice([self.store, self.store, self.load, self.load, self.lend, self.reserve, self.lookup])(
            keys, rows
        )

    async def store(self, keys: list[bytes], rows: Any) -> None:
        for row, key in zip(rows, keys, strict=True):
            row[:] = content(key)
        self.counts["stored"] += (await self.pages.store(keys, rows)).stored

    async def load(self, keys: list[bytes], rows: Any) -> None:
        self.compare(keys, rows[: await self.pages.load(keys, rows)])

    async def lend(self, keys: list[bytes], rows: Any) -> None:
        lend = self.dice.choice([self.pages.borrow, self.pages.prepare_load])
        async with lend(keys) as lent:
            for row, page in zip(rows, lent.pages, strict=False):
                row[:] = page
            good = await lent.complete()
        self.compare(keys, rows[:good])

    async def reserve(self, keys: list[bytes], rows: Any) -> None:
        async with self.pages.prepare_store(keys) as reserved:
            for key, page in zip(keys, reserved.pages, strict=True):
                if page is not None:
                    page[:] = content(key)
            self.counts["stored"] += (await reserved.complete()).stored

    async def lookup(self, keys: list[bytes], rows: Any) -> None:
        await self.pages.lookup(keys)

    def compare(self, keys: list[bytes], rows: Any) -> None:
        for key, row in zip(keys, rows, strict=False):
            self.counts["loaded"] += 1
            self.counts["wrong"] += not bool((row == content(key)).all())


@pytest.fixture
def lines(caplog) -> Iterator[list[str]]:
    """What asyncio says of exceptions that nobody awaited."""
    said: list[str] = []
    yield said
    said += [record.getMessage() for record in caplog.records if record.name == "asyncio"]
    assert not said


@pytest.mark.parametrize("patience", [aio_operations.PATIENCE_SECONDS, 0.0], ids=["as it is", "cut at once"])
def test_cancellations_mix_up_no_pages_and_leave_nothing(
    make_place, monkeypatch, eventually, lines, seed, patience
) -> None:
    """``CANCELLATIONS`` of each of three tasks over one client."""
    monkeypatch.setattr(aio_operations, "PATIENCE_SECONDS", patience)
    place = make_place(arena=16 << 20, disk_limit=0)
    totals: Counter[str] = Counter({"wrong": 0, "written behind the end": 0})

    async def main(client: kvstore.aio.AsyncClient) -> None:
        pages = await client.namespace(SPACE)
        works = [Work(pages, seed + number) for number in range(3)]

        async def go(work: Work) -> None:
            for _ in range(CANCELLATIONS):
                await work.cancelled()

        async with asyncio.TaskGroup() as group:
            for work in works:
                group.create_task(go(work))
        for work in works:
            totals.update(work.counts)
        assert not client._operations._under_way
        assert not client._operations._kept
        last = works[0]
        last.counts.clear()
        for keys in KEYS:
            await last.load(keys, last.buffer)
        totals["wrong"] += last.counts["wrong"]

    # What a cut leaves reserved lapses at the deadline.
    asyncio.run(with_client(place.url, place.opened, main, 30.0 if patience else 5.0))
    print(dict(totals))
    assert totals["wrong"] == totals["written behind the end"] == 0
    assert totals["cancelled"] > CANCELLATIONS
    assert totals["stored"] > 100
    assert set(totals) == {"wrong", "written behind the end", "cancelled", "stored", "loaded"}, "others were hit"
    leases = place.store._state.leases
    eventually(lambda: not leases.stores and not leases.loads, "leases are left")
    eventually(lambda: not [each for each in threading.enumerate() if each.name.startswith("kvstore-aio")])
