"""What is decided around the copies of a device: on CPU tensors, with streams that copy at once."""

from __future__ import annotations

import importlib.util
import logging
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from driver_library import DriverLibrary, copy_list
from kv_layouts import PagedCase, paged_kv, random_pages

from kvstore.errors import ResourceError
from kvstore.gpu import cuda
from kvstore.gpu.batched import Batched
from kvstore.gpu.cuda import DeviceCopies, Event
from kvstore.gpu.paged_kv import PagedKV
from kvstore.gpu.quantized import QuantizedKV
from kvstore.gpu.sample import Sample
from kvstore.gpu.strategies import CopyStrategy, RunByRun, Staged
from kvstore.gpu.tensors import PageBytes

SIZES = {"layer": 3, "kv": 2, "block": 6, "token": 4, "head": 2, "dim": 8}


class Done:
    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def wait(self, stream: torch.cuda.Stream) -> None:
        pass


class AtOnce:
    """Copies are done when they are queued."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.after: list[Event | None] = []

    def mark(self) -> Event:
        self.log.append("mark")
        return Done()

    def queue(
        self, direction: str, copies: Iterable[Callable[[], None]], after: Event | None = None
    ) -> Iterator[Event]:
        self.after.append(after)
        for copy in copies:
            copy()
            self.log.append(f"{direction} queued")
            yield Done()


class Garbled(Staged):
    def gather(self, piece_ids: Sequence[int], out: Sequence[PageBytes]) -> None:
        super().gather(piece_ids, out)
        out[-1][-1] ^= 1


class Misplaced(Staged):
    def scatter(self, pages: Sequence[PageBytes], piece_ids: Sequence[int], shares: Sequence[range]) -> Generator[None]:
        return super().scatter(pages, list(reversed(piece_ids)), shares)


class WrongBlocks(Staged):
    """Always the same ones."""

    def gather(self, piece_ids: Sequence[int], out: Sequence[PageBytes]) -> None:
        super().gather([piece_ids[0]] * len(piece_ids), out)


class FirstBlocks(Staged):
    """Whichever are asked for."""

    def gather(self, piece_ids: Sequence[int], out: Sequence[PageBytes]) -> None:
        super().gather(range(len(piece_ids)), out)

    def scatter(self, pages: Sequence[PageBytes], piece_ids: Sequence[int], shares: Sequence[range]) -> Generator[None]:
        return super().scatter(pages, range(len(piece_ids)), shares)


class Idle(Staged):
    """Leaves the blocks as they are."""

    def scatter(self, pages: Sequence[PageBytes], piece_ids: Sequence[int], shares: Sequence[range]) -> Generator[None]:
        yield from (None for _ in shares)


class Overflowing(Staged):
    """Writes to the next block, too."""

    def scatter(self, pages: Sequence[PageBytes], piece_ids: Sequence[int], shares: Sequence[range]) -> Generator[None]:
        blocks = self._layout.num_pieces
        beside = next((each + 1) % blocks for each in piece_ids if (each + 1) % blocks not in piece_ids)
        return super().scatter([*pages, pages[0]], [*piece_ids, beside], shares)


class Failing(Staged):
    def gather(self, piece_ids: Sequence[int], out: Sequence[PageBytes]) -> None:
        raise RuntimeError("no such symbol")


class WrongByLayer(Staged):
    """Right where all layers are copied at once."""

    def scatter(self, pages: Sequence[PageBytes], piece_ids: Sequence[int], shares: Sequence[range]) -> Generator[None]:
        return super().scatter(pages, piece_ids, shares if len(shares) == 1 else shares[::-1][:1] * len(shares))


class Elsewhere(Staged):
    def takes(self, pages: Sequence[PageBytes]) -> bool:
        return False


@pytest.fixture
def case() -> PagedCase:
    return paged_kv("kv block token head dim", SIZES, torch.bfloat16)


@pytest.fixture(autouse=True)
def _nothing_was_told() -> None:
    cuda._tell.cache_clear()


def test_measuring_leaves_the_blocks_as_they_were_and_keeps_every_strategy_that_is_right(case: PagedCase) -> None:
    before = [storage.copy() for storage in case.storages]

    copies = DeviceCopies(case.layers, case.layout, AtOnce())

    assert all(map(np.array_equal, case.storages, before))
    assert {frozenset(names) >= {"staged", "run by run"} for names in copies.order.values()} == {True}


@pytest.mark.parametrize("empty", [True, False], ids=["as an engine starts", "in use"])
@pytest.mark.parametrize(
    "wrong", [Garbled, Misplaced, WrongBlocks, FirstBlocks, Idle, Overflowing, Failing, WrongByLayer, Elsewhere]
)
def test_a_strategy_that_does_not_do_what_the_specification_says_is_not_used(
    case: PagedCase, wrong: type[Staged], empty: bool
) -> None:
    if empty:
        for storage in case.storages:
            storage[:] = 0
    before = [storage.copy() for storage in case.storages]
    layers, layout = case.layers, case.layout
    strategies = {"staged": wrong(layers, layout), "run by run": RunByRun(layers, layout)}

    copies = DeviceCopies(layers, layout, AtOnce(), strategies)

    assert copies.order == {"gather": ["run by run"], "scatter": ["run by run"]}
    assert all(map(np.array_equal, case.storages, before))


@pytest.mark.parametrize("page_tokens", [2, 4, 8])
def test_what_strategies_are_tried_on_is_all_over_the_blocks_in_no_order_and_not_all_of_them(page_tokens: int) -> None:
    case = paged_kv("kv block token head dim", SIZES | {"block": 64}, torch.float32, page_tokens=page_tokens)
    sample = Sample(case.layers, case.layout)

    assert {0, case.layout.num_pieces - 1} <= set(sample.ids) < set(range(case.layout.num_pieces))
    assert len(set(sample.ids)) == len(sample.ids) == len(sample.pages) * case.layout.pieces_per_page
    assert sample.ids != sorted(sample.ids)


def takes_time(strategies: Mapping[str, float]) -> Callable[..., dict[str, list[float]]]:
    """What a measurement finds: seconds by name."""
    return lambda calls: {name: [strategies[name]] for name in calls}


class Anywhere(Batched):
    """Takes pages that are not pinned, too."""

    def takes(self, pages: Sequence[PageBytes]) -> bool:
        return True


def every_strategy(case: PagedCase) -> dict[str, CopyStrategy]:
    """One of each name: the kernel's has another one's copies."""
    return {
        "staged": Staged(case.layers, case.layout),
        "kernel": Staged(case.layers, case.layout),
        "run by run": RunByRun(case.layers, case.layout),
        "batch": Anywhere(case.layers, case.layout, copy_list()),
    }


def test_the_rule_says_which_strategy_goes_first_whichever_is_the_fastest(
    monkeypatch: pytest.MonkeyPatch, case: PagedCase, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cuda, "measure", takes_time({"staged": 1.0, "kernel": 2.0, "run by run": 2.9, "batch": 2.0}))

    copies = DeviceCopies(case.layers, case.layout, AtOnce(), every_strategy(case))

    assert copies.order == {
        "gather": ["batch", "staged", "run by run", "kernel"],
        "scatter": ["kernel", "staged", "batch", "run by run"],
    }
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_one_that_is_much_slower_comes_last_and_is_told_where_it_would_have_been_first(
    monkeypatch: pytest.MonkeyPatch, case: PagedCase, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cuda, "measure", takes_time({"staged": 1.0, "kernel": 2.0, "run by run": 9.0, "batch": 3.5}))

    copies = DeviceCopies(case.layers, case.layout, AtOnce(), every_strategy(case))

    assert copies.order == {
        "gather": ["staged", "kernel", "batch", "run by run"],
        "scatter": ["kernel", "staged", "batch", "run by run"],
    }
    told = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert told == ["copies out by staged: batch takes 3.5 times as long as the fastest"]


def test_a_load_by_layer_has_fewer_runs_at_a_time_and_takes_what_is_better_for_few(
    monkeypatch: pytest.MonkeyPatch, case: PagedCase
) -> None:
    monkeypatch.setattr(cuda, "measure", lambda calls: {})
    copies = DeviceCopies(case.layers, case.layout, AtOnce(), every_strategy(case))
    pages = random_pages(4, case.layout.page_bytes, seed=2)  # of 3 layers, keys and values

    assert copies._strategy("scatter", pages) is copies._strategies["kernel"]
    assert copies._strategy("scatter", pages, by_layer=True) is copies._strategies["batch"]
    assert copies._strategy("scatter", pages[:2]) is copies._strategies["batch"]


def test_layers_that_touch_are_long_runs_to_the_rule_but_for_loads_by_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "measure", lambda calls: {})
    buffer = torch.zeros(20, 8, 4 << 10, dtype=torch.uint8)  # 8 layers of 4 KiB
    case = PagedCase(list(buffer.unbind(1)), "block dim", None, ("dim",))
    copies = DeviceCopies(case.layers, case.layout, AtOnce(), every_strategy(case))
    pages = random_pages(16, case.layout.page_bytes, seed=2)

    assert copies.order["scatter"][0] == "batch"
    assert copies._strategy("scatter", pages) is copies._strategies["batch"]
    assert copies._strategy("scatter", pages, by_layer=True) is copies._strategies["kernel"]


def test_pages_that_the_first_strategy_does_not_take_go_by_the_next_one(
    monkeypatch: pytest.MonkeyPatch, case: PagedCase
) -> None:
    monkeypatch.setattr(cuda, "measure", lambda calls: {})
    library = DriverLibrary()
    strategies = every_strategy(case) | {"batch": Anywhere(case.layers, case.layout, copy_list(library))}
    copies = DeviceCopies(case.layers, case.layout, AtOnce(), strategies)
    monkeypatch.setattr(Anywhere, "takes", Batched.takes)
    library.calls.clear()
    page = np.zeros(case.layout.page_bytes, np.uint8)

    copies.gather([4], [page])

    assert not library.calls
    assert page.tobytes() == case.naive_pages([4])[0]


def test_why_a_strategy_is_not_used_is_told_once_however_many_groups_a_model_has(
    case: PagedCase, caplog: pytest.LogCaptureFixture
) -> None:
    layers, layout = case.layers, case.layout
    strategies = {
        "kernel": Failing(layers, layout),
        "batch": Batched(layers, layout, copy_list()),
        "staged": Staged(layers, layout),
    }

    for _ in range(3):
        assert DeviceCopies(layers, layout, AtOnce(), strategies).order["gather"] == ["staged"]

    told = [(record.levelname, record.getMessage()) for record in caplog.records if record.levelno >= logging.WARNING]
    reason = "no CUDA device, or no CUDA runtime that can be found"
    assert told == [
        ("WARNING", "no copies by kernel: RuntimeError: no such symbol"),
        ("WARNING", f"no copies by batch: the device can't reach host memory: {reason}"),
    ]


@pytest.mark.parametrize("missing", [0, 500], ids=["CUDA 12.8", "older"])
def test_a_driver_without_batches_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, missing: int
) -> None:
    monkeypatch.setattr(cuda, "batched_memcpy", lambda: copy_list(DriverLibrary(missing=missing)))
    monkeypatch.setattr(cuda, "merging", lambda make, layers, layout: make)  # none is made
    case = paged_kv("kv block token head dim", SIZES, torch.bfloat16)
    layers: Any = [SimpleNamespace(device=torch.device("cuda", 0))]
    caplog.set_level(logging.INFO)

    found = [cuda.strategies_for(layers, case.layout) for _ in range(3)]

    assert {"batch" in strategies for strategies in found} == {not missing}
    told = [(record.levelname, record.getMessage()) for record in caplog.records if "batch" in record.getMessage()]
    reason = "the driver has no cuMemcpyBatchAsync, which came with CUDA 12.8: error 500"
    assert told == ([("INFO", f"no copies by batch: {reason}")] if missing else [])


def test_a_device_on_which_nothing_works_is_an_error_with_the_reasons_in_the_log(
    case: PagedCase, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ResourceError, match="no copy strategy works"):
        DeviceCopies(case.layers, case.layout, AtOnce(), {"staged": Failing(case.layers, case.layout)})

    assert "no copies by staged: RuntimeError: no such symbol" in caplog.text


def test_a_layer_is_told_when_the_next_one_is_queued_and_not_when_all_are(case: PagedCase) -> None:
    streams = AtOnce()
    copies = DeviceCopies(case.layers, case.layout, streams)
    streams.log.clear()
    pages = random_pages(2, case.layout.page_bytes, seed=3)

    copies.scatter(pages, [5, 1], lambda layer: streams.log.append(f"layer {layer}"))

    queued = "scatter queued"
    assert streams.log == [queued, queued, "layer 0", queued, "layer 1", "layer 2"]
    assert case.naive_pages([5, 1]) == [page.tobytes() for page in pages]


def test_layers_that_nobody_waits_for_are_one_copy(case: PagedCase) -> None:
    streams = AtOnce()
    copies = DeviceCopies(case.layers, case.layout, streams)
    streams.log.clear()
    (page,) = random_pages(1, case.layout.page_bytes, seed=4)

    copies.scatter([page], [2])

    assert streams.log == ["scatter queued"]
    assert case.naive_pages([2]) == [page.tobytes()]


def test_copies_wait_for_the_mark_that_they_are_given(monkeypatch: pytest.MonkeyPatch, case: PagedCase) -> None:
    streams = AtOnce()
    monkeypatch.setattr("kvstore.gpu.paged_kv.HostCopies", lambda layers, layout: DeviceCopies(layers, layout, streams))
    paged = PagedKV(case.tensors, case.axes)
    streams.log.clear()
    streams.after.clear()

    for pages in (paged, QuantizedKV(paged, "int8")):
        memory = [np.zeros(pages.page_bytes, np.uint8)]
        mark = pages.mark()
        pages.gather([1], memory, mark)
        pages.scatter(memory, [1], after=mark)
        assert isinstance(mark, Done)
        assert streams.after == [mark, mark]
        streams.after.clear()

    assert streams.log == ["mark", "gather queued", "scatter queued"] * 2


class Later(AtOnce):
    """Says which events were waited for, and fails where it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.waited: list[int] = []
        self.fails_at = -1

    def queue(
        self, direction: str, copies: Iterable[Callable[[], None]], after: Event | None = None
    ) -> Iterator[Event]:
        for number, _ in enumerate(super().queue(direction, copies, after)):
            if number == self.fails_at:
                raise RuntimeError("out of memory")
            yield Counted(self.waited, number)


class Counted(Done):
    def __init__(self, waited: list[int], number: int) -> None:
        self.synchronize = lambda: waited.append(number)


def test_no_copy_is_under_way_when_whoever_is_told_fails(case: PagedCase) -> None:
    streams = Later()
    copies = DeviceCopies(case.layers, case.layout, streams)
    streams.waited.clear()

    def fail(layer: int) -> None:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        copies.scatter(random_pages(1, case.layout.page_bytes, seed=1), [1], fail)

    assert streams.waited == [0, 1]  # what was queued: the layer that was told, and the one behind it


def test_no_copy_is_under_way_when_a_later_one_can_not_be_queued(case: PagedCase) -> None:
    streams = Later()
    copies = DeviceCopies(case.layers, case.layout, streams)
    streams.waited.clear()
    streams.fails_at = 2
    told: list[int] = []

    with pytest.raises(RuntimeError, match="out of memory"):
        copies.scatter(random_pages(1, case.layout.page_bytes, seed=1), [1], told.append)

    assert told == [0]
    assert streams.waited == [0, 1]


def test_fewer_blocks_than_one_page_takes_are_nothing_to_measure() -> None:
    case = paged_kv("kv block token head dim", SIZES | {"block": 1}, torch.float16, page_tokens=8)

    assert DeviceCopies(case.layers, case.layout, AtOnce()).order["gather"][0] == "staged"


def test_a_triton_that_can_not_be_imported_is_told_and_done_without(
    monkeypatch: pytest.MonkeyPatch, case: PagedCase, caplog: pytest.LogCaptureFixture
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: find_spec("math" if name == "triton" else name))
    monkeypatch.setitem(sys.modules, "kvstore.gpu.triton_kernel", None)
    assert "kernel" not in cuda.strategies_for(case.layers, case.layout)
    assert "no copies by kernel: " in caplog.text
