"""An engine whose ranks share each block by its tokens (decode context parallelism), around the made-up model.

vLLM's real scheduler with that setting, and a worker half for each rank with memory of its own, in one process: no
attention of vLLM's CPU build can do it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import reduce
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from vllm.distributed import parallel_state
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole, KVConnectorTransferResults
from vllm.v1.core.sched.output import SchedulerOutput

from tests.vllm.loop import BLOCK_SIZE, Loop, kv_caches

RANKS = 2


@contextmanager
def _rank(number: int) -> Iterator[None]:
    """Who asks vLLM which tensor-parallel rank this process is finds this one."""
    before = parallel_state.get_tp_group
    parallel_state.get_tp_group = lambda: SimpleNamespace(rank_in_group=number)
    try:
        yield
    finally:
        parallel_state.get_tp_group = before


class Workers:
    """The worker halves of all ranks, called as one: what they report is put together as vLLM's executor does it."""

    def __init__(self, halves: Sequence[Any]) -> None:
        self._halves = halves
        self._sent: Counter[str] = Counter()
        self._received: Counter[str] = Counter()
        self._failed: set[str] = set()

    @property
    def sub_connectors(self) -> Sequence[Any]:
        return self._halves

    def __getattr__(self, name: str) -> Any:
        def of_each(*arguments: Any) -> list[Any]:
            results = []
            for number, half in enumerate(self._halves):
                with _rank(number):
                    results.append(getattr(half, name)(*arguments))
            return results

        return of_each

    def get_transfer_results(self, finished: set[str]) -> KVConnectorTransferResults:
        results = self.__getattr__("get_transfer_results")(finished)
        for each in results:
            self._failed |= each.failed_recving or set()
        sent = _reported_by_all(self._sent, [each.finished_sending for each in results])
        received = _reported_by_all(self._received, [each.finished_recving for each in results])
        failed = received & self._failed
        self._failed -= failed
        return KVConnectorTransferResults(sent, received, failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        return set().union(*self.__getattr__("get_block_ids_with_load_errors")())

    def build_connector_worker_meta(self) -> Any:
        return _together(self.__getattr__("build_connector_worker_meta")())

    def get_kv_connector_stats(self) -> Any:
        return _together(self.__getattr__("get_kv_connector_stats")())

    def get_kv_connector_kv_cache_events(self) -> None:
        return None


def _reported_by_all(counts: Counter[str], told: Sequence[set[str] | None]) -> set[str]:
    for each in told:
        counts.update(each or ())
    over = {name for name, count in counts.items() if count == RANKS}
    for name in over:
        del counts[name]
    return over


def _together(told: Sequence[Any]) -> Any:
    some = [each for each in told if each is not None]
    return reduce(lambda all_, each: all_.aggregate(each), some) if some else None


class SharedBlocks(Loop):
    """As :class:`~tests.vllm.loop.Loop`, with two ranks; ``interleave`` tokens in turn are of one of them."""

    def __init__(self, model: Path, transfer: Mapping[str, Any], *, interleave: int = 1, **options: Any) -> None:
        self._interleave = interleave
        options |= {"tensor_parallel_size": RANKS, "decode_context_parallel_size": RANKS}
        super().__init__(model, transfer, cp_kv_cache_interleave_size=interleave, **options)

    def _start_worker(self) -> Any:
        self._caches = [self.caches, *(kv_caches(self.kv_cache_config) for _ in range(RANKS - 1))]
        halves, told = [], {}
        for number, caches in enumerate(self._caches):
            with _rank(number):
                half = KVConnectorFactory.create_connector(self.config, KVConnectorRole.WORKER, self.kv_cache_config)
                half.register_kv_caches(caches)
                told[0, number] = half.get_handshake_metadata()
            halves.append(half)
        if None not in told.values():
            self.connector.set_xfer_handshake_metadata_pp_aware(told)
        return Workers(halves)

    def _touch(self, step: SchedulerOutput) -> None:
        for caches in self._caches:
            self.caches = caches
            super()._touch(step)
        self.caches = self._caches[0]

    def _slot(self, layer: str, table: Sequence[int], position: int) -> torch.Tensor:
        block, inside = divmod(position, BLOCK_SIZE * RANKS)
        turn, offset = divmod(inside, self._interleave)
        turn, rank = divmod(turn, RANKS)
        assert table[block] != 0, f"position {position} has no block: {list(table)}"
        slot: torch.Tensor = self._caches[rank][layer][table[block], :, turn * self._interleave + offset]
        return slot
