"""What is queued on which stream, in which order. The boundary to CUDA is replaced: there is no device to queue on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from kvstore.gpu.cuda import CudaStreams, cuda_streams

DEVICE = torch.device("cuda", 1)
FIRST = torch.device("cuda", 0)
"""A new thread's device."""


class Cuda:
    """Streams that write down what happens on them."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.current = Stream(self, "engine")
        self.device = FIRST
        self.made = 0

    def make(self, device: torch.device) -> Stream:
        self.made += 1
        return Stream(self, f"copies {self.made}")

    @contextmanager
    def on(self, device: torch.device) -> Iterator[None]:
        before, self.device = self.device, device
        try:
            yield
        finally:
            self.device = before

    @contextmanager
    def use(self, stream: Stream) -> Iterator[None]:
        assert self.device == stream.device, "at its end the first device's stream would be set"
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before


class Stream:
    device = DEVICE

    def __init__(self, cuda: Cuda, name: str) -> None:
        self.cuda, self.name = cuda, name

    def synchronize(self) -> None:
        self.cuda.log.append(f"{self.name}: done")


class Event:
    """``blocking``: whoever waits sleeps."""

    def __init__(self, *, blocking: bool) -> None:
        assert blocking

    def record(self, stream: Stream) -> None:
        self.stream, self.cuda = stream, stream.cuda
        self.cuda.log.append(f"{stream.name}: event")

    def wait(self, stream: Stream) -> None:
        self.cuda.log.append(f"{stream.name} wait for {self.stream.name}")

    def synchronize(self) -> None:
        self.cuda.log.append(f"wait for {self.stream.name} on {self.cuda.device}")

    def query(self) -> bool:
        self.cuda.log.append(f"look at {self.stream.name} on {self.cuda.device}")
        return False


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    cuda = Cuda()
    monkeypatch.setattr(torch.cuda, "Stream", cuda.make)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", cuda.use)
    monkeypatch.setattr(torch.cuda, "device", cuda.on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: cuda.current)
    return cuda


def test_copies_wait_once_for_the_engine_and_are_queued_one_by_one(cuda: Cuda) -> None:
    streams = CudaStreams(DEVICE)
    queued = streams.queue("scatter", [lambda: cuda.log.append(f"{cuda.current.name}: a copy")] * 2)

    for _ in queued:
        cuda.log.append(f"{cuda.current.name}: a layer")

    assert cuda.log == [
        "engine: event",
        "copies 2 wait for engine",
        "copies 2: a copy",
        "copies 2: event",
        "engine: a layer",
        "copies 2: a copy",  # and not behind the layer
        "copies 2: event",
        "engine: a layer",
    ]


def test_a_store_does_not_queue_behind_a_load(cuda: Cuda) -> None:
    streams = CudaStreams(DEVICE)

    list(streams.queue("scatter", [lambda: None], streams.mark()))
    list(streams.queue("gather", [lambda: None], streams.mark()))

    assert [line for line in cuda.log if line.startswith("copies") and "event" in line] == [
        "copies 2: event",
        "copies 1: event",
    ]


def test_copies_wait_for_the_mark_and_not_for_what_was_queued_behind_it(cuda: Cuda) -> None:
    streams = CudaStreams(DEVICE)
    cuda.current = Stream(cuda, "another")
    mark = streams.mark()
    cuda.current = Stream(cuda, "the copying thread's")

    (done,) = streams.queue("gather", [lambda: None], mark)
    mark.synchronize()
    assert not done.query()
    done.synchronize()

    assert cuda.log == [
        "another: event",
        "copies 1 wait for another",
        "copies 1: event",
        "wait for another on cuda:1",
        "look at copies 1 on cuda:1",
        "wait for copies 1 on cuda:1",
    ]
    assert cuda.device == FIRST


def test_groups_and_parts_of_an_engine_share_their_streams(cuda: Cuda) -> None:
    cuda_streams.cache_clear()
    assert cuda_streams(DEVICE) is cuda_streams(torch.device("cuda", 1))
    assert cuda_streams(DEVICE) is not cuda_streams(FIRST)
    cuda_streams.cache_clear()


def test_what_was_queued_before_an_error_is_done_when_it_is_raised(cuda: Cuda) -> None:
    def fail() -> None:
        raise RuntimeError("out of memory")

    queued = CudaStreams(DEVICE).queue("gather", [lambda: None, fail])
    next(queued)

    with pytest.raises(RuntimeError, match="out of memory"):
        next(queued)

    assert cuda.log[-1] == "copies 1: done"
    assert cuda.current.name == "engine"
