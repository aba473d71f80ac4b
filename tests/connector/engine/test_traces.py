"""Spans of the halves, for who asks for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="moves an engine's tensors")
pytest.importorskip("opentelemetry.sdk.trace", reason="OpenTelemetry is not installed")

import kvstore  # noqa: E402
from kvstore.connector.engine.options import Options  # noqa: E402
from kvstore.connector.engine.setup import NodeClients  # noqa: E402
from kvstore.connector.plan import LoadPlan, StepPlan, StorePlan  # noqa: E402
from kvstore.gpu.paged_kv import PagedKV  # noqa: E402

LAYERS, BLOCKS, TOKENS, ROW = 2, 6, 16, 32
LAYOUT = kvstore.Layout(model="m", block_size=TOKENS, page_bytes=LAYERS * TOKENS * ROW * 4)
HASHES = tuple(kvstore.hash_blocks(list(range(2 * TOKENS)), TOKENS))


def test_a_worker_tells_of_its_transfers_and_of_the_calls_in_them(
    start_node: Callable[..., Any], eventually: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    from collector import running_collector

    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    url = f"unix://{start_node().config.socket}"
    tensors = [torch.rand(BLOCKS, TOKENS * ROW) for _ in range(LAYERS)]
    with running_collector() as (collector, endpoint):
        connection = NodeClients(Options.parse({"url": url, "traces": endpoint}), {})
        worker = connection.worker_half([[LAYOUT]], [[PagedKV(tensors, "block dim")]], None)
        worker.start_save_kv(StepPlan(stores=(StorePlan("a", HASHES, (1, 2)),)))
        worker.wait_for_save()
        worker.start_load_kv(StepPlan(loads=(LoadPlan("b", HASHES, (3, 4)),)))
        eventually(lambda: worker.get_finished()[1] == {"b"})
        stored, loaded = (collector.named(f"kvstore worker {what}") for what in ("store", "load"))
        for span, request, call in ((stored, "a", "prepare_store"), (loaded, "b", "borrow")):
            attributes = {each.key: each.value for each in span.attributes}
            assert attributes["kvstore.request"].string_value == request
            assert attributes["kvstore.pages"].int_value == 2
            assert collector.named(f"kvstore {call}").parent_span_id == span.span_id
        assert collector.services == {"kvstore-connector"}
        worker.shutdown()
        connection.close()
