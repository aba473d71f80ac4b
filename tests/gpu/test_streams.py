"""What is queued on which stream, in which order. The boundary to CUDA is replaced: there is no device to queue on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from gpu.device import CudaStreams

DEVICE = torch.device("cuda", 0)


class Cuda:
    """Streams that write down what happens on them."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.current = Stream(self, "engine")
        self.made = 0

    def make(self, device: torch.device) -> Stream:
        self.made += 1
        return Stream(self, f"copies {self.made}")

    @contextmanager
    def use(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before


class Stream:
    def __init__(self, cuda: Cuda, name: str) -> None:
        self.cuda, self.name = cuda, name

    def wait_stream(self, other: Stream) -> None:
        self.cuda.log.append(f"{self.name} wait for {other.name}")

    def record_event(self) -> str:
        self.cuda.log.append(f"{self.name}: event")
        return self.name

    def synchronize(self) -> None:
        self.cuda.log.append(f"{self.name}: done")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    cuda = Cuda()
    monkeypatch.setattr(torch.cuda, "Stream", cuda.make)
    monkeypatch.setattr(torch.cuda, "stream", cuda.use)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: cuda.current)
    return cuda


def test_copies_wait_once_for_the_engine_and_are_queued_one_by_one(cuda: Cuda) -> None:
    streams = CudaStreams(DEVICE)
    queued = streams.queue("scatter", [lambda: cuda.log.append(f"{cuda.current.name}: a copy")] * 2)

    for _ in queued:
        cuda.log.append(f"{cuda.current.name}: a layer")

    assert cuda.log == [
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

    assert list(streams.queue("scatter", [lambda: None])) != list(streams.queue("gather", [lambda: None]))


def test_copies_wait_for_the_stream_that_was_followed_last(cuda: Cuda) -> None:
    streams = CudaStreams(DEVICE)
    cuda.current = Stream(cuda, "another")
    streams.follow()
    cuda.current = Stream(cuda, "the copying thread's")

    list(streams.queue("gather", [lambda: None]))

    assert cuda.log == ["copies 1 wait for another", "copies 1: event"]


def test_what_was_queued_before_an_error_is_done_when_it_is_raised(cuda: Cuda) -> None:
    def fail() -> None:
        raise RuntimeError("out of memory")

    queued = CudaStreams(DEVICE).queue("gather", [lambda: None, fail])
    next(queued)

    with pytest.raises(RuntimeError, match="out of memory"):
        next(queued)

    assert cuda.log[-1] == "copies 1: done"
    assert cuda.current.name == "engine"
