"""vLLM's whole engine with kvstore inside ``MultiConnector``, before another connector and behind it."""

from __future__ import annotations

import os
import random
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from node_process import NodeProcess

pytest.importorskip("vllm", reason="drives vLLM, which is not installed (make test-vllm)")

from tests.vllm.driving import ORDERS, only_on_disk
from tests.vllm.engine import BLOCK_SIZE, PATIENT, TWO_RANKS, Answers, EngineProcess, beside
from tests.vllm.sibling import SIBLING

REQUESTS = int(os.environ.get("REQUESTS", "72"))
"""To each order of the connectors; ``make test-vllm-multi`` has 500."""
LOADED, NOT_LOADED = "vllm:kvstore_pages_loaded", "vllm:kvstore_pages_not_loaded"


@pytest.fixture
def two_nodes(short_folder: Path, shm_folder: Path) -> Iterator[list[NodeProcess]]:
    options = {"arena": "4MiB", "disk-limit": "256MiB"}  # half of the pages are on disk alone: their loads take a while
    nodes = []
    for name in ("one", "two"):
        (short_folder / name).mkdir()
        nodes.append(NodeProcess(short_folder / name, shm_folder / name, **options))
        nodes[-1].start()
    yield nodes
    for node in nodes:
        node.kill()


@ORDERS
def test_each_of_two_ranks_tells_and_loads_its_part(
    node: NodeProcess,
    start_engine: Callable[..., Any],
    plain: Callable[..., Any],
    prompt: Callable[..., list[int]],
    first: bool,
) -> None:
    prompts = [prompt(200, seed) for seed in range(3)]
    expected = plain(prompts, options=TWO_RANKS).tokens
    with start_engine(transfer=beside(SIBLING, node.url, first, **PATIENT), **TWO_RANKS) as engine:
        assert engine.run(prompts).tokens == expected
        engine.forget()  # refused until everything is stored
        again = engine.run(prompts)
        assert again.tokens == expected
        assert again.external_hits == 3 * 192
        assert again.counters[LOADED] == 2 * 3 * 192 // BLOCK_SIZE


@ORDERS
def test_a_file_connector_another_name_a_second_node_and_kills(
    two_nodes: list[NodeProcess],
    models: Callable[[str], Path],
    plain: Callable[..., Any],
    prompt: Callable[..., list[int]],
    tmp_path: Path,
    first: bool,
) -> None:
    """0 failed requests, 0 wrong tokens, of all that :data:`REQUESTS` says. Kills come at any moment; and to each
    engine one when a load is planned of pages that are on the node's disk alone: it is lost for certain."""
    renamed = tmp_path / "another-name"
    renamed.symlink_to(models("llama"))
    prompts = [prompt(100, seed % 5) + prompt(16 * seed, 100 + seed) for seed in range(12)]
    expected = plain(prompts, max_tokens=20)
    moments = random.Random(1)
    answered = kills = loaded = lost = 0
    first_node, second_node = two_nodes
    runs = [(models("llama"), first_node), (renamed, first_node), (renamed, second_node)]
    for number, (model, node) in enumerate(runs):
        folder = tmp_path / f"files-{number}"
        files = {
            "kv_connector": "ExampleConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"shared_storage_path": str(folder)},
        }
        deadlines = {"load_deadline_ms": 500, "store_deadline_ms": 500}
        engine = EngineProcess(
            model,
            tmp_path / f"engine-{number}.log",
            transfer=beside(files, node.url, first, **deadlines),
            disable_hybrid_kv_cache_manager=True,  # the file connector does not know it
            max_num_batched_tokens=8192,  # nor prompts in chunks
        )

        def round_of(engine: EngineProcess = engine, folder: Path = folder, **how: Any) -> Answers:
            """All prompts answered, and rightly, by an engine and a file connector that have none of them."""
            engine.forget()  # refused until everything is stored
            for stored in folder.glob("*"):
                shutil.rmtree(stored)  # or its owner, where it comes first, would leave nothing to kvstore
            answers = engine.run(prompts, max_tokens=20, **how)
            assert [each.finish for each in answers.answers] == ["length"] * len(prompts)
            assert answers.tokens == expected.tokens
            return answers

        with engine, ThreadPoolExecutor(1) as pool:
            assert engine.state()["recompute"] is True
            goal = answered + -(-REQUESTS // len(runs))
            while answered < goal:
                run = pool.submit(round_of, concurrency=4)
                while not run.done():
                    time.sleep(moments.uniform(0.0, moments.choice((0.03, 0.5))))  # most loads are at the beginning
                    node.kill()
                    kills += not run.done()
                    time.sleep(moments.uniform(0.0, 0.2))
                    node.start()
                answered += len(prompts)
                lost += int(run.result().counters.get(NOT_LOADED, 0))
            end = time.monotonic() + 120
            while not (hit := round_of().counters.get(LOADED, 0)):  # nobody kills it any more
                assert time.monotonic() < end, "no hit"
            loaded += int(hit)
            end = time.monotonic() + 120
            killed = None
            while killed is None or not killed.killed:  # nothing is found before the engine has found the new node
                assert time.monotonic() < end, "no load"
                engine.forget()
                only_on_disk(node)
                killed = round_of(kill_at_load=node.pid)
            node.kill()  # waits for its end
            kills += 1
            assert killed.counters.get(NOT_LOADED, 0) > 0, "nothing was lost"
            lost += int(killed.counters[NOT_LOADED])
            node.start()
    print(
        f"{answered} requests answered rightly, {kills} kills, {loaded} pages loaded without one, "
        f"{lost} lost in the middle of their load"
    )
    assert answered >= REQUESTS
