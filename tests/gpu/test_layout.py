from __future__ import annotations

import pytest
import torch

from gpu.layout import PageLayout
from kvstore.errors import InvalidRequestError


def test_a_page_is_one_block_of_all_layers() -> None:
    layout = PageLayout.of([torch.zeros(2, 7, 16, 4, 64, dtype=torch.bfloat16)] * 3)

    assert layout == PageLayout(3, 7, 16, 4, 64, torch.bfloat16)
    assert layout.page_shape == (3, 2, 16, 4, 64)
    assert layout.block_bytes == 16 * 4 * 64 * 2
    assert layout.page_bytes == 3 * 2 * layout.block_bytes


def test_layers_may_be_slices_of_one_storage() -> None:
    storage = torch.zeros(7, 3, 2, 16, 4, 8)

    layout = PageLayout.of([storage[:, layer].transpose(0, 1) for layer in range(3)])

    assert layout == PageLayout(3, 7, 16, 4, 8, torch.float32)


@pytest.mark.parametrize(
    ("layers", "says"),
    [
        ([], "at least 1 layer, got 0"),
        ([torch.zeros(2, 7, 16, 32)], r"got \(2, 7, 16, 32\)"),
        ([torch.zeros(3, 7, 16, 4, 8)], r"got \(3, 7, 16, 4, 8\)"),
        ([torch.zeros(2, 0, 16, 4, 8)], r"got \(2, 0, 16, 4, 8\)"),
        ([torch.zeros(2, 7, 16, 4, 8), torch.zeros(2, 6, 16, 4, 8)], r"layer 1 is \(2, 6, 16, 4, 8\)"),
        ([torch.zeros(2, 7, 16, 4, 8), torch.zeros(2, 7, 16, 4, 8).half()], r"layer 1 is .* torch.float16"),
        ([torch.zeros(2, 7, 16, 4, 8), torch.zeros(2, 7, 16, 4, 8, device="meta")], r"layer 1 is .* on meta"),
        ([torch.zeros(2, 7, 16, 8, 4).transpose(3, 4)], "layer 0: the inside of a block must be contiguous"),
    ],
)
def test_other_tensors_are_refused(layers: list[torch.Tensor], says: str) -> None:
    with pytest.raises(InvalidRequestError, match=says):
        PageLayout.of(layers)
