"""Who unregisters what, and when. The boundary to CUDA is replaced: there is no device to register anything with."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from kvstore.gpu.pinned import Bytes, PinnedMapping, is_pinned
from kvstore.gpu.pinned_arena import PinnedArena

Eventually = Callable[[Callable[[], object]], None]


class Runtime:
    def __init__(self) -> None:
        self.reached = threading.Event()
        self.go_on = threading.Event()
        self.go_on.set()
        self.status = 0

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.reached.set()
        assert self.go_on.wait(60)
        return self.status

    def cudaHostUnregister(self, address: int) -> int:
        return 0


class Client:
    def __init__(self) -> None:
        self.arena: Bytes | None = np.zeros(4096, np.uint8)


@pytest.fixture
def client() -> Client:
    return Client()


@pytest.fixture
def runtime() -> Runtime:
    return Runtime()


@pytest.fixture
def arena(client: Client, runtime: Runtime) -> Iterator[PinnedArena]:
    arena = PinnedArena(lambda: client.arena, lambda memory: PinnedMapping(memory, runtime))
    yield arena
    runtime.go_on.set()
    arena.close()


def test_the_clients_arena_is_pinned_until_the_end(client: Client, arena: PinnedArena, eventually: Eventually) -> None:
    eventually(lambda: is_pinned(client.arena))
    with arena.use():
        assert is_pinned(client.arena)
    assert is_pinned(client.arena)

    arena.close()

    assert not is_pinned(client.arena)
    with arena.use():  # a transfer queue's last copy
        assert not is_pinned(client.arena)


def test_another_arena_takes_over_and_the_first_one_goes_behind_its_last_use(
    client: Client, arena: PinnedArena, eventually: Eventually
) -> None:
    first = client.arena
    second = np.zeros(8192, np.uint8)
    eventually(lambda: is_pinned(first))
    with arena.use():
        client.arena = second
        with arena.use():
            eventually(lambda: is_pinned(second))
        assert is_pinned(first), "a copy that began before may still read from it"
    assert not is_pinned(first)
    assert is_pinned(second)


def test_a_use_keeps_every_arena_that_it_may_have_been_lent(
    client: Client, arena: PinnedArena, eventually: Eventually
) -> None:
    client.arena = second = np.zeros(8192, np.uint8)
    third = np.zeros(8192, np.uint8)
    with arena.use():
        eventually(lambda: is_pinned(second))
        client.arena = third
        with arena.use():
            pass
        assert is_pinned(second)
    assert not is_pinned(second)


def test_what_is_mapped_at_the_start_is_registered_before_the_engine_goes_on(client: Client, runtime: Runtime) -> None:
    # It may capture CUDA graphs next, and a capture does not survive that anybody registers memory.
    runtime.go_on.clear()
    made: list[PinnedArena] = []
    starting = threading.Thread(
        target=lambda: made.append(PinnedArena(lambda: client.arena, lambda memory: PinnedMapping(memory, runtime)))
    )
    starting.start()
    assert runtime.reached.wait(60)

    starting.join(0.1)
    assert not made

    runtime.go_on.set()
    starting.join()
    assert is_pinned(client.arena)
    made[0].close()


def test_one_that_is_over_before_it_is_registered_is_unregistered_then(
    client: Client, runtime: Runtime, arena: PinnedArena
) -> None:
    runtime.go_on.clear()
    client.arena = second = np.zeros(8192, np.uint8)
    with arena.use():  # a later one is not waited for
        threads = [thread for thread in threading.enumerate() if thread.name == "kvstore-pin"]
    arena.close()

    runtime.go_on.set()
    for thread in threads:
        thread.join(60)

    assert threads
    assert not is_pinned(second)


def test_without_an_arena_and_where_pinning_fails_copies_go_on(
    client: Client, runtime: Runtime, eventually: Eventually, caplog: pytest.LogCaptureFixture
) -> None:
    memory, client.arena = client.arena, None
    runtime.status = 1
    arena = PinnedArena(lambda: client.arena, lambda memory: PinnedMapping(memory, runtime))
    with arena.use():
        pass
    client.arena = memory
    with arena.use():
        eventually(lambda: "cudaHostRegister refused 4096 bytes: error 1" in caplog.text)
    arena.close()
