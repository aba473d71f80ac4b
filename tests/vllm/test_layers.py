"""Steps that compute what they load: each layer waits for its own part, and what fails behind it is computed again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from node_process import NodeProcess

from tests.vllm.engine import PATIENT, transfer_config


def test_a_layer_is_computed_while_those_behind_it_are_copied_and_a_page_lost_meanwhile_is_computed(
    node: NodeProcess,
    start_engine: Callable[..., Any],
    plain: Callable[..., Any],
    prompt: Callable[..., list[int]],
) -> None:
    from tests.vllm.watched_layers import BROKEN_PAGE, LOAD_TO_BREAK, OVERLAPPED

    whole, broken = prompt(200, 1), prompt(200, 2)
    beside = broken[:96] + prompt(50, 3)  # it finds blocks of the load that fails, in the same step
    expected = {name: plain([tokens]).tokens for name, tokens in (("whole", whole), ("broken", broken))}
    expected["both"] = expected["broken"] + plain([beside]).tokens
    transfer = transfer_config(node.url, async_load=False, **PATIENT)
    with start_engine(transfer=transfer) as first:
        assert first.run([whole]).tokens + first.run([broken]).tokens == expected["whole"] + expected["broken"]
        first.drain()
    transfer |= {
        "kv_connector": "ConnectorWithWatchedLayers",
        "kv_connector_module_path": "tests.vllm.watched_layers",
    }
    with start_engine(transfer=transfer, environment={LOAD_TO_BREAK: "1"}) as engine:
        hit = engine.run([whole])
        assert hit.tokens == expected["whole"]
        assert hit.external_hits == 192
        assert "vllm:kvstore_pages_not_loaded" not in hit.counters or not hit.counters["vllm:kvstore_pages_not_loaded"]
        assert engine.printed().count(OVERLAPPED) == 1

        failed = engine.run([broken, beside])
        assert failed.tokens == expected["both"]
        assert failed.counters["vllm:kvstore_pages_not_loaded"] == 6 - BROKEN_PAGE
        assert engine.printed().count(OVERLAPPED) == 2

        # What was computed instead is stored: rightly, and under its own name.
        engine.drain()
        engine.forget()
        again = engine.run([broken, beside], concurrency=1)
        assert again.tokens == expected["both"]
        assert again.external_hits == 192 + (len(beside) // 32 * 32 - 96)
