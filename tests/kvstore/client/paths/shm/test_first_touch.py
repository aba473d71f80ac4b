"""A mapping's page table entries are made ahead, and no longer than somebody needs them."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from node_process import NodeProcess

import kvstore
from kvstore.client.paths.shm import first_touch

SIZE = 3 * first_touch.STEP_BYTES + mmap.PAGESIZE
"""The last step is a short one."""


class Owner:
    """Has a mapping. ``looked`` is told of every look whether it is still needed."""

    def __init__(self, memory: npt.NDArray[np.uint8], looked: Callable[[], None] = lambda: None) -> None:
        self.memory = memory
        self.over = False
        self._looked = looked

    @property
    def is_over(self) -> bool:
        self._looked()
        return self.over


def touched(name: str) -> int:
    """Bytes of this process's mappings of that file that have page table entries."""
    total, counts = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0]:
            counts = name in line
        elif counts and line.startswith("Rss:"):
            total += int(line.split()[1]) << 10
    return total


@pytest.fixture
def file(shm_folder: Path) -> Iterator[Path]:
    path = shm_folder / "mapped"
    path.write_bytes(b"\x07" * SIZE)
    yield path
    path.unlink()


def mapped(path: Path) -> npt.NDArray[np.uint8]:
    with path.open("r+b") as file:
        return np.frombuffer(mmap.mmap(file.fileno(), SIZE), np.uint8)


@pytest.fixture(autouse=True)
def can_populate(file: Path) -> None:
    memory = mapped(file)
    if not first_touch._touch(Owner(memory), 0):
        pytest.skip("this kernel does not make page table entries ahead")


Eventually = Callable[[Callable[[], object]], None]


def test_all_of_a_mapping_is_touched_and_nothing_is_changed(file: Path, eventually: Eventually) -> None:
    owner = Owner(mapped(file))
    first_touch.touch_ahead(owner)
    eventually(lambda: touched(str(file)) == SIZE)
    assert (owner.memory == 7).all()


def test_touching_ends_where_nobody_needs_the_mapping_any_more(file: Path) -> None:
    memory = mapped(file)
    owner = Owner(memory)
    looks: list[bool] = []

    def looked() -> None:
        looks.append(owner.over)
        owner.over = len(looks) == 2

    owner._looked = looked
    first_touch._run(lambda: owner)  # type: ignore[arg-type]
    assert looks == [False, False]
    assert touched(str(file)) < 2 * first_touch.STEP_BYTES


def test_touching_ends_where_its_owner_is_gone(file: Path) -> None:
    memory = mapped(file)
    owners: list[Owner | None] = [Owner(memory), None]
    first_touch._run(lambda: owners.pop(0))  # type: ignore[arg-type]
    assert touched(str(file)) < 2 * first_touch.STEP_BYTES


def test_a_client_that_attaches_has_the_arena_touched(
    node_process: Callable[..., NodeProcess], eventually: Eventually
) -> None:
    node = node_process()
    with kvstore.connect(node.url, timeout=60.0) as client:
        client.namespace(kvstore.Layout(model="m", block_size=16, page_bytes=4096)).lookup([bytes(32)])
        eventually(lambda: touched(f"{node.arena_folder}/pages") == 16 << 20)
