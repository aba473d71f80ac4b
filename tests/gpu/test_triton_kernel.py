"""The Triton kernel as compiled for an H100, without one; what it copies: test_strategies.py, in the interpreter."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kvstore.gpu.layout import PageLayout
from kvstore.gpu.tensors import describe

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="TRITON_INTERPRET=1: nothing is compiled"),
]

SIGNATURE = {"numbers": "*i64", "pieces": "i32", "first_layer": "i32", "layers": "i32"}


def layout_of(axes: str, *shape: int, page_tokens: int | None = None) -> PageLayout:
    """32 layers of bfloat16."""
    return describe([torch.empty(shape, dtype=torch.bfloat16, device="meta")] * 32, axes, page_tokens)


def runs_of(size: int) -> PageLayout:
    """61 layers whose blocks are one run each."""
    return describe([torch.empty(512, size, dtype=torch.uint8, device="meta")] * 61, "block dim")


ALIGNED = {
    "2 MiB": runs_of(2 << 20),
    "64 KiB": runs_of(64 << 10),
    "18 KiB": runs_of(18 << 10),
    "40 KiB and 16": runs_of((40 << 10) + 16),
    "1152": runs_of(1152),
    "16": runs_of(16),
    "keys, then values": layout_of("kv block token head dim", 2, 512, 16, 8, 128),
    "rows of 4 KiB": layout_of("block head token dim", 512, 8, 64, 128, page_tokens=16),
    "pages of 4 blocks": layout_of("block head token dim", 512, 8, 16, 128, page_tokens=64),
}


@pytest.fixture(autouse=True)
def _nothing_compiled_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def compiled(layout: PageLayout, alignment: int, *, gather: bool) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from kvstore.gpu.triton_kernel import LAUNCH_OPTIONS, copy_runs, variant

    constants = variant(layout, alignment, gather=gather)
    assert {*SIGNATURE, *constants} == {*copy_runs.arg_names}
    signature = {name: SIGNATURE.get(name, "constexpr") for name in copy_runs.arg_names}
    source = ASTSource(fn=copy_runs, signature=signature, constexprs=constants)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=LAUNCH_OPTIONS)


def widths(ptx: str, what: str) -> list[int]:
    """Bytes of each access to global memory: of what one thread loads (``ld``) or stores (``st``) at once."""
    found = re.findall(rf"\b{what}\.global(?:\.[\w:]+?)*?(?:\.v([24]))?\.[bsuf](8|16|32|64)\b", ptx)
    return [int(count or 1) * int(bits) // 8 for count, bits in found]


@pytest.mark.parametrize("gather", [True, False], ids=["out", "in"])
@pytest.mark.parametrize("name", ALIGNED)
def test_what_is_aligned_is_copied_16_bytes_at_once(name: str, gather: bool) -> None:
    from kvstore.gpu.triton_kernel import alignment

    assert alignment([1 << 20], ALIGNED[name]) == 16
    ptx = compiled(ALIGNED[name], 16, gather=gather).asm["ptx"]

    loads, stores = widths(ptx, "ld"), widths(ptx, "st")
    assert set(stores) == {16}
    assert loads.count(16) == len(stores)
    assert set(loads) == {16, 8}, "the others load addresses and numbers of pieces"
    assert ".local" not in ptx


@pytest.mark.parametrize("gather", [True, False], ids=["out", "in"])
@pytest.mark.parametrize("width", [8, 4, 2, 1])
def test_what_is_aligned_to_less_is_copied_in_words_of_that(width: int, gather: bool) -> None:
    for size in (3 * width, (64 << 10) + width):
        ptx = compiled(runs_of(size), width, gather=gather).asm["ptx"]

        assert set(widths(ptx, "st")) == {width}
        assert set(widths(ptx, "ld")) == {width, 8}
        assert ".local" not in ptx


@pytest.mark.parametrize("gather", [True, False], ids=["out", "in"])
@pytest.mark.parametrize(("name", "alignment"), [("64 KiB", 16), ("18 KiB", 16), ("1152", 16), ("1152", 1)])
def test_the_device_is_told_to_copy_16_bytes_at_once_and_no_register_is_spilled(
    name: str, alignment: int, gather: bool
) -> None:
    kernel = compiled(ALIGNED[name], alignment, gather=gather)
    try:
        code = kernel.asm["sass"]
    except RuntimeError as error:
        pytest.skip(f"cuobjdump and nvdisasm, which come with triton, do not run here: {error}")

    def count(what: str) -> int:
        return len(re.findall(rf"\b{what}\b", code))

    assert count("EXIT") > 0
    assert (count(r"LDG\.E\.128"), count(r"LDL") + count("STL")) == (count(r"STG\.E\.128"), 0)
    assert (count(r"STG\.E\.128") > 0) == (alignment == 16)
    assert count("STG") == count(r"STG\.E\.128") or alignment < 16


class DeviceOnPaper:
    """As much of Triton's driver as it takes to compile for an H100 what is about to be launched."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)


@pytest.fixture
def _device_on_paper() -> Iterator[None]:
    from triton.runtime import driver

    driver.set_active(DeviceOnPaper())
    yield
    with contextlib.suppress(RuntimeError):  # there is no device
        driver.reset_active()


@pytest.mark.usefixtures("_device_on_paper")
def test_a_layout_is_compiled_for_once_a_direction_whatever_a_call_copies() -> None:
    from kvstore.gpu.triton_kernel import LAUNCH_OPTIONS, PROGRAMS, copy_runs, variant

    kernels = []
    for gather in (True, False):
        constants = variant(ALIGNED["64 KiB"], 16, gather=gather)
        for pieces, first_layer, layers in [(1, 0, 61), (16, 1, 1), (17, 16, 16), (65_536, 60, 1), (1 << 30, 0, 61)]:
            for unaligned in (0, 1):
                numbers = torch.zeros(16 + unaligned, dtype=torch.int64)[unaligned:]
                arguments = numbers, pieces, first_layer, layers
                kernels.append(copy_runs.warmup(*arguments, **constants, **LAUNCH_OPTIONS, grid=(PROGRAMS,)))

    assert len({id(kernel) for kernel in kernels}) == 2
