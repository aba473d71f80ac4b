"""A model with code of its own beside its weights (``trust_remote_code``): other code finds nothing that was stored."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from node_process import NodeProcess

import kvstore
from tests.vllm.engine import EngineProcess

CODE = "from transformers import LlamaConfig\n\n\nclass MadeConfig(LlamaConfig):\n    pass\n"


def test_another_line_of_code_is_another_namespace(
    node: NodeProcess,
    transfer: dict[str, Any],
    models: Callable[[str], Path],
    prompt: Callable[..., list[int]],
    tmp_path: Path,
) -> None:
    model = shutil.copytree(models("llama"), tmp_path / "made")
    settings = json.loads((model / "config.json").read_text())
    settings["auto_map"] = {"AutoConfig": "configuration_made.MadeConfig"}
    (model / "config.json").write_text(json.dumps(settings))
    tokens = prompt(200)

    def hits(code: str) -> int:
        """Of an engine that runs this code: the tokens that it finds."""
        (model / "configuration_made.py").write_text(code)
        with EngineProcess(
            model,
            tmp_path / "engine.log",
            transfer=transfer,
            # Transformers read where they keep the code when they are imported: a process that has not yet.
            environment={"HF_MODULES_CACHE": str(tmp_path / "modules"), "PYTHONHASHSEED": "0"},
            trust_remote_code=True,
        ) as engine:
            found = engine.run([tokens]).external_hits
            engine.drain()
            return found

    assert hits(CODE) == 0
    assert hits(CODE) == 192
    assert hits(CODE + "# another line\n") == 0
    with kvstore.connect(node.url) as client:
        assert [len(each.labels) for each in client.status().namespaces] == [1, 1]
