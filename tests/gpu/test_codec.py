from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_layouts import paged_kv

from kvstore.errors import InvalidRequestError
from kvstore.gpu.codec import CODECS, Codec
from kvstore.gpu.layout import PageLayout
from kvstore.gpu.paged_kv import PagedKV
from kvstore.gpu.quantized import QuantizedKV
from kvstore.gpu.tensors import describe

SIZES = {"layer": 2, "kv": 2, "block": 5, "token": 4, "head": 3, "dim": 8}
LARGEST = {"int8": 127.0, "fp8": 448.0}


def layout_of(axes: str = "block kv token head dim", dtype: torch.dtype = torch.float32) -> PageLayout:
    case = paged_kv(axes, SIZES, dtype)
    return describe(case.layers, axes)


def pages_of(layout: PageLayout, dtype: torch.dtype, seed: int, spread: float = 4.0) -> torch.Tensor:
    """Two pages whose heads are of very different size."""
    generator = torch.Generator().manual_seed(seed)
    pages = torch.randn((2, *layout.page_shape), generator=generator)
    return (pages * torch.exp(spread * torch.randn((*pages.shape[:-1], 1), generator=generator))).to(dtype)


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("axes", ["block kv token head dim", "block head token dim", "block token dim"])
@given(
    seed=st.integers(0, 1000),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
@settings(max_examples=30, deadline=None)
def test_what_comes_back_is_off_by_no_more_than_is_said(name: str, axes: str, seed: int, dtype: torch.dtype) -> None:
    layout = layout_of(axes, dtype)
    codec = Codec(name, layout, dtype)
    pages = pages_of(layout, dtype, seed, spread=1.0)

    encoded = codec.encode(pages)
    back = codec.decode(encoded)

    assert encoded.shape == (2, codec.page_bytes)
    assert encoded.dtype == torch.uint8
    assert back.dtype == dtype
    names = ("layer", *layout.inside)
    shared = [place + 1 for place, axis in enumerate(names) if axis in ("token", "dim")]
    values = pages.double()
    head = values.abs().amax(shared, keepdim=True)
    step = head / LARGEST[name]
    rounding = 2.0 ** {torch.float32: -20, torch.float16: -10, torch.bfloat16: -7}[dtype] * values.abs()
    # fp8 has 4 bits of an element, and below 2**-6 steps of 2**-9 of its scale.
    allowed = step / 2 if name == "int8" else torch.maximum(values.abs() / 16, step * 2.0**-10)
    assert ((back.double() - values).abs() <= allowed * 1.001 + rounding + 1e-30).all()


@pytest.mark.parametrize("name", CODECS)
def test_a_page_is_a_byte_an_element_and_a_scale_a_head(name: str) -> None:
    layout = layout_of()
    codec = Codec(name, layout, torch.float32)

    assert codec.scale_shape == (2, 2, 1, 3, 1)
    assert codec.page_bytes == 2 * 2 * 3 * 4 + math.prod(layout.page_shape)
    assert codec.page_bytes < layout.page_bytes / 3


@pytest.mark.parametrize("name", CODECS)
def test_a_head_of_zeros_stays_so_and_what_is_no_number_harms_its_own_head_only(name: str) -> None:
    layout = layout_of()
    codec = Codec(name, layout, torch.float32)
    pages = pages_of(layout, torch.float32, seed=1)
    pages[0, 0, 0, :, 0] = 0.0
    pages[0, 1, 0, 0, 1, 0] = float("nan")
    pages[0, 1, 1, 0, 2, 0] = float("inf")
    clean = codec.decode(codec.encode(pages_of(layout, torch.float32, seed=1)))

    back = codec.decode(codec.encode(pages))

    assert not back[0, 0, 0, :, 0].any()
    assert back.isfinite().all()
    assert back[0, 1, 0, 0, 1, 0] == 0.0
    harmed = torch.zeros_like(back, dtype=torch.bool)
    harmed[0, 0, 0, :, 0] = harmed[0, 1, 0, :, 1] = harmed[0, 1, 1, :, 2] = True
    assert torch.equal(back[~harmed], clean[~harmed])


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_decoded_page_encodes_to_nearly_itself(name: str, dtype: torch.dtype) -> None:
    layout = layout_of(dtype=dtype)
    codec = Codec(name, layout, dtype)
    once = codec.decode(codec.encode(pages_of(layout, dtype, seed=2)))

    twice = codec.decode(codec.encode(once))

    assert ((twice - once).abs().double() <= once.abs().double() / 64).all()


def test_blocks_come_back_through_encoded_pages() -> None:
    case = paged_kv("kv block token head dim", SIZES, torch.float32)
    for tensor in case.tensors:
        tensor.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(3)))
    before = [tensor.clone() for tensor in case.tensors]
    kv = QuantizedKV(PagedKV(case.tensors, case.axes), "int8")
    pages = [np.zeros(kv.page_bytes, np.uint8) for _ in range(2)]
    told: list[int] = []

    kv.gather([1, 4], pages)
    for tensor in case.tensors:
        tensor[:, [1, 4]] = 0.0
    kv.scatter(pages, [1, 4], told.append)

    for tensor, old in zip(case.tensors, before, strict=True):
        assert torch.equal(tensor[:, [0, 2, 3]], old[:, [0, 2, 3]])
        assert (tensor - old).abs().max() < 0.02
        assert not torch.equal(tensor, old)
    assert told == [0, 1]


@pytest.mark.parametrize(
    ("name", "dtype", "says"),
    [
        ("int4", torch.float32, "codec 'int4' is unknown; known: int8, fp8"),
        ("int8", torch.float8_e4m3fn, "got torch.float8_e4m3fn"),
        ("fp8", torch.int8, "codec 'fp8' takes torch.float32, torch.bfloat16, torch.float16, got torch.int8"),
    ],
)
def test_other_codecs_and_elements_are_refused(name: str, dtype: torch.dtype, says: str) -> None:
    case = paged_kv("block token dim", SIZES, dtype)
    with pytest.raises(InvalidRequestError, match=says):
        QuantizedKV(PagedKV(case.tensors, case.axes), name)
