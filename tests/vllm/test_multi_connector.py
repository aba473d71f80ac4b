"""Inside vLLM's ``MultiConnector``, before another connector and behind it: what kvstore promises alone holds there."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from node_process import NodeProcess

pytest.importorskip("vllm", reason="drives vLLM, which is not installed (make test-vllm)")

from tests.vllm.driving import PATIENT, WAYS, answer, answer_again, begin_load, drop, fill, only_on_disk
from tests.vllm.engine import BLOCK_SIZE, Answers, EngineProcess, transfer_config
from tests.vllm.loop import Loop, right_answer, run_all, run_until
from tests.vllm.sibling import LOADS, SiblingConnector

REQUESTS = int(os.environ.get("REQUESTS", "72"))
"""To each order of the connectors; ``make test-vllm-multi`` has 500."""
LOADED, NOT_LOADED = "vllm:kvstore_pages_loaded", "vllm:kvstore_pages_not_loaded"
ORDERS = pytest.mark.parametrize("first", [True, False], ids=["first", "second"])
SIBLING = {
    "kv_connector": "SiblingConnector",
    "kv_connector_module_path": "tests.vllm.sibling",
    "kv_role": "kv_both",
}


def beside(other: dict[str, Any], url: str, first: bool, **extra: Any) -> dict[str, Any]:
    """A ``kv_transfer_config`` with kvstore and another connector, which says nothing of failed loads: as users do."""
    both = [transfer_config(url, **extra), other]
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": both if first else both[::-1]},
    }


@pytest.fixture
def start_both(models: Callable[[str], Path], runner: str) -> Iterator[Callable[..., Loop]]:
    """Start an engine with a made-up model, with kvstore and the other connector."""
    loops: list[Loop] = []

    def start(
        node: NodeProcess,
        first: bool,
        *,
        extra: dict[str, Any] | None = None,
        other: dict[str, Any] = SIBLING,
        **options: Any,
    ) -> Loop:
        deadlines = {"lookup_budget_ms": PATIENT, "load_deadline_ms": PATIENT, "store_deadline_ms": PATIENT}
        transfer = beside(other, node.url, first, **(deadlines | (extra or {})))
        loops.append(Loop(models("llama"), transfer, runner=runner, **options))
        return loops[-1]

    yield start
    for loop in loops:
        loop.close()


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
def test_the_first_request_finds_pages_though_the_handshake_is_anothers(
    start_loop: Callable[..., Loop],
    start_both: Callable[..., Loop],
    node: NodeProcess,
    prompt: Callable[..., list[int]],
    first: bool,
) -> None:
    tokens = prompt(200)
    fill(start_loop, node, tokens)
    loop = start_both(node, first)
    assert answer(loop, "hits", tokens) == 200 % BLOCK_SIZE + 3
    [sibling] = [each for each in loop.connector.sub_connectors if isinstance(each, SiblingConnector)]
    assert len(sibling.heard) == 1
    assert loop.left_over() == []


@ORDERS
def test_what_is_stored_there_an_engine_without_it_finds(
    start_loop: Callable[..., Loop],
    start_both: Callable[..., Loop],
    node: NodeProcess,
    prompt: Callable[..., list[int]],
    first: bool,
) -> None:
    tokens = prompt(200)
    loop = start_both(node, first)
    answer(loop, "stores", tokens)
    assert loop.left_over() == []
    assert answer(start_loop(node), "hits", tokens) == 200 % BLOCK_SIZE + 3


@ORDERS
def test_beside_a_connector_that_hands_prompts_over_it_does_and_kvstore_keeps_pages(
    start_loop: Callable[..., Loop],
    start_both: Callable[..., Loop],
    node: NodeProcess,
    prompt: Callable[..., list[int]],
    tmp_path: Path,
    first: bool,
) -> None:
    """vLLM's engine ends where two connectors answer with one key."""
    key = tmp_path / "key"
    key.write_bytes(bytes(32))
    key.chmod(0o600)
    other = SIBLING | {"kv_connector": "NixlLikeConnector"}
    loop = start_both(node, first, extra={"ticket_key_file": str(key)}, other=other)
    tokens = prompt(200)
    loop.add("asks", tokens, max_tokens=1, params={"do_remote_decode": True})
    run_all(loop)
    assert loop.params["asks"]["remote_host"] == "here"
    assert "ticket" not in loop.params["asks"]
    assert loop.left_over() == []
    assert answer(start_loop(node), "hits", tokens) == 200 % BLOCK_SIZE + 3


@ORDERS
def test_a_reset_before_the_first_request_counts(
    start_loop: Callable[..., Loop],
    start_both: Callable[..., Loop],
    node: NodeProcess,
    prompt: Callable[..., list[int]],
    first: bool,
) -> None:
    fill(start_loop, node, prompt(200))
    loop = start_both(node, first)
    loop.connector.reset_cache()
    assert answer(loop, "misses", prompt(200)) == 203


@ORDERS
@WAYS
def test_a_node_that_is_killed_while_pages_are_loaded_fails_no_request(
    start_loop: Callable[..., Loop],
    start_both: Callable[..., Loop],
    node_process: Callable[..., NodeProcess],
    prompt: Callable[..., list[int]],
    first: bool,
    async_load: bool,
) -> None:
    node, tokens, extra = node_process(), prompt(200), {"async_load": async_load}
    fill(start_loop, node, tokens, extra=extra)
    only_on_disk(node)
    loop = start_both(node, first, extra=extra | {"load_deadline_ms": 2000})
    assert loop.scheduler.recompute_kv_load_failures
    loop.add("unlucky", tokens)
    planned = begin_load(loop, "unlucky")
    node.signal(signal.SIGKILL)
    loop.update(planned, loop.execute(planned))
    run_all(loop)
    assert loop.finished["unlucky"] == "length"
    assert loop.tokens["unlucky"] == right_answer(tokens, 4)
    node.kill()
    node.start()
    run_until(loop, lambda: answer_again(loop, tokens) < 100)
    assert loop.left_over() == []


@ORDERS
def test_its_policy_can_be_left_as_it_is(
    start_loop: Callable[..., Loop],
    start_both: Callable[..., Loop],
    node: NodeProcess,
    prompt: Callable[..., list[int]],
    first: bool,
) -> None:
    tokens = prompt(200)
    fill(start_loop, node, tokens)
    loop = start_both(node, first, extra={"load_failure_policy": "keep"})
    loop.add("unlucky", tokens)
    planned = begin_load(loop, "unlucky")
    drop(node)
    loop.update(planned, loop.execute(planned))
    run_all(loop)
    assert loop.finished["unlucky"] == "error"


@ORDERS
def test_what_another_connector_failed_to_load_is_stored_by_nobody(
    start_loop: Callable[..., Loop],
    start_both: Callable[..., Loop],
    node: NodeProcess,
    prompt: Callable[..., list[int]],
    first: bool,
) -> None:
    tokens = prompt(200)
    loop = start_both(node, first)
    loop.add("unlucky", tokens, params={LOADS: 4 * BLOCK_SIZE})
    loop.add("shares", tokens, params={LOADS: 4 * BLOCK_SIZE})
    run_all(loop)
    assert loop.load_failures > 0
    assert loop.tokens["unlucky"] == loop.tokens["shares"] == right_answer(tokens, 4)
    assert loop.left_over() == []
    assert answer(start_loop(node), "again", tokens) < 203  # what it loads is right


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
            assert killed.counters[NOT_LOADED] > 0
            lost += int(killed.counters[NOT_LOADED])
            node.start()
    print(
        f"{answered} requests answered rightly, {kills} kills, {loaded} pages loaded without one, "
        f"{lost} lost in the middle of their load"
    )
    assert answered >= REQUESTS
