"""Rows of bytes out of an engine's blocks, and what is told of them."""

from __future__ import annotations

import numpy as np
import pytest
from engine_objects import group_of_heads, group_of_shapes
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="reads an engine's tensors")

from kvstore.connector.engine.identity import cache_group  # noqa: E402
from kvstore.connector.engine.page_rows import layout_in_page, rows_by_part, rows_of  # noqa: E402
from kvstore.errors import ConfigError, ResourceError  # noqa: E402
from kvstore.gpu.mixed import paged_kv  # noqa: E402


def test_a_block_that_is_one_run_of_bytes_is_a_row() -> None:
    whole = torch.arange(4 * 2 * 8 * 6, dtype=torch.int16).view(4, 2, 8, 6)
    rows = rows_of(whole, 2 * 8 * 6 * 2)
    assert torch.equal(rows[3].view(torch.int16), whole[3].flatten())
    turned = whole.view(4, 8, 2, 6).transpose(1, 2)  # shown in another order than it lies
    assert torch.equal(rows_of(turned, 192), rows)
    padded = torch.zeros(4, 256, dtype=torch.uint8)[:, :192].view(4, 2, 96)
    assert rows_of(padded, 256).shape == (4, 256)
    assert rows_of(padded, 192).stride() == (256, 1)


ORDERS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
"""Of layers, blocks, heads, tokens and contents in memory, as vLLM names them."""


def laid_out(content: torch.Tensor, order: str) -> dict[str, torch.Tensor]:
    """Each layer's ``(blocks, heads, tokens, elements)`` of ``(layers, blocks, heads, tokens, elements)``, which lie in
    this order."""
    there = ["LBHNC".index(name) for name in order]
    memory = content.permute(there).contiguous()
    return dict(zip("01", memory.permute([there.index(axis) for axis in range(5)]), strict=True))


@given(
    sizes=st.tuples(*(st.integers(1, 4) for _ in range(3)), st.sampled_from([3, 1100])),
    orders=st.permutations(ORDERS),
    parts=st.sampled_from([0, 1, 2]),
    seed=st.integers(0, 1000),
)
def test_pages_are_the_same_whatever_lies_around_the_inside_of_a_block(
    sizes: tuple[int, int, int, int], orders: list[str], parts: int, seed: int
) -> None:
    blocks, share, tokens, elements = sizes
    heads = share * max(1, parts)
    dice = np.random.default_rng(seed)
    shape = (2, blocks, heads, tokens, elements)
    content = torch.from_numpy(dice.integers(-99, 99, shape, np.int16))
    group = group_of_heads(heads, heads * tokens * elements * 2)
    ids = dice.permutation(blocks)[: dice.integers(1, blocks + 1)].tolist()
    only = torch.zeros_like(content)
    only[:, ids] = content[:, ids]
    for order in orders:
        theirs, ours = laid_out(content, order), laid_out(torch.zeros_like(content), order)
        for part, (rows, others) in enumerate(
            zip(rows_by_part(group, theirs, parts), rows_by_part(group, ours, parts), strict=True)
        ):
            pages = list(np.zeros((len(ids), 2 * rows[0][0].numel()), np.uint8))
            paged_kv(rows).gather(ids, pages)
            of_part = content[:, :, part * share : (part + 1) * share]
            inside = of_part.transpose(2, 3) if order.endswith("NHC") else of_part
            assert [page.tobytes() for page in pages] == [
                inside[:, each].contiguous().numpy().tobytes() for each in ids
            ]
            paged_kv(others).scatter(pages, ids)
        assert torch.equal(torch.stack([*ours.values()]), only), "other bytes than those of the pages were written"


def test_engines_whose_pages_are_the_same_give_them_one_name() -> None:
    described = {}
    for number, order in enumerate(ORDERS):
        views = laid_out(torch.zeros(2, 5 + number, 4, 8, 6), order)  # engines with more memory or less
        details = ["vllm", layout_in_page(order)]
        described[order] = cache_group(group_of_heads(4), views, 2 * 768, details, lambda _: "")

    head_major, token_major = described["LBHNC"], described["LBNHC"]
    assert head_major != token_major
    assert [order for order, of in described.items() if of == head_major] == ["LBHNC", "LHBNC", "BLHNC", "BHLNC"]
    assert [order for order, of in described.items() if of == token_major] == ["LBNHC", "BLNHC"]
    assert layout_in_page("") == ""


def test_a_single_head_lies_where_it_lies() -> None:
    views = laid_out(torch.zeros(2, 5, 1, 8, 6), "LHBNC")
    fewer = laid_out(torch.zeros(2, 3, 1, 8, 6), "BHLNC")
    described = [
        cache_group(group_of_heads(1), each, 2 * 192, ["vllm", "LBHNC"], lambda _: "") for each in (views, fewer)
    ]
    assert described[0] == described[1]
    assert rows_of(views["1"], 192).shape == (5, 192)


def test_a_block_of_which_parts_lie_elsewhere_is_refused() -> None:
    tokens_outside = torch.zeros(8, 4, 2, 6).permute(1, 2, 0, 3)  # all blocks of one token, then of the next
    with pytest.raises(ResourceError, match="not one run of bytes"):
        rows_of(tokens_outside, 2 * 8 * 6 * 4)
    heads_outside = torch.zeros(2, 4, 8, 6).transpose(0, 1)
    with pytest.raises(ResourceError, match="not one run of bytes"):
        rows_of(heads_outside, 2 * 8 * 6 * 4 + 64)  # nothing pads what lies apart
    with pytest.raises(ResourceError, match="not one run of bytes"):
        rows_of(torch.zeros(4, 96, dtype=torch.uint8), 128)  # pages longer than from block to block


@pytest.mark.parametrize("order", ["LBHNC", "LBNHC"])
def test_heads_are_cut_into_what_ranks_have(order: str) -> None:
    content = torch.randn(2, 5, 4, 8, 6)
    whole, of_rank = laid_out(content, order), laid_out(content[:, :, 2:], order)
    first, second = rows_by_part(group_of_heads(4), whole, 2)
    (alone,) = rows_by_part(group_of_heads(2), of_rank, 1)
    assert all(torch.equal(ours.reshape(5, -1), theirs) for ours, theirs in zip(second, alone, strict=True))
    assert first[0].shape == ((5, 2 * 8 * 6 * 4) if order == "LBHNC" else (5, 8, 2 * 6 * 4))
    # So both have one name, and are told from what is cut otherwise.
    described = cache_group(group_of_heads(4), whole, 2 * 384, ["vllm"], lambda _: "", 2)
    assert described == cache_group(group_of_heads(2), of_rank, 2 * 384, ["vllm"], lambda _: "", 1)
    assert described == cache_group(group_of_heads(2), of_rank, 2 * 384, ["vllm"], lambda _: "")
    assert described != cache_group(group_of_heads(4), whole, 4 * 384, ["vllm"], lambda _: "")


def test_pages_of_layers_with_other_heads_are_those_of_ranks_that_have_a_part_of_each() -> None:
    whole = {name: torch.randn(5, heads, 8, 6) for name, heads in (("0", 4), ("1", 2), ("2", 4))}
    of_rank = {name: blocks[:, blocks.shape[1] // 2 :].contiguous() for name, blocks in whole.items()}
    _, second = rows_by_part(group_of_shapes([4, 2, 4]), whole, 2)
    (alone,) = rows_by_part(group_of_shapes([2, 1, 2]), of_rank, 0)
    pages = [np.zeros(5 * 8 * 6 * 4, np.uint8) for _ in range(2)]
    for rows, page in zip((second, alone), pages, strict=True):
        paged_kv(rows).gather([3], [page])
    assert pages[0].tobytes() == pages[1].tobytes()
    assert pages[0].tobytes() == b"".join(of_rank[name][3].numpy().tobytes() for name in ("0", "2", "1"))
    described = cache_group(group_of_shapes([2, 1, 2]), of_rank, 960, ["vllm"], lambda _: "")
    assert described != cache_group(group_of_shapes([2, 2, 1]), of_rank, 960, ["vllm"], lambda _: "")


@pytest.mark.parametrize(
    ("blocks", "parts", "says"),
    [
        (torch.zeros(5, 4, 8, 6), 3, "4 KV heads of 0 can't be cut into 3"),
        (torch.zeros(5, 6, 4, 8).permute(0, 2, 3, 1), 2, "are no runs of bytes, by head or by token"),
        (torch.zeros(5, 2, 4, 4, 6), 2, "don't show their KV heads"),
        (torch.zeros(5, 8, 6), 2, "don't show their KV heads"),
    ],
)
def test_heads_that_can_not_be_cut_are_refused(blocks: torch.Tensor, parts: int, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        rows_by_part(group_of_heads(4), {"0": blocks, "1": blocks}, parts)
