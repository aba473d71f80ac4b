"""What a hit adds to vLLM's own metrics, by the way that they take from the scheduler to ``/metrics``."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from node_process import NodeProcess
from redis_servers import RedisServer

import kvstore

pytest.importorskip("vllm", reason="drives vLLM, which is not installed (make test-vllm)")

from prometheus_client import REGISTRY
from vllm.v1.metrics.loggers import PrometheusStatLogger

from tests.vllm.driving import ALL_KINDS, WAYS, answer, fill, only_on_disk
from tests.vllm.loop import BLOCK_SIZE, Loop

LENGTH = 200
IN_FULL_BLOCKS = LENGTH // BLOCK_SIZE * BLOCK_SIZE


def metrics(loop: Loop) -> dict[str, float]:
    """vLLM's counters after the steps so far, by name, or by name and the label that is not the engine's."""
    logger = PrometheusStatLogger(loop.config, [0])
    for stats in loop.stats:
        logger.record(stats, None)
    return {
        "|".join(
            [sample.name, *(value for name, value in sample.labels.items() if name not in ("engine", "model_name"))]
        ): sample.value
        for family in REGISTRY.collect()
        if family.type == "counter" and family.name.startswith("vllm:")
        for sample in family.samples
        if sample.name.endswith("_total")
    }


def hits_by_source(loop: Loop) -> dict[str, float]:
    """Tokens of prompts that came from elsewhere than the engine's own blocks."""
    start = "vllm:prompt_tokens_cached_by_source_total|"
    return {
        name.removeprefix(start): value for name, value in metrics(loop).items() if name.startswith(start) and value
    }


@pytest.fixture
def sources() -> None:
    """Skips where vLLM's metrics know external hits as such alone."""
    pytest.importorskip("vllm.v1.metrics.cache_hit_source", reason="vLLM 0.31 counts hits, wherever they come from")


@ALL_KINDS
@WAYS
@pytest.mark.usefixtures("sources")
def test_hits_in_the_arena_and_on_disk(
    start_loop: Callable[..., Loop],
    node_process: Callable[..., NodeProcess],
    prompt: Callable[..., list[int]],
    kind: str,
    async_load: bool,
) -> None:
    node, options = node_process(), {"kind": kind, "extra": {"async_load": async_load}}
    fill(start_loop, node, prompt(LENGTH), **options)
    loop = start_loop(node, **options)
    answer(loop, "hot", prompt(LENGTH))
    assert hits_by_source(loop) == {"host": IN_FULL_BLOCKS}
    only_on_disk(node)
    loop = start_loop(node, **options)
    answer(loop, "cold", prompt(LENGTH))
    assert hits_by_source(loop) == {"disk": IN_FULL_BLOCKS}


@pytest.mark.usefixtures("sources")
def test_hits_in_redis_are_somewhere_else(
    start_loop: Callable[..., Loop],
    node_process: Callable[..., NodeProcess],
    prompt: Callable[..., list[int]],
    tmp_path: Path,
) -> None:
    server = RedisServer(tmp_path / "redis")
    try:
        node = node_process(disk=None, disk_limit="0", redis=server.url, redis_limit="16MiB")
        fill(start_loop, node, prompt(LENGTH))
        with kvstore.connect(node.url, timeout=30.0) as client:
            client.flush()
        assert node.terminate() == 0
        shutil.rmtree(node.arena_folder)
        node.start()
        loop = start_loop(node)
        answer(loop, "far", prompt(LENGTH))
        assert hits_by_source(loop) == {"external_unspecified": IN_FULL_BLOCKS}
    finally:
        server.close()


@WAYS
def test_hits_of_several_tiers_and_none(
    start_loop: Callable[..., Loop],
    node_process: Callable[..., NodeProcess],
    prompt: Callable[..., list[int]],
    async_load: bool,
) -> None:
    """Also where vLLM does not tell tiers apart: queries and hits."""
    node, extra = node_process(), {"async_load": async_load}
    fill(start_loop, node, prompt(LENGTH), extra=extra)
    only_on_disk(node)
    fill(start_loop, node, prompt(LENGTH, 2), extra=extra)
    loop = start_loop(node, extra=extra)
    for name, seed in (("cold", 0), ("nowhere", 1), ("hot", 2)):
        answer(loop, name, prompt(LENGTH, seed))
    told = metrics(loop)
    assert told["vllm:external_prefix_cache_hits_total"] == 2 * IN_FULL_BLOCKS
    assert told["vllm:external_prefix_cache_queries_total"] == 3 * LENGTH
    assert told["vllm:kvstore_pages_loaded_total|arena"] == IN_FULL_BLOCKS // BLOCK_SIZE
    assert told["vllm:kvstore_pages_loaded_total|disk"] == IN_FULL_BLOCKS // BLOCK_SIZE
    assert told["vllm:kvstore_pages_stored_total"] == IN_FULL_BLOCKS // BLOCK_SIZE
