from __future__ import annotations

import sys
import threading
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_layouts import PagedCase, arena_pages, bits, paged_cases, paged_kv, random_pages

from kvstore.errors import InvalidRequestError
from kvstore.gpu import reference
from kvstore.gpu.paged_kv import PagedKV
from kvstore.gpu.strategies import tensor_over

SMALL = {"layer": 2, "kv": 2, "block": 5, "token": 4, "head": 2, "dim": 8}
Case = tuple[PagedCase, list[int]]


def small_kv() -> list[torch.Tensor]:
    return paged_kv("kv block token head dim", SMALL, torch.float32).tensors


def paged_of(case: PagedCase) -> PagedKV:
    return PagedKV(case.tensors, case.axes, page_tokens=case.page_tokens)


@given(paged_cases())
@settings(max_examples=100, deadline=None)
def test_the_specification_is_what_a_loop_over_elements_gives(given_case: Case) -> None:
    case, ids = given_case

    assert [bits(page) for page in reference.gather(case.layers, case.layout, ids)] == case.naive_pages(ids)


@given(paged_cases(unique=True), st.integers(0, 1000))
@settings(max_examples=100, deadline=None)
def test_what_the_specification_scatters_it_gathers_and_nothing_else_changes(given_case: Case, seed: int) -> None:
    case, ids = given_case
    layout = case.layout
    rest = sorted(set(range(layout.num_pieces)) - set(ids))
    rest = rest[: len(rest) // layout.pieces_per_page * layout.pieces_per_page]
    before = case.naive_pages(rest)
    pages = random_pages(len(ids) // layout.pieces_per_page, layout.page_bytes, seed)
    tensors = [torch.from_numpy(page.copy()).view(case.tensors[0].dtype).view(layout.page_shape) for page in pages]
    wild = [storage.copy() for storage in case.storages]

    reference.scatter(tensors, case.layers, layout, ids)

    assert case.naive_pages(ids) == [page.tobytes() for page in pages]
    assert case.naive_pages(rest) == before
    changed = sum(int((now != old).sum()) for now, old in zip(case.storages, wild, strict=True))
    assert changed <= len(pages) * layout.page_bytes


@given(paged_cases())
@settings(max_examples=100, deadline=None)
def test_gather_equals_the_specification(given_case: Case) -> None:
    case, ids = given_case
    paged = paged_of(case)
    out = arena_pages(len(ids) // paged.layout.pieces_per_page, paged.page_bytes)

    paged.gather(ids, out)

    assert [page.tobytes() for page in out] == [bits(page) for page in reference.gather(case.layers, case.layout, ids)]


@given(paged_cases(unique=True), st.integers(0, 1000), st.booleans())
@settings(max_examples=100, deadline=None)
def test_scatter_equals_the_specification_and_touches_nothing_else(given_case: Case, seed: int, by_layer: bool) -> None:
    case, ids = given_case
    paged = paged_of(case)
    pages = random_pages(len(ids) // paged.layout.pieces_per_page, paged.page_bytes, seed)
    tensors = [torch.from_numpy(page.copy()).view(case.tensors[0].dtype).view(case.layout.page_shape) for page in pages]
    before = [storage.copy() for storage in case.storages]
    reference.scatter(tensors, case.layers, case.layout, ids)
    expected = [storage.copy() for storage in case.storages]
    for storage, content in zip(case.storages, before, strict=True):
        storage[:] = content

    told: list[int] = []
    paged.scatter(pages, ids, told.append if by_layer else None)

    assert all(map(np.array_equal, case.storages, expected))
    assert told == (list(range(paged.layout.layers)) if by_layer and ids else [])


def test_a_layer_is_in_place_when_it_is_told_and_the_next_one_is_not() -> None:
    case = paged_kv("block kv token head dim", SMALL | {"layer": 3}, torch.float32)
    paged = paged_of(case)
    (page,) = random_pages(1, paged.page_bytes, seed=1)
    parts = page.reshape(3, -1)
    before = [bits(layer[4]) for layer in case.layers]
    seen: list[list[bool]] = []

    def look(layer: int) -> None:
        seen.append([bits(kv[4]) == part.tobytes() for kv, part in zip(case.layers, parts, strict=True)])
        assert [bits(kv[4]) for kv in case.layers[layer + 1 :]] == before[layer + 1 :]

    paged.scatter([page], [4], look)

    assert seen == [[True, False, False], [True, True, False], [True, True, True]]


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

    assert out[0].tobytes() == b"".join(bits(layer[:, 2]) for layer in layers)


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


def test_ids_of_pieces_are_counted_and_checked_by_page() -> None:
    longer, shorter = (PagedKV(small_kv(), page_tokens=tokens) for tokens in (8, 2))

    with pytest.raises(InvalidRequestError, match="3 block ids for 2 pages of 2 blocks each"):
        longer.gather([0, 1, 2], arena_pages(2, longer.page_bytes))
    with pytest.raises(InvalidRequestError, match="piece id 10 is not between 0 and 9"):
        shorter.gather([10], arena_pages(1, shorter.page_bytes))


@pytest.mark.parametrize(
    ("layers", "axes", "says"),
    [
        ([], "block dim", "at least 1 layer, got 0"),
        ([torch.zeros(2, 3), torch.zeros(2, 4)], "block dim", r"layer 1 is \(2, 4\)"),
        ([torch.zeros(2, 4), torch.zeros(2, 4).half()], "block dim", "layer 1 is .* torch.float16"),
        ([torch.zeros(2, 4), torch.zeros(2, 8)[:, :4]], "block dim", r"layer 1 is .* with strides \(8, 1\)"),
        ([torch.zeros(2, 4), torch.zeros(2, 4, device="meta")], "block dim", "layer 1 is .* on meta"),
        ([torch.zeros(2, 4)] * 2, "layer block dim", "one tensor of 3 dimensions is needed"),
    ],
)
def test_other_tensors_are_refused(layers: list[torch.Tensor], axes: str, says: str) -> None:
    with pytest.raises(InvalidRequestError, match=says):
        PagedKV(layers, axes)


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
