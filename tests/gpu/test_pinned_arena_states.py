"""Any order of starts, chunks, refusals, new arenas, uses and ends: nothing is registered twice, nothing unregistered
under a use that may rely on it, and nothing stays."""

from __future__ import annotations

import threading
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import numpy as np
import pytest
from cuda_memory import CudaMemory
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from kvstore.gpu import pinned_arena
from kvstore.gpu.pinned import PinnedMapping, cut, is_pinned, pinned_bytes
from kvstore.gpu.pinned_arena import PinnedArena
from kvstore.gpu.registered import Bytes

CHUNK = 4096
CHUNKS = 3
CLIENTS = 2
EXAMPLES = 400  # fewer are not enough to come upon an old arena that stays registered
PATIENCE = 60.0


class Gate:
    """Lets one chunk at a time be registered, when the test says so."""

    def __init__(self, cuda: CudaMemory) -> None:
        self._cuda = cuda
        self._changed = threading.Condition()
        self._waiting: list[threading.Thread] = []
        self._passing: set[threading.Thread] = set()
        self.open = False

    def pin(self, chunk: Bytes) -> PinnedMapping:
        me = threading.current_thread()
        with self._changed:
            self._waiting.append(me)
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: self.open or me in self._passing, PATIENCE)
            self._passing.discard(me)
        return PinnedMapping(chunk, self._cuda)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def let(self, place: int) -> None:
        """One of those that wait."""
        with self._changed:
            self._passing.add(self._waiting.pop(place % len(self._waiting)))
            self._changed.notify_all()

    def let_all(self) -> None:
        with self._changed:
            self.open = True
            self._waiting.clear()
            self._changed.notify_all()

    def settle(self) -> None:
        """Until every thread that registers waits here, or is over."""
        end = time.monotonic() + PATIENCE
        while True:
            with self._changed:
                running = {thread for thread in threading.enumerate() if thread.name == "kvstore-pin"}
                if running <= set(self._waiting) - self._passing:
                    return
            assert time.monotonic() < end, "a thread that registers hangs"
            time.sleep(0.0001)


@dataclass
class Use:
    """A transfer under way."""

    ends: AbstractContextManager[None]
    relies_on: set[tuple[int, int]] = field(default_factory=set)
    """What was pinned at any time since it began: it may be copying from there."""


@dataclass
class Side:
    """An engine's side."""

    mapped: Bytes | None
    arena: PinnedArena | None = None
    followed: Bytes | None = None
    """What its arena has seen mapped last."""


class PinnedArenas(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.cuda = CudaMemory()
        self.gate = Gate(self.cuda)
        self.arenas: list[Bytes] = [np.zeros((CHUNKS, CHUNK), np.uint8) for _ in range(3)]
        self.sides = [Side(self.arenas[0]) for _ in range(CLIENTS)]  # both may map one arena, at one address
        self.uses: list[Use] = []
        self.refused = False

    @rule(number=st.integers(0, CLIENTS - 1))
    def start(self, number: int) -> None:
        side = self.sides[number]
        if side.arena is None:
            side.arena = PinnedArena(lambda: side.mapped, self.gate.pin)
            side.followed = side.mapped

    @rule(number=st.integers(0, CLIENTS - 1), arena=st.none() | st.integers(0, 2))
    def map_another(self, number: int, arena: int | None) -> None:
        self.sides[number].mapped = None if arena is None else self.arenas[arena]

    @precondition(lambda self: self.gate.waiting)
    @rule(place=st.integers(0, 9), status=st.sampled_from([0, 0, 0, 2]))
    def register_a_chunk(self, place: int, status: int) -> None:
        self.refused |= bool(status)
        self.cuda.statuses = [status] if status else []
        self.gate.let(place)
        self.gate.settle()
        self.cuda.statuses = []

    @precondition(lambda self: self.gate.waiting)
    @rule()
    def register_the_rest(self) -> None:
        while self.gate.waiting:
            self.register_a_chunk(0, 0)

    @rule(number=st.integers(0, CLIENTS - 1))
    def begin_use(self, number: int) -> None:
        side = self.sides[number]
        if side.arena is not None and len(self.uses) < 4:
            use = side.arena.use()
            use.__enter__()
            self.uses.append(Use(use))
            if side.mapped is not None:
                side.followed = side.mapped

    @precondition(lambda self: self.uses)
    @rule(place=st.integers(0, 9))
    def end_use(self, place: int) -> None:
        self.uses.pop(place % len(self.uses)).ends.__exit__(None, None, None)

    @rule(number=st.integers(0, CLIENTS - 1))
    def close(self, number: int) -> None:
        side = self.sides[number]
        if side.arena is not None:
            side.arena.close()
            with side.arena.use():  # a transfer queue's last one
                pass
            side.arena = side.followed = None

    @invariant()
    def holds(self) -> None:
        self.gate.settle()
        chunks = {_range(chunk): chunk for arena in self.arenas for chunk in arena}
        pinned = {key for key, chunk in chunks.items() if is_pinned(chunk)}
        for use in self.uses:
            use.relies_on |= pinned
        assert not self.cuda.faults
        for start, end in pinned.union(*(use.relies_on for use in self.uses)):
            assert self.cuda.has(start, end) == CHUNK, "unregistered under a use that may rely on it"
        for arena in self.arenas:
            for part in cut(arena.reshape(-1)[CHUNK // 2 : -CHUNK // 2]):
                assert self.cuda.has(*_range(part)) in (0, part.nbytes), "CUDA refuses a copy of this"
        if self.uses or self.gate.waiting:
            return
        assert all(pinned_bytes(arena) in (0, arena.nbytes) for arena in self.arenas), "what is refused goes as a whole"
        if not self.refused:
            followed = {each.followed.ctypes.data for each in self.sides if each.followed is not None}
            whole = {arena.ctypes.data for arena in self.arenas if pinned_bytes(arena) == arena.nbytes}
            assert whole == followed
            assert sum(self.cuda.registered.values()) == len(whole) * CHUNKS * CHUNK

    def teardown(self) -> None:
        for use in self.uses:
            use.ends.__exit__(None, None, None)
        for side in self.sides:
            if side.arena is not None:
                side.arena.close()
        self.gate.let_all()
        end = time.monotonic() + PATIENCE
        for thread in threading.enumerate():
            if thread.name == "kvstore-pin":
                thread.join(end - time.monotonic())
        assert not self.cuda.registered
        assert not self.cuda.faults
        assert all(pinned_bytes(arena) == 0 and len(cut(arena.reshape(-1))) == 1 for arena in self.arenas)


def _range(memory: Bytes) -> tuple[int, int]:
    return memory.ctypes.data, memory.ctypes.data + memory.nbytes


@pytest.fixture(autouse=True)
def small_and_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned_arena, "CHUNK_BYTES", CHUNK)
    monkeypatch.setattr(pinned_arena, "PAUSE", 0.0)
    monkeypatch.setattr(pinned_arena, "CLOSE_WAIT", 0.0)  # the chunk under way goes when the gate lets it


def test_pinned_arenas_in_any_order() -> None:
    run_state_machine_as_test(
        PinnedArenas, settings=settings(deadline=None, max_examples=EXAMPLES, stateful_step_count=30)
    )
