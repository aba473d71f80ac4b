"""New blocks: those that a step of vLLM gives out, and whose old content is gone from that step on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvstore.connector.engine.request_state import RequestState


def new_blocks(output: Any, requests: Mapping[str, RequestState], block_sizes: Sequence[int]) -> Iterable[int]:
    """Blocks that a ``SchedulerOutput`` gives to requests, and that they did not find in vLLM's own cache, and those
    that are zeroed or copied to."""
    cached = output.scheduled_cached_reqs
    whole = [(new.req_id, new.block_ids) for new in output.scheduled_new_reqs]
    for request_id, block_ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
        if block_ids is not None and request_id in cached.resumed_req_ids:
            whole.append((request_id, block_ids))
        else:
            yield from (block_id for of_group in block_ids or () for block_id in of_group)
    for request_id, block_ids in whole:
        state = requests.get(request_id)
        num_local = state.num_local if state is not None else 0
        for size, of_group in zip(block_sizes, block_ids, strict=True):
            yield from of_group[num_local // size :]
    for copy in getattr(output, "kv_cache_block_copies", None) or ():
        yield copy.dst_block_id
    yield from getattr(output, "new_block_ids_to_zero", None) or ()  # also for requests that wait for their loads
