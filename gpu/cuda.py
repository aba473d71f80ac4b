"""Gather and scatter where the paged KV is on a CUDA device: asynchronous copies on streams of their own.

The engine's streams wait for nothing. The engine's thread records an event on its current stream (a mark), the copy
stream waits for that event on the device, and the host thread that copies synchronizes with an event that it records
behind its copies. Which copy strategy is used is a rule (:mod:`kvstore.gpu.preference`); at start each is compared with
the specification (:mod:`kvstore.gpu.sample`), and timed (:mod:`kvstore.gpu.tuning`).
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from itertools import repeat
from typing import Protocol

import torch

from kvstore.errors import ResourceError
from kvstore.gpu.batched import Batched
from kvstore.gpu.cuda_driver import batched_memcpy
from kvstore.gpu.cudart import cuda_runtime
from kvstore.gpu.layout import PageLayout
from kvstore.gpu.pinned import PinnedMapping
from kvstore.gpu.preference import MANY_RUNS, preference
from kvstore.gpu.sample import Sample
from kvstore.gpu.strategies import CopyStrategy, RunByRun, Staged, merging
from kvstore.gpu.tensors import PageBytes, merge_touching
from kvstore.gpu.tuning import measure, much_slower

_log = logging.getLogger(__name__)


class Event(Protocol):
    """A CUDA event that was recorded on a stream: a point in it, which any thread may wait for."""

    def synchronize(self) -> None:
        """Wait in this thread until everything queued before it is done."""
        ...

    def query(self) -> bool:
        """Whether everything queued before it is done, without a wait."""
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

    def query(self) -> bool:
        """Whether it is over."""
        with torch.cuda.device(self._device):
            return bool(self._event.query())  # type: ignore[no-untyped-call]

    def wait(self, stream: torch.cuda.Stream) -> None:
        """Have another stream wait."""
        self._event.wait(stream)


@cache
def cuda_streams(device: torch.device) -> CudaStreams:
    """One pair for all groups and parts of an engine: torch has 32 streams, and gives each out again and again."""
    return CudaStreams(device)


class QueuedCopy:
    """:class:`kvstore.gpu.begun.BegunCopy` on a device's stream.

    Args:
        events: queues a part of the copy each time that the next one, the event behind that part, is asked for. The
            first part is queued at once, the others by :meth:`wait`.
        pages: which the copy reads or writes: they are kept until it has ended.
        on_part: told each part that is done.
    """

    def __init__(
        self, events: Iterator[Event], pages: Sequence[PageBytes], on_part: Callable[[int], None] | None = None
    ) -> None:
        self._events = events
        self._pages = pages
        self._on_part = on_part
        self._last = next(events)
        self._ended = False

    @property
    def is_done(self) -> bool:
        """Whether what was queued of it is done."""
        try:
            return self._ended or self._last.query()
        except RuntimeError:  # a device that has failed copies nothing more, and whoever waits is told
            return True

    def wait(self) -> None:
        """Queue the rest, and wait for all of it."""
        part = 0
        try:
            # To queue all parts may take longer than to copy them. With one queued ahead the bus does not rest.
            for event in self._events:
                before, self._last = self._last, event
                self._finish(before, part)
                part += 1
            self._finish(self._last, part)
        finally:
            self.end()

    def end(self) -> None:
        """Wait for what was queued."""
        if not self._ended:
            try:
                self._last.synchronize()
            finally:
                self._ended = True
                self._pages = ()

    def _finish(self, event: Event, part: int) -> None:
        event.synchronize()
        if self._on_part is not None:
            self._on_part(part)


class DeviceCopies:
    """:class:`kvstore.gpu.paged_kv.Copies` for tensors on a CUDA device.

    When it is made, it copies some pages out and others in by each strategy (:mod:`kvstore.gpu.sample`), and leaves the
    tensors as they were. A strategy that fails, or gives other bytes than the specification, is not used again. Nothing
    else may use the tensors meanwhile.

    Args:
        layers: one tensor a layer.
        layout: theirs.
        streams: of the layers' device, where not given.
        strategies: by name; those that this machine has, where not given.

    Raises:
        ResourceError: not one strategy works.
    """

    def __init__(
        self,
        layers: Sequence[torch.Tensor],
        layout: PageLayout,
        streams: Streams | None = None,
        strategies: Mapping[str, CopyStrategy] | None = None,
    ) -> None:
        self._layers = list(layers)
        self._layout = layout
        self._streams = streams if streams is not None else cuda_streams(layers[0].device)
        self._strategies = dict(strategies if strategies is not None else strategies_for(layers, layout))
        _, stretches = merge_touching(layers, layout)
        self._runs = stretches.runs.run_bytes, stretches.layers * stretches.runs.of_a_layer
        """Their bytes, and how many a page has, where all layers are copied at once."""
        self._runs_of_a_layer = layout.runs.run_bytes, layout.runs.of_a_layer
        self._much_slower: dict[str, Mapping[str, float]] = {"gather": {}, "scatter": {}}
        """Names by direction, with how many times as long they take as the fastest strategy."""
        self._measure()

    @property
    def order(self) -> dict[str, list[str]]:
        """Names of the copy strategies by direction, in the order in which a batch of many pages tries them."""
        return {each: self._order(each, self._runs[0], MANY_RUNS) for each in ("gather", "scatter")}

    def mark(self) -> Event:
        """A point behind all that was queued so far on the stream that is current in this thread."""
        return self._streams.mark()

    def begin_gather(
        self, piece_ids: Sequence[int], out: Sequence[PageBytes], after: Event | None = None
    ) -> QueuedCopy:
        """Begin to copy pieces into pages."""
        return self._begin_gather(self._strategy("gather", out), piece_ids, out, after)

    def begin_scatter(
        self,
        pages: Sequence[PageBytes],
        piece_ids: Sequence[int],
        on_layer: Callable[[int], None] | None = None,
        after: Event | None = None,
    ) -> QueuedCopy:
        """Begin to copy pages into pieces."""
        return self._begin_scatter(
            self._strategy("scatter", pages, on_layer is not None), pages, piece_ids, on_layer, after
        )

    def gather(self, piece_ids: Sequence[int], out: Sequence[PageBytes], after: Event | None = None) -> None:
        """Copy pieces into pages."""
        self.begin_gather(piece_ids, out, after).wait()

    def scatter(
        self,
        pages: Sequence[PageBytes],
        piece_ids: Sequence[int],
        on_layer: Callable[[int], None] | None = None,
        after: Event | None = None,
    ) -> None:
        """Copy pages into pieces."""
        self.begin_scatter(pages, piece_ids, on_layer, after).wait()

    def _strategy(self, direction: str, pages: Sequence[PageBytes], by_layer: bool = False) -> CopyStrategy:
        run_bytes, of_a_page = self._runs_of_a_layer if by_layer else self._runs
        for name in self._order(direction, run_bytes, of_a_page * len(pages)):
            if self._strategies[name].takes(pages):
                return self._strategies[name]
        raise ResourceError(
            f"none of the copy strategies that work here takes these pages: {', '.join(self._strategies)}"
        )

    def _order(self, direction: str, run_bytes: int, runs: int) -> list[str]:
        """By the rule; those that are much slower here come last, and are used where no other takes the pages."""
        names = [name for name in preference(direction, run_bytes, runs) if name in self._strategies]
        return sorted(names, key=self._much_slower[direction].__contains__)

    def _begin_gather(
        self, strategy: CopyStrategy, piece_ids: Sequence[int], out: Sequence[PageBytes], after: Event | None = None
    ) -> QueuedCopy:
        return QueuedCopy(self._streams.queue("gather", [partial(strategy.gather, piece_ids, out)], after), out)

    def _begin_scatter(
        self,
        strategy: CopyStrategy,
        pages: Sequence[PageBytes],
        piece_ids: Sequence[int],
        on_layer: Callable[[int], None] | None = None,
        after: Event | None = None,
    ) -> QueuedCopy:
        every = range(len(self._layers))
        shares = [every] if on_layer is None else [range(each, each + 1) for each in every]
        copies = repeat(partial(next, strategy.scatter(pages, piece_ids, shares)), len(shares))
        return QueuedCopy(self._streams.queue("scatter", copies, after), pages, on_layer)

    def _gather(self, strategy: CopyStrategy, piece_ids: Sequence[int], out: Sequence[PageBytes]) -> None:
        self._begin_gather(strategy, piece_ids, out).wait()

    def _scatter(
        self,
        strategy: CopyStrategy,
        pages: Sequence[PageBytes],
        piece_ids: Sequence[int],
        on_layer: Callable[[int], None] | None = None,
    ) -> None:
        self._begin_scatter(strategy, pages, piece_ids, on_layer).wait()

    def _measure(self) -> None:
        """Drop the strategies that do not do what the specification says, and time the others."""
        layout = self._layout
        if layout.num_pieces < layout.pieces_per_page:
            return  # not one page fits: nothing will be copied
        sample = Sample(self._layers, layout)
        try:
            with PinnedMapping(sample.memory, cuda_runtime(self._layers[0].device)) as mapping:  # where the machine can
                for name, strategy in list(self._strategies.items()):
                    if fault := self._fault(strategy, sample, mapping.reason):
                        _tell(logging.WARNING, f"no copies by {name}: {fault}")
                        del self._strategies[name]
                if not self._strategies:
                    raise ResourceError("no copy strategy works on this device: the log has the reasons")
                ids, pages, strategies = sample.ids, sample.pages, self._strategies.items()
                gathers = {name: partial(self._gather, strategy, ids, pages) for name, strategy in strategies}
                scatters = {name: partial(self._scatter, strategy, pages, ids) for name, strategy in strategies}
                self._time("gather", gathers)
                self._time("scatter", scatters)
        finally:
            sample.restore()
        _log.info("copies out by %s, in by %s", self.order["gather"][0], self.order["scatter"][0])

    def _time(self, direction: str, calls: Mapping[str, Callable[[], None]]) -> None:
        first = self.order[direction][0]
        slow = self._much_slower[direction] = much_slower(measure(calls))
        if first in slow:
            way = {"gather": "out", "scatter": "in"}[direction]
            times = f"{first} takes {slow[first]:.1f} times as long as the fastest"
            _tell(logging.WARNING, f"copies {way} by {self.order[direction][0]}: {times}")

    def _fault(self, strategy: CopyStrategy, sample: Sample, not_pinned: str) -> str:
        """What keeps a strategy from being used; empty where nothing does."""
        if not strategy.takes(sample.pages):
            return f"the device can't reach host memory{not_pinned and ': '}{not_pinned}"
        sample.fill()
        try:
            self._gather(strategy, sample.ids, sample.pages)
            if not sample.was_copied_out():
                return "pages copied out differ from the specification"
            for on_layer in None, _nobody:  # all layers at once, and one by one
                sample.fill()
                self._scatter(strategy, sample.pages, sample.ids, on_layer)
                if not sample.was_copied_in():
                    return "pages copied in differ from the specification"
        except Exception as error:  # noqa: BLE001 - the others work
            return f"{type(error).__name__}: {error}"
        return ""


def strategies_for(layers: Sequence[torch.Tensor], layout: PageLayout) -> dict[str, CopyStrategy]:
    """The copy strategies that this machine has, by name."""
    made: dict[str, Callable[[Sequence[torch.Tensor], PageLayout], CopyStrategy]]
    made = {"staged": Staged, "run by run": RunByRun}
    if layers[0].device.type == "cuda":
        try:
            made["batch"] = partial(Batched, copy_list=batched_memcpy())
        except ResourceError as error:
            _tell(logging.INFO, f"no copies by batch: {error}")
    if importlib.util.find_spec("triton") is not None:
        try:
            from kvstore.gpu.triton_kernel import Kernel

            made["kernel"] = Kernel
        except ImportError as error:  # installed, and of another torch, or without a part of it
            _tell(logging.WARNING, f"no copies by kernel: {error}")
    return {name: merging(make, layers, layout) for name, make in made.items()}


def _nobody(layer: int) -> None:
    """Is told of layers."""


@cache
def _tell(level: int, text: str) -> None:
    """Once in a process: a model may have many groups of layers, all of them on one machine."""
    _log.log(level, text)
