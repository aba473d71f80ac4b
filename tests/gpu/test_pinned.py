from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from cuda_memory import CudaMemory

from kvstore.errors import InvalidRequestError
from kvstore.gpu.pinned import PinnedMapping, is_pinned


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is here")
def test_without_a_device_nothing_is_pinned_and_the_reason_is_told() -> None:
    with PinnedMapping(np.zeros(4096, np.uint8)) as mapping:
        assert not mapping.pinned
        assert mapping.reason.startswith("no CUDA device")
    mapping.release()


@pytest.mark.parametrize("memory", [np.zeros(0, np.uint8), np.zeros(64, np.uint8)[::2]])
def test_memory_that_is_not_one_piece_is_refused(memory: np.ndarray) -> None:  # type: ignore[type-arg]
    with pytest.raises(InvalidRequestError, match="only contiguous memory of at least 1 byte"):
        PinnedMapping(memory)


def test_what_lies_in_a_mapping_is_pinned_until_it_is_released() -> None:
    memory, runtime = np.zeros(4096, np.uint8), CudaMemory()

    with PinnedMapping(memory[1024:3072], runtime) as mapping:
        assert mapping.pinned
        assert runtime.registered == {memory.ctypes.data + 1024: 2048}
        assert runtime.flags == {memory.ctypes.data + 1024: 0x03}  # portable, mapped
        assert is_pinned(memory[1024:3072])
        assert not is_pinned(memory[1023:2000])
        assert not is_pinned(memory[2000:3073])

    assert not runtime.registered
    assert not is_pinned(memory[1024:3072])
    mapping.release()


def test_memory_that_may_not_be_written_is_registered_as_such() -> None:
    memory, runtime = np.zeros(4096, np.uint8), CudaMemory()
    memory.flags.writeable = False

    with PinnedMapping(memory, runtime):
        assert runtime.flags[memory.ctypes.data] == 0x0B


def test_what_the_runtime_refuses_is_not_pinned_and_not_unregistered() -> None:
    memory, runtime = np.zeros(4096, np.uint8), CudaMemory()
    runtime.statuses = [2, 217]

    with PinnedMapping(memory, runtime) as mapping:
        assert mapping.reason == "cudaHostRegister refused 4096 bytes: cudaErrorMemoryAllocation (2)"
        assert not is_pinned(memory)
    assert PinnedMapping(memory, runtime).reason == "cudaHostRegister refused 4096 bytes: error 217"
    assert not runtime.faults


def test_one_memory_is_registered_once_and_until_its_last_mapping_is_released() -> None:
    memory, runtime = np.zeros(4096, np.uint8), CudaMemory()
    first, second = PinnedMapping(memory, runtime), PinnedMapping(memory[:], runtime)
    assert first.pinned
    assert second.pinned

    first.release()
    first.release()

    assert is_pinned(memory)
    assert runtime.registered

    second.release()
    assert not is_pinned(memory)
    assert not runtime.registered

    with PinnedMapping(memory, runtime):
        assert is_pinned(memory)


def test_one_that_comes_while_the_memory_is_being_registered_waits_for_that() -> None:
    memory = np.zeros(4096, np.uint8)
    runtime = CudaMemory()
    runtime.go_on.clear()
    mappings: list[PinnedMapping] = []
    threads = [threading.Thread(target=lambda: mappings.append(PinnedMapping(memory, runtime))) for _ in range(2)]
    for thread in threads:
        thread.start()
    assert runtime.reached.wait(60)
    assert not is_pinned(memory), "whoever asks meanwhile does not wait"
    runtime.go_on.set()
    for thread in threads:
        thread.join(60)

    assert [mapping.pinned for mapping in mappings] == [True, True]
    for mapping in mappings:
        mapping.release()
    assert not runtime.registered
