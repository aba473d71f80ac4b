from __future__ import annotations

import errno

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_layouts import PagedCase, arena_pages, random_pages, shared_buffers

from kvstore.core import choice
from kvstore.gpu import host
from kvstore.gpu.host import MOST_RUNS, HostCopies, can_copy_runs, copy_runs
from kvstore.gpu.tensors import describe

PYTHON = choice.Choice(None, "a test says so")
needs_lists = pytest.mark.skipif(not can_copy_runs(), reason="this system refuses process_vm_readv")


@pytest.fixture(params=["native", "python"])
def core(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Lists of runs are copied by the native core, or without it."""
    if request.param == "python":
        monkeypatch.setattr(choice, "CHOSEN", PYTHON)
    elif choice.native() is None:
        pytest.skip(choice.CHOSEN.reason)
    return str(request.param)


def addresses(arrays: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint64]:
    return (arrays.ctypes.data + np.arange(len(arrays)) * arrays.strides[0]).astype(np.uint64)


@needs_lists
@pytest.mark.parametrize("count", [0, 1, MOST_RUNS, MOST_RUNS + 1, 2 * MOST_RUNS + 7])
def test_every_run_comes_to_its_place_and_nothing_else_changes(count: int) -> None:
    random = np.random.default_rng(count)
    source = random.integers(0, 256, (count + 1, 64), np.uint8)
    target = np.zeros((count + 1, 80), np.uint8)
    order = random.permutation(count)
    copy_runs(addresses(target)[:count], addresses(source)[order], 64)
    assert np.array_equal(target[:count, :64], source[order])
    assert not target[:, 64:].any()
    assert not target[count:].any()


@needs_lists
def test_memory_that_is_not_there_is_an_error() -> None:
    target = np.zeros((2, 64), np.uint8)
    with pytest.raises(OSError, match="process_vm_readv copied -1 of 128") as told:
        copy_runs(addresses(target), np.array([0, 0], np.uint64), 64)
    assert told.value.errno == errno.EFAULT


@pytest.mark.parametrize("axes", ["kv block token head dim", "block kv token head dim", "block token dim"])
@pytest.mark.parametrize("page_tokens", [8, 16, 32])
def test_lists_of_runs_move_what_one_run_after_the_other_moves(
    axes: str, page_tokens: int, core: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs of at least a page of memory, as one list and one by one; the property tests have shorter ones."""
    sizes = {"kv": 2, "block": 6, "token": 16, "head": 4, "dim": 64 if "head" in axes else 256}
    shape = [sizes[name] for name in axes.split()]
    layers = [torch.rand(shape) for _ in range(3)]
    layout = describe(layers, axes, page_tokens)
    in_lists = HostCopies(layers, layout)
    with monkeypatch.context() as patch:
        patch.setattr("kvstore.gpu.host.can_copy_runs", lambda: False)
        patch.setattr(choice, "CHOSEN", PYTHON)
        one_by_one = HostCopies(layers, layout)
    assert in_lists._in_lists
    assert not one_by_one._in_lists
    ids = np.random.default_rng(1).permutation(layout.num_pieces).tolist()
    ids = ids[: len(ids) // layout.pieces_per_page // 2 * layout.pieces_per_page]
    pages, others = (
        [np.zeros(layout.page_bytes, np.uint8) for _ in range(len(ids) // layout.pieces_per_page)] for _ in range(2)
    )
    in_lists.gather(ids, pages)
    one_by_one.gather(ids, others)
    assert [page.tobytes() for page in pages] == [page.tobytes() for page in others]

    before = [layer.clone() for layer in layers]
    done: list[int] = []
    in_lists.scatter(pages, ids[::-1], done.append)
    after = [layer.clone() for layer in layers]
    for layer, old in zip(layers, before, strict=True):
        layer.copy_(old)
    one_by_one.scatter(pages, ids[::-1])
    assert all(torch.equal(layer, other) for layer, other in zip(layers, after, strict=True))
    assert done == [0, 1, 2]


@needs_lists
def test_a_prompt_is_a_call_for_every_1024_runs(python_core: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call gives the interpreter's lock away, and a busy thread takes 5 ms to give it back."""
    layers = [torch.rand(2, 64, 16, 8, 16) for _ in range(12)]
    layout = describe(layers, "kv block token head dim")
    copies = HostCopies(layers, layout)
    calls = []

    class Counted:
        def process_vm_readv(self, *arguments: int) -> int:
            calls.append(arguments)
            return int(system.process_vm_readv(*arguments))

    system = host._SYSTEM
    monkeypatch.setattr(host, "_SYSTEM", Counted())
    copies.scatter([np.ones(layout.page_bytes, np.uint8) for _ in range(64)], range(64))
    assert len(calls) == 2  # 64 pages of 12 layers, keys and values


def test_with_the_native_core_a_prompt_is_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = [torch.rand(2, 64, 16, 8, 16) for _ in range(12)]
    layout = describe(layers, "kv block token head dim")
    lists = []

    class Counted:
        def copy_runs(self, targets: npt.NDArray[np.uint64], *others: object) -> None:
            lists.append(len(targets))

    monkeypatch.setattr(choice, "CHOSEN", choice.Choice(Counted(), ""))
    HostCopies(layers, layout).scatter([np.ones(layout.page_bytes, np.uint8) for _ in range(64)], range(64))
    assert lists == [64 * 12 * 2]


@pytest.mark.parametrize(
    ("chosen", "shortest"),
    [(choice.CHOSEN, 1), (PYTHON, 1), (PYTHON, host.SHORTEST_RUN)],
    ids=["as chosen", "in lists", "one by one"],
)
@given(given_case=shared_buffers(), ids=st.permutations(range(4)), by_layer=st.booleans())
@settings(max_examples=80, deadline=None)
def test_layers_of_one_buffer_are_copied_as_the_specification_says(
    chosen: choice.Choice, shortest: int, given_case: tuple[PagedCase, int], ids: list[int], by_layer: bool
) -> None:
    case, count = given_case
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host, "SHORTEST_RUN", shortest)
        patch.setattr(choice, "CHOSEN", chosen)
        check_copies(case, count, ids, by_layer=by_layer)


def check_copies(case: PagedCase, count: int, ids: list[int], *, by_layer: bool) -> None:
    copies = HostCopies(case.layers, case.layout)
    assert (copies._merged is not None) == (count > 1)
    out = arena_pages(3, case.layout.page_bytes)
    copies.gather(ids[:3], out)
    assert [page.tobytes() for page in out] == case.naive_pages(ids[:3])

    pages = random_pages(2, case.layout.page_bytes, seed=1)
    untouched = case.naive_pages(ids[2:])
    told: list[int] = []
    copies.scatter(pages, ids[:2], told.append if by_layer else None)
    assert case.naive_pages(ids) == [*(page.tobytes() for page in pages), *untouched]
    assert told == (list(range(case.layout.layers)) if by_layer else [])


@needs_lists
def test_layers_that_touch_are_one_run_a_page(python_core: None, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = torch.rand(8, 12, 4096)
    copies = HostCopies(list(blocks.unbind(1)), describe(list(blocks.unbind(1)), "block dim"))
    lists: list[tuple[int, int]] = []
    monkeypatch.setattr(host, "copy_runs", lambda targets, _, run_bytes: lists.append((len(targets), run_bytes)))
    pages = [np.zeros(12 * 4 * 4096, np.uint8) for _ in range(3)]

    copies.gather([5, 0, 2], pages)
    copies.scatter(pages, [5, 0, 2])
    copies.scatter(pages, [5, 0, 2], lambda layer: None)

    assert lists == [(3, 12 * 4 * 4096)] * 2 + [(3, 4 * 4096)] * 12
