"""Generated workloads, and what policies make of them."""

import os
from pathlib import Path

import pytest

from kvstore.catalog.policies import ExpectedReuse, LeastRecentlyUsed
from kvstore.cli.bench.replay import hit_blocks, hit_blocks_offline
from kvstore.cli.bench.trace import read_trace, unique_blocks
from kvstore.cli.bench.workloads import WORKLOADS, Prompts

CONVERSATIONS = os.environ.get("TEST_TRACE", "")


def share(prompts: Prompts, percent: int) -> int:
    """So many percent of the different blocks."""
    return len({block for prompt in prompts for block in prompt}) * percent // 100


@pytest.mark.parametrize("workload", sorted(WORKLOADS))
class TestWorkloads:
    def test_a_seed_makes_the_same_prompts_again(self, workload: str) -> None:
        assert WORKLOADS[workload](200, 1) == WORKLOADS[workload](200, 1)
        assert WORKLOADS[workload](200, 1) != WORKLOADS[workload](200, 2)

    def test_a_block_has_one_place_and_comes_behind_one_block(self, workload: str) -> None:
        prompts = WORKLOADS[workload](500, 3)
        assert len(prompts) == 500
        before: dict[int, tuple[int, int]] = {}
        for prompt in prompts:
            assert len(set(prompt)) == len(prompt) > 0
            for place, block in enumerate(prompt):
                where = (place, prompt[place - 1] if place else -1)
                assert before.setdefault(block, where) == where

    @pytest.mark.parametrize("seed", range(5, 9))
    def test_the_default_policy_stays_near_lru_and_below_the_optimum(self, workload: str, seed: int) -> None:
        prompts = WORKLOADS[workload](300, seed)
        for percent in (2, 5, 10, 20, 50):
            pages = share(prompts, percent)
            plain = hit_blocks(prompts, pages, LeastRecentlyUsed())
            learnt = hit_blocks(prompts, pages, ExpectedReuse())
            assert 0.99 * plain <= learnt <= hit_blocks_offline(prompts, pages), f"{percent} %"


@pytest.mark.parametrize(("seed", "percent"), [(16, 10), (16, 20), (17, 10), (20, 20)])
def test_chats_that_teach_wrong_things_cost_little(seed: int, percent: int) -> None:
    """Where what was learned from the first prompts is wrong of later ones: found by trying many seeds."""
    prompts = WORKLOADS["chat"](1500, seed)
    pages = share(prompts, percent)
    assert hit_blocks(prompts, pages, ExpectedReuse()) >= 0.99 * hit_blocks(prompts, pages, LeastRecentlyUsed())


@pytest.mark.timeout(600)
@pytest.mark.skipif(not CONVERSATIONS, reason="TEST_TRACE names no file: the conversation trace of the Mooncake paper")
def test_the_conversation_trace() -> None:
    requests = read_trace(Path(CONVERSATIONS))
    prompts = [request.hash_ids for request in requests]
    pages = unique_blocks(requests) * 5 // 100
    assert hit_blocks(prompts, pages, ExpectedReuse()) / sum(map(len, prompts)) >= 0.226
