"""What the scheduler half tells the worker half in one step. Plain data: it crosses from one process to another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgpack

from kvstore.errors import FormatError, InvalidRequestError
from kvstore.hashing import HASH_BYTES


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """Pages to fetch from kvstore into a request's blocks.

    Raises:
        InvalidRequestError: another number of hashes than blocks.
    """

    request_id: str
    hashes: tuple[bytes, ...]
    """Block hashes of neighbouring blocks, in the order of the tokens."""
    block_ids: tuple[int, ...]
    """Where each page goes."""

    def __post_init__(self) -> None:
        _check_lengths(self.request_id, self.hashes, self.block_ids)


@dataclass(frozen=True, slots=True)
class StorePlan:
    """Full blocks of a request to copy to kvstore.

    Raises:
        InvalidRequestError: another number of hashes than blocks.
    """

    request_id: str
    hashes: tuple[bytes, ...]
    """Block hashes in the order of the tokens; blocks that kvstore has are left out."""
    block_ids: tuple[int, ...]
    """Where each page comes from."""

    def __post_init__(self) -> None:
        _check_lengths(self.request_id, self.hashes, self.block_ids)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Everything for one step of the engine."""

    loads: tuple[LoadPlan, ...] = ()
    stores: tuple[StorePlan, ...] = ()
    preempted: tuple[str, ...] = ()
    """Requests whose blocks are given away from this step on: what is still to be stored of them must not be."""
    finished: tuple[str, ...] = ()
    """Requests that are over and whose blocks the engine holds for their stores, those of this plan included."""

    def __bool__(self) -> bool:
        return bool(self.loads or self.stores or self.preempted or self.finished)

    def to_bytes(self) -> bytes:
        """The plan in msgpack."""
        transfers = [
            [(plan.request_id, b"".join(plan.hashes), plan.block_ids) for plan in plans]
            for plans in (self.loads, self.stores)
        ]
        packed: bytes = msgpack.packb([*transfers, self.preempted, self.finished])
        return packed

    @classmethod
    def from_bytes(cls, data: bytes) -> StepPlan:
        """The plan that :meth:`to_bytes` packed.

        Raises:
            FormatError: no such plan.
        """
        try:
            loads, stores, preempted, finished = msgpack.unpackb(data)
            return cls(
                tuple(LoadPlan(*_fields(load)) for load in loads),
                tuple(StorePlan(*_fields(store)) for store in stores),
                tuple(map(str, preempted)),
                tuple(map(str, finished)),
            )
        except (ValueError, TypeError, msgpack.UnpackException) as error:
            raise FormatError(f"{len(data)} bytes are no plan of a step: {error}") from error


def _fields(packed: Any) -> tuple[str, tuple[bytes, ...], tuple[int, ...]]:
    request_id, joined, block_ids = packed
    hashes = tuple(joined[start : start + HASH_BYTES] for start in range(0, len(joined), HASH_BYTES))
    return str(request_id), hashes, tuple(map(int, block_ids))


def _check_lengths(request_id: str, hashes: Sequence[bytes], block_ids: Sequence[int]) -> None:
    if len(hashes) != len(block_ids):
        raise InvalidRequestError(f"request {request_id}: {len(hashes)} hashes for {len(block_ids)} blocks")
