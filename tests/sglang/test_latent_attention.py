"""A model with latent attention, whose pages are the same on all ranks: what one rank has stored, servers of any number
of ranks find."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from node_process import NodeProcess

import kvstore
from tests.sglang.server import PAGE_SIZE, backend

pytestmark = pytest.mark.timeout(600)

PROMPT = 800
WHOLE = PROMPT - PAGE_SIZE
SHAPE = {
    "num_hidden_layers": 3,
    "first_k_dense_replace": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 24,
    "v_head_dim": 32,
    "moe_intermediate_size": 256,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_layer_freq": 1,
    "rope_scaling": {
        "type": "yarn",  # on a CPU SGLang rotates in no other way
        "factor": 2.0,
        "original_max_position_embeddings": 1024,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}


@pytest.mark.parametrize("layout", ["page_first_direct", "page_first", "layer_first"])
def test_what_two_ranks_stored_one_finds(
    layout: str,
    node: NodeProcess,
    start_server: Callable[..., Any],
    models: Callable[..., Path],
    prompt: Callable[..., list[int]],
) -> None:
    tokens = prompt(PROMPT)
    options = {"model": models("deepseek", **SHAPE), "layout": layout}
    two = {"flags": ("--tp", "2"), "environment": {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}}
    server = start_server(backend(node.url), **options, **two)
    cold = server.answer(tokens)
    assert cold.stored == 0
    found = server.wait_stored(tokens, WHOLE)
    assert found.tokens == cold.tokens
    with kvstore.connect(node.url) as client:
        (namespace,) = client.status().namespaces
    assert "tp " not in namespace.name
    server.stop()
    alone = start_server(backend(node.url), **options)
    whole = alone.answer(tokens)
    assert (whole.tokens, whole.stored) == (cold.tokens, WHOLE)
