"""What users write into vLLM's configuration, and what they are told when it is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore.client.default_node import DefaultNode
from kvstore.connector.blocks.extra_keys import SharedPrefix
from kvstore.connector.engine.options import Options
from kvstore.connector.engine.versions import check_version
from kvstore.errors import ConfigError

URL = "unix:///run/kvstore.sock"


def test_a_url_is_all_that_is_needed() -> None:
    options = Options.parse({"url": URL})
    assert (options.async_load, options.store_threshold, options.load_failure_policy) == (True, 1, "recompute")


@pytest.mark.parametrize("given", [{}, {"url": ""}])
def test_without_a_url_it_is_the_node_that_commands_find(
    given: dict[str, object], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = DefaultNode(Path("/run/kvstore.sock"), "no node serves there yet", listens=False)
    monkeypatch.setattr("kvstore.client.default_node.default_node", lambda environment: found)
    assert Options.parse(given).located({}).url == URL
    assert [(each.levelname, each.message) for each in caplog.records] == [("WARNING", found.note)]


def test_a_url_is_looked_for_nowhere_else() -> None:
    options = Options.parse({"url": URL})
    assert options.located({"KVSTORE_SOCKET": "/run/other.sock"}) == options


def test_a_call_may_take_as_long_as_the_most_patient_who_waits_for_it() -> None:
    assert Options(url=URL).call_timeout == 5.0
    assert Options(url=URL, load_deadline_ms=100).call_timeout == 5.0
    assert Options(url=URL, load_deadline_ms=30_000, store_deadline_ms=60_000).call_timeout == 60.0


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"url": URL, "async_laod": False}, "did you mean 'async_load'"),
        ({"url": URL, "zzz": 1}, "known: url, async_load"),
        ({"url": 5}, "url must be a string, got 5"),
        ({"url": URL, "async_load": "no"}, "async_load must be true or false, got 'no'"),
        ({"url": URL, "store_threshold": 0}, "store_threshold must be a whole number of at least 1, got 0"),
        ({"url": URL, "kv_parts": -1}, "kv_parts must be a whole number of at least 0, got -1"),
        ({"url": URL, "kv_parts": "head"}, "kv_parts must be a whole number of at least 0, or 'heads', got 'head'"),
        ({"url": URL, "load_deadline_ms": 0}, "load_deadline_ms must be milliseconds between 1"),
        ({"url": URL, "lookup_budget_ms": True}, "lookup_budget_ms must be milliseconds"),
        ({"url": URL, "load_failure_policy": "fail"}, "must be 'recompute' or 'keep', got 'fail'"),
        ({"url": URL, "traces": "collector:4317"}, "traces: 'collector:4317' is not an http:// or https:// URL"),
        ({"url": URL, "peers": ["a"]}, "peers must be an object"),
        ({"url": URL, "shared_prefixes": ["a"]}, 'an object of names, each with {"tokens": at least 1, "hash": 64'),
        ({"url": URL, "shared_prefixes": {"a": {"tokens": 0, "hash": "0" * 64}}}, "shared_prefixes must be an object"),
        ({"url": URL, "shared_prefixes": {"a": {"tokens": 5, "hash": "0" * 63}}}, "shared_prefixes must be an object"),
        ({"url": URL, "shared_prefixes": {"a": {"tokens": 5}}}, "got {'a': {'tokens': 5}}"),
        ({"url": "embedded:///var/lib/kvstore"}, "start a node with 'kvstore serve'"),
    ],
)
def test_what_cannot_be_used_is_named(given: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match="kv_connector_extra_config") as error:
        Options.parse(given)
    assert says in str(error.value)


def test_shared_prefixes_are_named_by_their_hash() -> None:
    given = {"assistant": {"tokens": 5, "hash": "AB" * 32}}
    options = Options.parse({"url": URL, "shared_prefixes": given})
    assert options.prefixes == {"assistant": SharedPrefix(identifier="ab" * 32, num_tokens=5)}
    assert Options.parse({"url": URL}).prefixes == {}


@pytest.mark.parametrize("version", ["0.31.0", "0.32.0", "0.33.0", "0.33.1.dev3+cpu"])
def test_supported_releases(version: str) -> None:
    check_version(version)


@pytest.mark.parametrize("version", ["0.30.2", "0.34.0", "1.0.0", "dev"])
def test_another_release_is_refused_with_the_range(version: str) -> None:
    with pytest.raises(ConfigError, match=r"supports vLLM 0\.31 to 0\.33, this is vLLM " + version):
        check_version(version)
