"""One client of the soak test, a process of its own: random calls, and every byte that comes back is checked.

A page's content follows from its layout and its hash, so that any process can tell whether it is right. Run as
``soak_client.py URL SEED``; it works until SIGTERM, and then prints what it did as one line of JSON. What must not be
is printed as ``{"failure": ...}``, and ends it.
"""

from __future__ import annotations

import json
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

import kvstore
from kvstore.errors import DeadlineError, ResourceError, UnavailableError

TIMEOUT = 2.0
SLACK = 1.0
"""Seconds that a call may take beyond its timeout, on top of those for which the whole process stood still."""
PAGE_BYTES = (16 << 10, 100_000, 1_124_352)
LONGEST = (48, 24, 6)
"""Pages of the longest prompts, by page size."""
PROMPTS = 300
Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Answer = TypeVar("Answer")


def layout(space: int) -> kvstore.Layout:
    return kvstore.Layout(model="soak", group=space, block_size=16, page_bytes=PAGE_BYTES[space])


def prompt(space: int, number: int) -> list[bytes]:
    """The hashes of a prompt; those with the same number divided by 10 share their first half."""
    length = LONGEST[space] // 2 + number % (LONGEST[space] // 2)
    head = np.random.default_rng([space, number // 10]).integers(0, 50_000, LONGEST[space] * 8)
    tail = np.random.default_rng([space, number, 1]).integers(0, 50_000, LONGEST[space] * 8)
    return kvstore.hash_blocks(np.concatenate([head, tail])[: length * 16], 16)


def content(space: int, block_hash: bytes) -> Bytes:
    seed = [space, *np.frombuffer(block_hash, np.uint32).tolist()]
    return np.random.default_rng(seed).integers(0, 256, PAGE_BYTES[space], dtype=np.uint8)


class Pulse:
    """Notes for how long this process stood still: a machine that is busy is nobody's late answer."""

    def __init__(self) -> None:
        self.longest = 0.0
        threading.Thread(target=self._beat, daemon=True).start()

    def _beat(self) -> None:
        while True:
            start = time.monotonic()
            time.sleep(0.02)
            self.longest = max(self.longest, time.monotonic() - start - 0.02)


def waited_for_processors() -> float:
    """Seconds for which the threads of this process, all together, could have run and others did."""
    waited = 0
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # it has ended
            waited += int((task / "schedstat").read_text().split()[1])
    return waited / 1e9


class SoakClient:
    """Makes calls, and counts what came of them."""

    def __init__(self, url: str, seed: int) -> None:
        self.dice = random.Random(seed)
        self.client = kvstore.connect(url, timeout=TIMEOUT)
        self.counts: Counter[str] = Counter()
        self.worst = 0.0
        self.pulse = Pulse()
        self.stop = False

    def work(self) -> None:
        while not self.stop:
            self.do_something()
            time.sleep(self.dice.uniform(0, 0.04))

    def do_something(self) -> None:
        space = self.dice.choices(range(len(PAGE_BYTES)), [6, 3, 1])[0]
        # A few prompts are asked for much more often than the rest.
        hashes = prompt(space, int(PROMPTS * self.dice.random() ** 3))
        pages = self.timely(lambda: self.client.namespace(layout(space)))
        if pages is None:
            time.sleep(0.1)
            return
        chance = self.dice.random()
        if chance < 0.01:
            self.timely(lambda: pages.evict(hashes[len(hashes) // 2 :]))
        elif chance < 0.0115:
            self.timely(pages.clear)
        else:
            actions = [self.store, self.load, self.load_in_place, self.store_in_place, self.look, self.touch]
            self.dice.choices(actions, [30, 40, 10, 8, 8, 4])[0](space, pages, hashes)

    # -- calls -----------------------------------------------------------------------------------------------------

    def store(self, space: int, pages: kvstore.Namespace, hashes: list[bytes]) -> None:
        payloads = [content(space, each) for each in hashes]
        result = self.timely(lambda: pages.store(hashes, payloads))
        if result is not None:
            assert result.stored + result.present + result.refused == len(hashes), f"a store of {len(hashes)}: {result}"
            self.counts.update(stored=result.stored, present=result.present, refused=result.refused)

    def load(self, space: int, pages: kvstore.Namespace, hashes: list[bytes]) -> None:
        into = np.zeros((len(hashes), PAGE_BYTES[space]), np.uint8)
        loaded = self.timely(lambda: pages.load(hashes, into)) or 0
        for block_hash, page in zip(hashes[:loaded], into, strict=False):
            self.check(space, block_hash, page)
        self.counts.update(loaded=loaded, asked=len(hashes))

    def load_in_place(self, space: int, pages: kvstore.Namespace, hashes: list[bytes]) -> None:
        pending = self.timely(lambda: pages.prepare_load(hashes[: pages.batch_pages]))
        if pending is not None:
            time.sleep(self.dice.choice([0, 0, 0.01, 0.2]))
            copies = [page.copy() for page in pending.pages]
            good = self.timely(pending.complete) or 0
            for block_hash, page in zip(hashes[:good], copies, strict=False):
                self.check(space, block_hash, page)
            self.counts.update(loaded=good)

    def store_in_place(self, space: int, pages: kvstore.Namespace, hashes: list[bytes]) -> None:
        hashes = hashes[: pages.batch_pages]
        pending = self.timely(lambda: pages.prepare_store(hashes))
        if pending is None:
            return
        for block_hash, page in zip(hashes, pending.pages, strict=True):
            if page is not None:
                page[:] = content(space, block_hash)
        if self.dice.random() < 0.2:
            self.timely(pending.abort)
            return
        result = self.timely(pending.complete)
        if result is not None:
            assert result.stored + result.present + result.refused == len(hashes), f"a store of {len(hashes)}: {result}"
            self.counts.update(stored=result.stored, present=result.present, refused=result.refused)

    def look(self, space: int, pages: kvstore.Namespace, hashes: list[bytes]) -> None:
        found = self.timely(lambda: pages.lookup(hashes))
        if found is not None:
            assert len(found.present) == len(found.tiers) == len(hashes)
            assert all(found.present[: found.prefix])

    def touch(self, space: int, pages: kvstore.Namespace, hashes: list[bytes]) -> None:
        touched = self.timely(lambda: pages.touch(hashes))
        assert touched is None or 0 <= touched <= len(hashes)

    # -- inside ----------------------------------------------------------------------------------------------------

    def timely(self, call: Callable[[], Answer]) -> Answer | None:
        """What a call answers; None when the node was away or late. It is never later than its deadline."""
        waited = waited_for_processors()
        self.pulse.longest, start = 0.0, time.monotonic()
        try:
            return call()
        except UnavailableError:
            self.counts["unavailable"] += 1
        except DeadlineError:
            self.counts["late"] += 1
        except ResourceError:  # Redis is away, and what was to be dropped may still be there
            self.counts["not dropped"] += 1
        finally:
            seconds = time.monotonic() - start
            self.counts["calls"] += 1
            self.worst = max(self.worst, seconds)
            most = TIMEOUT + SLACK + 2 * self.pulse.longest + max(0.0, waited_for_processors() - waited)
            assert seconds <= most, f"a call took {seconds:.2f} s, its timeout is {TIMEOUT} s"
        return None

    def check(self, space: int, block_hash: bytes, page: Bytes) -> None:
        right = content(space, block_hash)
        assert np.array_equal(page, right), (
            f"wrong bytes in {block_hash.hex()} of {PAGE_BYTES[space]} bytes, {int((page != right).sum())} of them"
        )


def main() -> int:
    client = SoakClient(sys.argv[1], int(sys.argv[2]))

    def end(*_: object) -> None:
        client.stop = True

    signal.signal(signal.SIGTERM, end)
    print("ready", flush=True)
    try:
        client.work()
    except BaseException as error:
        print(json.dumps({"failure": f"{type(error).__name__}: {error}"}), flush=True)
        raise
    print(json.dumps({**client.counts, "worst": client.worst}), flush=True)
    client.client.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
