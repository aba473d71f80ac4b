from __future__ import annotations

import numpy as np
import pytest
import torch

from gpu.pinned import PinnedMapping
from kvstore.errors import InvalidRequestError


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is here")
def test_without_a_device_nothing_is_pinned_and_the_reason_is_told() -> None:
    with PinnedMapping(np.zeros(4096, np.uint8)) as mapping:
        assert not mapping.pinned
        assert mapping.reason == "no CUDA device"
    mapping.release()


@pytest.mark.parametrize("memory", [np.zeros(0, np.uint8), np.zeros(64, np.uint8)[::2]])
def test_memory_that_is_not_one_piece_is_refused(memory: np.ndarray) -> None:  # type: ignore[type-arg]
    with pytest.raises(InvalidRequestError, match="only contiguous memory of at least 1 byte"):
        PinnedMapping(memory)


@pytest.mark.cuda
def test_a_mapping_is_pinned_until_it_is_released() -> None:
    memory = np.zeros(1 << 20, np.uint8)
    tensor = torch.from_numpy(memory)

    with PinnedMapping(memory) as mapping:
        assert mapping.pinned, mapping.reason
        assert tensor.is_pinned()

    assert not mapping.pinned
    assert not tensor.is_pinned()
