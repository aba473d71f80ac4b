"""What is registered when, by chunks and in the background, and who unregisters it. CUDA's account is replaced: there
is no device to register anything with."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from cuda_memory import CudaMemory
from kv_layouts import paged_kv
from pinning_process import map_file

from kvstore.gpu import pinned_arena
from kvstore.gpu.cudart import cuda_runtime
from kvstore.gpu.paged_kv import PagedKV
from kvstore.gpu.pinned import PinnedMapping, cut, is_pinned, pinned_bytes
from kvstore.gpu.pinned_arena import PinnedArena
from kvstore.gpu.registered import Bytes
from kvstore.gpu.strategies import RunByRun, Staged, tensor_over

Eventually = Callable[[Callable[[], object]], None]
CHUNK = 4096
REAL_CHUNK = pinned_arena.CHUNK_BYTES
SIZES = {"layer": 3, "kv": 2, "block": 24, "token": 16, "head": 4, "dim": 8}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned_arena, "CHUNK_BYTES", CHUNK)


class Client:
    def __init__(self) -> None:
        self.arena: Bytes | None = np.zeros(4 * CHUNK, np.uint8)


@pytest.fixture
def client() -> Client:
    return Client()


@pytest.fixture
def cuda() -> Iterator[CudaMemory]:
    cuda = CudaMemory()
    yield cuda
    assert not cuda.faults


@pytest.fixture
def arena(client: Client, cuda: CudaMemory) -> Iterator[PinnedArena]:
    arena = PinnedArena(lambda: client.arena, lambda memory: PinnedMapping(memory, cuda))
    yield arena
    cuda.go_on.set()
    arena.close()
    assert not cuda.registered


def is_whole(memory: Bytes | None) -> bool:
    return memory is not None and pinned_bytes(memory) == memory.nbytes


def pin_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "kvstore-pin"]


def test_the_clients_arena_is_pinned_until_the_end(
    client: Client, cuda: CudaMemory, arena: PinnedArena, eventually: Eventually
) -> None:
    eventually(lambda: is_whole(client.arena))
    assert sorted(cuda.registered.values()) == [CHUNK] * 4
    with arena.use():
        assert is_whole(client.arena)
    assert is_whole(client.arena)

    arena.close()

    assert not cuda.registered
    with arena.use():  # a transfer queue's last copy
        assert pinned_bytes(client.arena) == 0
    assert not cuda.registered


def test_a_start_waits_for_nothing_and_what_is_registered_is_fast_at_once(client: Client, cuda: CudaMemory) -> None:
    second = threading.Event()

    def pin(memory: Bytes) -> PinnedMapping:
        if cuda.registered:
            second.set()
            cuda.go_on.clear()
        return PinnedMapping(memory, cuda)

    arena = PinnedArena(lambda: client.arena, pin)
    assert second.wait(60)

    assert is_pinned(client.arena[:CHUNK])
    assert not is_pinned(client.arena[CHUNK : 2 * CHUNK])
    with arena.use():
        assert pinned_bytes(client.arena) == CHUNK
    cuda.go_on.set()
    arena.close()


@pytest.mark.parametrize(
    ("units", "sizes"),
    [
        (8 << 10, [8 << 10] * 4),  # larger than a chunk: one each
        (1 << 10, [4 << 10] * 8),
        (3 << 10, [12 << 10] * 4),  # whole units, and whole pages of the machine's
        (20 << 10, [20 << 10] * 2),
    ],
)
def test_chunks_are_whole_units_and_whole_pages_of_the_machine(
    cuda: CudaMemory, units: int, sizes: list[int], eventually: Eventually
) -> None:
    memory = np.zeros((sum(sizes) // units, units), np.uint8)
    arena = PinnedArena(lambda: memory, lambda chunk: PinnedMapping(chunk, cuda))

    eventually(lambda: is_whole(memory))

    assert [cuda.registered[address] for address in sorted(cuda.registered)] == sizes
    arena.close()


def test_another_arena_takes_over_and_the_first_one_goes_behind_its_last_use(
    client: Client, cuda: CudaMemory, arena: PinnedArena, eventually: Eventually
) -> None:
    first = client.arena
    second = np.zeros(8192, np.uint8)
    eventually(lambda: is_whole(first))
    with arena.use():
        client.arena = second
        with arena.use():
            eventually(lambda: is_whole(second))
            eventually(lambda: pinned_bytes(first) == 0)  # no copy that begins now
        assert len(cuda.registered) == 6, "a copy that began before may still read from it"
    assert len(cuda.registered) == 2
    assert is_whole(second)


def test_a_use_keeps_every_arena_that_it_may_have_been_lent(
    client: Client, cuda: CudaMemory, arena: PinnedArena, eventually: Eventually
) -> None:
    client.arena = second = np.zeros(8192, np.uint8)
    third = np.zeros(8192, np.uint8)
    with arena.use():
        eventually(lambda: is_whole(second))
        client.arena = third
        with arena.use():
            pass
        eventually(lambda: is_whole(third))
        assert cuda.has(second.ctypes.data, second.ctypes.data + second.nbytes) == second.nbytes
    eventually(lambda: cuda.has(second.ctypes.data, second.ctypes.data + second.nbytes) == 0)


def test_a_node_that_comes_back_in_the_middle_leaves_nothing_of_the_first_arena(
    client: Client, cuda: CudaMemory, eventually: Eventually
) -> None:
    cuda.go_on.clear()
    first = client.arena
    arena = PinnedArena(lambda: client.arena, lambda memory: PinnedMapping(memory, cuda))
    assert cuda.reached.wait(60)
    client.arena = second = np.zeros(8192, np.uint8)
    with arena.use():
        pass
    cuda.go_on.set()

    eventually(lambda: is_whole(second))
    eventually(lambda: len(cuda.registered) == 2)
    assert pinned_bytes(first) == 0
    arena.close()


def test_an_end_in_the_middle_waits_for_one_chunk_and_leaves_nothing(
    client: Client, cuda: CudaMemory, eventually: Eventually
) -> None:
    chunks: list[int] = []
    third = threading.Event()

    def pin(memory: Bytes) -> PinnedMapping:
        chunks.append(memory.nbytes)
        if len(chunks) == 3:
            cuda.go_on.clear()
            third.set()
        return PinnedMapping(memory, cuda)

    arena = PinnedArena(lambda: client.arena, pin)
    assert third.wait(60)
    ends = threading.Thread(target=arena.close)
    ends.start()
    eventually(lambda: not cuda.registered)  # the first two
    assert ends.is_alive(), "the third one would be registered when it is over"

    cuda.go_on.set()
    ends.join(60)

    assert not cuda.registered
    assert chunks == [CHUNK] * 3
    assert not pin_threads()


def test_an_end_does_not_wait_for_a_driver_that_hangs(
    client: Client, cuda: CudaMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pinned_arena, "CLOSE_WAIT", 0.01)
    cuda.go_on.clear()
    arena = PinnedArena(lambda: client.arena, lambda memory: PinnedMapping(memory, cuda))
    assert cuda.reached.wait(60)

    arena.close()

    (thread,) = pin_threads()
    cuda.go_on.set()
    thread.join(60)
    assert not cuda.registered


def test_what_is_refused_is_refused_as_a_whole_and_told_once(
    client: Client, cuda: CudaMemory, eventually: Eventually, caplog: pytest.LogCaptureFixture
) -> None:
    cuda.go_on.clear()
    cuda.statuses = [0, 0, 2]
    arena = PinnedArena(lambda: client.arena, lambda memory: PinnedMapping(memory, cuda))
    with arena.use():  # has copied from the first chunk
        cuda.go_on.set()
        eventually(lambda: not pin_threads())
        assert pinned_bytes(client.arena) == 0, "no copy that begins now relies on it"
        assert len(cuda.registered) == 2
    assert not cuda.registered

    (line,) = (record for record in caplog.records if record.levelno == logging.WARNING)
    assert line.message.startswith(
        "the arena is not pinned, copies take a detour:"
        " cudaHostRegister refused 4096 bytes: cudaErrorMemoryAllocation (2), behind 0.0 of 0.0 GiB; "
    )
    assert "RLIMIT_MEMLOCK" in line.message
    with arena.use():  # it is not asked for again: the machine has not changed
        pass
    assert not pin_threads()
    arena.close()


def test_what_can_not_even_be_tried_is_told_and_copies_go_on(
    client: Client, eventually: Eventually, caplog: pytest.LogCaptureFixture
) -> None:
    def pin(memory: Bytes) -> PinnedMapping:
        raise OSError("no such library")

    arena = PinnedArena(lambda: client.arena, pin)
    with arena.use():
        eventually(lambda: "the arena is not pinned, copies take a detour: OSError: no such library" in caplog.text)
    arena.close()


def test_without_more_threads_copies_go_on(
    client: Client, cuda: CudaMemory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    arena = PinnedArena(lambda: client.arena, lambda memory: PinnedMapping(memory, cuda))
    with arena.use():
        assert "the arena is not pinned, copies take a detour: can't start new thread" in caplog.text
        assert client.arena is not None
        assert len(cut(client.arena)) == 1, "copies are cut for chunks that will not come"
    arena.close()


def test_the_beginning_and_the_end_are_told(
    client: Client, arena: PinnedArena, eventually: Eventually, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    client.arena = np.zeros(8192, np.uint8)
    with arena.use():
        pass
    eventually(lambda: "the arena is pinned: " in caplog.text)
    assert "pinning the arena, 0.0 GiB in 2 chunks: copies take a detour until then" in caplog.text


def test_without_an_arena_there_is_nothing_to_pin(
    client: Client, cuda: CudaMemory, arena: PinnedArena, eventually: Eventually
) -> None:
    memory, client.arena = client.arena, None
    other = PinnedArena(lambda: client.arena, lambda memory: PinnedMapping(memory, cuda))
    with other.use():
        pass
    client.arena = memory
    with other.use():
        eventually(lambda: is_whole(memory))
    other.close()


def test_two_engines_of_one_process_register_one_arena_once_and_keep_it_for_each_other(
    client: Client, cuda: CudaMemory, arena: PinnedArena, eventually: Eventually
) -> None:
    other = PinnedArena(lambda: client.arena, lambda memory: PinnedMapping(memory, cuda))
    eventually(lambda: is_whole(client.arena) and not pin_threads())
    assert len(cuda.registered) == 4
    with arena.use():  # may copy what only the other one has, in the middle
        other.close()
        assert len(cuda.registered) == 4
    assert len(cuda.registered) == 4
    arena.close()
    assert not cuda.registered


def test_an_end_of_the_interpreter_in_the_middle_leaves_nothing() -> None:
    script = """
        import atexit, threading
        import numpy as np
        from cuda_memory import CudaMemory
        from kvstore.gpu import pinned_arena
        from kvstore.gpu.pinned import PinnedMapping
        pinned_arena.CHUNK_BYTES = 4096
        memory, cuda, reached = np.zeros(16 << 20, np.uint8), CudaMemory(), threading.Event()
        atexit.register(lambda: print(f"{len(cuda.registered)} registered, {len(cuda.faults)} faults"))  # runs last
        def pin(chunk):
            pinned = PinnedMapping(chunk, cuda)
            reached.set()
            return pinned
        arena = pinned_arena.PinnedArena(lambda: memory, pin)
        assert reached.wait(60)
        print(f"{len(cuda.registered) > 0}")
    """
    tests = Path(__file__).resolve().parents[1]
    script = textwrap.dedent(script)
    run = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(tests / 'fixtures')!r})\n{script}"],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert run.stdout.splitlines() == ["True", "0 registered, 0 faults"], run.stdout + run.stderr


def test_a_page_across_two_chunks_is_copied_in_two_parts(cuda: CudaMemory) -> None:
    case = paged_kv("kv block token head dim", SIZES, torch.float32)
    size = case.layout.page_bytes
    memory = np.zeros(3 * size, np.uint8)
    page = memory[size : 2 * size]
    with PinnedMapping(memory[: size + 1000], cuda), PinnedMapping(memory[size + 1000 :], cuda):
        assert len(cut(page)) == 2
        assert not is_pinned(page)
        assert RunByRun(case.layers, case.layout).takes([memory[:size]])
        assert not RunByRun(case.layers, case.layout).takes([memory[:size], page])
        staged = Staged(case.layers, case.layout)
        staged.gather([5], [page])
        assert page.tobytes() == case.naive_pages([5])[0]

        page[:] = page[::-1].copy()
        for _ in staged.scatter([page], [7], [range(each, each + 1) for each in range(3)]):
            pass
        assert case.naive_pages([7])[0] == page.tobytes()


def test_the_parts_of_a_page_follow_each_other(cuda: CudaMemory) -> None:
    memory = np.zeros(16 * CHUNK, np.uint8)
    cuda.go_on.clear()  # nothing is registered yet, and may be when CUDA gets the copy
    arena = PinnedArena(lambda: memory, lambda chunk: PinnedMapping(chunk, cuda))
    page = memory[CHUNK // 2 : 5 * CHUNK + 7]

    parts = cut(page)

    assert [part.size for part in parts] == [CHUNK // 2, CHUNK, CHUNK, CHUNK, CHUNK, 7]
    assert all(a.ctypes.data + a.nbytes == b.ctypes.data for a, b in pairwise(parts))
    cuda.go_on.set()
    arena.close()


@pytest.fixture
def three_chunks(shm_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of three chunks of the size that engines register, where shared memory has as much."""
    monkeypatch.setattr(pinned_arena, "CHUNK_BYTES", REAL_CHUNK)
    path, folder = shm_folder / "pages", os.statvfs(shm_folder)
    if folder.f_bavail * folder.f_frsize < 4 * REAL_CHUNK:
        pytest.skip(f"{shm_folder} has less than {4 * REAL_CHUNK >> 20} MiB")
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, 3 * REAL_CHUNK)
    return path


@pytest.mark.cuda
def test_on_a_device_an_arena_is_registered_by_chunks_and_copied_across_them(
    three_chunks: Path, eventually: Eventually
) -> None:
    device = torch.device("cuda", 0)
    memory = map_file(three_chunks)
    arena = PinnedArena(lambda: memory, partial(PinnedMapping, runtime=cuda_runtime(device)))
    eventually(lambda: not pin_threads())
    assert is_whole(memory), "kvstore's log says what was refused"
    whole = torch.from_numpy(memory)
    for start in range(0, memory.nbytes, REAL_CHUNK):
        assert whole[start : start + REAL_CHUNK].is_pinned()

    case = paged_kv("kv block token head dim", {**SIZES, "dim": 64}, torch.bfloat16)
    paged, size = PagedKV([tensor.cuda() for tensor in case.tensors], case.axes), case.layout.page_bytes
    starts = (0, REAL_CHUNK - size // 2, 2 * REAL_CHUNK - 4096, 3 * REAL_CHUNK - size)
    pages = [memory[start : start + size] for start in starts]
    with arena.use():
        paged.gather([5, 6, 7, 8], pages)
    assert [page.tobytes() for page in pages] == case.naive_pages([5, 6, 7, 8])
    with arena.use():
        paged.scatter(pages, [8, 7, 6, 5])
        again = [np.zeros(size, np.uint8) for _ in pages]
        paged.gather([8, 7, 6, 5], again)
    assert [page.tobytes() for page in again] == [page.tobytes() for page in pages]

    arena.close()
    assert not whole[:REAL_CHUNK].is_pinned()


@pytest.mark.cuda
def test_on_a_device_a_copy_of_memory_that_is_registered_in_part_is_refused() -> None:
    # What pages are cut for. Should a driver take it, then cutting is no more than careful.
    memory = np.zeros(2 << 20, np.uint8)
    there = torch.zeros(memory.nbytes, dtype=torch.uint8, device="cuda")
    with PinnedMapping(memory[: 1 << 20], cuda_runtime(torch.device("cuda", 0))) as mapping:
        assert mapping.pinned, mapping.reason
        with pytest.raises(RuntimeError, match="invalid argument"):
            there.copy_(tensor_over(memory), non_blocking=True)
        for part in cut(memory):
            tensor_over(part).copy_(there[: part.size], non_blocking=True)
        torch.cuda.synchronize()


@pytest.mark.cuda
def test_on_a_device_graphs_are_captured_while_an_arena_is_registered(three_chunks: Path) -> None:
    memory = map_file(three_chunks)
    tensor = torch.zeros(1 << 10, device="cuda")
    pin = partial(PinnedMapping, runtime=cuda_runtime(torch.device("cuda", 0)))
    captured = 0
    for _ in range(3):
        arena = PinnedArena(lambda: memory, pin)
        while pin_threads():
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="global"):
                for _ in range(100):
                    tensor += 1
            graph.replay()
            captured += 1
        assert is_whole(memory), "kvstore's log says what was refused"
        closing = threading.Thread(target=arena.close)
        closing.start()  # and while it is unregistered
        while closing.is_alive():
            with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="global"):
                tensor.add_(1)
        closing.join()

    assert captured
    assert (tensor == 100 * captured).all()


@pytest.mark.cuda
def test_on_a_device_two_processes_register_one_arena(three_chunks: Path, tmp_path: Path) -> None:
    program = Path(__file__).resolve().parents[1] / "fixtures" / "pinning_process.py"
    command = [sys.executable, str(program), str(three_chunks), str(tmp_path / "log"), str(REAL_CHUNK), "cuda"]
    ranks = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    said = [rank.stdout.readline() for rank in ranks if rank.stdout is not None]
    errors = [rank.communicate()[1] for rank in ranks]

    assert said == ["pinned\n"] * 2, errors
    assert [rank.returncode for rank in ranks] == [0, 0], errors
