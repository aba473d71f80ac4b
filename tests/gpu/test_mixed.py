from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_layouts import arena_pages, random_pages

from kvstore.errors import InvalidRequestError
from kvstore.gpu.mixed import MixedKV, paged_kv
from kvstore.gpu.paged_kv import PagedKV

BLOCKS = 6
Shape = tuple[int, int]
"""Bytes of a block, and of the gap behind it."""

shapes = st.lists(
    st.tuples(st.sampled_from([1, 7, 132, 576, 4096, 8192]), st.sampled_from([0, 8, 64])), min_size=1, max_size=6
)
block_ids = st.lists(st.integers(0, BLOCKS - 1), unique=True, max_size=BLOCKS)


def memory_of(shapes: Sequence[Shape], seed: int = 0) -> list[torch.Tensor]:
    """Of each layer all bytes, a block and its gap a row."""
    generator = np.random.default_rng(seed)
    return [torch.from_numpy(generator.integers(0, 256, (BLOCKS, size + gap), dtype=np.uint8)) for size, gap in shapes]


def layers_in(memory: Sequence[torch.Tensor], shapes: Sequence[Shape]) -> list[torch.Tensor]:
    return [rows[:, :size] for rows, (size, _) in zip(memory, shapes, strict=True)]


def page_of(layers: Sequence[torch.Tensor], block: int) -> bytes:
    return b"".join(layer[block].cpu().numpy().tobytes() for layer in layers)


@given(shapes, block_ids, st.integers(0, 1000))
@settings(max_examples=200, deadline=None)
def test_a_page_is_a_block_of_one_layer_after_the_other(shapes: list[Shape], ids: list[int], seed: int) -> None:
    layers = layers_in(memory_of(shapes, seed), shapes)
    kv = paged_kv(layers)
    out = arena_pages(len(ids), kv.page_bytes)

    kv.gather(ids, out)

    assert [page.tobytes() for page in out] == [page_of(layers, block) for block in ids]


@given(shapes, block_ids, st.integers(0, 1000), st.booleans())
@settings(max_examples=200, deadline=None)
def test_pages_go_into_their_blocks_and_nowhere_else(
    shapes: list[Shape], ids: list[int], seed: int, by_layer: bool
) -> None:
    memory = memory_of(shapes, seed)
    kv = paged_kv(layers_in(memory, shapes))
    pages = random_pages(len(ids), kv.page_bytes, seed)
    expected = [rows.clone() for rows in memory]
    for block, page in zip(ids, pages, strict=True):
        start = 0
        for rows, (size, _) in zip(expected, shapes, strict=True):
            rows[block, :size] = torch.from_numpy(page[start : start + size].copy())
            start += size

    told: list[int] = []
    kv.scatter(pages, ids, told.append if by_layer else None)

    assert all(map(torch.equal, memory, expected))
    assert told == (list(range(len(shapes))) if by_layer and ids else [])


def test_a_layer_is_in_place_when_it_is_told_and_the_next_one_is_not() -> None:
    shapes = [(576, 0), (576, 0), (132, 8), (576, 0)]
    layers = layers_in(memory_of(shapes), shapes)
    kv = paged_kv(layers)
    (page,) = random_pages(1, kv.page_bytes, seed=1)
    parts = np.split(page, [576, 1152, 1284])
    seen: list[list[bool]] = []

    kv.scatter(
        [page],
        [4],
        lambda layer: seen.append(
            [bool((kv[4].numpy() == part).all()) for kv, part in zip(layers, parts, strict=True)]
        ),
    )

    assert seen == [[place <= layer for place in range(4)] for layer in range(4)]


def test_layers_that_are_alike_are_one_paged_kv_as_ever() -> None:
    shapes = [(576, 8)] * 3
    assert isinstance(paged_kv(layers_in(memory_of(shapes), shapes)), PagedKV)


SHAPES = [(576, 0), (132, 0), (132, 0)]


@pytest.mark.parametrize(
    ("ids", "sizes", "says"),
    [
        ([0, 1], [840], "2 block ids for 1 pages"),
        ([0, BLOCKS], [840, 840], "block id 6 is not between 0 and 5"),
        ([0, 1], [840, 841], "page 1 has 841 bytes, a page has 840"),
        ([0, 1], [840, 576], "page 1 has 576 bytes, a page has 840"),
    ],
)
def test_what_is_wrong_is_refused_and_nothing_is_copied(ids: list[int], sizes: list[int], says: str) -> None:
    memory = memory_of(SHAPES)
    before = [rows.clone() for rows in memory]
    kv = paged_kv(layers_in(memory, SHAPES))
    pages = [np.zeros(size, np.uint8) for size in sizes]

    with pytest.raises(InvalidRequestError, match=says):
        kv.gather(ids, pages)
    with pytest.raises(InvalidRequestError, match=says):
        kv.scatter(pages, ids)

    assert not any(page.any() for page in pages)
    assert all(map(torch.equal, memory, before))


def test_a_page_that_may_not_be_written_and_a_block_given_twice_are_refused_before_anything_is_copied() -> None:
    memory = memory_of(SHAPES)
    before = [rows.clone() for rows in memory]
    kv = paged_kv(layers_in(memory, SHAPES))
    pages = [np.zeros(840, np.uint8) for _ in range(2)]
    pages[1].flags.writeable = False

    with pytest.raises(InvalidRequestError, match="page 1: gather needs a writable array"):
        kv.gather([0, 1], pages)
    with pytest.raises(InvalidRequestError, match="block id 3 occurs twice"):
        kv.scatter(pages, [3, 3])

    assert not pages[0].any()
    assert all(map(torch.equal, memory, before))


def test_layers_of_other_blocks_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="have 6 blocks of 1 tokens and 5 of 1"):
        paged_kv([torch.zeros(6, 8), torch.zeros(5, 4)])
    with pytest.raises(InvalidRequestError, match="have 6 blocks of 4 tokens and 6 of 2"):
        MixedKV([PagedKV([torch.zeros(6, tokens, 8)], "block token dim") for tokens in (4, 2)])


@pytest.mark.cuda
@pytest.mark.parametrize("by_layer", [False, True])
def test_on_a_device_pages_go_out_and_back_in(by_layer: bool) -> None:
    shapes = [(8192, 0)] * 3 + [(132 * 64, 128)] * 2 + [(1001, 7)]
    layers = [rows.cuda()[:, :size] for rows, (size, _) in zip(memory_of(shapes), shapes, strict=True)]
    kv = paged_kv(layers)
    assert isinstance(kv, MixedKV)
    ids, others = [4, 0, 2], [1, 5, 3]
    wanted = [page_of(layers, block) for block in ids]
    out = arena_pages(3, kv.page_bytes)

    kv.gather(ids, out, kv.mark())
    assert [page.tobytes() for page in out] == wanted

    told: list[int] = []
    kv.scatter(out, others, told.append if by_layer else None, kv.mark())
    assert [page_of(layers, block) for block in others] == [page_of(layers, block) for block in ids] == wanted
    assert told == (list(range(6)) if by_layer else [])
