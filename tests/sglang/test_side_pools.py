"""Models with pools beside that of their attention: the start fails with a line that names the pool.

The pool of a sliding window is a real server's. Recurrent layers and sparse attention need kernels that a CPU has not:
their pools' names are tried by :mod:`latent_pools`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from made_models import ModelFolders
from node_process import NodeProcess

import kvstore
from tests.sglang.server import backend

pytestmark = pytest.mark.timeout(600)

WINDOWS = {"is_hybrid_swa": True, "hybrid_layer_pattern": [0, 1, 0, 1], "sliding_window": 128}


def test_a_sliding_window_is_refused_at_start_in_words(
    node: NodeProcess, start_server: Callable[..., Any], models: ModelFolders
) -> None:
    refused = start_server(backend(node.url), model=models(**WINDOWS), ready=False)
    refused.wait_ended()
    said = "kvstore does not keep the pages of this model, which has a pool 'swa' beside that of its attention"
    assert said in refused.printed()
    assert "start SGLang without --hicache-storage-backend" in refused.printed()
    with kvstore.connect(node.url) as client:
        assert not client.status().namespaces
