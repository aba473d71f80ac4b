"""How vLLM finds the connector: by its name alone, through the plugin that kvstore's installation brings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvstore.connector import vllm_plugin

MODULE = {"kv_connector_module_path": vllm_plugin.MODULE}


def test_registering_twice_changes_nothing() -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    vllm_plugin.register()
    vllm_plugin.register()
    found = KVConnectorFactory.get_connector_class_by_name(vllm_plugin.CONNECTOR)
    assert (found.__module__, found.__name__) == (vllm_plugin.MODULE, vllm_plugin.CONNECTOR)


def test_an_error_of_vllms_is_a_warning(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    from vllm.distributed.kv_transfer.kv_connector import factory

    monkeypatch.delattr(factory, "KVConnectorFactory")
    with caplog.at_level("WARNING", "kvstore.connector"):
        vllm_plugin.register()
    assert "vLLM could not be told of KVStoreConnector" in caplog.text


@pytest.mark.parametrize(
    ("plugins", "extra"), [(None, {}), ("kvstore", {}), ("other", MODULE), (None, MODULE)], ids=str
)
def test_an_engine_finds_the_connector(
    plugins: str | None,
    extra: dict[str, str],
    start_engine: Callable[..., Any],
    transfer: dict[str, Any],
    prompt: Callable[..., list[int]],
) -> None:
    environment = {} if plugins is None else {"VLLM_PLUGINS": plugins}
    engine = start_engine(transfer=transfer | extra, environment=environment)
    prompts = [prompt(200)]
    expected = engine.run(prompts).tokens
    engine.drain()
    engine.forget()
    again = engine.run(prompts)
    assert again.tokens == expected
    assert again.counters["vllm:external_prefix_cache_hits"] > 0
    engine.close()


def test_an_engine_that_may_not_load_the_plugin_says_which_connector_it_does_not_know(
    start_engine: Callable[..., Any], transfer: dict[str, Any]
) -> None:
    from tests.vllm.engine import EngineError

    with pytest.raises(EngineError, match="Unsupported connector type: KVStoreConnector"):
        start_engine(transfer=transfer, environment={"VLLM_PLUGINS": "other"})


def test_inside_multi_connector(
    start_engine: Callable[..., Any], transfer: dict[str, Any], prompt: Callable[..., list[int]]
) -> None:
    both = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": [transfer]},
    }
    engine = start_engine(transfer=both)
    prompts = [prompt(200)]
    expected = engine.run(prompts).tokens
    engine.drain()
    engine.forget()
    again = engine.run(prompts)
    assert again.tokens == expected
    assert again.external_hits == 192
    engine.drain()  # what the worker has counted comes with a step
    assert engine.counters()["vllm:kvstore_pages_loaded"] == 6
    engine.close()
