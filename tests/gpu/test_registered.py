"""Which memory is registered, what of it a copy may rely on, and where a copy has to be cut."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from cuda_memory import CudaMemory

from kvstore.gpu.registered import Registered


@pytest.fixture
def cuda() -> CudaMemory:
    return CudaMemory()


def test_a_page_is_pinned_that_lies_in_one_piece_of_registered_memory(cuda: CudaMemory) -> None:
    memory, registered = np.zeros(4096, np.uint8), Registered()
    for part in (memory[2048:3072], memory[1024:2048]):
        assert registered.take(part, cuda, 0) == 0

    assert registered.is_pinned(memory[1024:2048])
    assert registered.is_pinned(memory[2047:2048])
    assert registered.is_pinned(memory[2048:3072])
    assert not registered.is_pinned(memory[1023:1025])
    assert not registered.is_pinned(memory[3071:3073])
    assert not registered.is_pinned(memory[2000:2100]), "CUDA promises nothing for a copy across two"
    assert not registered.is_pinned(memory)
    assert registered.pinned_bytes(memory) == 2048
    assert registered.pinned_bytes(memory[2000:2100]) == 100


def test_a_use_keeps_what_it_may_rely_on_and_nothing_else_does(cuda: CudaMemory) -> None:
    first, second, registered = np.zeros(64, np.uint8), np.zeros(64, np.uint8), Registered()
    registered.take(first, cuda, 0)
    registered.take(second, cuda, 0)

    with registered.use():
        registered.leave(first)
        assert not registered.is_pinned(first)
        assert len(cuda.registered) == 2
        with registered.use():  # began behind it, and never saw the first one
            registered.leave(second)
        assert len(cuda.registered) == 2
    assert not cuda.registered

    registered.take(first, cuda, 0)
    registered.leave(first)
    assert not cuda.registered, "without a use nothing is waited for"


def test_a_use_that_began_behind_the_end_of_a_registration_does_not_keep_it(cuda: CudaMemory) -> None:
    memory, registered = np.zeros(64, np.uint8), Registered()
    registered.take(memory, cuda, 0)
    with registered.use():
        registered.leave(memory)
        later = registered.use()
        later.__enter__()
    assert not cuda.registered
    later.__exit__(None, None, None)


def test_memory_that_comes_back_before_it_was_unregistered_is_not_registered_twice(cuda: CudaMemory) -> None:
    memory, registered = np.zeros(64, np.uint8), Registered()
    registered.take(memory, cuda, 0)
    with registered.use():
        registered.leave(memory)
        assert registered.take(memory, cuda, 0) == 0
        assert registered.is_pinned(memory)
    assert registered.is_pinned(memory)
    assert cuda.registered

    registered.leave(memory)
    assert not cuda.registered
    assert not cuda.faults


def test_one_that_comes_while_the_memory_is_being_unregistered_waits_for_that() -> None:
    memory, registered = np.zeros(64, np.uint8), Registered()
    reached, go_on = threading.Event(), threading.Event()

    class Slow(CudaMemory):
        def cudaHostUnregister(self, address: int) -> int:
            reached.set()
            assert go_on.wait(60)
            return super().cudaHostUnregister(address)

    cuda = Slow()
    registered.take(memory, cuda, 0)
    leaving = threading.Thread(target=registered.leave, args=(memory,))
    leaving.start()
    assert reached.wait(60)
    statuses: list[int] = []
    coming = threading.Thread(target=lambda: statuses.append(registered.take(memory, cuda, 0)))
    coming.start()
    assert not registered.is_pinned(memory)
    go_on.set()
    leaving.join(60)
    coming.join(60)

    assert statuses == [0]
    assert registered.is_pinned(memory)
    assert not cuda.faults


def test_a_call_that_fails_leaves_nothing_behind() -> None:
    memory, registered = np.zeros(64, np.uint8), Registered()

    class Broken(CudaMemory):
        def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
            raise OSError("the library is gone")

    with pytest.raises(OSError, match="the library is gone"):
        registered.take(memory, Broken(), 0)

    assert registered.cut(np.zeros(64, np.uint8)[:0]) != []
    assert registered.take(memory, CudaMemory(), 0) == 0


def test_a_page_is_cut_where_registered_memory_begins_and_ends(cuda: CudaMemory) -> None:
    memory, registered = np.arange(4096).astype(np.uint8), Registered()

    def cuts(page: slice) -> list[int]:
        parts = registered.cut(memory[page])
        assert np.array_equal(np.concatenate(parts), memory[page])
        return [part.size for part in parts]

    assert cuts(slice(0, 4096)) == [4096]
    registered.take(memory[1024:2048], cuda, 0)
    registered.take(memory[2048:3072], cuda, 0)
    assert cuts(slice(0, 4096)) == [1024, 1024, 1024, 1024]
    assert cuts(slice(1024, 2048)) == [1024]
    assert cuts(slice(2000, 2100)) == [48, 52]
    registered.leave(memory[1024:2048])
    assert cuts(slice(2000, 2100)) == [48, 52], "the second one is registered"
    registered.leave(memory[2048:3072])
    assert cuts(slice(0, 4096)) == [4096]


def test_a_page_is_cut_before_cuda_has_the_memory_and_until_it_has_it_no_more() -> None:
    # What CUDA has at the moment it gets the copy is what counts, not at the moment it was cut.
    memory, registered, seen = np.zeros(128, np.uint8), Registered(), []

    class Looking(CudaMemory):
        def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
            seen.append(len(registered.cut(memory)))
            return super().cudaHostRegister(address, size, flags)

        def cudaHostUnregister(self, address: int) -> int:
            seen.append(len(registered.cut(memory)))
            return super().cudaHostUnregister(address)

    registered.take(memory[:64], Looking(), 0)
    registered.leave(memory[:64])

    assert seen == [2, 2]


def test_a_page_is_cut_where_memory_will_be_registered(cuda: CudaMemory) -> None:
    memory, registered = np.zeros(192, np.uint8), Registered()
    planned = [memory.ctypes.data + 64, memory.ctypes.data + 128]

    registered.plan(planned)
    assert len(registered.cut(memory)) == 3
    registered.take(memory[:64], cuda, 0)
    registered.unplan(planned)
    assert [part.size for part in registered.cut(memory)] == [64, 128]
    registered.leave(memory[:64])
    assert len(registered.cut(memory)) == 1
