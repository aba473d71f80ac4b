from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import InvalidRequestError
from kvstore.gpu.layout import (
    KV_FIRST,
    PAGE_FORMAT,
    PageLayout,
    Runs,
)

SIZES = {"kv": 2, "block": 7, "token": 16, "head": 4, "dim": 64}


def dense(axes: str, *, itemsize: int = 2, order: str = "", page_tokens: int | None = None) -> PageLayout:
    """Three layers without gaps, in the order given."""
    names = axes.split()
    strides, step = {}, itemsize
    for name in reversed((order or axes).split()):
        strides[name] = step
        step *= SIZES[name]
    shape = [SIZES[name] for name in names]
    return PageLayout.describe(
        axes, shape, [strides[name] for name in names], itemsize, layers=3, page_tokens=page_tokens
    )


@pytest.mark.parametrize(
    ("axes", "order", "format_"),
    [
        (KV_FIRST, "", PAGE_FORMAT),
        ("block kv token head dim", "", PAGE_FORMAT),
        ("block head token dim", "", "layer-head-token-dim/1"),
        (KV_FIRST, "kv block head token dim", "layer-kv-head-token-dim/1"),  # shown as others, lying otherwise
        ("block token dim", "", "layer-token-dim/1"),
        ("block dim", "", "layer-dim/1"),
        ("block token kv head dim", "", "layer-token-kv-head-dim/1"),
        ("head block token dim", "", "layer-head-token-dim/1"),
    ],
)
def test_a_pages_format_says_how_a_blocks_inside_lies(axes: str, order: str, format_: str) -> None:
    layout = dense(axes, order=order)

    assert layout.format == format_
    assert layout.page_bytes == 3 * 2 * math.prod(SIZES[name] for name in axes.split() if name != "block")


def test_an_axis_of_one_element_changes_no_order_whatever_its_stride() -> None:
    shape = [2, 7, 16, 1, 64]
    usual = PageLayout.describe(KV_FIRST, shape, [7 * 2048, 2048, 128, 128, 2], 2)
    odd = PageLayout.describe(KV_FIRST, shape, [7 * 2048, 2048, 128, 999, 2], 2)

    assert usual.format == odd.format == PAGE_FORMAT
    assert usual.runs == odd.runs


@pytest.mark.parametrize(
    ("axes", "order", "page_tokens", "runs"),
    [
        (KV_FIRST, "", None, Runs(2, 7 * 8192, 8192, 1, 0, 1, 1, 8192)),
        ("block kv token head dim", "", None, Runs(1, 0, 16384, 1, 0, 1, 1, 16384)),  # one run a block
        ("block head token dim", "", None, Runs(1, 0, 8192, 1, 0, 1, 1, 8192)),
        ("block head token dim", "", 64, Runs(1, 0, 8192, 4, 2048, 1, 4, 2048)),
        ("block head token dim", "", 4, Runs(1, 0, 8192, 4, 2048, 4, 1, 512)),
        (KV_FIRST, "", 4, Runs(2, 7 * 8192, 8192, 1, 0, 4, 1, 2048)),
        ("head block token dim", "", None, Runs(4, 7 * 2048, 2048, 1, 0, 1, 1, 2048)),
        ("head block token dim", "", 4, Runs(4, 7 * 2048, 2048, 1, 0, 4, 1, 512)),
        ("block dim", "", None, Runs(1, 0, 128, 1, 0, 1, 1, 128)),
    ],
)
def test_runs_are_as_long_as_page_and_block_agree(axes: str, order: str, page_tokens: int | None, runs: Runs) -> None:
    assert dense(axes, order=order, page_tokens=page_tokens).runs == runs


def test_a_page_or_a_block_is_several_pieces_where_the_other_is_shorter() -> None:
    same, longer, shorter = (dense(KV_FIRST, page_tokens=tokens) for tokens in (16, 32, 8))

    assert [(each.pieces_per_page, each.pieces_per_block) for each in (same, longer, shorter)] == [
        (1, 1),
        (2, 1),
        (1, 2),
    ]
    assert [each.num_pieces for each in (same, longer, shorter)] == [7, 7, 14]


@pytest.mark.parametrize(
    ("axes", "says"),
    [
        ("kv block token heads dim", "unknown axis 'heads'"),
        ("kv block token token dim", "axis 'token' is there twice"),
        ("kv token head dim", "axis 'block' is missing"),
        ("block token head", "axis 'dim' is missing"),
        ("layer block token dim", "has no axis 'layer'"),
    ],
)
def test_axes_that_declare_no_paged_kv_are_refused(axes: str, says: str) -> None:
    with pytest.raises(InvalidRequestError, match=says):
        PageLayout.describe(axes, [2] * len(axes.split()), [2] * len(axes.split()), 2)


@pytest.mark.parametrize(
    ("shape", "strides", "says"),
    [
        ([7, 16], [2048, 128], r"3 axes \(block, token, dim\), none of them empty, got shape \(7, 16\)"),
        ([7, 0, 64], [2048, 128, 2], r"got shape \(7, 0, 64\)"),
        ([7, 16, 64], [2048, 130, 2], "axis 'token' has a stride of 130 bytes where 128 follow each other"),
        ([7, 16, 64], [2048, 128, 4], "axis 'dim' has a stride of 4 bytes where 2 follow"),
        ([7, 16, 64], [2048, 0, 2], "axis 'dim' has a stride of 2 bytes|axis 'token' has a stride of 0"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(shape: list[int], strides: list[int], says: str) -> None:
    with pytest.raises(InvalidRequestError, match=says):
        PageLayout.describe("block token dim", shape, strides, 2)


@pytest.mark.parametrize("page_tokens", [0, -16, 24, 5])
def test_pages_that_do_not_go_into_blocks_nor_blocks_into_them_are_refused(page_tokens: int) -> None:
    with pytest.raises(InvalidRequestError, match=f"pages of {page_tokens} tokens and blocks of 16"):
        dense(KV_FIRST, page_tokens=page_tokens)


def test_a_block_without_tokens_is_a_page() -> None:
    with pytest.raises(InvalidRequestError, match="without an axis 'token' are pages, there are none of 4 tokens"):
        dense("block dim", page_tokens=4)


@given(stretches=st.lists(st.integers(1, 12), min_size=1, max_size=4), block=st.sampled_from([6 * 128, 4096]))
def test_layers_touch_in_stretches_and_what_divides_them_all_is_copied_as_one(stretches: list[int], block: int) -> None:
    starts, at = [], 1000
    for length in stretches:
        starts += [at + 128 * number for number in range(length)]
        at = starts[-1] + 128 + 64
    layout = PageLayout.describe("block dim", [7, 64], [block, 2], 2, layers=len(starts))
    count = layout.touching(starts)

    assert all(length % count == 0 for length in stretches)
    assert not any(all(length % more == 0 for length in stretches) for more in range(count + 1, max(stretches) + 1))
    merged = layout.merged(count)
    assert (merged.layers, merged.page_bytes, merged.num_pieces) == (len(starts) // count, layout.page_bytes, 7)
    assert merged.runs == Runs(1, 0, block, 1, 0, 1, 1, 128 * count)
    assert merged.merged(merged.touching(starts[::count])) == merged


@pytest.mark.parametrize(
    ("axes", "order", "page_tokens", "step"),
    [
        (KV_FIRST, "", None, 8192),  # keys of all blocks, then values: two runs a layer
        ("block head token dim", "", 4, 8192),  # a page is a part of a block
        ("block head token dim", "", 4, 512),
        ("block token dim", "", 4, 512),
        ("block token dim", "", 64, 2048),  # a page is several blocks: a layer of them, then the next one
        ("block dim", "", None, 127),
        ("block dim", "", None, 0),
        ("block dim", "", None, -128),
    ],
)
def test_layers_that_a_page_does_not_have_side_by_side_are_copied_one_by_one(
    axes: str, order: str, page_tokens: int | None, step: int
) -> None:
    assert dense(axes, order=order, page_tokens=page_tokens).touching([9000 + step * layer for layer in range(3)]) == 1
