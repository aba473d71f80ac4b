from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pytest

torch = pytest.importorskip("torch", reason="the reference engine needs torch")

from kvstore.connector.reference.model import Llama, LlamaConfig  # noqa: E402
from kvstore.layout import Layout  # noqa: E402

Page = npt.NDArray[np.uint8]


class MemoryNode:
    """What the connector sees of a client and its namespaces, over dictionaries, with every way to fail built in."""

    def __init__(self) -> None:
        self.by_group: defaultdict[int, dict[bytes, Page]] = defaultdict(dict)
        self.lost: set[tuple[int, bytes]] = set()
        """Pages, by group and hash, that a lookup promises and a load does not find."""
        self.before_load: Callable[[], None] = lambda: None
        self.before_lookup: Callable[[], None] = lambda: None
        self.before_store: Callable[[], None] = lambda: None
        self.pages_asked = 0

    @property
    def stored(self) -> dict[bytes, Page]:
        """The pages of the first group."""
        return self.by_group[0]

    def namespace(self, layout: Layout, *, lazy: bool = False) -> _Namespace:
        return _Namespace(self, layout)

    def lookup_here(self, queries: Sequence[tuple[_Namespace, Sequence[bytes]]], *, counts: bool = True) -> None:
        """It shows nothing without a call."""

    def lookup(self, queries: Sequence[tuple[_Namespace, Sequence[bytes]]], *, counts: bool = True) -> list[Any]:
        self.before_lookup()
        return [
            _Lookup(tuple("arena" if h in namespace.stored else None for h in hashes)) for namespace, hashes in queries
        ]


class _Namespace:
    """The pages of one group."""

    batch_pages = 3

    def __init__(self, node: MemoryNode, layout: Layout) -> None:
        self.node = node
        self.layout = layout
        self.stored = node.by_group[layout.group]

    def touch(self, hashes: Sequence[bytes]) -> int:
        return sum(block_hash in self.stored for block_hash in hashes)

    def evict(self, hashes: Sequence[bytes]) -> int:
        return sum(self.stored.pop(block_hash, None) is not None for block_hash in hashes)

    def count_lookup(self, asked: int, found: Mapping[str, int]) -> None:
        """Nobody looks at the ratio."""

    def lookup(self, hashes: Sequence[bytes], *, counts: bool = True) -> _Lookup:
        return _Lookup(tuple("arena" if block_hash in self.stored else None for block_hash in hashes))

    def borrow(self, hashes: Sequence[bytes], *, counts: bool = True) -> _Load:
        self.node.before_load()
        assert len(hashes) <= self.batch_pages
        self.node.pages_asked += len(hashes)
        pages: list[Page] = []
        for block_hash in hashes:
            if (self.layout.group, block_hash) in self.node.lost or block_hash not in self.stored:
                break
            page = self.stored[block_hash].view()
            page.flags.writeable = False
            pages.append(page)
        return _Load(pages)

    def prepare_store(self, hashes: Sequence[bytes], *, parent: bytes = b"") -> _Store:
        self.node.before_store()
        assert len(hashes) <= self.batch_pages
        return _Store(self, hashes)


class _Lookup:
    def __init__(self, tiers: tuple[str | None, ...]) -> None:
        self.tiers = tiers


class _Pending:
    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        pass


class _Load(_Pending):
    def __init__(self, pages: list[Page]) -> None:
        self.pages = pages
        self.tiers = ["arena"] * len(pages)
        self.more = False

    def complete(self) -> int:
        return len(self.pages)


class _Store(_Pending):
    def __init__(self, namespace: _Namespace, hashes: Sequence[bytes]) -> None:
        self._stored = namespace.stored
        self._hashes = hashes
        self.pages = [
            None if block_hash in namespace.stored else np.zeros(namespace.layout.page_bytes, np.uint8)
            for block_hash in hashes
        ]

    def complete(self) -> Any:
        new = {h: page for h, page in zip(self._hashes, self.pages, strict=True) if page is not None}
        self._stored.update(new)
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


@pytest.fixture(scope="module", autouse=True)
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


LAYERS: dict[str, dict[str, Any]] = {
    "windows": {"layer_types": ("sliding", "full", "sliding", "full", "sliding"), "sliding_window": 40},
    "windows alone": {"layer_types": ("sliding",) * 3, "sliding_window": 24},
    "longer blocks": {
        "layer_types": ("sliding", "full", "sliding"),
        "sliding_window": 20,
        "sliding_num_kv_heads": 1,  # half the bytes a token, so twice the tokens a block
    },
    "recurrent": {"layer_types": ("recurrent",) * 3},
    "recurrent and full": {"layer_types": ("recurrent", "full", "recurrent")},
    "all": {"layer_types": ("recurrent", "full", "sliding", "recurrent"), "sliding_window": 40},
}


@pytest.fixture(scope="module", params=LAYERS)
def mixed(request: pytest.FixtureRequest) -> Llama:
    """As :func:`tiny`, with layers of other kinds, one combination after the other."""
    layers = LAYERS[request.param]
    return Llama(
        LlamaConfig(
            vocab_size=512,
            hidden_size=128,
            intermediate_size=192,
            num_layers=len(layers["layer_types"]),
            num_heads=8,
            num_kv_heads=2,
            seed=3,
            **layers,
        )
    )


@pytest.fixture(scope="session")
def node_kind() -> type[MemoryNode]:
    """For tests that need many."""
    return MemoryNode


@pytest.fixture(params=[False, True], ids=["told first", "zeroed first"])
def zeroes_blocks(request: pytest.FixtureRequest) -> bool:
    """Whether an engine zeroes a step's new blocks before it tells the connector of the step."""
    return bool(request.param)
