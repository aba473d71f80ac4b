from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu import reference
from gpu.device import tensor_over
from gpu.layout import PageLayout
from gpu.pages import PagedKV
from gpu.pinned import PinnedMapping
from kvstore.errors import InvalidRequestError

Pages = list[npt.NDArray[np.uint8]]


@dataclass
class Case:
    layers: list[torch.Tensor]
    block_ids: list[int]


def random_kv(layout: PageLayout, seed: int, *, joined: bool = False) -> list[torch.Tensor]:
    """KV tensors of random bytes (NaNs of every kind among them), each its own or all slices of one storage."""
    bits = np.random.default_rng(seed).integers(0, 256, layout.num_blocks * layout.page_bytes, dtype=np.uint8)
    storage = torch.from_numpy(bits).view(layout.dtype)
    inside = (layout.block_size, layout.kv_heads, layout.head_size)
    if joined:
        blocks = storage.view(layout.num_blocks, layout.layers, 2, *inside)
        return [blocks[:, layer].transpose(0, 1) for layer in range(layout.layers)]
    return list(storage.view(layout.layers, 2, layout.num_blocks, *inside).unbind())


def arena_pages(count: int, page_bytes: int, *, fill: int = 0) -> Pages:
    """Pages as slots of one mapping, neither aligned nor in order."""
    mapping = np.full(count * (page_bytes + 3) + 1, fill, np.uint8)
    starts = [1 + slot * (page_bytes + 3) for slot in reversed(range(count))]
    return [mapping[start : start + page_bytes] for start in starts]


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def small_kv() -> list[torch.Tensor]:
    return random_kv(PageLayout(2, 5, 4, 2, 8, torch.float32), seed=0)


@st.composite
def cases(draw: st.DrawFn, *, unique: bool = False) -> Case:
    layout = PageLayout(
        layers=draw(st.integers(1, 3)),
        num_blocks=draw(st.integers(1, 6)),
        block_size=draw(st.sampled_from([1, 3, 4])),
        kv_heads=draw(st.integers(1, 3)),
        head_size=draw(st.sampled_from([1, 5, 8])),
        dtype=draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16])),
    )
    block = st.integers(0, layout.num_blocks - 1)
    return Case(
        random_kv(layout, draw(st.integers(0, 1000)), joined=draw(st.booleans())),
        draw(st.lists(block, unique=unique, max_size=8)),
    )


@given(cases())
@settings(max_examples=60, deadline=None)
def test_gather_equals_the_reference(case: Case) -> None:
    paged = PagedKV(case.layers)
    out = arena_pages(len(case.block_ids), paged.page_bytes)

    paged.gather(case.block_ids, out)

    assert [page.tobytes() for page in out] == [bits(page) for page in reference.gather(case.layers, case.block_ids)]


@given(cases(unique=True), st.integers(0, 1000))
@settings(max_examples=60, deadline=None)
def test_scatter_equals_the_reference_and_touches_nothing_else(case: Case, seed: int) -> None:
    paged = PagedKV(case.layers)
    expected = [layer.clone() for layer in case.layers]
    pages = arena_pages(len(case.block_ids), paged.page_bytes)
    for page in pages:
        page[:] = np.random.default_rng(seed).integers(0, 256, page.size, dtype=np.uint8)
        page.flags.writeable = False
    as_tensors = [
        torch.from_numpy(page.copy()).view(paged.layout.dtype).view(paged.layout.page_shape) for page in pages
    ]

    paged.scatter(pages, case.block_ids)

    reference.scatter(as_tensors, expected, case.block_ids)
    assert [bits(layer) for layer in case.layers] == [bits(layer) for layer in expected]


@given(cases(unique=True), st.randoms(use_true_random=False))
@settings(max_examples=40, deadline=None)
def test_pages_survive_the_way_out_and_back_into_other_blocks(case: Case, random: object) -> None:
    paged = PagedKV(case.layers)
    other = PagedKV([torch.zeros_like(layer) for layer in case.layers])
    pages = arena_pages(len(case.block_ids), paged.page_bytes)
    moved = list(range(other.num_blocks))
    random.shuffle(moved)  # type: ignore[attr-defined]
    moved = moved[: len(case.block_ids)]

    paged.gather(case.block_ids, pages)
    other.scatter(pages, moved)
    again = arena_pages(len(moved), other.page_bytes)
    other.gather(moved, again)

    assert [page.tobytes() for page in again] == [page.tobytes() for page in pages]


def test_bytes_around_a_page_stay_as_they_were() -> None:
    paged = PagedKV(small_kv())
    mapping = np.full(paged.page_bytes + 2, 0xAB, np.uint8)

    paged.gather([3], [mapping[1:-1]])

    assert mapping[0] == mapping[-1] == 0xAB


def test_a_kv_that_requires_gradients_is_copied_too() -> None:
    layers = [layer.nan_to_num().requires_grad_() for layer in small_kv()]
    paged = PagedKV(layers)
    out = arena_pages(1, paged.page_bytes)

    paged.gather([2], out)

    assert out[0].tobytes() == bits(reference.gather([layer.detach() for layer in layers], [2])[0])


@pytest.mark.parametrize(
    ("block_ids", "pages", "says"),
    [
        ([0, 1], 1, "2 block ids for 1 pages"),
        ([5], 1, "block id 5 is not between 0 and 4"),
        ([-1], 1, "block id -1 is not between 0 and 4"),
        ([0.5], 1, "a block id must be an integer, got 0.5"),
    ],
)
def test_bad_block_ids_are_refused_and_nothing_is_copied(block_ids: list[int], pages: int, says: str) -> None:
    layers = small_kv()
    before = [bits(layer) for layer in layers]
    paged = PagedKV(layers)
    out = arena_pages(pages, paged.page_bytes, fill=0xAB)

    with pytest.raises(InvalidRequestError, match=says):
        paged.gather(block_ids, out)
    with pytest.raises(InvalidRequestError, match=says):
        paged.scatter(out, block_ids)

    assert all((page == 0xAB).all() for page in out)
    assert [bits(layer) for layer in layers] == before


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda n: np.zeros(n - 1, np.uint8), "page 1 has 1023 bytes, a page has 1024"),
        (lambda n: np.zeros(n, np.int8), "page 1 must be a one-dimensional array of uint8, got int8"),
        (lambda n: np.zeros((1, n), np.uint8), r"got uint8 of shape \(1, 1024\)"),
        (lambda n: np.zeros(2 * n, np.uint8)[::2], "page 1 must be contiguous, its stride is 2 bytes"),
        (bytearray, "page 1 must be a one-dimensional array of uint8, got bytearray"),
    ],
)
def test_bad_pages_are_refused_and_nothing_is_copied(make: Callable[[int], npt.NDArray[np.uint8]], says: str) -> None:
    layers = small_kv()
    before = [bits(layer) for layer in layers]
    paged = PagedKV(layers)
    pages = [np.zeros(paged.page_bytes, np.uint8), make(paged.page_bytes)]

    with pytest.raises(InvalidRequestError, match=says):
        paged.gather([0, 1], pages)
    with pytest.raises(InvalidRequestError, match=says):
        paged.scatter(pages, [0, 1])

    assert not pages[0].any()
    assert [bits(layer) for layer in layers] == before


def test_gather_refuses_a_page_that_may_not_be_written() -> None:
    paged = PagedKV(small_kv())
    out = arena_pages(2, paged.page_bytes)
    out[1].flags.writeable = False

    with pytest.raises(InvalidRequestError, match="page 1: gather needs a writable array"):
        paged.gather([0, 1], out)

    assert not out[0].any()


def test_scatter_refuses_two_pages_for_one_block() -> None:
    paged = PagedKV(small_kv())

    with pytest.raises(InvalidRequestError, match="block id 3 occurs twice"):
        paged.scatter(arena_pages(3, paged.page_bytes), [3, 1, 3])


def test_a_device_of_another_kind_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="cpu or cuda device, got meta"):
        PagedKV([torch.zeros(2, 5, 4, 2, 8, device="meta")])


@pytest.mark.parametrize("direction", ["gather", "scatter"])
def test_other_threads_run_while_pages_are_copied(direction: str) -> None:
    layers = [torch.zeros(2, 1, 64, 16, 256) for _ in range(2)]
    paged = PagedKV(layers)
    pages = [np.zeros(paged.page_bytes, np.uint8)]
    ran = threading.Event()
    gate = threading.Lock()
    gate.acquire()

    def wait_for_gate() -> None:
        gate.acquire()
        ran.set()

    thread = threading.Thread(target=wait_for_gate)
    thread.start()
    before = sys.getswitchinterval()
    sys.setswitchinterval(1000)  # nobody takes the GIL away: the other thread gets it only where it is given up
    try:
        gate.release()
        for _ in range(1000):
            if direction == "gather":
                paged.gather([0], pages)
            else:
                paged.scatter(pages, [0])
            if ran.is_set():
                break
        seen = ran.is_set()
    finally:
        sys.setswitchinterval(before)
        thread.join()
    assert seen


def test_a_tensor_over_read_only_memory_shares_it_without_a_warning() -> None:
    memory = np.arange(64, dtype=np.uint8)
    page = memory[:]
    page.flags.writeable = False

    tensor = tensor_over(page)
    memory[3] = 200

    assert tensor.tolist() == memory.tolist()


@pytest.mark.cuda
@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_cuda_device_copies_as_the_reference_does(dtype: torch.dtype, joined: bool, pinned: bool) -> None:
    layout = PageLayout(4, 40, 16, 4, 64, dtype)
    layers = random_kv(layout, seed=1, joined=joined)
    paged = PagedKV([layer.cuda() if not joined else layer.transpose(0, 1).cuda().transpose(0, 1) for layer in layers])
    ids = np.random.default_rng(2).permutation(layout.num_blocks)[:25].tolist()
    arena = np.zeros(len(ids) * layout.page_bytes, np.uint8)
    pages = list(arena.reshape(len(ids), layout.page_bytes))

    with PinnedMapping(arena) if pinned else PinnedMapping(np.zeros(1, np.uint8)) as mapping:
        assert not pinned or mapping.pinned, mapping.reason
        paged.gather(ids, pages)
        assert [page.tobytes() for page in pages] == [bits(page) for page in reference.gather(layers, ids)]

        other = PagedKV([torch.zeros(2, 40, 16, 4, 64, dtype=dtype, device="cuda") for _ in range(4)])
        moved = list(reversed(ids))
        other.scatter(pages, moved)
        again = [np.zeros(layout.page_bytes, np.uint8) for _ in ids]
        other.gather(moved, again)
        assert [page.tobytes() for page in again] == [page.tobytes() for page in pages]
