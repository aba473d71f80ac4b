"""What is decided around the copies of a device: on CPU tensors, with streams that copy at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from kv_layouts import PagedCase, paged_kv, random_pages

from gpu import device
from gpu.device import DeviceCopies, Event
from gpu.ways import RunByRun, Staged

SIZES = {"layer": 3, "kv": 2, "block": 6, "token": 4, "head": 2, "dim": 8}


class Done:
    def synchronize(self) -> None:
        pass


class AtOnce:
    def __init__(self) -> None:
        self.queued: list[tuple[str, int]] = []

    def queue(self, direction: str, copies: Sequence[Callable[[], None]]) -> list[Event]:
        self.queued.append((direction, len(copies)))
        for copy in copies:
            copy()
        return [Done() for _ in copies]


class Garbled(Staged):
    def gather(self, piece_ids, out) -> None:
        super().gather(piece_ids, out)
        out[-1][-1] ^= 1


class Misplaced(Staged):
    def scatter(self, pages, piece_ids, layers) -> None:
        super().scatter(pages, list(reversed(piece_ids)), layers)


class Failing(Staged):
    def gather(self, piece_ids, out) -> None:
        raise RuntimeError("no such symbol")


class Elsewhere(Staged):
    def takes(self, pages) -> bool:
        return False


@pytest.fixture
def case() -> PagedCase:
    return paged_kv("kv block token head dim", SIZES, torch.bfloat16)


def test_measuring_leaves_the_blocks_as_they_were_and_ranks_every_way(case: PagedCase) -> None:
    before = [storage.copy() for storage in case.storages]

    copies = DeviceCopies(case.layers, case.layout, AtOnce())

    assert all(map(np.array_equal, case.storages, before))
    assert {frozenset(names) >= {"staged", "run by run"} for names in copies.order.values()} == {True}


@pytest.mark.parametrize("wrong", [Garbled, Misplaced, Failing, Elsewhere])
def test_a_way_that_does_not_do_what_the_specification_says_is_not_used(
    monkeypatch: pytest.MonkeyPatch, case: PagedCase, wrong: type[Staged]
) -> None:
    layers, layout = case.layers, case.layout
    ways = {"wrong": wrong(layers, layout), "run by run": RunByRun(layers, layout)}
    monkeypatch.setattr(device, "ways_for", lambda layers, layout: dict(ways))

    assert DeviceCopies(layers, layout, AtOnce()).order == {"gather": ["run by run"], "scatter": ["run by run"]}


def test_the_fastest_way_that_takes_the_pages_copies_them(monkeypatch: pytest.MonkeyPatch, case: PagedCase) -> None:
    copies = DeviceCopies(case.layers, case.layout, AtOnce())
    copies._ways = {"first": Elsewhere(case.layers, case.layout), "second": Staged(case.layers, case.layout)}
    copies.order = {"gather": ["first", "second"], "scatter": ["first", "second"]}
    used: list[str] = []
    monkeypatch.setattr(Elsewhere, "gather", lambda *_: used.append("first"))
    page = np.zeros(case.layout.page_bytes, np.uint8)

    copies.gather([4], [page])

    assert not used
    assert page.tobytes() == case.naive_pages([4])[0]


def test_layers_are_queued_all_at_once_and_told_in_turn(case: PagedCase) -> None:
    streams = AtOnce()
    copies = DeviceCopies(case.layers, case.layout, streams)
    streams.queued.clear()
    pages = random_pages(2, case.layout.page_bytes, seed=3)
    told: list[int] = []

    copies.scatter(pages, [5, 1], told.append)
    copies.scatter(pages[:1], [2])

    assert told == [0, 1, 2]
    assert streams.queued == [("scatter", 3), ("scatter", 1)]
    assert case.naive_pages([5, 1, 2]) == [page.tobytes() for page in (*pages, pages[0])]


def test_no_copy_is_under_way_when_an_error_is_raised(case: PagedCase) -> None:
    done: list[int] = []

    class Counted:
        def __init__(self, number: int) -> None:
            self.number = number

        def synchronize(self) -> None:
            done.append(self.number)

    class Later(AtOnce):
        def queue(self, direction: str, copies: Sequence[Callable[[], None]]) -> list[Event]:
            return [Counted(number) for number, _ in enumerate(super().queue(direction, copies))]

    def fail(layer: int) -> None:
        raise RuntimeError("no")

    copies = DeviceCopies(case.layers, case.layout, Later())
    done.clear()

    with pytest.raises(RuntimeError, match="no"):
        copies.scatter(random_pages(1, case.layout.page_bytes, seed=1), [1], fail)

    assert done == [0, 2]


def test_fewer_blocks_than_one_page_takes_are_nothing_to_measure() -> None:
    case = paged_kv("kv block token head dim", SIZES | {"block": 1}, torch.float16, page_tokens=8)

    assert DeviceCopies(case.layers, case.layout, AtOnce()).order["gather"][0] == "staged"
