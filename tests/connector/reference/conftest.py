from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pytest

torch = pytest.importorskip("torch", reason="the reference engine needs torch")

from connector.reference.model import Llama, LlamaConfig  # noqa: E402
from kvstore.layout import Layout  # noqa: E402

Page = npt.NDArray[np.uint8]


class MemoryNode:
    """What the connector sees of a client and its namespace, over a dictionary, with every way to fail built in."""

    def __init__(self) -> None:
        self.stored: dict[bytes, Page] = {}
        self.lost: set[bytes] = set()
        """Pages that a lookup promises and a load does not find."""
        self.before_load: Callable[[], None] = lambda: None
        self.before_lookup: Callable[[], None] = lambda: None
        self.before_store: Callable[[], None] = lambda: None
        self.pages_asked = 0
        self.batch_pages = 3
        self.layout: Layout

    def namespace(self, layout: Layout) -> Self:
        self.layout = layout
        return self

    def lookup(self, queries: Sequence[tuple[Any, Sequence[bytes]]]) -> list[Any]:
        self.before_lookup()
        return [_Lookup(tuple(h in self.stored for h in hashes)) for _, hashes in queries]

    def touch(self, hashes: Sequence[bytes]) -> int:
        return sum(block_hash in self.stored for block_hash in hashes)

    def prepare_load(self, hashes: Sequence[bytes]) -> _Load:
        self.before_load()
        assert len(hashes) <= self.batch_pages
        self.pages_asked += len(hashes)
        pages: list[Page] = []
        for block_hash in hashes:
            if block_hash in self.lost or block_hash not in self.stored:
                break
            page = self.stored[block_hash].view()
            page.flags.writeable = False
            pages.append(page)
        return _Load(pages)

    def prepare_store(self, hashes: Sequence[bytes]) -> _Store:
        self.before_store()
        assert len(hashes) <= self.batch_pages
        return _Store(self, hashes)


class _Lookup:
    def __init__(self, present: tuple[bool, ...]) -> None:
        self.present = present


class _Pending:
    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        pass


class _Load(_Pending):
    def __init__(self, pages: list[Page]) -> None:
        self.pages = pages
        self.tiers = ["arena"] * len(pages)

    def complete(self) -> int:
        return len(self.pages)


class _Store(_Pending):
    def __init__(self, node: MemoryNode, hashes: Sequence[bytes]) -> None:
        self._node = node
        self._hashes = hashes
        self.pages = [
            None if block_hash in node.stored else np.zeros(node.layout.page_bytes, np.uint8) for block_hash in hashes
        ]

    def complete(self) -> Any:
        new = {h: page for h, page in zip(self._hashes, self.pages, strict=True) if page is not None}
        self._node.stored |= new
        return _Stored(len(new), len(self.pages) - len(new))


class _Stored:
    def __init__(self, stored: int, present: int) -> None:
        self.stored, self.present, self.refused = stored, present, 0


@pytest.fixture
def node() -> MemoryNode:
    return MemoryNode()


class Gate:
    """Holds a call up until it is opened."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.opened = threading.Event()

    def __call__(self) -> None:
        self.reached.set()
        assert self.opened.wait(60)


@pytest.fixture
def gate() -> Iterator[Gate]:
    made = Gate()
    yield made
    made.opened.set()


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny tensors: a second thread costs more than it brings."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny() -> Llama:
    """Everything that the large one has, in a size that computes a token in about a millisecond."""
    return Llama(
        LlamaConfig(
            vocab_size=512, hidden_size=128, intermediate_size=192, num_layers=3, num_heads=8, num_kv_heads=2, seed=3
        )
    )


@pytest.fixture(scope="session")
def node_kind() -> type[MemoryNode]:
    """For tests that need many."""
    return MemoryNode
