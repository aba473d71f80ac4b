"""The worker half of the connector: it carries out the scheduler half's plans, in the background."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from kvstore.connector.awaited_pages import PARTIAL_WAIT, pause_after
from kvstore.connector.batches import Batch, Pending, carry_out
from kvstore.connector.health import NodeHealth
from kvstore.connector.plan import LoadPlan, StepPlan, StorePlan
from kvstore.connector.transfer_queue import TransferQueue
from kvstore.connector.transfers import Plan, Transfer
from kvstore.connector.worker_statistics import LoadTiming, WorkerCounters, WorkerStatistics
from kvstore.errors import InvalidRequestError, KVStoreError, PermissionDeniedError

if TYPE_CHECKING:
    from kvstore import Namespace
    from kvstore.client.paths.pending import PendingLoad, PendingStore
    from kvstore.gpu.begun import BegunCopy
    from kvstore.gpu.cuda import Event
    from kvstore.gpu.mixed import MixedKV
    from kvstore.gpu.paged_kv import PagedKV
    from kvstore.gpu.pinned_arena import PinnedArena
    from kvstore.gpu.quantized import QuantizedKV
    from kvstore.tracing import ClientSpans

LOAD_DEADLINE = 5.0
"""Seconds after which a request stops waiting for its pages and computes what did not come."""

STORE_DEADLINE = 5.0
"""Seconds after which a finished request's blocks are no longer held for a store."""

QUEUED_LOADS = 1024
"""Most loads that wait for the thread. One more fails at once."""

QUEUED_STORES = 256
"""Most stores that wait for the thread. One more is dropped."""

SHUTDOWN_WAIT = 5.0
"""Seconds for which the last calls and copies are waited for at shutdown; before that, as many for stores."""

_ARENA_SHARE = 16
"""Two batches are under way where one takes at most this part of the arena."""


class WorkerConnector:
    """Moves pages between kvstore and the engine's paged KV. Its methods belong to the engine's worker thread; none
    raises for a failure of kvstore, none but :meth:`wait_for_save`, :meth:`rest` and :meth:`shutdown` waits for I/O.

    In each step, also in one that computes nothing: :meth:`handle_preemptions` and :meth:`start_load_kv` before the
    forward pass, :meth:`start_save_kv` after it, :meth:`get_finished`, then :meth:`get_block_ids_with_load_errors`.

    An engine may write to blocks that it gives out in a step before it calls :meth:`handle_preemptions` for that step
    (``touched_early``). Then a store is published behind the first such call after its copy, or at once where its
    request is over and holds the blocks (``StepPlan.held``). No other call does it: an engine may have begun a step,
    and have failed, before it calls :meth:`wait_for_save` or :meth:`shutdown`.

    A load that fails at some page, is past its deadline or finds no place in the queue is *finished* like any other:
    the blocks that were not filled are load errors, and the engine computes them. It is never reported while a copy
    into its blocks is still running. A store that fails is only counted. A load whose pages are on their way
    (``LoadPlan.wait``) copies those that are there, and lets other loads pass while it waits for the next ones.

    Args:
        namespaces: of the layouts of the model's cache groups, one each, or ``parts``, group by group.
        peers: the same namespaces at other nodes, by the names that plans give these. Their pages are loaded on a
            thread of its own, as are those that are not in the arena (``LoadPlan.lower_tier``), so that a node that
            hangs, or a slow disk or Redis, holds up nobody else's.
        pages: the engine's paged KV, one for each namespace; its ``page_bytes`` is the layout's.
        parts: into how many parts a page is cut here, each with a namespace of its own. They are moved one after the
            other; plans speak of whole pages, and what is counted are parts.
        touched_early: see above.
        load_deadline: seconds from :meth:`start_load_kv` on.
        store_deadline: seconds from :meth:`start_save_kv` on.
        clock: seconds, monotonic.
        arena: the client's, kept pinned for a CUDA device; closed by :meth:`shutdown`.
        spans: around each load and store; None: nobody wants to see them.
        by_layer: copy one layer after the other, so that the engine can wait for one (:meth:`wait_for_layer_load`).

    Raises:
        InvalidRequestError: a group's pages have another size than its layout says, or not each group has pages.
    """

    def __init__(
        self,
        namespaces: Sequence[Namespace],
        pages: Sequence[PagedKV | QuantizedKV | MixedKV],
        *,
        load_deadline: float = LOAD_DEADLINE,
        store_deadline: float = STORE_DEADLINE,
        clock: Callable[[], float] = time.monotonic,
        arena: PinnedArena | None = None,
        spans: ClientSpans | None = None,
        by_layer: bool = False,
        touched_early: bool = False,
        parts: int = 1,
        peers: Mapping[str, Sequence[Namespace]] | None = None,
    ) -> None:
        if len(namespaces) != len(pages):
            raise InvalidRequestError(f"{len(namespaces)} namespaces for the pages of {len(pages)} groups")
        for group, (namespace, kv) in enumerate(zip(namespaces, pages, strict=True)):
            if kv.page_bytes != namespace.layout.page_bytes:
                raise InvalidRequestError(
                    f"group {group}: the engine's pages have {kv.page_bytes} bytes,"
                    f" the layout says {namespace.layout.page_bytes}"
                )
        self._groups = tuple(zip(namespaces, pages, strict=True))
        self._peers = {node: tuple(theirs) for node, theirs in (peers or {}).items()}
        self._peer_health = {node: NodeHealth(f"loading pages of {node}", clock) for node in self._peers}
        self._arena = arena
        self._spans = spans
        self._by_layer = by_layer
        self._touched_early = touched_early
        self._parts = parts
        self._clock = clock
        self._load_health = NodeHealth("loading pages", clock)
        self._lower_tier_health = NodeHealth("loading pages from disk or Redis", clock)
        self._store_health = NodeHealth("storing pages", clock)
        self._load_errors: set[int] = set()
        self._failed: set[str] = set()
        self._loads_under_way: Counter[str] = Counter()
        self._not_loaded: dict[str, set[int]] = {}  # load errors of requests with other loads under way
        self._stores_under_way: Counter[str] = Counter()
        self._ending: set[str] = set()  # finished requests that are reported when their stores are over
        self._counters = WorkerCounters()
        self._loads, self._lower_tier_loads, self._peer_loads = self._load_queues = [
            TransferQueue[LoadPlan](name, QUEUED_LOADS, load_deadline, self._carry_out_load, clock)
            for name in ("kvstore-load", "kvstore-load-lower", "kvstore-peer-load")
        ]
        self._stores: TransferQueue[StorePlan] = TransferQueue(
            "kvstore-store", QUEUED_STORES, store_deadline, self._carry_out_store, clock
        )
        self._queues: tuple[TransferQueue[LoadPlan] | TransferQueue[StorePlan], ...] = (
            *self._load_queues,
            self._stores,
        )

    def handle_preemptions(self, plan: StepPlan) -> None:
        """Gives up stores of blocks that the step overwrites. Call it before the forward pass, and before anything else
        that writes to these blocks, but for engines that are ``touched_early``."""
        self._stores.revoke(plan.preempted)
        if plan.overwritten:
            self._counters.add(pages_dropped=self._stores.withdraw(plan.overwritten))
        self._stores.confirm()

    def start_load_kv(self, plan: StepPlan) -> None:
        """Begins the step's loads. Call it before the forward pass where that computes what is loaded."""
        after = self._mark(plan.loads)
        for load in self._of_parts(plan.loads):
            self._loads_under_way[load.request_id] += 1
            self._queue_of(load).submit(load, after)

    def wait_for_load(self) -> None:
        """Waits until every load begun so far is over, well or badly, ``load_deadline`` and a copy at most.

        For steps that compute what they load: before the forward pass, or behind it where that waited for each layer
        (:meth:`wait_for_layer_load`).
        """
        for queue in self._load_queues:
            queue.wait_idle()

    def wait_for_layer_load(self, layer: int) -> set[str]:
        """Waits until every load begun so far has this layer in its blocks, or is over, ``load_deadline`` at most. Call
        it before the layer is computed, for requests that are computed in the step that loads them; ``by_layer`` must
        be on. When the step has been computed, :meth:`wait_for_load` sees to it that :meth:`get_finished` has them all.

        Args:
            layer: of each group's pages, from 0 on.

        Returns:
            Requests whose load is late. It is given up: the step goes on without it, what the step computes for the
            request counts for nothing, and :meth:`get_finished` reports it, with load errors, when no copy writes to
            its blocks any more. So do loads that failed meanwhile.
        """
        return {load.plan.request_id for queue in self._load_queues for load in queue.wait_layer(layer)}

    def start_save_kv(self, plan: StepPlan) -> None:
        """Begins the step's stores. Call it when the forward pass that computes their blocks has been queued."""
        after = self._mark(plan.stores)
        for store in self._of_parts(plan.stores):
            self._stores_under_way[store.request_id] += 1
            self._stores.submit(store, after)
        self._ending.update(plan.finished)
        if self._touched_early and plan.held:
            self._stores.hold(dict(zip(plan.finished, plan.held, strict=True)))

    def wait_for_save(self, most: float = math.inf) -> None:
        """Waits until every store begun so far has been carried out or given up, ``store_deadline`` at most, or
        ``most`` seconds.

        For the end of a run, and for engines that can't hold a finished request's blocks until it is reported. What can
        be published behind the next step alone (``touched_early``) is not waited for.
        """
        self._stores.wait_idle(most)

    def rest(self) -> None:
        """Before the engine's memory is taken away: waits until every load and store begun so far is over, for their
        deadlines and a copy at most. Nothing is copied then until :meth:`wake`: loads fail, stores are dropped."""
        for queue in self._queues:
            queue.rest()

    def wake(self) -> None:
        """The engine's memory is back, at its old addresses; what was in it counts for nothing."""
        for queue in self._queues:
            queue.wake()

    def get_finished(self) -> tuple[set[str], set[str]]:
        """What came to its end since the last call.

        Returns:
            ``finished_sending``: finished requests (``StepPlan.finished``) whose blocks are read no longer.
            ``finished_recving``: requests whose loads, of all groups, are over, well or badly; nothing writes to their
            blocks any more.
        """
        received = self._collect_loads()
        for store in self._stores.take_ended():
            self._stores_under_way[store.plan.request_id] -= 1
            self._counters.add(pages_dropped=len(store.plan.hashes) - store.pages_done)
        self._stores_under_way += Counter()  # drops those at zero
        sent = {request_id for request_id in self._ending if not self._stores_under_way[request_id]}
        self._ending -= sent
        if self._touched_early and sent:
            self._stores.release(sent)
        return sent, received

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks that were not filled, of the requests that :meth:`get_finished` reported since the last call."""
        errors, self._load_errors = self._load_errors, set()
        return errors

    def get_requests_with_load_errors(self) -> set[str]:
        """Of the requests that the last :meth:`get_finished` reported, those of which something was not loaded: for
        engines in which a block's number is one of several groups'. Told once."""
        failed, self._failed = self._failed, set()
        return failed

    def take_load_timings(self) -> list[LoadTiming]:
        """How long loads from one tier alone took, since the last call."""
        return self._counters.take_timings()

    def take_stored(self) -> list[tuple[int, tuple[bytes, ...]]]:
        """Groups and hashes of pages that are stored, or were before, since the last call."""
        return self._counters.take_stored()

    def statistics(self) -> WorkerStatistics:
        """Counters since the start."""
        load_health = (self._load_health, self._lower_tier_health, *self._peer_health.values())
        return self._counters.statistics(
            loads_late=sum(queue.late for queue in self._load_queues),
            stores_late=self._stores.late,
            load_failures=sum(health.failures for health in load_health),
            store_failures=self._store_health.failures,
        )

    def shutdown(self) -> None:
        """Gives up what is under way and stops the threads, waiting :data:`SHUTDOWN_WAIT` for all of them at most.

        Stores that have to arrive: :meth:`wait_for_save` before. A second call changes nothing.
        """
        for queue in self._queues:
            queue.stop()
        end = time.monotonic() + SHUTDOWN_WAIT
        for queue in self._queues:
            queue.join(max(0.0, end - time.monotonic()))
        if self._arena is not None:
            self._arena.close()

    def _collect_loads(self) -> set[str]:
        """Requests all of whose loads are over now; what is missing of them are load errors."""
        received: set[str] = set()
        self._failed = set()  # most engines never ask for them
        for load in [load for queue in self._load_queues for load in queue.take_ended()]:
            request_id = load.plan.request_id
            missing = load.plan.block_ids[load.pages_done :]
            self._not_loaded.setdefault(request_id, set()).update(missing)
            self._counters.add(pages_not_loaded=len(missing))
            self._loads_under_way[request_id] -= 1
            if not self._loads_under_way[request_id]:
                received.add(request_id)
                del self._loads_under_way[request_id]
                errors = self._not_loaded.pop(request_id)
                self._load_errors.update(errors)
                if errors:
                    self._failed.add(request_id)
        return received

    def _mark(self, plans: Sequence[LoadPlan | StorePlan]) -> Event | None:
        """What is copied, by other threads, waits for what this one has queued by now. All groups are on one device."""
        return self._groups[0][1].mark() if plans else None

    def _of_parts(self, plans: Sequence[Plan]) -> Iterator[Plan]:
        """The same for each part of the pages; a part's number among the namespaces stands for its group."""
        for plan in plans:
            for part in range(self._parts):
                yield replace(plan, group=plan.group * self._parts + part)

    def _queue_of(self, load: LoadPlan) -> TransferQueue[LoadPlan]:
        """Nobody waits behind a load that may take longer than their own."""
        return self._peer_loads if load.node else self._lower_tier_loads if load.lower_tier else self._loads

    def _carry_out_load(self, transfer: Transfer[LoadPlan]) -> None:
        started = time.monotonic()
        node = transfer.plan.node
        own = self._lower_tier_health if transfer.plan.lower_tier else self._load_health
        health = self._peer_health.get(node) if node else own
        if health is not None and health.available():  # None: not one of the peers, and so nothing is loaded
            try:
                with self._span("kvstore worker load", transfer.plan):
                    self._load(transfer)
            except Exception as error:  # noqa: BLE001 - whatever goes wrong here is a miss, never the engine's error
                health.failed(error)
            else:
                health.succeeded()
        self._counters.add_seconds("load", time.monotonic() - started)

    def _load(self, transfer: Transfer[LoadPlan]) -> None:
        plan, queue = transfer.plan, self._queue_of(transfer.plan)
        hashes, block_ids = plan.hashes, plan.block_ids
        namespace, pages = self._groups[plan.group]
        _wait_for_engine(transfer)
        if plan.node:
            namespace = self._peers[plan.node][plan.group]
        size = namespace.batch_pages  # once: it changes when a node comes back with another arena
        # What a lower tier has is asked for by calls that may take long: pages that are lent are not held meanwhile.
        overlaps = not plan.node and not plan.lower_tier and self._overlaps(pages, size)
        next_page, whole, ended = transfer.pages_done, True, 0.0
        tells_layers = False

        def begin(alone: bool) -> Batch[PendingLoad] | None:
            nonlocal next_page, whole, tells_layers
            batch = slice(next_page, next_page + size)
            if next_page >= len(hashes) or not whole or not queue.wanted(transfer):
                return None
            began = time.monotonic()
            with ExitStack() as held:
                held.enter_context(self._pinned())
                pending = held.enter_context(namespace.borrow(hashes[batch], counts=False))
                next_page += len(pending.pages)
                whole = pending.more or len(pending.pages) == len(hashes[batch])
                tells_layers = self._by_layer and next_page >= len(hashes)  # the batches before it are there as a whole
                on_layer = partial(queue.pass_layer, transfer) if tells_layers else None
                ids = list(block_ids[batch][: len(pending.pages)])
                begin_copy = partial(pages.begin_scatter, pending.pages, ids, on_layer, transfer.after)
                return _begun(queue, transfer, batch, pending, ids, began, begin_copy, held)

        def finish(batch: Batch[PendingLoad]) -> bool:
            nonlocal ended
            if not queue.wait(transfer, batch.copy):
                return False
            tiers = list(batch.pending.tiers)
            valid = batch.pending.complete()
            if not queue.advance(transfer, range(batch.pages.start, batch.pages.start + valid)):
                return False
            began, ended = max(batch.began, ended), time.monotonic()  # no second counts for two batches
            is_timed = valid == len(tiers) and len(set(tiers)) == 1 and not plan.node
            timing = (tiers[0], valid, (ended - began) * self._parts) if is_timed else None
            self._counters.add_loaded(tiers[:valid], timing)
            self._counters.add(bytes_loaded=valid * pages.page_bytes)
            return valid == len(tiers)

        def may_overlap() -> bool:
            return (
                overlaps
                and next_page < len(hashes)
                and queue.may_overlap(transfer, 0)
                and _is_here(namespace, hashes[next_page])
            )

        carry_out(begin, finish, may_overlap)
        if not queue.wanted(transfer):
            return
        if transfer.pages_done < len(hashes):
            # A step may have computed on pages whose layers were told of: they must not be loaded once more, and called
            # good.
            if not tells_layers and self._may_come(transfer, namespace):
                queue.postpone(transfer, pause_after(self._clock() - transfer.advanced))
            return
        queue.end(transfer)  # nobody has to wait for what follows
        if plan.partial:
            with suppress(PermissionDeniedError):  # a token that may only read: it leaves by itself
                namespace.evict(hashes[-1:])
        _touch_whole(namespace, hashes)

    def _may_come(self, transfer: Transfer[LoadPlan], namespace: Namespace) -> bool:
        """Whether the next page of a load, which is not there, may be on its way."""
        plan, missing = transfer.plan, transfer.plan.hashes[transfer.pages_done :]
        now = self._clock()
        if now >= transfer.began + plan.wait:
            return False
        if plan.partial and len(missing) == 1:
            return now < transfer.advanced + PARTIAL_WAIT
        # Pages are stored in their order: with the last one there, what is missing was refused or dropped.
        tiers = namespace.lookup(missing, counts=False).tiers
        return tiers[0] is not None or tiers[-1] is None

    def _carry_out_store(self, transfer: Transfer[StorePlan]) -> None:
        started = time.monotonic()
        if self._store_health.available():
            try:
                with self._span("kvstore worker store", transfer.plan):
                    self._store(transfer)
            except Exception as error:  # noqa: BLE001 - a store that fails is a miss later on, never the engine's error
                self._store_health.failed(error)
            else:
                self._store_health.succeeded()
        self._counters.add_seconds("store", time.monotonic() - started)

    def _store(self, transfer: Transfer[StorePlan]) -> None:
        hashes, block_ids = transfer.plan.hashes, transfer.plan.block_ids
        namespace, pages = self._groups[transfer.plan.group]
        _wait_for_engine(transfer)
        size = namespace.batch_pages  # once: it changes when a node comes back with another arena
        overlaps, next_page = self._overlaps(pages, size), 0

        def begin(alone: bool) -> Batch[PendingStore] | None:
            nonlocal overlaps, next_page
            batch = slice(next_page, next_page + size)
            if next_page >= len(hashes) or not self._stores.finish_copies(transfer):
                return None
            parent = hashes[next_page - 1] if next_page else transfer.plan.parent
            began = time.monotonic()
            with ExitStack() as held:
                held.enter_context(self._pinned())
                pending = held.enter_context(namespace.prepare_store(hashes[batch], parent=parent))
                if not alone and pending.refused:
                    overlaps = False  # the room may be what is under way: when that is published, it can leave
                    return None
                next_page = batch.stop
                wanted = [
                    (block_id, page)
                    for block_id, page in zip(block_ids[batch], pending.pages, strict=True)
                    if page is not None
                ]
                ids, out = [each for each, _ in wanted], [page for _, page in wanted]
                begin_copy = partial(pages.begin_gather, ids, out, transfer.after)
                return _begun(self._stores, transfer, batch, pending, ids, began, begin_copy, held)

        def finish(batch: Batch[PendingStore]) -> bool:
            if not self._stores.wait(transfer, batch.copy):
                return False  # its blocks may have been given away, and overwritten, during the copy
            if not self._touched_early:
                return self._publish(transfer, batch.pages, batch.pending)
            publish = partial(self._finish, transfer, batch.pages, batch.pending, batch.held.pop_all())
            self._stores.await_confirmation(transfer, batch.block_ids, len(batch.block_ids) * pages.page_bytes, publish)
            return True

        def may_overlap() -> bool:
            return overlaps and self._stores.may_overlap(transfer, size * pages.page_bytes)

        carry_out(begin, finish, may_overlap)

    def _finish(
        self,
        transfer: Transfer[StorePlan],
        batch: slice,
        pending: PendingStore,
        reserved: AbstractContextManager[object],
        wanted: bool,
    ) -> bool:
        """Publish a copy that had to be confirmed, or give it up. Whether there is a point in going on with its
        transfer."""
        started = time.monotonic()
        published = False
        try:
            with reserved:
                published = wanted and self._publish(transfer, batch, pending)
        except Exception as error:  # noqa: BLE001 - as in _carry_out_store
            self._store_health.failed(error)
        self._counters.add_seconds("store", time.monotonic() - started)
        return published

    def _publish(self, transfer: Transfer[StorePlan], batch: slice, pending: PendingStore) -> bool:
        """Others find the pages of a batch from now on. False: the transfer is over."""
        hashes = transfer.plan.hashes
        namespace, pages = self._groups[transfer.plan.group]
        result = pending.complete()
        if not self._stores.advance(transfer, range(len(hashes))[batch]):
            return False
        self._counters.add(
            pages_stored=result.stored,
            pages_present=result.present,
            pages_refused=result.refused,
            bytes_stored=result.stored * pages.page_bytes,
        )
        if not result.refused:
            self._counters.add_stored(transfer.plan.group // self._parts, hashes[batch])
        if batch.stop >= len(hashes):
            _touch_whole(namespace, hashes)
        return True

    def _overlaps(self, pages: PagedKV | QuantizedKV | MixedKV, size: int) -> bool:
        """Whether two batches of so many pages may be under way. Copies go on by themselves only from and to memory
        that is pinned, or soon will be; and a node lends one client half of its arena, for all that it does."""
        return self._arena is not None and size * pages.page_bytes * _ARENA_SHARE <= self._arena.size

    def _span(self, name: str, plan: LoadPlan | StorePlan) -> AbstractContextManager[object]:
        if self._spans is None:
            return nullcontext()
        return self._spans.span(name, len(plan.hashes), plan.request_id)

    def _pinned(self) -> AbstractContextManager[None]:
        """Around asking for pages and copying them."""
        return nullcontext() if self._arena is None else self._arena.use()


def _wait_for_engine(transfer: Transfer[Plan]) -> None:
    """Until the device has done what the engine had queued when it submitted this.

    The copies would wait for that, too, but with pages of the arena in hand, and a node refuses
    stores into slots that are read for longer than 0.1 s: a step may take longer. A load gives up that its pages are
    asked for, or read from disk, meanwhile, for the rest of one step at most: the one before the step that loads where
    that begins its loads first, and that one itself where it begins them behind its forward pass, as vLLM does with
    asynchronous loads.
    """
    if transfer.after is not None:
        transfer.after.synchronize()


def _begun(
    queue: TransferQueue[Plan],
    transfer: Transfer[Plan],
    pages: slice,
    pending: Pending,
    block_ids: list[int],
    began: float,
    begin_copy: Callable[[], BegunCopy],
    held: ExitStack,
) -> Batch[Pending] | None:
    """A batch whose pages were asked for, with its copy; it takes over what is held for them. None: its transfer is not
    wanted any more."""
    copy = queue.begin(transfer, begin_copy)
    if copy is None:
        return None
    held.callback(queue.drop, copy)
    return Batch(pages, pending, copy, held.pop_all(), block_ids, began)


def _is_here(namespace: Namespace, block_hash: bytes) -> bool:
    """Whether a page is in the arena, so that it can be lent without a call that takes long."""
    try:
        return namespace.lookup([block_hash], counts=False).tiers == ("arena",)
    except KVStoreError:  # whoever asks for the page is told
        return False


def _touch_whole(namespace: Namespace, hashes: Sequence[bytes]) -> None:
    """Use pages of several batches once more, as a whole: a prefix's head must not count as older than its tail."""
    if len(hashes) > namespace.batch_pages:
        namespace.touch(hashes)
