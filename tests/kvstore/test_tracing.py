"""Spans of clients and nodes, in one trace; over OTLP to a collector; and nothing of it for who does not ask for it."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest

import kvstore
from kvstore.config.node import NodeConfig
from kvstore.errors import ConfigError, InvalidRequestError, UnknownNamespaceError

pytest.importorskip("opentelemetry.sdk.trace", reason="OpenTelemetry is not installed")
from collector import Collector, running_collector
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

PAGE = 5000
LAYOUT = kvstore.Layout(model="m", block_size=16, page_bytes=PAGE)
SECONDS = 60.0
HASHES = [bytes([1]) * 32, bytes([2]) * 32]
DATA = np.ones((2, PAGE), np.uint8)


@pytest.fixture
def collector() -> Iterator[tuple[Collector, str]]:
    with running_collector() as running:
        yield running


@pytest.fixture
def told() -> tuple[TracerProvider, InMemorySpanExporter]:
    provider, exporter = TracerProvider(), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return provider, exporter


def spans(exporter: InMemorySpanExporter, name: str) -> list[ReadableSpan]:
    return [span for span in exporter.get_finished_spans() if span.name == name]


def test_what_a_client_does_goes_on_in_the_node_as_one_trace(start_node, collector, told, monkeypatch):
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    received, endpoint = collector
    provider, exporter = told
    node = start_node(traces=endpoint)
    with kvstore.connect(f"kv://127.0.0.1:{node.port}", timeout=SECONDS, traces=provider) as client:
        pages = client.namespace(LAYOUT)
        with provider.get_tracer("engine").start_as_current_span("a request") as request:
            pages.store(HASHES, DATA)
            assert client.lookup([(pages, [*HASHES, b"x" * 32])])[0].prefix == 2
            assert pages.load(HASHES, np.zeros((2, PAGE), np.uint8)) == 2
    [lookup] = spans(exporter, "kvstore lookup")
    assert lookup.kind is SpanKind.CLIENT
    assert dict(lookup.attributes) == {"kvstore.pages": 3, "kvstore.pages.found": 2}
    assert lookup.parent.span_id == request.get_span_context().span_id
    [stored], [loaded] = spans(exporter, "kvstore store"), spans(exporter, "kvstore load")
    assert stored.attributes["kvstore.pages.stored"] == 2 and loaded.attributes["kvstore.pages.loaded"] == 2
    there = received.named("kvstore.v1.Cache/Lookup")
    assert there.trace_id == lookup.context.trace_id.to_bytes(16, "big")
    assert there.parent_span_id == lookup.context.span_id.to_bytes(8, "big")
    attributes = {each.key: each.value for each in there.attributes}
    assert attributes["rpc.service"].string_value == "kvstore.v1.Cache"
    assert attributes["rpc.grpc.status_code"].int_value == 0
    assert received.services == {"kvstore"}


def test_spans_of_the_asyncio_client_are_children_of_the_tasks_own(start_node, told):
    provider, exporter = told
    node = start_node()

    async def work() -> int:
        async with kvstore.aio.connect(f"kv://127.0.0.1:{node.port}", timeout=SECONDS, traces=provider) as client:
            pages = await client.namespace(LAYOUT)
            with provider.get_tracer("engine").start_as_current_span("a request") as request:
                await pages.store(HASHES, DATA)
                return request.get_span_context().span_id

    parent = asyncio.run(work())
    [stored] = spans(exporter, "kvstore store")
    assert stored.parent.span_id == parent


def test_an_error_is_told_at_both_ends(start_node, collector, told, monkeypatch):
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    received, endpoint = collector
    provider, exporter = told
    node = start_node(traces=endpoint)
    with kvstore.connect(f"unix://{node.config.socket}", timeout=SECONDS, traces=provider) as client:
        pages = client.namespace(LAYOUT)
        with pytest.raises(InvalidRequestError):
            pages.load([b"short"], np.zeros((1, PAGE), np.uint8))
        with pytest.raises(UnknownNamespaceError):
            client.explain(bytes(32), HASHES)
    assert spans(exporter, "kvstore load")[0].status.status_code is StatusCode.ERROR
    assert received.named("kvstore.v1.Cache/Explain").status.message == "NOT_FOUND"


@pytest.mark.parametrize("scheme", ["unix", "kv"])
def test_streams_of_pages_carry_the_context_too(start_node, collector, told, monkeypatch, scheme):
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    monkeypatch.setattr("kvstore.client.connect.ShmPath", no_shared_memory)
    received, endpoint = collector
    provider, exporter = told
    node = start_node(traces=endpoint)
    where = f"unix://{node.config.socket}" if scheme == "unix" else f"kv://127.0.0.1:{node.port}"
    with kvstore.connect(where, timeout=SECONDS, traces=provider) as client:
        pages = client.namespace(LAYOUT)
        assert pages.store(HASHES, DATA).stored == 2
        assert pages.load(HASHES, np.zeros((2, PAGE), np.uint8)) == 2
    [load] = spans(exporter, "kvstore load")
    if scheme == "unix":
        assert received.named("kvstore.v1.Pages/Load").parent_span_id == load.context.span_id.to_bytes(8, "big")


def no_shared_memory(*arguments: object) -> None:
    raise kvstore.errors.ResourceError("not here")


def test_a_collector_that_is_away_delays_nothing(start_node, told):
    node = start_node(traces="http://127.0.0.1:9")
    with kvstore.connect(f"unix://{node.config.socket}", timeout=SECONDS) as client:
        assert client.namespace(LAYOUT).store(HASHES, DATA).stored == 2
    assert node.stop()


def test_who_does_not_ask_for_it_does_not_even_import_it():
    script = (
        "import sys, kvstore, kvstore.node.node, kvstore.client.client;"
        "sys.exit(any(name.startswith('opentelemetry') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", script], timeout=SECONDS).returncode == 0


def test_without_it_installed_a_node_says_what_to_install(start_node, monkeypatch):
    monkeypatch.delitem(sys.modules, "kvstore.tracing", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=r"kvstore-offload\[tracing\]"):
        start_node(traces="http://127.0.0.1:9")


def test_no_url():
    with pytest.raises(ConfigError, match="traces: 'collector:4317' is not an http"):
        NodeConfig(traces="collector:4317")
