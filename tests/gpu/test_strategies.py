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
from kv_layouts import (
    RUNS_OF_EVERY_LENGTH,
    PagedCase,
    arena_pages,
    bits,
    paged_cases,
    paged_kv,
    random_pages,
    shared_buffers,
)

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
@pytest.mark.parametrize(("dim", "alignment"), [(8, 16), (3, 8), (1, 8)])
def test_the_kernel_takes_only_pages_that_are_pinned_and_aligned_as_it_relies_on(dim: int, alignment: int) -> None:
    case = paged_kv("kv block token head dim", SMALL | {"token": 1, "dim": dim}, torch.float32)
    kernel = make_strategy("kernel", case)
    size = case.layout.page_bytes
    memory = np.zeros(4 * size + 32, np.uint8)
    memory = memory[-memory.ctypes.data % 16 :]
    first, odd = memory[:size], memory[size + alignment // 2 : 2 * size + alignment // 2]
    assert kernel._alignment == alignment

    assert not kernel.takes([first])
    with pinned.PinnedMapping(memory[: 3 * size], EverythingRegisters()):
        assert kernel.takes([first])
        assert not kernel.takes([first, odd])
        assert not kernel.takes([first, memory[3 * size :]])
    assert not kernel.takes([first])


@NEEDS_TRITON
def test_the_kernel_has_as_few_programs_however_many_runs_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"layer": 20, "block": 3, "head": 4096, "token": 2, "dim": 2}
    case = paged_kv("block head token dim", sizes, torch.float16, page_tokens=1)
    kernel, pages = make_strategy("kernel", case), pages_for(case, [0, 5])
    grids: list[tuple[int, ...]] = []

    class Launched:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            grids.append(grid)
            return lambda *args, **kwargs: None

    monkeypatch.setattr("kvstore.gpu.triton_kernel.copy_runs", Launched())

    kernel.gather([0, 5], pages)
    list(kernel.scatter(pages, [0, 5], [range(20)]))

    assert grids == [(12,)] * 2


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize(("run_bytes", "gap"), RUNS_OF_EVERY_LENGTH)
def test_runs_of_every_length_are_copied(name: str, run_bytes: int, gap: int) -> None:
    # The kernel cuts long ones into tiles, and takes short ones together.
    case = paged_kv("block dim", {"layer": 3, "block": 9, "dim": run_bytes}, torch.uint8, gap=gap)
    strategy, ids, others = make_strategy(name, case), [8, 0, 3, 4, 1], [7, 2, 6]
    out, pages = pages_for(case, ids), random_pages(len(others), case.layout.page_bytes, 1)
    expected = [storage.reshape(9, -1).copy() for storage in case.storages]

    strategy.gather(ids, out)
    list(strategy.scatter(pages, others, [range(1), range(1, 3)]))

    for number, page in zip(ids, out, strict=True):
        assert np.array_equal(page.reshape(3, -1), [blocks[number, :run_bytes] for blocks in expected])
    for number, page in zip(others, pages, strict=True):
        for blocks, run in zip(expected, page.reshape(3, -1), strict=True):
            blocks[number, :run_bytes] = run
    assert all(np.array_equal(storage, blocks.ravel()) for storage, blocks in zip(case.storages, expected, strict=True))


@NEEDS_TRITON
@NEEDS_INTERPRETER
@pytest.mark.parametrize("programs", [1, 3, 12, 100])
def test_any_number_of_programs_copies_all_runs(programs: int) -> None:
    from kvstore.gpu.triton_kernel import Kernel, variant

    sizes = {"layer": 4, "block": 4, "head": 40, "token": 4, "dim": 128}
    case = paged_kv("block head token dim", sizes, torch.int8, page_tokens=1)
    ids = [15, 0, 7, 3, 8]
    assert len(ids) * 4 * 40 > 3 * variant(case.layout, 16, gather=True)["RUNS_AT_ONCE"], "not one step each"
    out = pages_for(case, ids)

    Kernel(case.layers, case.layout, programs).gather(ids, out)

    assert [page.tobytes() for page in out] == case.naive_pages(ids)


@NEEDS_TRITON
@NEEDS_INTERPRETER
@pytest.mark.parametrize(("run_bytes", "gap"), RUNS_OF_EVERY_LENGTH)
def test_no_byte_crosses_the_bus_twice(run_bytes: int, gap: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime.interpreter import InterpreterBuilder

    case = paged_kv("block dim", {"layer": 3, "block": 5, "dim": run_bytes}, torch.uint8, gap=gap)
    stored: list[Any] = []
    store = InterpreterBuilder.create_masked_store

    def watched(self: Any, addresses: Any, value: Any, mask: Any, *how: Any) -> Any:
        stored.append(addresses.data[mask.data])
        return store(self, addresses, value, mask, *how)

    monkeypatch.setattr(InterpreterBuilder, "create_masked_store", watched)
    kernel = make_strategy("kernel", case)

    kernel.gather([4, 0, 2], pages_for(case, [4, 0, 2]))

    addresses = np.concatenate(stored)
    assert len(np.unique(addresses)) == len(addresses) == 9 * run_bytes // min(8, kernel._alignment)


@NEEDS_TRITON
@NEEDS_INTERPRETER
@pytest.mark.parametrize("ids", [[], [3]])
def test_the_kernel_copies_no_page_and_one(ids: list[int]) -> None:
    case = paged_kv("kv block token head dim", SMALL, torch.float32)
    kernel, out, expected = make_strategy("kernel", case), pages_for(case, ids), case.naive_pages(range(5))
    pages = random_pages(len(ids), case.layout.page_bytes, 1)

    kernel.gather(ids, out)
    assert len(list(kernel.scatter(pages, ids, [range(1), range(1, 2)]))) == 2

    assert [page.tobytes() for page in out] == [expected[each] for each in ids]
    for each, page in zip(ids, pages, strict=True):
        expected[each] = page.tobytes()
    assert case.naive_pages(range(5)) == expected


@NEEDS_TRITON
@pytest.mark.parametrize(
    ("addresses", "run_bytes", "gap", "page_tokens", "expected"),
    [
        ([4096, 8192], 64, 0, None, 16),
        ([4096, 8192 + 8], 64, 0, None, 8),
        ([4096 + 1, 8192], 64, 0, None, 1),
        ([4096, 8192], 24, 0, None, 8),
        ([4096, 8192], 36, 12, None, 4),
        ([4096, 8192], 64, 2, None, 2),
        ([4096, 8192], 48, 16, 1, 4),
    ],
)
def test_the_kernel_relies_on_what_layers_strides_and_runs_have_in_common(
    addresses: list[int], run_bytes: int, gap: int, page_tokens: int | None, expected: int
) -> None:
    from kvstore.gpu.triton_kernel import alignment

    sizes = {"layer": 2, "block": 5, "token": 4, "dim": run_bytes // 4}
    layout = paged_kv("block token dim", sizes, torch.uint8, gap=gap, page_tokens=page_tokens).layout

    assert alignment(addresses, layout) == expected


def aligned_pages(count: int, page_bytes: int, alignment: int) -> list[Any]:
    memory = np.zeros(count * (page_bytes + 16) + 32, np.uint8)
    first = -memory.ctypes.data % 16 + alignment  # a multiple of this, and not of more
    starts = [first + each * (page_bytes + -page_bytes % 16) for each in range(count)]
    return [memory[start : start + page_bytes] for start in starts]


@NEEDS_TRITON
@NEEDS_INTERPRETER
@given(given_case=paged_cases(), offset=st.sampled_from([0, 8, 4, 1]))
@settings(max_examples=60, deadline=None)
def test_addresses_are_aligned_as_the_kernel_promises_the_compiler(given_case: Case, offset: int) -> None:
    # Otherwise an access of 16 bytes is one to other bytes, or a fault, which the interpreter does not show.
    from kvstore.gpu.triton_kernel import Kernel

    case, ids = given_case
    layers, layout = [moved(layer, offset) for layer in case.layers], case.layout
    kernel = Kernel(layers, layout)
    expected = reference.gather(layers, layout, ids)
    pages = aligned_pages(len(expected), layout.page_bytes, kernel._alignment)
    seen: list[Any] = []

    def watched(addresses: Any, name: str, divisors: list[int]) -> None:
        assert (name, divisors) == ("tt.divisibility", [kernel._alignment])
        assert not (addresses.data.astype(np.uint64) % np.uint64(kernel._alignment)).any()
        seen.append(addresses)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("triton.runtime.interpreter.TensorHandle.set_attr", watched)
        kernel.gather(ids, pages)
        list(kernel.scatter(pages, ids, [range(layout.layers)]))

    assert [page.tobytes() for page in pages] == [bits(page) for page in expected]
    assert bool(seen) == bool(pages)


def moved(layer: torch.Tensor, offset: int) -> torch.Tensor:
    """The same tensor so many bytes, rounded up to whole elements, behind a multiple of 16."""
    elements = -(-offset // layer.itemsize)
    storage = torch.empty(0, dtype=layer.dtype).set_(layer.untyped_storage())
    longer = torch.zeros(len(storage) + elements + 16, dtype=layer.dtype)
    begin = -longer.data_ptr() % 16 // layer.itemsize + elements
    longer[begin : begin + len(storage)] = storage
    return longer.as_strided(layer.shape, layer.stride(), begin + layer.storage_offset())
