"""Every copy strategy against the specification, on CPU tensors; the same on a device: test_cuda.py."""

from __future__ import annotations

import importlib.util
import math
import os
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from driver_library import DriverLibrary, copy_list
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_layouts import PagedCase, arena_pages, bits, paged_cases, paged_kv, random_pages, shared_buffers

from kvstore.gpu import pinned, reference
from kvstore.gpu import strategies as strategies_module
from kvstore.gpu.batched import Batched
from kvstore.gpu.strategies import CopyStrategy, Merged, RunByRun, Staged, merging

Case = tuple[PagedCase, list[int]]
SMALL = {"layer": 2, "kv": 2, "block": 5, "token": 4, "head": 2, "dim": 8}


class EverythingRegisters:
    """Memory can be "pinned" without a device."""

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        return 0


def maker(name: str) -> Callable[..., CopyStrategy]:
    if name != "kernel":
        return {"staged": Staged, "run by run": RunByRun, "batch": partial(Batched, copy_list=copy_list())}[name]
    from kvstore.gpu.triton_kernel import Kernel

    return Kernel


def make_strategy(name: str, case: PagedCase) -> CopyStrategy:
    return maker(name)(case.layers, case.layout)


NEEDS_TRITON = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
NEEDS_INTERPRETER = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="without TRITON_INTERPRET=1 the kernel needs a CUDA device"
)
STRATEGIES = ["staged", "run by run", "batch", pytest.param("kernel", marks=[NEEDS_TRITON, NEEDS_INTERPRETER])]


def pages_for(case: PagedCase, ids: Sequence[int], *, fill: int = 0) -> list[Any]:
    return arena_pages(len(ids) // case.layout.pieces_per_page, case.layout.page_bytes, fill=fill)


@pytest.mark.parametrize("name", STRATEGIES)
@given(given_case=paged_cases())
@settings(max_examples=60, deadline=None)
def test_pages_come_out_as_the_specification_says(name: str, given_case: Case) -> None:
    case, ids = given_case
    out = pages_for(case, ids)
    if not out:
        return

    make_strategy(name, case).gather(ids, out)

    assert [page.tobytes() for page in out] == [bits(page) for page in reference.gather(case.layers, case.layout, ids)]


@pytest.mark.parametrize("name", STRATEGIES)
@given(given_case=paged_cases(unique=True), seed=st.integers(0, 1000), split=st.integers(0, 3))
@settings(max_examples=60, deadline=None)
def test_pages_go_in_as_the_specification_says_layer_by_layer(
    name: str, given_case: Case, seed: int, split: int
) -> None:
    case, ids = given_case
    layout = case.layout
    pages = random_pages(len(ids) // layout.pieces_per_page, layout.page_bytes, seed)
    if not pages:
        return
    tensors = [torch.from_numpy(page.copy()).view(case.tensors[0].dtype).view(layout.page_shape) for page in pages]
    before = [storage.copy() for storage in case.storages]
    reference.scatter(tensors, case.layers, layout, ids)
    expected = [storage.copy() for storage in case.storages]
    for storage, content in zip(case.storages, before, strict=True):
        storage[:] = content

    strategy = make_strategy(name, case)
    split = min(split, layout.layers)
    shares = [layers for layers in (range(split), range(split, layout.layers)) if layers]
    assert len(list(strategy.scatter(pages, ids, shares))) == len(shares)

    assert all(map(np.array_equal, case.storages, expected))


@pytest.mark.parametrize("name", STRATEGIES)
@given(given_case=shared_buffers(), ids=st.permutations(range(4)), by_layer=st.booleans())
@settings(max_examples=60, deadline=None)
def test_layers_of_one_buffer_are_copied_as_the_specification_says(
    name: str, given_case: tuple[PagedCase, int], ids: list[int], by_layer: bool
) -> None:
    case, count = given_case
    layout = case.layout
    strategy = merging(maker(name), case.layers, layout)
    assert isinstance(strategy, Merged) == (count > 1)
    out = pages_for(case, ids[:3])
    strategy.gather(ids[:3], out)
    assert [page.tobytes() for page in out] == case.naive_pages(ids[:3])

    pages = random_pages(2, layout.page_bytes, seed=1)
    untouched = case.naive_pages(ids[2:])
    shares = [range(each, each + 1) for each in range(layout.layers)] if by_layer else [range(layout.layers)]
    assert len(list(strategy.scatter(pages, ids[:2], shares))) == len(shares)
    assert case.naive_pages(ids) == [*(page.tobytes() for page in pages), *untouched]


def test_layers_that_touch_are_one_copy_a_page_and_each_its_own_where_they_are_waited_for() -> None:
    buffer = torch.arange(5 * 6 * 8).view(5, 6, 8)  # blocks, layers, elements of 8 bytes
    library = DriverLibrary()
    case = PagedCase(list(buffer.unbind(1)), "block dim", None, ("dim",))
    strategy = merging(partial(Batched, copy_list=copy_list(library)), case.layers, case.layout)
    pages = pages_for(case, range(2))

    strategy.gather([4, 1], pages)
    list(strategy.scatter(pages, [0, 3], [range(6)]))
    list(strategy.scatter(pages, [0, 3], [range(each, each + 1) for each in range(6)]))
    list(strategy.scatter(pages, [0, 3], [range(2)]))

    assert [call.sizes for call in library.calls] == [(384, 384)] * 2 + [(64, 64)] * 6 + [(64,) * 4]
    # What the engine computes is read in the stream's order; pages hold still.
    assert [call.source_access_order for call in library.calls] == [1] + [3] * 8
    assert torch.equal(buffer[[0, 3]], buffer[[4, 1]])


@pytest.mark.parametrize("name", STRATEGIES)
def test_layers_of_different_tensors_are_not_merged_though_they_touch(name: str) -> None:
    buffer = np.arange(5 * 2 * 64, dtype=np.int32).reshape(5, 2, 64)
    layers = [torch.from_numpy(buffer[:, number]) for number in range(2)]
    case = PagedCase(layers, "block dim", None, ("dim",))
    pages = pages_for(case, range(3))

    strategy = merging(maker(name), case.layers, case.layout)
    strategy.gather([4, 0, 2], pages)

    assert [page.tobytes() for page in pages] == [buffer[block].tobytes() for block in (4, 0, 2)]


def test_several_threads_queue_by_one_strategy_at_once() -> None:
    case = paged_kv("kv block token head dim", SMALL | {"block": 24}, torch.float32)
    strategy = make_strategy("batch", case)
    expected = case.naive_pages(range(24))

    def copy(first: int) -> bool:
        wrong = 0
        for turn in range(40):
            ids = [(first + turn + each) % 24 for each in range(1 + turn % 5)]
            out = pages_for(case, ids)
            strategy.gather(ids, out)
            wrong += [page.tobytes() for page in out] != [expected[each] for each in ids]
        return not wrong

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(copy, range(8)))


def test_one_call_takes_only_pages_that_are_pinned() -> None:
    case = paged_kv("kv block token head dim", SMALL, torch.float32)
    strategy, size = make_strategy("batch", case), case.layout.page_bytes
    memory = np.zeros(3 * size, np.uint8)
    first, second, third = memory.reshape(3, -1)

    assert not strategy.takes([first])
    with pinned.PinnedMapping(memory[: 2 * size], EverythingRegisters()):
        assert strategy.takes([first, second])
        assert strategy.takes([memory[1 : size + 1]])  # words are the kernel's concern
        assert not strategy.takes([first, third])


@pytest.mark.parametrize("name", STRATEGIES)
def test_the_numbers_of_pieces_go_to_the_device_once_and_not_with_each_layer(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The thread waits there until all that was queued is done: layers would be copied without one queued ahead.
    case = paged_kv("kv block token head dim", SMALL | {"layer": 4}, torch.float32)
    strategy, pages = make_strategy(name, case), pages_for(case, [3, 1])
    sent: list[Any] = []
    make = torch.tensor

    def watched(data: Any, **kwargs: Any) -> torch.Tensor:
        sent.append(data)
        return make(data, **kwargs)

    monkeypatch.setattr(torch, "tensor", watched)

    for _ in strategy.scatter(pages, [3, 1], [range(each, each + 1) for each in range(4)]):
        pass

    assert len([data for data in sent if isinstance(data, list) and {1, 3} <= set(data)]) == (
        name in ("staged", "kernel")
    )


@pytest.mark.parametrize("name", STRATEGIES)
def test_bytes_around_a_page_stay_as_they_were(name: str) -> None:
    case = paged_kv("kv block token head dim", SMALL, torch.float32)
    mapping = np.full(case.layout.page_bytes + 16, 0xAB, np.uint8)

    make_strategy(name, case).gather([3], [mapping[8:-8]])

    assert (mapping[:8] == 0xAB).all()
    assert (mapping[-8:] == 0xAB).all()


def test_what_does_not_fit_into_the_staging_buffer_goes_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    case = paged_kv("block kv token head dim", SMALL, torch.float32)
    monkeypatch.setattr(strategies_module, "STAGING_BYTES", 2 * case.layout.page_bytes)
    sizes: list[int] = []
    make = Staged._staging

    def watched(self: Staged, pages: int, layers: int) -> torch.Tensor:
        sizes.append(pages)
        return make(self, pages, layers)

    monkeypatch.setattr(Staged, "_staging", watched)
    out = pages_for(case, range(5))

    Staged(case.layers, case.layout).gather(range(5), out)

    assert sizes == [2, 2, 1]
    assert [page.tobytes() for page in out] == case.naive_pages(range(5))


def test_a_staging_buffer_is_given_back_before_the_next_one_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    buffers: list[weakref.ref[Any]] = []

    def make(self: Staged, pages: int, layers: int) -> torch.Tensor:
        assert not any(buffer() is not None for buffer in buffers)
        memory = np.empty(self._words * 8, np.uint8)  # lives as long as a view of the tensor
        buffers.append(weakref.ref(memory))
        first, shape = self._layers[0], (pages, layers, *self._page_shape)
        return torch.from_numpy(memory).view(first.dtype)[: math.prod(shape)].view(shape)

    monkeypatch.setattr(Staged, "_staging", make)
    case = paged_kv("block token dim", SMALL, torch.int16)
    monkeypatch.setattr(strategies_module, "STAGING_BYTES", 2 * case.layout.page_bytes)
    strategy, pages = Staged(case.layers, case.layout), pages_for(case, range(5))
    strategy.gather(range(5), pages)
    assert len(buffers) == 3
    for _ in strategy.scatter(pages, range(5), [range(1), range(1, len(case.layers))]):
        assert not any(buffer() is not None for buffer in buffers), "it is held while the layer is waited for"
    assert len(buffers) > 5


def test_the_staging_buffer_has_one_size_so_that_one_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    # Torch keeps what a copy had, and a buffer of another size would come on top of it.
    case = paged_kv("block kv token head dim", SMALL, torch.float32)
    strategy = Staged(case.layers, case.layout)
    bytes_asked: list[int] = []
    empty = torch.empty

    def watched(*args: Any, **kwargs: Any) -> torch.Tensor:
        made = empty(*args, **kwargs)
        bytes_asked.append(made.nbytes)
        return made

    monkeypatch.setattr(torch, "empty", watched)
    strategy.gather([0], pages_for(case, [0]))
    strategy.gather([0, 1, 2], pages_for(case, [0, 1, 2]))
    for _ in strategy.scatter(pages_for(case, [3, 4]), [3, 4], [range(1), range(1, 2)]):
        pass

    assert bytes_asked == [strategies_module.STAGING_BYTES] * 4


def test_numbers_go_to_a_device_from_pinned_memory_and_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda", 1)

    class Pinned:
        def to(self, device: torch.device, *, non_blocking: bool) -> tuple[torch.device, bool]:
            return device, non_blocking

    def make(data: list[int], *, pin_memory: bool) -> Pinned:
        assert (data, pin_memory) == ([1, 2], True)
        return Pinned()

    assert strategies_module.on_device([1, 2], torch.device("cpu")).tolist() == [1, 2]
    monkeypatch.setattr(torch, "tensor", make)
    assert strategies_module.on_device([1, 2], device) == (device, True)


@NEEDS_TRITON
@NEEDS_INTERPRETER
def test_the_kernel_takes_nothing_where_the_device_has_other_addresses_than_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = paged_kv("kv block token head dim", SMALL, torch.float32)
    kernel = make_strategy("kernel", case)
    memory = np.zeros(case.layout.page_bytes, np.uint8)

    with pinned.PinnedMapping(memory, EverythingRegisters()):
        assert kernel.takes([memory])
        kernel._has_host_addresses = False
        assert not kernel.takes([memory])


@NEEDS_TRITON
def test_the_kernel_keeps_nothing_on_the_device_but_the_layers() -> None:
    # An engine that sleeps may discard it.
    case = paged_kv("kv block token head dim", SMALL, torch.float32)

    kept = vars(make_strategy("kernel", case))

    assert [name for name, value in kept.items() if isinstance(value, torch.Tensor)] == []


@NEEDS_TRITON
@NEEDS_INTERPRETER
def test_the_kernel_takes_only_pages_that_are_pinned_and_whole_words() -> None:
    case = paged_kv("kv block token head dim", SMALL, torch.float32)
    kernel = make_strategy("kernel", case)
    size = case.layout.page_bytes
    memory = np.zeros(4 * size, np.uint8)
    first, odd = memory[:size], memory[size + 1 : 2 * size + 1]

    assert not kernel.takes([first])
    with pinned.PinnedMapping(memory[: 3 * size], EverythingRegisters()):
        assert kernel.takes([first])
        assert not kernel.takes([first, odd])
        assert not kernel.takes([first, memory[3 * size :]])
    assert not kernel.takes([first])


@NEEDS_TRITON
def test_the_kernel_is_launched_in_one_dimension_however_many_runs_a_page_has(monkeypatch: pytest.MonkeyPatch) -> None:
    # CUDA takes 65,535 programs in the others.
    sizes = {"layer": 20, "block": 3, "head": 4096, "token": 2, "dim": 2}
    case = paged_kv("block head token dim", sizes, torch.float16, page_tokens=1)
    grids: list[tuple[int, ...]] = []

    class Launched:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            grids.append(grid)
            return lambda *args, **kwargs: None

    monkeypatch.setattr("kvstore.gpu.triton_kernel.copy_runs", Launched())

    make_strategy("kernel", case).gather([0, 5], pages_for(case, [0, 5]))

    assert grids == [(2 * 20 * 4096,)]
