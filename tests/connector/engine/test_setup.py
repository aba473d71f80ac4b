"""The halves put together at a node that is in no state to answer."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="moves an engine's tensors")

import kvstore  # noqa: E402
from kvstore.connector.blocks.hashing import BlockHashChain  # noqa: E402
from kvstore.connector.disagg.handover import Prompt  # noqa: E402
from kvstore.connector.engine import setup  # noqa: E402
from kvstore.connector.engine.groups import Group  # noqa: E402
from kvstore.connector.engine.load_admission import LoadAdmission  # noqa: E402
from kvstore.connector.engine.options import Options  # noqa: E402
from kvstore.connector.engine.page_parts import Part  # noqa: E402
from kvstore.connector.engine.requests import EngineRequests  # noqa: E402
from kvstore.connector.plan import StepPlan, StorePlan  # noqa: E402
from kvstore.gpu.paged_kv import PagedKV  # noqa: E402

LAYOUT = kvstore.Layout(model="m", block_size=16, page_bytes=16 * 32 * 4)
HASHES = tuple(kvstore.hash_blocks(list(range(16)), 16))


def scheduler_half(connection: setup.NodeClients, parts: list[Part], **more: Any) -> EngineRequests:
    groups = [Group(16, keeps=True, num_skipped=lambda num_tokens: 0)]
    return connection.scheduler_half(
        parts,
        groups,
        load_admission=LoadAdmission(groups, 100),
        async_load=True,
        may_store=True,
        may_load=True,
        touched_early=False,
        block_events=None,
        event_block_size=16,
        **more,
    )


def test_a_start_does_not_wait_for_a_node_that_hangs_however_patient_its_calls_are(
    node_process: Callable[..., Any],
    eventually: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(setup, "START_WAIT", 0.05)
    node = node_process()
    node.pause()
    connection = setup.NodeClients(Options.parse({"url": node.url, "load_deadline_ms": 3_600_000}), {})
    workers: list[Any] = []

    def start() -> None:
        pages = PagedKV([torch.rand(2, 16 * 32)], "block dim")
        workers.append(connection.worker_half([[LAYOUT]], [[pages]], None))

    starting = threading.Thread(target=start, daemon=True)
    starting.start()
    starting.join(60)
    assert workers, "it waits"
    assert "is not there yet, vLLM starts without it: no answer in 0.05 s" in caplog.text
    node.resume()
    workers[0].start_save_kv(StepPlan(stores=(StorePlan("a", HASHES, (1,)),)))
    eventually(lambda: workers[0].statistics().pages_stored == 1)
    workers[0].shutdown()
    connection.close()


def test_all_parts_of_a_page_wait_together(
    node_process: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(setup, "START_WAIT", 0.05)
    node = node_process()
    node.pause()
    connection = setup.NodeClients(Options.parse({"url": node.url}), {})
    parts = [Part("", (replace(LAYOUT, tp_rank=rank, tp_size=8),), rank) for rank in range(8)]
    half = scheduler_half(connection, parts)
    assert caplog.text.count("is not there yet") == 1
    node.resume()
    half.shutdown()
    connection.close()


def test_what_goes_wrong_at_a_start_is_told_whatever_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("can't start new thread")

    connection = setup.NodeClients(Options.parse({"url": "unix:///nobody/s"}), {})
    monkeypatch.setattr(connection._client, "lookup", fail)
    scheduler_half(connection, [Part("", (LAYOUT,))]).shutdown()
    assert "vLLM starts without it: RuntimeError: can't start new thread" in caplog.text
    connection.close()


@pytest.mark.parametrize("other", [None, "NixlConnector"])
def test_beside_a_connector_that_hands_prompts_over_no_tickets_are_given(
    other: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    key = tmp_path / "key"
    key.write_bytes(bytes(32))
    key.chmod(0o600)
    options = Options.parse({"url": "unix:///nobody/s", "node_id": "n", "ticket_key_file": str(key)})
    connection = setup.NodeClients(options, {})
    half = scheduler_half(connection, [Part("", (LAYOUT,))], handed_over_by=other)
    handover = half._tickets._handover
    assert handover is not None
    prompt = Prompt(range(16), BlockHashChain(16), 16)
    prompt.chain.extend(range(16))
    assert (handover.give("r", prompt, [[1]]) is None) == (other is not None)
    assert ("NixlConnector beside it does that" in caplog.text) == (other is not None)
    half.shutdown()
    connection.close()
