"""The control: a damaged page that is served unverified changes answers, so that equal answers elsewhere say something.
A node that verifies pages does not serve it: a miss.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from node_process import NodeProcess

import kvstore
from kvstore.layout import Layout
from tests.sglang.server import PAGE_SIZE, backend

pytestmark = pytest.mark.timeout(600)

TOKENS = 800


def page_of(node: NodeProcess, tokens: list[int]) -> bytes:
    """The first page of a prompt, when everything is on disk. SGLang's key of it is the SHA-256 of its tokens."""
    key = hashlib.sha256(np.array(tokens[:PAGE_SIZE], "<u4").tobytes()).digest()
    with kvstore.connect(node.url, timeout=30.0) as client:
        client.flush()
        (known,) = client.status().namespaces
        layout = Layout.from_json(known.layout)
        page = np.empty(layout.page_bytes, np.uint8)
        assert client.namespace(layout).load([key], page) == 1
    return page.tobytes()


def damage(page: bytes, disk: Path) -> None:
    """Turn over the sign of each number of a page, wherever a file has it."""
    found = 0
    for path in [path for path in sorted(disk.rglob("*")) if path.is_file()]:
        content = path.read_bytes()
        at = content.find(page)
        while at >= 0:
            found += 1
            with path.open("r+b") as file:
                file.seek(at)
                file.write((-np.frombuffer(page, np.float32)).tobytes())
            at = content.find(page, at + len(page))
    assert found, "no file has the page"


@pytest.mark.parametrize("verify", [False, True], ids=["served unverified", "verified"])
def test_a_page_that_was_damaged_on_disk(
    node_process: Callable[..., NodeProcess],
    start_server: Callable[..., Any],
    prompt: Callable[..., list[int]],
    tmp_path: Path,
    verify: bool,
) -> None:
    config = tmp_path / "node.toml"
    config.write_text(f"verify_checksums = {str(verify).lower()}\n")
    node = node_process(arena="64MiB", config=str(config))
    tokens, sound = prompt(TOKENS), prompt(TOKENS, 8)
    server = start_server(backend(node.url))
    cold = server.answer(tokens)
    server.answer(sound)
    server.flush()
    page = page_of(node, tokens)
    assert node.terminate() == 0
    damage(page, node.disk)
    shutil.rmtree(node.arena_folder)
    node.start()
    server.wait_stored(sound, TOKENS - PAGE_SIZE)  # it has found the new node: what it misses now was looked at
    answer = server.answer(tokens)
    assert (answer.tokens == cold.tokens) is verify
    assert answer.stored == (0 if verify else TOKENS - PAGE_SIZE)
    with kvstore.connect(node.url, timeout=60.0) as client:
        assert (client.status().tier("disk").counters["corrupt"] > 0) is verify
