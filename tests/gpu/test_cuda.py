"""On a CUDA device. ``make test-cuda`` runs what is marked ``cuda``."""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import numpy.typing as npt
import pytest
import torch
from kv_layouts import DECLARED, RUNS_OF_EVERY_LENGTH, PagedCase, paged_kv

from kvstore.errors import ResourceError
from kvstore.gpu import reference
from kvstore.gpu.cuda import CudaStreams, DeviceCopies, strategies_for
from kvstore.gpu.cuda_driver import BatchedMemcpy, batched_memcpy
from kvstore.gpu.cudart import cuda_runtime
from kvstore.gpu.paged_kv import PagedKV
from kvstore.gpu.pinned import PinnedMapping, is_pinned
from kvstore.gpu.pinned_arena import PinnedArena
from kvstore.gpu.tensors import by_layer, describe

pytestmark = pytest.mark.cuda

SIZES = {"layer": 3, "kv": 2, "block": 24, "token": 16, "head": 4, "dim": 64}


def on_device(case: PagedCase) -> list[torch.Tensor]:
    """The same tensors there, with the same strides."""
    moved = []
    for tensor in case.tensors:
        storage = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).cuda().view(tensor.dtype)
        moved.append(storage.as_strided(tensor.shape, tensor.stride()))
    return moved


def as_bytes(page: torch.Tensor) -> npt.NDArray[np.uint8]:
    return page.cpu().view(-1).view(torch.uint8).numpy()


@pytest.fixture
def batched() -> BatchedMemcpy:
    """The driver's call."""
    try:
        return batched_memcpy()
    except ResourceError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("page_tokens", [None, 4, 48])
@pytest.mark.parametrize("axes", [axes for axes in DECLARED if "token" in axes])
def test_every_strategy_copies_as_specified(axes: str, page_tokens: int | None, dtype: torch.dtype) -> None:
    case = paged_kv(axes, SIZES, dtype, gap=8, page_tokens=page_tokens)
    layers, names = by_layer(on_device(case), axes)
    layout = describe(layers, names, page_tokens)
    count = 3
    ids = np.random.default_rng(1).permutation(layout.num_pieces)[: count * layout.pieces_per_page].tolist()
    expected = [as_bytes(page) for page in reference.gather(case.layers, case.layout, ids)]
    memory = np.zeros(count * layout.page_bytes, np.uint8)
    pages = list(memory.reshape(count, -1))
    streams = CudaStreams(layers[0].device)
    with PinnedMapping(memory) as mapping:
        assert mapping.pinned, mapping.reason
        for name, strategy in strategies_for(layers, layout).items():
            assert strategy.takes(pages), name
            memory[:] = 0
            (done,) = streams.queue("gather", [lambda strategy=strategy: strategy.gather(ids, pages)])
            done.synchronize()
            assert all(map(np.array_equal, pages, expected)), name

            for shares in [range(3)], [range(each, each + 1) for each in range(3)]:
                for layer in layers:
                    layer.view(torch.uint8).zero_()
                torch.cuda.synchronize()
                steps = strategy.scatter(pages, ids, shares)
                for done in streams.queue("scatter", [partial(next, steps)] * len(shares)):
                    done.synchronize()
                again = [as_bytes(page) for page in reference.gather(layers, layout, ids)]
                assert all(map(np.array_equal, again, expected)), name


@pytest.mark.parametrize(("run_bytes", "gap"), RUNS_OF_EVERY_LENGTH)
def test_runs_of_every_length_are_copied_and_nothing_beside_them(run_bytes: int, gap: int) -> None:
    case = paged_kv("block dim", {"layer": 3, "block": 64, "dim": run_bytes}, torch.uint8, gap=gap)
    layers, size = on_device(case), case.layout.page_bytes
    storages = [layer.as_strided((64, run_bytes + gap), (run_bytes + gap, 1)) for layer in layers]
    ids = np.random.default_rng(1).permutation(64)[:40].tolist()
    runs = [storage.reshape(64, -1)[ids, :run_bytes] for storage in case.storages]
    expected = np.stack(runs, 1).ravel()  # by page, then by layer
    memory = np.zeros(42 * size, np.uint8)
    pages = list(memory.reshape(42, -1)[1:-1])
    streams = CudaStreams(layers[0].device)
    with PinnedMapping(memory) as mapping:
        assert mapping.pinned, mapping.reason
        for name, strategy in strategies_for(layers, case.layout).items():
            assert strategy.takes(pages), name
            memory[:] = 0xAB
            (done,) = streams.queue("gather", [partial(strategy.gather, ids, pages)])
            done.synchronize()
            assert np.array_equal(memory[size:-size], expected), name
            assert (memory[:size] == 0xAB).all(), name
            assert (memory[-size:] == 0xAB).all(), name

            for storage in storages:
                storage.fill_(0xAB)
            torch.cuda.synchronize()
            steps = strategy.scatter(pages, ids, [range(1), range(1, 3)])
            for done in streams.queue("scatter", [partial(next, steps)] * 2):
                done.synchronize()
            for layer, storage in enumerate(storages):
                wanted = np.full(storage.shape, 0xAB, np.uint8)
                wanted[ids, :run_bytes] = runs[layer]
                assert np.array_equal(storage.cpu().numpy(), wanted), name
                storage[:, :run_bytes] = case.layers[layer].cuda()


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_every_strategy_works_here(batched: BatchedMemcpy, caplog: pytest.LogCaptureFixture) -> None:
    case = paged_kv("kv block token head dim", SIZES, torch.bfloat16)

    copies = DeviceCopies(on_device(case), case.layout)

    every = {"staged", "run by run", "kernel", "batch"}
    assert set(copies.order["gather"]) == set(copies.order["scatter"]) == every, caplog.text


@pytest.mark.parametrize("pinned", [False, True])
def test_pages_survive_the_way_out_and_back_into_other_blocks(pinned: bool) -> None:
    case = paged_kv("block kv token head dim", SIZES, torch.bfloat16)
    paged = PagedKV(on_device(case), case.axes)
    ids = np.random.default_rng(2).permutation(24)[:20].tolist()
    memory = np.zeros(len(ids) * paged.page_bytes, np.uint8)
    pages = list(memory.reshape(len(ids), -1))
    with PinnedMapping(memory if pinned else np.zeros(1, np.uint8)) as mapping:
        assert mapping.pinned, mapping.reason
        paged.gather(ids, pages)
        other = PagedKV([torch.zeros_like(tensor) for tensor in on_device(case)], case.axes)
        told: list[int] = []
        other.scatter(pages, ids[::-1], told.append)
        again = [np.zeros(paged.page_bytes, np.uint8) for _ in ids]
        other.gather(ids[::-1], again)

    assert [page.tobytes() for page in pages] == case.naive_pages(ids)
    assert [page.tobytes() for page in again] == [page.tobytes() for page in pages]
    assert told == [0, 1, 2]


@pytest.mark.parametrize("pinned", [False, True])
def test_a_copy_waits_for_what_was_queued_before_it(pinned: bool) -> None:
    case = paged_kv("block kv token head dim", SIZES, torch.bfloat16)
    tensors = on_device(case)
    paged = PagedKV(tensors, case.axes)
    page = np.zeros(paged.page_bytes, np.uint8)
    with PinnedMapping(page if pinned else np.zeros(1, np.uint8)) as mapping:
        assert mapping.pinned, mapping.reason
        torch.cuda._sleep(100_000_000)  # the engine's stream is busy ...
        for tensor in tensors:
            tensor.view(torch.uint8).fill_(7)  # ... and then writes

        paged.gather([3], [page])

    assert (page == 7).all()


def test_the_driver_needs_the_lists_of_a_batch_only_while_it_is_called(batched: BatchedMemcpy) -> None:
    source = torch.arange(256, dtype=torch.uint8, device="cuda").view(4, 64)
    memory = np.zeros((4, 64), np.uint8)
    with PinnedMapping(memory.reshape(-1)) as mapping, torch.cuda.stream(torch.cuda.Stream()):
        assert mapping.pinned, mapping.reason
        sources, targets = (
            np.array([start + 64 * row for row in range(4)], np.uint64)
            for start in (source.data_ptr(), memory.ctypes.data)
        )
        sizes = np.full(4, 64, np.uint64)
        torch.cuda.synchronize()
        torch.cuda._sleep(100_000_000)  # nothing is copied yet ...
        batched(targets, sources, sizes, stable_source=False)
        sources[:], targets[:], sizes[:] = 0, 0, 0  # ... when the lists go
        torch.cuda.current_stream().synchronize()

    assert memory.reshape(-1).tolist() == list(range(256))


def test_the_driver_says_why_it_refuses_a_batch(batched: BatchedMemcpy) -> None:
    there = torch.zeros(64, dtype=torch.uint8, device="cuda")
    memory = np.zeros(64, np.uint8)
    one = [np.array([number], np.uint64) for number in (there.data_ptr(), memory.ctypes.data, 64)]
    with PinnedMapping(memory) as mapping:
        assert mapping.pinned, mapping.reason
        with torch.cuda.stream(torch.cuda.default_stream()), pytest.raises(ResourceError, match="refused 1 copies"):
            batched(*one, stable_source=True)
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            there.fill_(1)
            with pytest.raises(ResourceError, match="captur"):
                batched(*one, stable_source=True)
        torch.cuda.synchronize()


def test_a_thread_that_never_used_the_device_copies_a_batch(batched: BatchedMemcpy) -> None:
    case = paged_kv("block kv token head dim", SIZES, torch.bfloat16)
    layers = on_device(case)
    copies = DeviceCopies(layers, case.layout, strategies={"batch": strategies_for(layers, case.layout)["batch"]})
    memory = np.zeros(2 * case.layout.page_bytes, np.uint8)
    pages = list(memory.reshape(2, -1))
    mark = copies.mark()
    with PinnedMapping(memory) as mapping, ThreadPoolExecutor(1) as thread:
        assert mapping.pinned, mapping.reason
        thread.submit(copies.gather, [3, 20], pages, mark).result()

    assert [page.tobytes() for page in pages] == case.naive_pages([3, 20])


def test_a_copy_waits_for_the_stream_that_the_engine_has_changed_to() -> None:
    case = paged_kv("block kv token head dim", SIZES, torch.bfloat16)
    tensors = on_device(case)
    paged = PagedKV(tensors, case.axes)
    page = np.zeros(paged.page_bytes, np.uint8)
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(100_000_000)
        for tensor in tensors:
            tensor.view(torch.uint8).fill_(7)
        mark = paged.mark()

    paged.gather([3], [page], mark)

    assert (page == 7).all()


def test_layers_are_copied_while_the_engine_computes_those_that_are_there() -> None:
    case = paged_kv("block kv token head dim", SIZES, torch.bfloat16)
    paged = PagedKV(on_device(case), case.axes)
    memory = np.zeros(paged.page_bytes, np.uint8)
    busy: list[bool] = []
    with PinnedMapping(memory) as mapping:
        assert mapping.pinned, mapping.reason
        paged.scatter([memory], [3], lambda layer: None)  # what is loaded at the first call waits for the device
        computed = torch.cuda.Event()

        def compute(layer: int) -> None:
            if layer == 0:
                torch.cuda._sleep(2_000_000_000)  # more than the other layers take
                computed.record()
            busy.append(not computed.query())

        paged.scatter([memory], [3], compute)

    assert busy == [True, True, True]


@pytest.mark.parametrize("name", ["kernel", "batch"])
def test_an_arena_is_read_and_written_in_place_until_the_last_engine_that_maps_it_is_gone(
    name: str, eventually: Callable[[Callable[[], object]], None]
) -> None:
    case = paged_kv("block kv token head dim", SIZES, torch.bfloat16)
    layers = on_device(case)
    if name not in (found := strategies_for(layers, case.layout)):
        pytest.skip(f"no copies by {name} here")
    copies = DeviceCopies(layers, case.layout, strategies={name: found[name]})
    arena = np.zeros(4 * case.layout.page_bytes, np.uint8)
    pages = list(arena.reshape(4, -1)[1:3])
    pin = partial(PinnedMapping, runtime=cuda_runtime(torch.device("cuda", 0)))
    first, second = (PinnedArena(lambda: arena, pin) for _ in range(2))
    eventually(lambda: not [thread for thread in threading.enumerate() if thread.name == "kvstore-pin"])
    assert is_pinned(arena)
    first.close()
    assert is_pinned(arena)

    copies.gather([5, 7], pages)
    copies.scatter(pages, [1, 2], lambda layer: None)
    copies.gather([1, 2], pages)

    assert [page.tobytes() for page in pages] == case.naive_pages([5, 7])
    second.close()
    with pytest.raises(ResourceError, match="takes these pages"):
        copies.gather([5, 7], pages)
    assert not torch.from_numpy(arena).is_pinned()


def test_a_mapping_is_pinned_until_it_is_released() -> None:
    memory = np.zeros(1 << 20, np.uint8)
    tensor = torch.from_numpy(memory)

    with PinnedMapping(memory) as mapping:
        assert mapping.pinned, mapping.reason
        assert tensor.is_pinned()

    assert not mapping.pinned
    assert not tensor.is_pinned()
