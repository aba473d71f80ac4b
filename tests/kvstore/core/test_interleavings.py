"""The native reader's own code in all interleavings with a node that evicts, lends, publishes, or is taken over.

``tests/kvstore/arena/test_protocol_model.py`` models the protocol; here the C that ships is the reader. Between any two
of its steps the node may do any number of its own, which are those of the table in docs/architecture/arena.md. This
finds what an order of steps can break, not what a processor's reordering can: for that there are the thread sanitizer
(``make test-core-sanitized``) and the acquire loads in ``arena.c``.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from stepped_core import COMPILER, SteppedCore

from kvstore.arena import format as fmt
from kvstore.arena.index import IndexWriter, description

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C compiler here")

LENGTH = 64
NUMBER, EDITION = 3, 7
A, B = b"a" * 32, b"b" * 32
CHECK = "while (same < found && core_is_unchanged(index, frames[same], generations[same]))"
ARENA = 4 * fmt.FRAME_BYTES


class BrokenPromiseError(AssertionError):
    """A promise was."""


class Node:
    """Shared memory with page A in its slot, and a node's writes, one a step.

    ``watched``: it is a broken promise to write under a reader.
    """

    def __init__(self, *, watched: bool) -> None:
        self.watched = watched
        self.geometry = fmt.geometry(ARENA)
        slots, words, reach, _, buckets = struct.unpack("<5Q", self.geometry)
        self.file = np.zeros(fmt.headers_bytes(ARENA), np.uint8)
        self.pages = np.zeros(ARENA, np.uint8)
        self.header = self.file[slots : slots + fmt.HEADER_BYTES].view(np.uint64)
        self.edition = self.file[fmt.EDITION_OFFSET :][:8].view(np.uint64)
        index = self.file[words : words + buckets * fmt.BUCKET_BYTES].view(np.uint64)
        self.index = IndexWriter(memoryview(index), memoryview(self.file[reach : reach + buckets]))
        self.words = index
        self.edition[0] = EDITION
        self.epoch = 1
        self.line = 0
        """What the reader announced; 0: nothing."""
        self.found = False
        """Whether the reader relies on the slot."""
        self.write("A")
        self.describe(A)
        self.header[0] = 2
        self.index.insert(NUMBER, A, 0)

    def write(self, page: str, half: slice = slice(0, LENGTH)) -> None:
        self.pages[:LENGTH][half] = ord(page)

    def describe(self, key: bytes) -> None:
        self.header[1:5] = np.frombuffer(key, np.uint64)
        self.header[7] = description(NUMBER, LENGTH)

    def overwrite(self, half: slice) -> None:
        if self.watched and self.found:
            raise BrokenPromiseError("writes under a reader that has announced itself")
        self.write("B", half)

    def evicting(self, *, waits: bool) -> Iterator[None]:
        """A leaves and B comes."""
        self.header[0] = 3
        yield
        self.index.remove(NUMBER, A, 0)
        yield
        retired_at, self.epoch = self.epoch, self.epoch + 1
        yield
        while waits and 0 < self.line <= retired_at:
            yield
        self.overwrite(slice(0, LENGTH // 2))
        yield
        self.overwrite(slice(LENGTH // 2, LENGTH))
        yield
        self.describe(B)
        yield
        self.header[0] = 4
        yield
        self.index.insert(NUMBER, B, 0)
        yield

    def taken_over(self) -> Iterator[None]:
        """Another node's first steps: the namespace's number stands for another one from now on."""
        self.edition[0] = 0
        yield
        self.index.clear()
        yield
        self.header[0] = 3
        yield
        self.write("C")
        yield
        self.header[0] = 4
        yield
        self.index.insert(NUMBER, A, 0)
        yield
        self.edition[0] = EDITION + 1
        yield


Work = Callable[[Node], Iterator[None]]
"""What the node does, step by step."""


def evicting(node: Node) -> Iterator[None]:
    return node.evicting(waits=False)


def evicting_that_waits(node: Node) -> Iterator[None]:
    return node.evicting(waits=True)


def load(core: SteppedCore, node: Node, work: Iterator[None], wanted: bytes, plan: list[int]) -> tuple[int, bytes]:
    """One load, with as many steps of the node's behind each of the reader's as ``plan`` says; it grows to as many
    places as there are."""
    place = 0

    def between(step: str) -> None:
        nonlocal place
        node.found |= step == "found"
        if place == len(plan):
            plan.append(0)
        for _ in range(plan[place]):
            next(work, None)
        place += 1

    node.line = node.epoch
    core.between = between
    into = np.zeros((1, LENGTH), np.uint8)
    good = core.load(node.file, node.geometry, node.pages, NUMBER, LENGTH, EDITION, wanted, into)
    return good, into[0].tobytes()


def check_all(core: SteppedCore, work: Work, wanted: bytes, steps: int, *, watched: bool = False) -> int:
    """Load in every interleaving with ``steps`` steps of the node's. Returns how many there are.

    Raises:
        BrokenPromiseError: the reader took other bytes for the page's, or was written under.
    """
    plan: list[int] = []
    count = 0
    while True:
        node = Node(watched=watched)
        good, read = load(core, node, work(node), wanted, plan)
        count += 1
        if good and read != wanted[:1].upper() * LENGTH:
            raise BrokenPromiseError(f"accepts {read!r} as {wanted!r}: {plan}")
        while plan and sum(plan) == steps:
            plan.pop()
        if not plan:
            return count
        plan[-1] += 1


@pytest.mark.parametrize("wanted", [A, B], ids=["the page that leaves", "the page that comes"])
def test_no_interleaving_with_an_eviction_gives_wrong_bytes(wanted: bytes) -> None:
    """Though nobody waits for readers: generations alone must tell."""
    assert check_all(SteppedCore(), evicting, wanted, 8) > (1000 if wanted == A else 5)


def test_nobody_writes_under_a_reader_that_has_announced_itself() -> None:
    assert check_all(SteppedCore(), evicting_that_waits, A, 8, watched=True) > 1000
    with pytest.raises(BrokenPromiseError, match="writes under"):
        check_all(SteppedCore(), evicting, A, 8, watched=True)


def test_no_interleaving_with_a_takeover_gives_another_namespaces_page() -> None:
    assert check_all(SteppedCore(), Node.taken_over, A, 7) > 1000


@pytest.mark.parametrize(
    ("rule", "instead", "work"),
    [
        ("__ATOMIC_RELAXED) != key[i])", "__ATOMIC_RELAXED) != key[i] && 0)", evicting),
        ("if (generation & 1)", "if (0)", evicting),
        (CHECK, "while (same < found)", evicting),
        ("return edition_of(index) == edition ? good : 0;", "return good;", Node.taken_over),
    ],
    ids=["keys are compared", "odd generations mean nothing", "checked behind the copy", "the edition last"],
)
def test_every_rule_is_needed(rule: str, instead: str, work: Work) -> None:
    with pytest.raises(BrokenPromiseError, match="accepts"):
        check_all(SteppedCore({rule: instead}), work, A, 8)
