"""Gather and scatter where the paged KV is on a CUDA device: asynchronous copies on streams of their own.

The engine's streams wait for nothing. The engine's thread records an event on its current stream (a mark), the copy
stream waits for that event on the device, and the host thread that copies synchronizes with an event that it records
behind its copies. Which copy strategy is used is measured at start (:mod:`kvstore.gpu.tuning`), after each was compared
with the specification (:mod:`kvstore.gpu.sample`).
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial
from itertools import repeat
from typing import Protocol

import torch

from kvstore.gpu.cudart import cuda_runtime
from kvstore.gpu.layout import PageLayout
from kvstore.gpu.pinned import PinnedMapping
from kvstore.gpu.sample import Sample
from kvstore.gpu.strategies import CopyStrategy, RunByRun, Staged
from kvstore.gpu.tensors import PageBytes
from kvstore.gpu.tuning import measure, ranking

_log = logging.getLogger(__name__)


class Event(Protocol):
    """A CUDA event that was recorded on a stream: a point in it, which any thread may wait for."""

    def synchronize(self) -> None:
        """Wait in this thread until everything queued before it is done."""
        ...

    def wait(self, stream: torch.cuda.Stream) -> None:
        """Have another stream wait until then, on the device; the calling thread goes on."""
        ...


class Streams(Protocol):
    """The copy streams, by direction: ``"gather"`` (device to host) and ``"scatter"`` (host to device)."""

    def mark(self) -> Event:
        """A point behind all that was queued so far on the stream that is current in this thread."""
        ...

    def queue(
        self, direction: str, copies: Iterable[Callable[[], None]], after: Event | None = None
    ) -> Iterator[Event]:
        """Queue copies behind a point (a mark made now where none is given): one each time that the next event, the one
        behind it, is asked for.

        When one can't be queued, those before it are done when its error is raised.
        """
        ...


class CudaStreams:
    """A CUDA stream a direction: a store does not queue behind a load, and the bus carries both at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams: dict[str, torch.cuda.Stream] = {
            direction: torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            for direction in ("gather", "scatter")
        }

    def mark(self) -> Event:
        """A point behind all that was queued so far on the stream that is current in this thread."""
        return CudaEvent(torch.cuda.current_stream(self._device))

    def queue(
        self, direction: str, copies: Iterable[Callable[[], None]], after: Event | None = None
    ) -> Iterator[Event]:
        """Queue copies. The engine's streams wait for nothing."""
        stream = self._streams[direction]
        # Once: while the second layer is queued, the engine may have begun to compute the first one.
        (self.mark() if after is None else after).wait(stream)
        for copy in copies:
            # The device, too: at its end ``stream`` sets that of the thread's current device, which is the first one in
            # a new thread, and would take memory there.
            with torch.cuda.device(self._device), torch.cuda.stream(stream):
                try:
                    copy()
                    event = CudaEvent(stream)
                except BaseException:
                    stream.synchronize()  # whoever learns of the error gives pages and blocks away
                    raise
            yield event


class CudaEvent:
    """An event recorded behind what a stream has queued so far. A thread that waits for it sleeps (``blocking``)."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._device = stream.device
        self._event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        self._event.record(stream)

    def synchronize(self) -> None:
        """Wait in this thread."""
        with torch.cuda.device(self._device):  # or a new thread would begin to use the first one
            self._event.synchronize()

    def wait(self, stream: torch.cuda.Stream) -> None:
        """Have another stream wait."""
        self._event.wait(stream)


@cache
def cuda_streams(device: torch.device) -> CudaStreams:
    """One pair for all groups and parts of an engine: torch has 32 streams, and gives each out again and again."""
    return CudaStreams(device)


class DeviceCopies:
    """:class:`kvstore.gpu.paged_kv.Copies` for tensors on a CUDA device.

    When it is made, it copies some pages out and others in by each strategy (:mod:`kvstore.gpu.sample`), and leaves the
    tensors as they were. A strategy that fails, or gives other bytes than the specification, is not used again. Nothing
    else may use the tensors meanwhile.
    """

    def __init__(self, layers: Sequence[torch.Tensor], layout: PageLayout, streams: Streams | None = None) -> None:
        self._layers = list(layers)
        self._layout = layout
        self._streams = streams if streams is not None else cuda_streams(layers[0].device)
        self._strategies = strategies_for(layers, layout)
        self.order: dict[str, list[str]] = {each: list(self._strategies) for each in ("gather", "scatter")}
        """Names of the copy strategies by direction, the fastest first."""
        self._measure()

    def mark(self) -> Event:
        """A point behind all that was queued so far on the stream that is current in this thread."""
        return self._streams.mark()

    def gather(self, piece_ids: Sequence[int], out: Sequence[PageBytes], after: Event | None = None) -> None:
        """Copy pieces into pages."""
        self._gather(self._strategy("gather", out), piece_ids, out, after)

    def scatter(
        self,
        pages: Sequence[PageBytes],
        piece_ids: Sequence[int],
        on_layer: Callable[[int], None] | None = None,
        after: Event | None = None,
    ) -> None:
        """Copy pages into pieces."""
        self._scatter(self._strategy("scatter", pages), pages, piece_ids, on_layer, after)

    def _strategy(self, direction: str, pages: Sequence[PageBytes]) -> CopyStrategy:
        strategies = (self._strategies[name] for name in self.order[direction])
        return next(strategy for strategy in strategies if strategy.takes(pages))

    def _gather(
        self,
        strategy: CopyStrategy,
        piece_ids: Sequence[int],
        out: Sequence[PageBytes],
        after: Event | None = None,
    ) -> None:
        (done,) = self._streams.queue("gather", [partial(strategy.gather, piece_ids, out)], after)
        done.synchronize()

    def _scatter(
        self,
        strategy: CopyStrategy,
        pages: Sequence[PageBytes],
        piece_ids: Sequence[int],
        on_layer: Callable[[int], None] | None = None,
        after: Event | None = None,
    ) -> None:
        every = range(len(self._layers))
        shares = [every] if on_layer is None else [range(each, each + 1) for each in every]
        copies = repeat(partial(next, strategy.scatter(pages, piece_ids, shares)), len(shares))
        events: list[Event] = []

        def finish(number: int) -> None:
            events[number].synchronize()
            if on_layer is not None:
                on_layer(number)

        try:
            for event in self._streams.queue("scatter", copies, after):
                events.append(event)
                # To queue all layers may take longer than to copy them. With one queued ahead the bus does not rest.
                if len(events) > 1:
                    finish(len(events) - 2)
            finish(len(shares) - 1)
        finally:
            for event in events[-1:]:
                event.synchronize()  # nothing is copied any more when this returns, however it does

    def _measure(self) -> None:
        """Rank the strategies, and drop those that do not do what the specification says."""
        layout = self._layout
        if layout.num_pieces < layout.pieces_per_page:
            return  # not one page fits: nothing will be copied
        sample = Sample(self._layers, layout)
        try:
            with PinnedMapping(sample.memory, cuda_runtime(self._layers[0].device)):  # where the machine can
                for name, strategy in list(self._strategies.items()):
                    if fault := self._fault(strategy, sample):
                        _log.log(logging.INFO if name == "kernel" else logging.ERROR, "copies by %s: %s", name, fault)
                        del self._strategies[name]
                ids, pages, strategies = sample.ids, sample.pages, self._strategies.items()
                gathers = {name: partial(self._gather, strategy, ids, pages) for name, strategy in strategies}
                scatters = {name: partial(self._scatter, strategy, pages, ids) for name, strategy in strategies}
                self.order = {"gather": ranking(measure(gathers)), "scatter": ranking(measure(scatters))}
        finally:
            sample.restore()
        _log.info("copies out by %s, in by %s", self.order["gather"][0], self.order["scatter"][0])

    def _fault(self, strategy: CopyStrategy, sample: Sample) -> str:
        """What keeps a strategy from being used; empty where nothing does."""
        if not strategy.takes(sample.pages):
            return "the device can't reach host memory"
        sample.fill()
        try:
            self._gather(strategy, sample.ids, sample.pages)
            if not sample.was_copied_out():
                return "pages copied out differ from the specification"
            sample.fill_pages()
            self._scatter(strategy, sample.pages, sample.ids)
        except Exception as error:  # noqa: BLE001 - the others work
            return f"{type(error).__name__}: {error}"
        return "" if sample.was_copied_in() else "pages copied in differ from the specification"


def strategies_for(layers: Sequence[torch.Tensor], layout: PageLayout) -> dict[str, CopyStrategy]:
    """The copy strategies that this machine has, by name."""
    found: dict[str, CopyStrategy] = {"staged": Staged(layers, layout), "run by run": RunByRun(layers, layout)}
    if importlib.util.find_spec("triton") is not None:
        from kvstore.gpu.triton_kernel import Kernel

        found["kernel"] = Kernel(layers, layout)
    return found
