"""Latent attention: what one rank has written, all ranks find. Real host pools and backends, without a server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from node_process import NodeProcess

import kvstore
from tests.sglang.server import HERE

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize("layout", ["page_first_direct", "page_first", "layer_first"])
def test_pages_of_one_rank_are_all_ranks(layout: str, node: NodeProcess, models: Callable[..., Path]) -> None:
    paths = [str(HERE / "shim"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "SGLANG_USE_CPU_ENGINE": "1"}
    command = [sys.executable, str(HERE / "latent_pools.py"), str(models()), node.url, layout]
    run = subprocess.run(command, env=environment, cwd=node.socket.parent, capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stderr[-4000:]
    told, said = run.stdout.splitlines()[-2:]
    assert json.loads(told) == {
        "stored": [True] * 4,
        "found": 4,
        "loaded": [True] * 4,
        "equal": True,
        "untouched": True,
    }
    refused = json.loads(said)
    assert {"swa", "mamba", "indexer", "draft", "draft_swa"} <= refused.keys()
    assert "kv" not in refused
    for name, words in refused.items():
        assert f"which has a pool {name!r} beside that of its attention" in words
    with kvstore.connect(node.url) as client:
        (namespace,) = client.status().namespaces
    assert "tp " not in namespace.name
