"""In which order vLLM's model runners touch blocks and tell the connector: read in the installed release's source,
since no test here runs V2. ``loop.py`` has both orders, ``connector/engine/groups.py`` says for whom they differ."""

from __future__ import annotations

import ast
import importlib.util
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="reads vLLM, which is not installed (make test-vllm)")


@cache
def parsed(module: str) -> tuple[str, ast.Module]:
    """Of the installed release."""
    (folder,) = importlib.util.find_spec("vllm").submodule_search_locations  # type: ignore[union-attr,misc]
    text = Path(folder, module).read_text()
    return text, ast.parse(text)


def calls(module: str, name: str, function: str) -> list[str]:
    """What a method calls, by the last part of its name, in the order of the text."""
    _, tree = parsed(module)
    (cls,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name]
    (method,) = [node for node in cls.body if isinstance(node, ast.FunctionDef) and node.name == function]
    found = [node for node in ast.walk(method) if isinstance(node, ast.Call)]
    found.sort(key=lambda node: (node.lineno, node.col_offset))
    return [func.attr if isinstance(func := node.func, ast.Attribute) else getattr(func, "id", "") for node in found]


def in_order(found: list[str], *names: str) -> bool:
    """Whether all calls of each of these come before all of the next."""
    places = [[at for at, each in enumerate(found) if each == name] for name in names]
    return all(places) and all(first[-1] < second[0] for first, second in pairwise(places))


V1, V2, HOOKS = "v1/worker/gpu_model_runner.py", "v1/worker/gpu/model_runner.py", "v1/worker/gpu/kv_connector.py"
TOUCHES = "copy_kv_cache_blocks_inplace"


def test_v1_tells_before_it_touches() -> None:
    step = calls(V1, "GPUModelRunner", "execute_model")
    assert in_order(step, "handle_preemptions", "_update_states", "preprocess_mamba")
    assert in_order(calls(V1, "GPUModelRunner", "_update_states"), "_zero_block_ids", TOUCHES)


def test_v2_touches_before_it_tells() -> None:
    step = calls(V2, "GPUModelRunner", "execute_model")
    assert in_order(step, "update_requests", "no_forward")
    assert in_order(step, "update_requests", "preprocess_state", "pre_forward")
    assert in_order(calls(V2, "GPUModelRunner", "update_requests"), "zero_block_ids", TOUCHES)
    assert in_order(calls(HOOKS, "ActiveKVConnector", "pre_forward"), "handle_preemptions", "bind_connector_metadata")
    assert in_order(calls(HOOKS, "ActiveKVConnector", "no_forward"), "pre_forward", "post_forward")


def test_nothing_else_touches_blocks_before_v2_tells() -> None:
    """No other method of the runner that a step calls before names the KV cache's tensors."""
    step = calls(V2, "GPUModelRunner", "execute_model")
    before = {name for name in step[: step.index("pre_forward")] if source(name)}
    assert {"finish_requests", "add_requests", "update_requests", "prepare_inputs", "prepare_attn"} <= before
    assert {name for name in before if "kv_caches" in source(name)} == {"update_requests"}


def source(method: str) -> str:
    """Of one of V2's methods; empty: it has no such."""
    text, tree = parsed(V2)
    (cls,) = [n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "GPUModelRunner"]
    found = [n for n in cls.body if isinstance(n, ast.FunctionDef) and n.name == method]
    lines = text.splitlines()
    return "\n".join(line for each in found for line in lines[each.lineno - 1 : each.end_lineno])


def test_only_recurrent_layers_and_mixed_types_are_zeroed_and_copied() -> None:
    text, _ = parsed("v1/kv_cache_interface.py")
    assert "return self.has_mamba_layers or self.has_mixed_precision_kv_cache" in text
