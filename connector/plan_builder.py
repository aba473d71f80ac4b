"""The plan of the next step, as it grows: loads and stores, and what ends those of earlier steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from kvstore.connector.plan import LoadPlan, StepPlan, StorePlan


class PlanBuilder:
    """What was planned since the last step."""

    def __init__(self) -> None:
        self._loads: list[LoadPlan] = []
        self._stores: dict[tuple[str, int], tuple[bytes, dict[int, bytes]]] = {}
        """Request and group → the first block's parent, and block id → hash."""
        self._preempted: list[str] = []
        self._finished: list[str] = []
        self._held: list[tuple[int, ...]] = []
        self._overwritten: dict[int, None] = {}

    def load(self, loads: Sequence[LoadPlan]) -> None:
        """Pages are fetched into blocks."""
        self._loads.extend(loads)

    def store(self, request_id: str, group: int, blocks: Mapping[int, bytes], parent: bytes) -> None:
        """Blocks are copied to kvstore.

        Args:
            request_id: whose.
            group: theirs.
            blocks: the hash of each, by its id, in the order of the tokens.
            parent: hash of the block before the first one; counts for the first of several calls.
        """
        self._stores.setdefault((request_id, group), (parent, {}))[1].update(blocks)

    def is_stored(self, request_id: str, group: int, block_id: int) -> bool:
        """Whether this step stores it."""
        return (request_id, group) in self._stores and block_id in self._stores[request_id, group][1]

    def overwrite(self, block_ids: Iterable[int]) -> None:
        """These blocks get other content: they are not stored any more."""
        overwritten = dict.fromkeys(block_ids)
        for _, blocks in self._stores.values():
            for block_id in blocks.keys() & overwritten.keys():
                del blocks[block_id]
        self._overwritten.update(overwritten)

    def is_overwritten(self, block_id: int) -> bool:
        """Whether :meth:`overwrite` named it."""
        return block_id in self._overwritten

    def drop_stores(self, request_id: str) -> None:
        """Nothing of this request is stored that was not given to the worker half before."""
        for key in [key for key in self._stores if key[0] == request_id]:
            del self._stores[key]

    def preempt(self, request_ids: Iterable[str]) -> None:
        """The worker half gives up what it still stores of these."""
        self._preempted.extend(request_ids)

    def finish(self, request_id: str, held: tuple[int, ...] | None) -> None:
        """The request is over, and holds its blocks, which are these, until the worker half has reported it. None:
        nobody asks which."""
        self._finished.append(request_id)
        if held is not None:
            self._held.append(held)

    def build(self) -> StepPlan:
        """The plan."""
        stores = tuple(
            StorePlan(request_id, tuple(blocks.values()), tuple(blocks), group, parent)
            for (request_id, group), (parent, blocks) in self._stores.items()
            if blocks
        )
        return StepPlan(
            tuple(self._loads),
            stores,
            tuple(self._preempted),
            tuple(self._finished),
            tuple(self._held),
            tuple(self._overwritten),
        )
