"""Plans: what the scheduler half tells the worker half in one step. Plain data: it crosses to another process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgpack

from kvstore.errors import FormatError, InvalidRequestError
from kvstore.hashing import HASH_BYTES


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """Pages of one cache group to fetch from kvstore into a request's blocks.

    Raises:
        InvalidRequestError: another number of hashes than blocks, or a group below 0.
    """

    request_id: str
    hashes: tuple[bytes, ...]
    """Block hashes in the order of the tokens, not always from the first one on: a window's are the last ones."""
    block_ids: tuple[int, ...]
    """Where each page goes."""
    group: int = 0
    """Which of the model's cache groups."""
    node: str = ""
    """The node that has them, by its name among the peers; empty: the engine's own."""
    partial: bool = False
    """The last one is a ticket's, of a block that is not full: nobody else has a use for it."""
    wait: float = 0.0
    """Seconds for which pages that are not there are waited for: they are on their way, in the order of the tokens."""
    lower_tier: bool = False
    """Not all of them are in the node's arena: it may take long, and others must not wait behind it."""

    def __post_init__(self) -> None:
        _check(self)


@dataclass(frozen=True, slots=True)
class StorePlan:
    """Full blocks of a request, of one cache group, to copy to kvstore.

    Raises:
        InvalidRequestError: another number of hashes than blocks, or a group below 0.
    """

    request_id: str
    hashes: tuple[bytes, ...]
    """Block hashes in the order of the tokens; blocks that kvstore has are left out."""
    block_ids: tuple[int, ...]
    """Where each page comes from."""
    group: int = 0
    """Which of the model's cache groups."""
    parent: bytes = b""
    """Hash of the block before the first one; empty for the prompt's head."""

    def __post_init__(self) -> None:
        _check(self)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Everything for one step of the engine."""

    loads: tuple[LoadPlan, ...] = ()
    stores: tuple[StorePlan, ...] = ()
    preempted: tuple[str, ...] = ()
    """Requests whose blocks are given away from this step on, or wanted back: what is still to be stored of them must
    not be."""
    finished: tuple[str, ...] = ()
    """Requests that are over and whose blocks the engine holds for their stores, those of this plan included."""
    held: tuple[tuple[int, ...], ...] = ()
    """For each of them the blocks that nobody gets before it is reported; nothing where nobody asks for it."""
    overwritten: tuple[int, ...] = ()
    """Blocks that get other content from this step on: what is still to be stored from them must not be."""
    copies: tuple[tuple[int, int], ...] = ()
    """Source and destination of blocks to be copied before the step writes anything: by the engine, when
    :meth:`~kvstore.connector.worker.WorkerConnector.handle_preemptions` is over. The destinations are among
    ``overwritten``."""

    def __bool__(self) -> bool:
        return bool(self.loads or self.stores or self.preempted or self.finished or self.overwritten or self.copies)

    def to_bytes(self) -> bytes:
        """The plan in msgpack."""
        loads = [
            (
                load.request_id,
                b"".join(load.hashes),
                load.block_ids,
                load.group,
                load.node,
                load.partial,
                load.wait,
                load.lower_tier,
            )
            for load in self.loads
        ]
        stores = [
            (store.request_id, b"".join(store.hashes), store.block_ids, store.group, store.parent)
            for store in self.stores
        ]
        packed: bytes = msgpack.packb(
            [loads, stores, self.preempted, self.finished, self.held, self.overwritten, self.copies]
        )
        return packed

    @classmethod
    def from_bytes(cls, data: bytes) -> StepPlan:
        """The plan that :meth:`to_bytes` packed.

        Raises:
            FormatError: no such plan.
        """
        try:
            loads, stores, preempted, finished, held, overwritten, copies = msgpack.unpackb(data)
            return cls(
                tuple(
                    LoadPlan(*_fields(load), str(node), bool(partial), float(wait), bool(lower_tier))
                    for *load, node, partial, wait, lower_tier in loads
                ),
                tuple(StorePlan(*_fields(store), parent=bytes(parent)) for *store, parent in stores),
                tuple(map(str, preempted)),
                tuple(map(str, finished)),
                tuple(tuple(map(int, block_ids)) for block_ids in held),
                tuple(map(int, overwritten)),
                tuple((int(source), int(destination)) for source, destination in copies),
            )
        except (ValueError, TypeError, msgpack.UnpackException) as error:
            raise FormatError(f"{len(data)} bytes are not the plan of a step: {error}") from error


def _fields(packed: Any) -> tuple[str, tuple[bytes, ...], tuple[int, ...], int]:
    request_id, joined, block_ids, group = packed
    hashes = tuple(joined[start : start + HASH_BYTES] for start in range(0, len(joined), HASH_BYTES))
    return str(request_id), hashes, tuple(map(int, block_ids)), int(group)


def _check(plan: LoadPlan | StorePlan) -> None:
    if len(plan.hashes) != len(plan.block_ids):
        raise InvalidRequestError(
            f"request {plan.request_id}: {len(plan.hashes)} hashes for {len(plan.block_ids)} blocks"
        )
    if plan.group < 0:
        raise InvalidRequestError(f"request {plan.request_id}: a cache group must be at least 0, got {plan.group}")
