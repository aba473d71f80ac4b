"""The scheduler half of the connector: decides what to load and what to store. No tensors, no waiting for I/O."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from connector.lookups import Lookups, LookupStatistics
from connector.plan import LoadPlan, StepPlan, StorePlan
from kvstore.errors import InvalidRequestError

if TYPE_CHECKING:
    from kvstore import Client, Namespace

LOOKUP_BUDGET = 0.020
"""Seconds for which a request may be told to wait for its lookup."""


@dataclass(slots=True)
class _Transfers:
    """What moved, or moves, between kvstore and the blocks of one request."""

    present: list[bool] = field(default_factory=list)
    """Which leading pages kvstore is known to have."""
    loading: tuple[int, ...] = ()
    """Blocks that a load fills, and the place of the first one in the prefix."""
    loading_from: int = 0
    loaded: bool = False
    """A load was planned. There is no second one for the same request: if the first failed, the second may as well."""
    num_saved: int = 0
    """Leading blocks that were looked at for storing."""
    stores: bool = False
    """A store was planned: a worker may still read from the request's blocks."""


class SchedulerConnector:
    """Runs on the engine's scheduler thread; no call waits for I/O, and no failure of kvstore is an error here.

    The order of calls for a request, as in vLLM:

    1. :meth:`get_num_new_matched_tokens`, as often as the scheduler looks at the waiting request;
    2. allocate, then :meth:`update_state_after_alloc` with the blocks to be filled;
    3. :meth:`build_connector_meta` once a step, for the worker half;
    4. :meth:`update_connector_output` with what the worker half reported. Blocks that are being filled belong to the
       load until the request is in ``finished_recving``, also when it is aborted meanwhile;
    5. :meth:`save_blocks` as blocks become full;
    6. :meth:`request_preempted` when its blocks are taken from it, :meth:`request_finished` when it ends.

    Args:
        client: connected to the node.
        namespace: of the model's layout; its block size is the engine's.
        lookup_budget: seconds from a request's first ask for which it may be told to ask again.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        client: Client,
        namespace: Namespace,
        *,
        lookup_budget: float = LOOKUP_BUDGET,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._block_size = namespace.layout.block_size
        self._lookups = Lookups(client, namespace, lookup_budget, clock)
        self._transfers: dict[str, _Transfers] = {}
        self._held: set[str] = set()
        # Planned since the last step.
        self._loads: list[LoadPlan] = []
        self._stores: dict[str, list[tuple[bytes, int]]] = {}
        self._preempted: list[str] = []
        self._finished: list[str] = []

    def get_num_new_matched_tokens(
        self, request_id: str, block_hashes: Sequence[bytes], num_tokens: int, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """How many tokens kvstore can add to what the engine has. Plans nothing; may be asked any number of times.

        Args:
            request_id: whose prefix it is.
            block_hashes: of its full blocks, 32 bytes each.
            num_tokens: tokens of the request.
            num_computed_tokens: leading tokens that the engine has itself: whole blocks.

        Returns:
            ``(n, True)``: n more tokens, whole blocks, to be loaded in the background; at least one token is left to
            compute. ``(0, False)``: nothing. ``(None, False)``: not known yet; ask again (this ends after
            ``lookup_budget``).
        """
        first, partial = divmod(num_computed_tokens, self._block_size)
        limit = min((num_tokens - 1) // self._block_size, len(block_hashes))
        transfers = self._transfers.get(request_id)
        if partial or first >= limit or (transfers is not None and transfers.loaded):
            return 0, False
        present = self._lookups.ask(request_id, block_hashes, limit, first)
        if present is None:
            return None, False
        matched = _leading(present[first:limit])
        return matched * self._block_size, matched > 0

    def update_state_after_alloc(self, request_id: str, block_ids: Sequence[int], num_external_tokens: int) -> None:
        """The request has blocks now, and waits for those that kvstore is to fill.

        Args:
            request_id: asked for before.
            block_ids: the blocks to be filled from kvstore, in order. Empty where nothing is loaded.
            num_external_tokens: tokens to load, at most as many as :meth:`get_num_new_matched_tokens` offered.

        Raises:
            InvalidRequestError: more tokens than were offered, or another number of blocks than they fill.
        """
        num_blocks, partial = divmod(num_external_tokens, self._block_size)
        if partial or num_external_tokens < 0 or num_blocks != len(block_ids):
            raise InvalidRequestError(
                f"request {request_id}: {num_external_tokens} tokens do not fill {len(block_ids)} blocks"
                f" of {self._block_size}"
            )
        answer = self._lookups.take(request_id)
        transfers = self._transfers.setdefault(request_id, _Transfers())
        if answer is not None and answer.present is not None:
            transfers.present = list(answer.present)
        if not num_blocks:
            return
        offered = 0 if answer is None else _leading(transfers.present[answer.first :])
        if answer is None or num_blocks > offered:
            raise InvalidRequestError(
                f"request {request_id}: {num_external_tokens} tokens to load, {offered * self._block_size} were offered"
            )
        transfers.loaded = True
        transfers.loading = tuple(block_ids)
        transfers.loading_from = answer.first
        hashes = answer.hashes[answer.first : answer.first + num_blocks]
        self._loads.append(LoadPlan(request_id, hashes, transfers.loading))

    def save_blocks(self, request_id: str, block_hashes: Sequence[bytes], block_ids: Sequence[int]) -> None:
        """Plans to store what is not in kvstore yet of a request's full blocks.

        Args:
            request_id: it holds the blocks until it is preempted or finished.
            block_hashes: of all full blocks from the first token on, whose KV is computed when the worker half is given
                the plan.
            block_ids: one for each. Blocks that came from kvstore or were given before may be among them: they are not
                stored again.

        Raises:
            InvalidRequestError: another number of hashes than blocks.
        """
        if len(block_hashes) != len(block_ids):
            raise InvalidRequestError(f"request {request_id}: {len(block_hashes)} hashes for {len(block_ids)} blocks")
        transfers = self._transfers.setdefault(request_id, _Transfers())
        known = transfers.present
        new = [
            (block_hashes[index], block_ids[index])
            for index in range(transfers.num_saved, len(block_ids))
            if index >= len(known) or not known[index]
        ]
        transfers.num_saved = max(transfers.num_saved, len(block_ids))
        if new:
            transfers.stores = True
            self._stores.setdefault(request_id, []).extend(new)
            self._lookups.expect([block_hash for block_hash, _ in new])

    def build_connector_meta(self) -> StepPlan:
        """Everything planned since the last call, for the worker half. Give it also to steps that compute nothing."""
        stores = tuple(
            StorePlan(request_id, tuple(block_hash for block_hash, _ in new), tuple(block_id for _, block_id in new))
            for request_id, new in self._stores.items()
        )
        plan = StepPlan(tuple(self._loads), stores, tuple(self._preempted), tuple(self._finished))
        self._loads, self._stores, self._preempted, self._finished = [], {}, [], []
        return plan

    def request_preempted(self, request_id: str) -> None:
        """The request's blocks go to others from the next step on. Call it before that step's plan is built.

        Stores that still read from the blocks are given up; when the request is scheduled again it starts over here.
        """
        self._lookups.forget(request_id)
        self._stores.pop(request_id, None)
        transfers = self._transfers.pop(request_id, None)
        if transfers is not None and transfers.stores:
            self._preempted.append(request_id)

    def request_finished(self, request_id: str) -> bool:
        """The request is over: computed to its end, or aborted at any moment. Forgets it.

        Returns:
            True: its blocks may still be read. Free them when the worker half has reported it in ``finished_sending``.
        """
        self._lookups.forget(request_id)
        transfers = self._transfers.pop(request_id, None)
        if transfers is None or not transfers.stores:
            return False
        self._finished.append(request_id)
        self._held.add(request_id)
        return True

    def update_connector_output(
        self, finished_sending: Collection[str], finished_recving: Collection[str], load_errors: Collection[int] = ()
    ) -> None:
        """What the worker half has reported.

        Args:
            finished_sending: finished requests whose blocks are read no longer.
            finished_recving: requests whose load is over, well or badly.
            load_errors: blocks of them that were not filled; what the engine computes there is stored again.
        """
        self._held.difference_update(finished_sending)
        for request_id in finished_recving:
            transfers = self._transfers.get(request_id)
            if transfers is None:
                continue
            for offset, block_id in enumerate(transfers.loading):
                if block_id in load_errors:
                    del transfers.present[transfers.loading_from + offset :]
                    break
            transfers.loading = ()

    def has_pending_block_frees(self) -> bool:
        """Whether blocks of finished requests wait for ``finished_sending``: the engine must go on stepping."""
        return bool(self._held)

    def statistics(self) -> LookupStatistics:
        """How lookups went since the start."""
        return self._lookups.statistics()

    def shutdown(self) -> None:
        """Stops the background thread, in a few seconds at most. Everything is a miss from now on."""
        self._lookups.shutdown()


def _leading(present: Sequence[bool]) -> int:
    """How many leading values are True."""
    for index, here in enumerate(present):
        if not here:
            return index
    return len(present)
