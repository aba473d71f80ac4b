"""The scheduler half of the connector: it decides what to load and what to store. No tensors, no waiting for I/O."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from kvstore.connector.awaited_pages import AwaitedPages, PagePoller
from kvstore.connector.longest_hit import leading
from kvstore.connector.lookup_counts import LookupCounts
from kvstore.connector.lookups import Answer, Lookups, LookupStatistics, Tiers
from kvstore.connector.plan import LoadPlan, StepPlan
from kvstore.connector.plan_builder import PlanBuilder
from kvstore.connector.store_threshold import StoreThreshold
from kvstore.errors import InvalidRequestError

if TYPE_CHECKING:
    from kvstore import Namespace
    from kvstore.connector.rank_nodes import NodeClient

LOOKUP_BUDGET = 0.020
"""Seconds for which a request may be told to wait for its lookup."""

HOLD = 0.250
"""Seconds, from a request's end on, for which an engine that has no free block waits for what stores still read."""

_OWN_NODE = ""

NULL_BLOCK_ID = 0
"""Stands in a request's blocks for one that it does not have, such as those before a window."""


@dataclass(slots=True)
class _Transfers:
    """What moved, or moves, between kvstore and the blocks of one request."""

    present: dict[int, list[bool]] = field(default_factory=dict)
    """Which pages kvstore is known to have, by group, from the first block on."""
    loading: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Blocks that a load fills → group and place in the prefix."""
    loaded: bool = False
    """A load was planned. There is no second one for the same request: if the first failed, the second may as well."""
    tiers: Tiers = ()
    """Where the pages are, of those that kvstore is known to have."""
    num_saved: dict[int, int] = field(default_factory=dict)
    """Leading blocks that were looked at for storing, by group."""
    stores: bool = False
    """A store was planned: a worker may still read from the request's blocks."""


@dataclass(frozen=True, slots=True)
class PartialBlock:
    """A prompt's last block of one cache group, which is not full."""

    group: int
    block_hash: bytes
    """Its name, bound to a ticket."""
    block_id: int
    parent: bytes
    """Hash of the block before it; empty: there is none."""


class SchedulerConnector:
    """Runs on the engine's scheduler thread; no call waits for I/O, and no failure of kvstore is an error here.

    The order of calls for a request, in the words of vLLM where it has them:

    1. :meth:`get_presence` (or, for models of one group, :meth:`get_num_new_matched_tokens`), as often as the scheduler
       looks at the waiting request;
    2. allocate, then :meth:`blocks_allocated`, and :meth:`update_state_after_alloc` with the blocks to be filled;
    3. :meth:`build_connector_meta` once a step, for the worker half;
    4. :meth:`update_connector_output` with what the worker half reported. Blocks that are being filled belong to the
       load until the request is in ``finished_recving``, also when it is aborted meanwhile;
    5. :meth:`save_blocks` as blocks become full;
    6. :meth:`request_preempted` when its blocks are taken from it, :meth:`request_finished` when it ends.

    Args:
        client: connected to the node.
        namespaces: of the layouts of the model's cache groups, one each; a layout's block size is its group's.
        other_ranks: the same of each further rank, where pages have one part a rank.
        peers: other nodes that pages may be loaded from, each with the same namespaces there, rank after rank, by the
            names that the worker half knows them by.
        lookup_budget: seconds from a request's first ask for which it may be told to ask again.
        store_threshold: how many requests must have had a page before it is stored.
        touched_early: the worker half's: it needs to know which blocks a request holds that is over.
        uncounted: groups of which only some pages are ever stored, such as states: hit ratios are of the others.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        client: NodeClient,
        namespaces: Sequence[Namespace],
        *,
        other_ranks: Sequence[Sequence[Namespace]] = (),
        lookup_budget: float = LOOKUP_BUDGET,
        store_threshold: int = 1,
        touched_early: bool = False,
        uncounted: Collection[int] = (),
        clock: Callable[[], float] = time.monotonic,
        peers: Mapping[str, tuple[NodeClient, Sequence[Sequence[Namespace]]]] | None = None,
    ) -> None:
        nodes = {_OWN_NODE: (client, (namespaces, *other_ranks))} | dict(peers or {})
        self._ranks_at = {node: theirs for node, (_, theirs) in nodes.items()}
        self._pollers = {
            node: PagePoller(f"pages at {node or 'the own node'}", its_client, theirs, clock)
            for node, (its_client, theirs) in nodes.items()
        }
        self._awaited: dict[str, tuple[str, AwaitedPages]] = {}  # by request: the node, and what comes there
        self._block_sizes = tuple(namespace.layout.block_size for namespace in namespaces)
        self._lookups = Lookups(client, namespaces, lookup_budget, clock, other_ranks)
        self._lookup_counts = LookupCounts()
        self._uncounted = frozenset(uncounted)
        self._store_threshold = StoreThreshold(store_threshold)
        self._touched_early = touched_early
        self._clock = clock
        self._transfers: dict[str, _Transfers] = {}
        self._loading: set[str] = set()
        self._held: dict[str, float] = {}  # finished requests whose blocks are held → since when
        self._next = PlanBuilder()

    def get_presence(
        self, request_id: str, hashes_by_group: Sequence[Sequence[bytes]], num_computed_tokens: int = 0
    ) -> dict[int, tuple[bool, ...]] | None:
        """Which of a request's pages kvstore has. Plans nothing; may be asked any number of times.

        Args:
            request_id: whose prefix it is.
            hashes_by_group: for each group the hashes, 32 bytes each, of the request's blocks from the first one on,
                as far as they may be loaded: the block of the last token is left out, which has to be computed.
            num_computed_tokens: leading tokens that the engine has itself. While an answer has no page behind them,
                it is asked for again after a while.

        Returns:
            By group, whether each of these pages is there. All False for a request whose load was planned before. None:
            not known yet; ask again (this ends after ``lookup_budget``, with nothing there).

        Raises:
            InvalidRequestError: hashes for another number of groups.
        """
        if len(hashes_by_group) != len(self._block_sizes):
            raise InvalidRequestError(
                f"request {request_id}: hashes for {len(hashes_by_group)} groups, the model has"
                f" {len(self._block_sizes)}"
            )
        first = tuple(num_computed_tokens // block_size for block_size in self._block_sizes)
        transfers = self._transfers.get(request_id)
        present: tuple[tuple[bool, ...], ...] | None = ((),) * len(first)
        if (transfers is None or not transfers.loaded) and any(
            start < len(hashes) for start, hashes in zip(first, hashes_by_group, strict=True)
        ):
            present = self._ask(request_id, hashes_by_group, first)
            if present is not None and not self._lookup_counts.is_counted(request_id):
                self._count_lookup(request_id, hashes_by_group, first, present)
        if present is None:
            return None
        return {
            group: known[: len(hashes)] + (False,) * (len(hashes) - len(known))
            for group, (known, hashes) in enumerate(zip(present, hashes_by_group, strict=True))
        }

    def await_pages(
        self,
        request_id: str,
        node: str,
        hashes_by_group: Sequence[Sequence[bytes]],
        partials: Sequence[bytes | None],
        deadline: float,
        *,
        states: Sequence[int | None] = (),
        early: bool = False,
    ) -> None:
        """Pages of this request are on their way to a node: it is told to ask again until they are there.

        From now on :meth:`get_presence` speaks of that node, or, when nothing comes, of the engine's own as ever.

        Args:
            request_id: not asked for before.
            node: one of the peers; empty: the engine's own.
            hashes_by_group: of its full blocks.
            partials: for each group the hash of the block behind them; None where there is none.
            deadline: seconds, by the clock, up to which it is waited for.
            states: for each group of which only some pages are stored, which of them is waited for, as a number of
                leading blocks; 0: none is. None: all are waited for, as they are where nothing is given.
            early: the load begins with the first pages that are there, and copies them while it waits for the others.
                Those that do not come are load errors.
        """
        awaited = AwaitedPages(
            tuple(
                (*hashes, *([partial] if partial is not None else ()))
                for hashes, partial in zip(hashes_by_group, partials, strict=True)
            ),
            tuple(partial is not None for partial in partials),
            deadline,
            tuple(states),
            early and len(self._block_sizes) == 1,
        )
        self._awaited[request_id] = node, awaited
        self._pollers[node].expect(request_id, awaited)

    def partials_are_there(self, request_id: str) -> bool:
        """Whether also those blocks of an awaited request that are not full can be loaded, of every group that has one:
        each by the place behind the group's full blocks."""
        _, awaited = self._awaited.get(request_id, (_OWN_NODE, None))
        return (
            awaited is not None
            and awaited.settled
            and any(awaited.has_partial)
            and all(known[-1] for known, partial in zip(awaited.expected, awaited.has_partial, strict=True) if partial)
        )

    def get_num_new_matched_tokens(
        self, request_id: str, block_hashes: Sequence[bytes], num_tokens: int, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """How many tokens kvstore can add to what the engine has, for a model of one group without a window.

        Args:
            request_id: whose prefix it is.
            block_hashes: of its full blocks, 32 bytes each.
            num_tokens: tokens of the request.
            num_computed_tokens: leading tokens that the engine has itself: whole blocks.

        Returns:
            ``(n, True)``: n more tokens, whole blocks, to be loaded in the background; at least one token is left to
            compute. ``(0, False)``: nothing. ``(None, False)``: not known yet; ask again (this ends after
            ``lookup_budget``).

        Raises:
            InvalidRequestError: the model has several groups.
        """
        block_size = self._block_sizes[0]
        first, partial = divmod(num_computed_tokens, block_size)
        if partial:
            return 0, False
        limit = max(0, (num_tokens - 1) // block_size)
        presence = self.get_presence(request_id, [block_hashes[:limit]], num_computed_tokens)
        if presence is None:
            return None, False
        matched = leading(presence[0][first:])
        return matched * block_size, matched > 0

    def blocks_allocated(self, block_ids: Iterable[int]) -> None:
        """These blocks were given to a request in this step: what they held is overwritten from this step on.

        Stores that still read from them are given up. Needed where blocks are freed while their request runs, as those
        before a window are; with :meth:`request_preempted` and :meth:`request_finished` alone it is known otherwise.

        Args:
            block_ids: of any group. Tell them before :meth:`save_blocks` of the same step.
        """
        self._next.overwrite(block_ids)

    def was_allocated(self, block_id: int) -> bool:
        """Whether :meth:`blocks_allocated` told of it in this step."""
        return self._next.is_overwritten(block_id)

    def update_state_after_alloc(self, request_id: str, loads: Mapping[int, Sequence[tuple[int, int]]]) -> None:
        """The request has blocks now, and waits for those that kvstore is to fill.

        Args:
            request_id: asked for before.
            loads: by group the pages to fill, each by its block's place in the request, from 0 on, and its block id, in
                the order of the tokens. Empty where nothing is loaded.

        Raises:
            InvalidRequestError: a page that the answer to :meth:`get_presence` did not have. Nothing is loaded.
        """
        transfers = self._transfers.setdefault(request_id, _Transfers())
        node, awaited = self._forget_awaited(request_id)
        answer = self._lookups.take(request_id)
        if awaited is not None:
            # What a peer has, the own node may lack: it is stored there.
            transfers.present = {
                group: [] if node else _with(known, loads.get(group, ()))[: len(known) - partial]
                for group, (known, partial) in enumerate(zip(awaited.present, awaited.has_partial, strict=True))
            }
            transfers.tiers = tuple(map(tuple, awaited.tiers))
        elif answer is not None and answer.present is not None:
            transfers.present = {group: list(present) for group, present in enumerate(answer.present)}
            transfers.tiers = answer.tiers
        offered = answer if awaited is None else awaited
        wait = max(0.0, awaited.deadline - self._clock()) if awaited is not None and awaited.on_the_way else 0.0
        plans = []
        for group, pages in loads.items():
            hashes = _offered_hashes(request_id, offered, group, pages)
            if hashes:
                partial = awaited is not None and awaited.has_partial[group] and hashes[-1] == awaited.hashes[group][-1]
                block_ids = tuple(block_id for _, block_id in pages)
                lower_tier = any(transfers.tiers[group][index] != "arena" for index, _ in pages)
                plans.append(LoadPlan(request_id, hashes, block_ids, group, node, partial, wait, lower_tier))
        if plans:
            transfers.loaded = True
            transfers.loading = {
                block_id: (group, index) for group, pages in loads.items() for index, block_id in pages
            }
            self._loading.add(request_id)
            self._next.load(plans)

    def offered_tiers(self, request_id: str) -> Tiers:
        """By group, the tier of each page that :meth:`get_presence` has told of; empty where that is not known."""
        return () if request_id in self._awaited else self._lookups.tiers(request_id)

    def loading_tiers(self, request_id: str) -> tuple[tuple[int, int, str], ...]:
        """Group, place in the prefix, and tier of each page that is being loaded for a request."""
        transfers = self._transfers.get(request_id)
        if transfers is None:
            return ()
        return tuple((group, index, transfers.tiers[group][index] or "") for group, index in transfers.loading.values())

    def save_blocks(
        self,
        request_id: str,
        group: int,
        block_hashes: Sequence[bytes],
        block_ids: Sequence[int],
        *,
        wanted: bool = False,
    ) -> None:
        """Plans to store what is not in kvstore yet of a request's full blocks.

        Args:
            request_id: it holds the blocks until it is preempted or finished, but for those that
                :meth:`blocks_allocated` names.
            group: which cache group's blocks.
            block_hashes: of all full blocks from the first token on, whose KV is computed when the worker half is given
                the plan.
            block_ids: one for each, :data:`NULL_BLOCK_ID` where the request has no block. Each place is looked at once:
                blocks that came from kvstore or were given before may be among them, and are not stored again.
            wanted: somebody waits for them: they are stored however seldom they were seen.

        Raises:
            InvalidRequestError: another number of hashes than blocks, or a group that the model does not have.
        """
        if len(block_hashes) != len(block_ids):
            raise InvalidRequestError(f"request {request_id}: {len(block_hashes)} hashes for {len(block_ids)} blocks")
        if not 0 <= group < len(self._block_sizes):
            raise InvalidRequestError(
                f"request {request_id}: group must lie between 0 and {len(self._block_sizes) - 1}, got {group}"
            )
        transfers = self._transfers.setdefault(request_id, _Transfers())
        known = transfers.present.get(group, ())
        num_saved = transfers.num_saved.get(group, 0)
        places = [
            index
            for index in range(num_saved, len(block_ids))
            if block_ids[index] != NULL_BLOCK_ID
            and not (index < len(known) and known[index])
            and (self._store_threshold.see(group, block_hashes[index]) or wanted)
        ]
        transfers.num_saved[group] = max(num_saved, len(block_ids))
        if places:
            transfers.stores = True
            parent = block_hashes[places[0] - 1] if places[0] else b""
            blocks = {block_ids[index]: block_hashes[index] for index in places}
            self._next.store(request_id, group, blocks, parent)
            self._lookups.expect(group, list(blocks.values()))

    def save_state(
        self, request_id: str, group: int, block_hashes: Sequence[bytes], block_id: int, *, wanted: bool = False
    ) -> None:
        """Plans to store one state, where a request has only some: of recurrent layers.

        Args:
            request_id: it holds the block until :meth:`blocks_allocated` names it, or it is preempted or finished.
            group: which cache group's block.
            block_hashes: of all blocks up to the one that the state is behind; the last one names it.
            block_id: the block that holds it when the worker half is given the plan.
            wanted: somebody waits for it: it is stored however seldom it was seen.
        """
        transfers = self._transfers.setdefault(request_id, _Transfers())
        known, place, block_hash = transfers.present.get(group, ()), len(block_hashes) - 1, block_hashes[-1]
        if (place < len(known) and known[place]) or not (self._store_threshold.see(group, block_hash) or wanted):
            return
        transfers.stores = True
        self._next.store(request_id, group, {block_id: block_hash}, block_hashes[-2] if place else b"")
        self._lookups.expect(group, block_hashes)  # a miss is remembered under the first of them

    def save_partials(self, request_id: str, partials: Sequence[PartialBlock]) -> bool:
        """Plans to store a prompt's last blocks that are not full, behind those that are: one of each group, or none.

        Args:
            request_id: it holds the blocks until it is finished, and computes nothing more in them.
            partials: by group.

        Returns:
            Whether they are stored: not where the request went on behind its prompt, and one of them is full in this
            step. It is stored under its own name then, by which others hit it.
        """
        if any(self._next.is_stored(request_id, partial.group, partial.block_id) for partial in partials):
            return False
        for partial in partials:
            self._transfers.setdefault(request_id, _Transfers()).stores = True
            self._next.store(request_id, partial.group, {partial.block_id: partial.block_hash}, partial.parent)
        return bool(partials)

    def build_connector_meta(self) -> StepPlan:
        """Everything planned since the last call, for the worker half. Give it also to steps that compute nothing."""
        planned, self._next = self._next, PlanBuilder()
        return planned.build()

    def request_preempted(self, request_id: str) -> None:
        """The request's blocks go to others from the next step on. Call it before that step's plan is built.

        Stores that still read from the blocks are given up; when the request is scheduled again it starts over here.
        """
        self._next.drop_stores(request_id)
        if self._forget(request_id):
            self._next.preempt([request_id])

    def request_finished(self, request_id: str, block_ids: Iterable[int] = ()) -> bool:
        """The request is over: computed to its end, or aborted at any moment. Forgets it.

        Args:
            request_id: whose.
            block_ids: that it has, of all groups.

        Returns:
            True: its blocks may still be read. Free them when the worker half has reported it in ``finished_sending``.
            False says nothing of a load: its blocks stay the load's until ``finished_recving``.
        """
        self._lookup_counts.forget(request_id)
        if not self._forget(request_id):
            return False
        self._next.finish(request_id, tuple(block_ids) if self._touched_early else None)
        self._held[request_id] = self._clock()
        return True

    def update_connector_output(
        self,
        finished_sending: Collection[str],
        finished_recving: Collection[str],
        load_errors: Collection[int] = (),
        failed_recving: Collection[str] = (),
    ) -> set[str]:
        """What the worker half has reported.

        Args:
            finished_sending: finished requests whose blocks are read no longer.
            finished_recving: requests whose load is over, well or badly.
            load_errors: blocks that were not filled, of requests whose load is over or nearly so; what the engine
                computes there is stored again.
            failed_recving: requests of which it is not known which blocks these are: all are stored again.

        Returns:
            Requests of which something was not loaded.
        """
        for request_id in finished_sending:
            self._held.pop(request_id, None)
        failed = self._loading.intersection(failed_recving)
        for request_id in self._loading if load_errors else ():
            transfers = self._transfers[request_id]
            for block_id in transfers.loading.keys() & load_errors:
                group, index = transfers.loading[block_id]
                del transfers.present[group][index:]
                failed.add(request_id)
        for request_id in self._loading.intersection(failed_recving):
            self._transfers[request_id].present = {}
        for request_id in self._loading.intersection(finished_recving):
            self._loading.discard(request_id)
            self._transfers[request_id].loading = {}
        return failed

    def has_pending_block_frees(self) -> bool:
        """Whether blocks of finished requests come free soon. For an engine that needs some: it waits for them instead
        of preempting a request. Stores of those that ended :data:`HOLD` ago are given up with the next plan; twice as
        long after its end nobody waits for a request any more."""
        now = self._clock()
        self._next.preempt([request_id for request_id, since in self._held.items() if now - since >= HOLD])
        return any(now - since < 2 * HOLD for since in self._held.values())

    def statistics(self) -> LookupStatistics:
        """How lookups went since the start."""
        counts = self._lookup_counts
        return replace(self._lookups.statistics(), pages_asked=counts.asked, pages_found=counts.found)

    def shutdown(self) -> None:
        """Stops the background threads, in a few seconds at most. Everything is a miss from now on."""
        self._lookups.shutdown()
        for poller in self._pollers.values():
            poller.shutdown()

    def _ask(
        self, request_id: str, hashes_by_group: Sequence[Sequence[bytes]], first: tuple[int, ...]
    ) -> tuple[tuple[bool, ...], ...] | None:
        """By group what is there; None: not known yet."""
        node, awaited = self._awaited.get(request_id, (_OWN_NODE, None))
        if awaited is not None:
            if not self._pollers[node].look(request_id, awaited):
                return None
            if any(True in known[start:] for known, start in zip(awaited.expected, first, strict=True)):
                return awaited.expected
            del self._awaited[request_id]
        return self._lookups.ask(request_id, hashes_by_group, first)

    def _count_lookup(
        self,
        request_id: str,
        hashes_by_group: Sequence[Sequence[bytes]],
        first: tuple[int, ...],
        present: Sequence[Sequence[bool]],
    ) -> None:
        """Count a request's first final answer: what is there behind the pages that the engine has itself."""
        node, awaited = self._awaited.get(request_id, (_OWN_NODE, None))
        tiers = self._lookups.tiers(request_id) if awaited is None else tuple(map(tuple, awaited.tiers))
        ends = [len(hashes) for hashes in hashes_by_group]
        self._lookup_counts.count(
            request_id,
            self._ranks_at[node],
            [
                max(0, end - start) if group not in self._uncounted else 0
                for group, (start, end) in enumerate(zip(first, ends, strict=True))
            ],
            [known[start:end] for known, start, end in zip(present, first, ends, strict=True)],
            tuple(of_group[start:] for of_group, start in zip(tiers, first, strict=True)) if tiers else (),
        )

    def _forget(self, request_id: str) -> bool:
        """Drops everything that is known of a request. Whether a worker may still read from its blocks."""
        self._lookups.forget(request_id)
        self._forget_awaited(request_id)
        self._loading.discard(request_id)
        transfers = self._transfers.pop(request_id, None)
        return transfers is not None and transfers.stores

    def _forget_awaited(self, request_id: str) -> tuple[str, AwaitedPages | None]:
        """Waits no longer for a request's pages. Returns the node, and what is known of them."""
        if request_id not in self._awaited:
            return _OWN_NODE, None
        node, awaited = self._awaited.pop(request_id)
        self._pollers[node].forget(request_id)
        return node, awaited


def _offered_hashes(
    request_id: str, answer: Answer | AwaitedPages | None, group: int, pages: Sequence[tuple[int, int]]
) -> tuple[bytes, ...]:
    """Of these pages of a group, each named by its place in the prefix; its block does not matter.

    Raises:
        InvalidRequestError: the answer does not have one of them.
    """
    hashes = []
    for index, _ in pages:
        block_hash = None if answer is None else answer.offered(group, index)
        if block_hash is None:
            raise InvalidRequestError(
                f"request {request_id}: block {index} of group {group} is to be loaded and was not offered"
            )
        hashes.append(block_hash)
    return tuple(hashes)


def _with(known: Sequence[bool], loads: Sequence[tuple[int, int]]) -> list[bool]:
    """Which pages a node has, those that are being loaded among them."""
    loaded = {index for index, _ in loads}
    return [here or index in loaded for index, here in enumerate(known)]
