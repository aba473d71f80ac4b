"""A request of a prefill instance that loses its blocks while its last token is in flight.

Only of an engine that loads nothing: else vLLM takes blocks from nobody whose step is not over.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="drives vLLM, which is not installed (make test-vllm)")

from tests.vllm.driving import answer
from tests.vllm.loop import BLOCK_SIZE, Loop, right_answer, run_all, run_until

NUM_TOKENS = 200
"""Of the prompt: six full blocks and one for the rest."""
MAX_TOKENS = 8
"""Of its answer."""
HANDS_OVER = {"do_remote_decode": True}


@pytest.mark.parametrize(("kind", "num_blocks"), [("full", 10), ("hybrid", 19)])
def test_preempted(
    start_loop: Callable[..., Loop],
    node_process: Callable[..., Any],
    prompt: Callable[..., list[int]],
    key: Path,
    kind: str,
    num_blocks: int,
) -> None:
    """vLLM delivers the token, and the request ends without blocks: there is no ticket for what was to be stored from
    them, and nobody is given what others have computed there since."""
    node, tokens, extra = node_process(), prompt(NUM_TOKENS), {"ticket_key_file": str(key)}
    small = {"num_blocks": num_blocks, "max_model_len": 256}  # these two requests have room, and not one block more
    prefill = start_loop(node, role="kv_producer", kind=kind, extra=extra, overlap=True, **small)
    beside = prompt(2 * BLOCK_SIZE - 1, 1)
    prefill.add("runs", beside, max_tokens=40, params={"kvstore_store": False})
    first = prefill.schedule()
    prefill.add("p", tokens, max_tokens=1, params=HANDS_OVER)
    last = prefill.schedule()  # the one beside it fills a block
    assert last.num_scheduled_tokens == {"runs": 1, "p": NUM_TOKENS}
    prefill.update(first, prefill.execute(first))
    node.pause()  # what is to be stored waits
    output = prefill.execute(last)
    behind = prefill.schedule()
    assert prefill.status("p") == "PREEMPTED"
    prefill.update(last, output)
    assert prefill.finished["p"] == "length"
    assert prefill.tokens["p"] == right_answer(tokens, 1)
    assert prefill.params["p"] is None
    prefill.update(behind, prefill.execute(behind))
    prefill.add("other", prompt(150, 2), max_tokens=1, params={"kvstore_store": False})  # gets its blocks
    run_until(prefill, lambda: "other" in prefill.finished)
    node.resume()
    run_all(prefill)
    assert prefill.tokens["runs"] == right_answer(beside, 40)
    assert prefill.left_over() == []

    decode = start_loop(node, kind=kind, extra=extra)
    answer(decode, "d", tokens, MAX_TOKENS)
    assert decode.left_over() == []


@pytest.mark.parametrize("kind", ["full", "hybrid"])
def test_reset(
    start_loop: Callable[..., Loop],
    node_process: Callable[..., Any],
    prompt: Callable[..., list[int]],
    key: Path,
    kind: str,
) -> None:
    """vLLM throws the token away, and computes the request again: its ticket holds."""
    node, tokens, extra = node_process(), prompt(NUM_TOKENS), {"ticket_key_file": str(key)}
    prefill = start_loop(node, role="kv_producer", kind=kind, extra=extra, overlap=True)
    prefill.add("p", tokens, max_tokens=1, params=HANDS_OVER)
    last = prefill.schedule()
    node.pause()  # what is to be stored waits
    output = prefill.execute(last)
    assert prefill.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert prefill.status("p") == "PREEMPTED"
    prefill.update(last, output)
    assert "p" not in prefill.finished
    prefill.step()
    node.resume()
    run_all(prefill)
    assert prefill.tokens["p"] == right_answer(tokens, 1)
    assert prefill.left_over() == []

    decode = start_loop(node, kind=kind, extra=extra)
    assert answer(decode, "d", tokens, MAX_TOKENS, params=prefill.params["p"]) == MAX_TOKENS
    assert decode.left_over() == []
