"""Which pages a node writes to object storage: those that were used again, by what eviction expects of their like."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from tiny_stores import kill_store, layout_of, load_pages, page_hash, put_pages

from kvstore.arena.arena import Arena
from kvstore.arena.format import FRAME_BYTES
from kvstore.catalog.policies import Prospect
from kvstore.namespaces.registry import KnownNamespace
from kvstore.store.archive import is_worth
from kvstore.store.store import Store
from kvstore.tiers.objects import ObjectTier

PAGES = 64
"""As many as the arena holds."""
PROMPT = 8


class Node:
    """A store whose pages a test uses, without threads, and what it writes to its bucket."""

    def __init__(self, store: Store, bucket: ObjectTier) -> None:
        self.store = store
        self._bucket = bucket
        self._known: KnownNamespace = store.open_namespace(layout_of("a", FRAME_BYTES))

    def put(self, pages: Sequence[int]) -> None:
        """An engine has computed them."""
        assert put_pages(self.store, self._known, pages).refused == 0

    def load(self, pages: Sequence[int]) -> None:
        """Another one reads them."""
        assert load_pages(self.store, self._known, pages) == len(pages)

    def archived(self, pages: Sequence[int]) -> list[int]:
        """Of these, those in object storage once everything is there that goes there."""
        self.store.archive.tell()
        self.store.archive.write()
        here = self._bucket.contains([self._known.fingerprint + page_hash(page) for page in pages])
        return [page for page, there in zip(pages, here, strict=True) if there]


@pytest.fixture
def node(shm: Path, open_objects: Callable[..., ObjectTier]) -> Iterator[Node]:
    bucket = open_objects(interval=3600.0)
    store = Store(Arena(shm / "arena", PAGES * FRAME_BYTES), (), [shm / "arena"], objects=bucket)
    yield Node(store, bucket)
    kill_store(store)


def prompts(first: int, count: int) -> Iterator[range]:
    """Prompts with no page in common."""
    return (range(PROMPT * number, PROMPT * (number + 1)) for number in range(first, first + count))


def test_a_page_goes_there_once_it_is_read(node: Node) -> None:
    used, unused = prompts(0, 2)
    for prompt in (used, unused):
        node.put(prompt)
    assert node.archived([*used, *unused]) == []
    node.load(used)
    assert node.archived([*used, *unused]) == [*used]


def test_pages_whose_like_are_never_wanted_again_do_not_go_there(node: Node) -> None:
    """As between prefill and decode engines: each page is read once. Who is read twice is none of these."""
    written = []
    for prompt in prompts(0, 100):
        node.put(prompt)
        node.load(prompt)
        written.append(len(node.archived(prompt)))
    assert written[0] == PROMPT, "nothing is known yet"
    assert written[-20:] == [0] * 20
    wanted = range(PROMPT * 100, PROMPT * 101)
    node.put(wanted)
    node.load(wanted)
    assert node.archived(wanted) == []
    node.load(wanted)
    assert node.archived(wanted) == [*wanted]


@pytest.mark.parametrize(
    ("prospect", "worth"),
    [
        (None, True),
        (Prospect(odds=0.3, mean=0.9), True),
        (Prospect(odds=0.2, mean=0.9), False),
        (Prospect(odds=0.06, mean=0.1), True),
        (Prospect(odds=0.04, mean=0.1), False),
    ],
    ids=[
        "nothing is known",
        "every fourth time, however often others are",
        "less often than that, and than half as often as others",
        "few pages are wanted again, these half as often",
        "few pages are wanted again, these hardly",
    ],
)
def test_what_is_worth_it(prospect: Prospect | None, worth: bool) -> None:
    assert is_worth(prospect) == worth
