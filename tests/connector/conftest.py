"""A kvstore that does as it is told: it answers, hangs at an exact step, raises, or answers in part."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, Self, TypeVar

import numpy as np
import pytest
from openai_instance import OpenAIInstance
from proxy_process import ProxyProcess

from kvstore.errors import PermissionDeniedError
from kvstore.gpu.begun import DONE, DoneCopy
from kvstore.hashing import hash_blocks
from kvstore.layout import Layout

BLOCK_SIZE = 4
PAGE_BYTES = 64
WINDOW_BLOCK_SIZE = 8
WINDOW_PAGE_BYTES = 48
BATCH_PAGES = 2
LAYERS = 3
PATIENCE = 60.0


class FakeClock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


class Gate:
    """A step that a thread goes through: open unless a test closes it; then the thread stops there."""

    def __init__(self) -> None:
        self._reached = threading.Event()
        self._open = threading.Event()
        self._open.set()
        self.error: Exception | None = None

    def close(self) -> None:
        self._reached.clear()
        self._open.clear()

    def open(self) -> None:
        self._open.set()

    @property
    def reached(self) -> bool:
        return self._reached.is_set()

    def wait_reached(self) -> None:
        assert self._reached.wait(PATIENCE), "no thread came here"

    def go_through(self) -> None:
        self._reached.set()
        assert self._open.wait(PATIENCE), "a test left a gate closed"
        if self.error is not None:
            raise self.error


Queries = Sequence[tuple["FakeNamespace", Sequence[bytes]]]
T = TypeVar("T")


@dataclass
class Found:
    tiers: tuple[str | None, ...]


class FakeClient:
    """Its ``pages`` are the hashes that it has of group 0, ``pages_of`` those of each group."""

    def __init__(self) -> None:
        self.pages_of: defaultdict[int, set[bytes]] = defaultdict(set)
        self.pages = self.pages_of[0]
        self.missing_parts: defaultdict[int, set[bytes]] = defaultdict(set)
        """By rank, of pages whose other parts are there."""
        self.calls: list[list[tuple[bytes, ...]]] = []
        self.shows = False
        self.gate = Gate()

    def lookup_here(self, queries: Queries, *, counts: bool = True) -> list[Found] | None:
        """What it shows without a call: all of it, once ``shows`` is set."""
        return self._answer(queries) if self.shows else None

    def lookup(self, queries: Queries, *, counts: bool = True) -> list[Found]:
        self.calls.append([tuple(hashes) for _, hashes in queries])
        self.gate.go_through()
        return self._answer(queries)

    def _answer(self, queries: Queries) -> list[Found]:
        answers = []
        for namespace, hashes in queries:
            layout = namespace.layout
            pages = self.pages_of[layout.group] - self.missing_parts[layout.tp_rank]
            on_disk = getattr(namespace, "on_disk", ())
            tiers = ("disk" if block_hash in on_disk else "arena" for block_hash in hashes)
            answers.append(Found(tuple(t if h in pages else None for t, h in zip(tiers, hashes, strict=True))))
        return answers


@dataclass
class Stored:
    stored: int
    present: int
    refused: int


class FakePending(Generic[T]):
    """Both kinds: what is not completed is given up when its context ends."""

    def __init__(
        self,
        pages: Sequence[np.ndarray | None],
        tiers: list[str],
        finish: Callable[[], T],
        give_up: Callable[[], None],
    ) -> None:
        self.pages, self.tiers, self.more = pages, tiers, False
        self._finish = finish
        self._give_up: Callable[[], None] | None = give_up

    def complete(self) -> T:
        self._give_up = None
        return self._finish()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._give_up is not None:
            self._give_up()


@dataclass
class FakeNamespace:
    """Keeps pages by hash. Each step of a load and of a store has a gate."""

    layout: Layout = field(default_factory=lambda: Layout(model="test", block_size=BLOCK_SIZE, page_bytes=PAGE_BYTES))
    batch_pages: int = BATCH_PAGES
    pages: dict[bytes, np.ndarray] = field(default_factory=dict)
    on_disk: set[bytes] = field(default_factory=set)
    refuse: set[bytes] = field(default_factory=set)
    valid: int | None = None
    """How many pages of a load count as valid when it is completed; None: all."""
    touched: list[tuple[bytes, ...]] = field(default_factory=list)
    read_only: bool = False
    """Whether the token may only read."""
    held: int = 0
    """Pending loads and stores that are neither completed nor given up."""
    looked_up: list[tuple[int, dict[str, int]]] = field(default_factory=list)
    """What it was told of lookups: pages asked for, and found by tier."""
    borrow_gate: Gate = field(default_factory=Gate)
    complete_load_gate: Gate = field(default_factory=Gate)
    prepare_store_gate: Gate = field(default_factory=Gate)
    complete_store_gate: Gate = field(default_factory=Gate)

    def count_lookup(self, asked: int, found: Mapping[str, int]) -> None:
        self.looked_up.append((asked, dict(found)))

    def touch(self, hashes: Sequence[bytes]) -> int:
        self.touched.append(tuple(hashes))
        return sum(block_hash in self.pages for block_hash in hashes)

    def evict(self, hashes: Sequence[bytes]) -> int:
        if self.read_only:
            raise PermissionDeniedError("no right to write")
        return sum(self.pages.pop(block_hash, None) is not None for block_hash in hashes)

    def lookup(self, hashes: Sequence[bytes], *, counts: bool = True) -> Found:
        return Found(tuple("arena" if block_hash in self.pages else None for block_hash in hashes))

    def borrow(self, hashes: Sequence[bytes], *, counts: bool = True) -> FakePending[int]:
        assert 0 < len(hashes) <= self.batch_pages
        self.borrow_gate.go_through()
        here = [block_hash in self.pages for block_hash in hashes]
        hashes = hashes[: (*here, False).index(False)]
        self.held += 1

        def complete() -> int:
            self.held -= 1
            self.complete_load_gate.go_through()
            return len(hashes) if self.valid is None else min(self.valid, len(hashes))

        tiers = ["disk" if block_hash in self.on_disk else "arena" for block_hash in hashes]
        return FakePending([self.pages[block_hash] for block_hash in hashes], tiers, complete, self._release)

    def prepare_store(self, hashes: Sequence[bytes], *, parent: bytes = b"") -> FakePending[Stored]:
        assert 0 < len(hashes) <= self.batch_pages
        self.prepare_store_gate.go_through()
        known, refused = set(self.pages), self.refuse
        reserved = {
            h: np.zeros(self.layout.page_bytes, np.uint8) for h in hashes if h not in known and h not in refused
        }
        self.held += 1

        def complete() -> Stored:
            self.held -= 1
            self.complete_store_gate.go_through()
            self.pages.update(reserved)
            return Stored(len(reserved), len(known & set(hashes)), len(refused & set(hashes)))

        return FakePending([reserved.get(block_hash) for block_hash in hashes], [], complete, self._release)

    def _release(self) -> None:
        self.held -= 1


class Mark:
    """A point in a stream."""

    def __init__(self, gate: Gate) -> None:
        self.gate = gate
        self.passed = False

    def synchronize(self) -> None:
        self.gate.go_through()
        self.passed = True


class FakePagedKV:
    """An engine's blocks: one row of bytes each, block n filled with n."""

    def __init__(self, page_bytes: int = PAGE_BYTES) -> None:
        self.page_bytes = page_bytes
        self.blocks = np.repeat(np.arange(32, dtype=np.uint8)[:, None], page_bytes, axis=1)
        self.scatter_gate = Gate()
        self.layer_gates = [Gate() for _ in range(LAYERS)]
        self.gather_gate = Gate()
        self.computed = Gate()
        """What the engine has queued on its device."""
        self.calls: list[tuple[str, int]] = []
        """What was called, and in which thread."""

    def mark(self) -> Mark:
        self.calls.append(("mark", threading.get_ident()))
        return Mark(self.computed)

    def begin_scatter(
        self,
        pages: Sequence[np.ndarray],
        block_ids: Sequence[int],
        on_layer: Callable[[int], None] | None = None,
        after: Mark | None = None,
    ) -> DoneCopy:
        assert after is not None and after.passed, "what the engine computes is not there yet"
        self.calls.append(("scatter", threading.get_ident()))
        assert len(pages) == len(block_ids)
        if on_layer is not None:
            for layer, gate in enumerate(self.layer_gates):
                gate.go_through()
                on_layer(layer)
        self.scatter_gate.go_through()
        for page, block_id in zip(pages, block_ids, strict=True):
            self.blocks[block_id] = page
        return DONE

    def begin_gather(self, block_ids: Sequence[int], out: Sequence[np.ndarray], after: Mark | None = None) -> DoneCopy:
        assert after is not None and after.passed, "what the engine computes is not there yet"
        self.calls.append(("gather", threading.get_ident()))
        for page, block_id in zip(out, block_ids, strict=True):
            page[:] = self.blocks[block_id]
        self.gather_gate.go_through()
        return DONE


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fingerprints of weights are remembered here, not in the user's cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def client() -> Iterator[FakeClient]:
    client = FakeClient()
    yield client
    client.gate.open()


@pytest.fixture
def namespace() -> FakeNamespace:
    return FakeNamespace()


@pytest.fixture
def window_namespace() -> FakeNamespace:
    """Of a second group, with larger blocks and smaller pages."""
    return FakeNamespace(Layout(model="test", block_size=WINDOW_BLOCK_SIZE, page_bytes=WINDOW_PAGE_BYTES, group=1))


@pytest.fixture
def kv() -> FakePagedKV:
    return FakePagedKV()


@pytest.fixture
def window_kv() -> FakePagedKV:
    return FakePagedKV(WINDOW_PAGE_BYTES)


@pytest.fixture
def hashes() -> list[bytes]:
    """Of a prompt of 12 blocks."""
    return list(hash_blocks(range(12 * BLOCK_SIZE), BLOCK_SIZE))


@pytest.fixture
def window_hashes() -> list[bytes]:
    """Of the same prompt's 6 blocks in the second group."""
    return list(hash_blocks(range(12 * BLOCK_SIZE), WINDOW_BLOCK_SIZE))


@pytest.fixture
def instance() -> Iterator[Callable[..., OpenAIInstance]]:
    """Start an instance of this name, which behaves so; with certificate, key and perhaps its clients' authority."""
    started: list[OpenAIInstance] = []

    def start(name: str, mode: str = "ok", *tls: Path) -> OpenAIInstance:
        started.append(OpenAIInstance(name, *tls))
        if mode != "ok":
            started[-1].behave(mode)
        return started[-1]

    yield start
    for each in started:
        each.kill()


@pytest.fixture
def proxy(tmp_path: Path) -> Iterator[Callable[..., ProxyProcess]]:
    started: list[ProxyProcess] = []

    def start(prefill: list[OpenAIInstance], decode: list[OpenAIInstance], **flags: object) -> ProxyProcess:
        started.append(ProxyProcess(prefill, decode, tmp_path / "log", **flags))
        return started[-1]

    yield start
    for each in started:
        each.kill()
        assert "Traceback" not in each.log.read_text(), each.log.read_text()
