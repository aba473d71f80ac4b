"""The block manager beside vLLM's own, operation by operation, on the same random workloads.

After each operation both must have answered the same and be in the same state: hits, block ids, the order of eviction,
reference counts, hashes, events, usage, statistics.

Where the two differ on purpose:

- Failed loads: vLLM truncates in the scheduler, to the first block that was not filled, also where a window or a
  recurrent state leaves nothing to continue from there; in models with several groups it gives the whole load up. Here
  the manager truncates, to a length that every group can continue from; vLLM's manager is then told that length.
- Recurrent states in mode "align", with external tokens and new ones in one call: vLLM counts a block too few and, when
  that one is missing, raises halfway. Here the answer is that too few blocks are free.
- Hits that are told again (``kv_cache_report_mode``) and end inside a block: vLLM tells the whole block, or fails. No
  model here has both.
- ``get_num_common_prefix_blocks``: vLLM answers 0.

Skipped where vLLM is not installed. Each model gets 25 workloads of up to 160 operations; ``BESIDE_VLLM_SEEDS`` says
how many instead, ``BESIDE_VLLM_OPERATIONS`` how many operations at least, which are then told.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from itertools import count

import pytest

os.environ["VLLM_NO_USAGE_STATS"] = "1"
os.environ["VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES"] = "0"  # whole hashes in events
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("vllm", reason="compares with vLLM, which is not installed (make test-vllm)")
    from beside_vllm_models import MODELS
    from beside_vllm_workload import Counts, Workload

SEEDS = int(os.environ.get("BESIDE_VLLM_SEEDS", "25"))
FIRST_SEED = int(os.environ.get("BESIDE_VLLM_FIRST_SEED", "0"))
OPERATIONS = int(os.environ.get("BESIDE_VLLM_OPERATIONS", "0"))

pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)  # vLLM warns of each reset that it refuses
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("name", MODELS)
def test_does_what_vllm_does(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    counts = Counts()
    for seed in count(FIRST_SEED):
        if seed >= FIRST_SEED + SEEDS and counts.operations >= OPERATIONS:
            break
        workload = Workload(MODELS[name], seed, counts)
        workload.run()
    if OPERATIONS:
        with capsys.disabled():
            print(f"\n{name}: {counts.operations} operations, 0 differences", end="", flush=True)
            print(f" ({counts.hits} hits, {counts.copies} copies)", end="", flush=True)
    assert counts.refused or not MODELS[name].groups
    assert counts.loads
    assert counts.preemptions
    if MODELS[name].caching:
        assert counts.hits or name == "window of 1"  # vLLM caches none of its blocks: nothing is attended to
        assert counts.remote_hits or name == "chunks of 4"  # whole chunks always hit
        # With several modules, no step is known to be final where it ends.
        assert counts.copies or not workload.hits_inside_blocks or MODELS[name].modules > 1
