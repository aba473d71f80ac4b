"""The reference engine on a CUDA device. ``make test-cuda`` runs it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the reference engine needs torch")

import kvstore  # noqa: E402
from kvstore.connector.reference.engine import Engine  # noqa: E402
from kvstore.connector.reference.model import Llama, LlamaConfig  # noqa: E402
from kvstore.gpu.pinned import is_pinned  # noqa: E402

TINY = LlamaConfig(vocab_size=512, hidden_size=64, intermediate_size=128, num_layers=3, num_heads=4, num_kv_heads=2)


@pytest.mark.cuda
def test_pages_stored_by_one_engine_on_the_device_answer_for_the_next(
    short_folder: Path, shm_folder: Path, eventually: Callable[[Callable[[], object]], None]
) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device, torch finds none")
    model = Llama(TINY).to("cuda")
    prompt = np.random.default_rng(0).integers(0, 512, 120).tolist()
    answers = []
    url = f"embedded://{short_folder}/store?arena=64MiB&disk_limit=0&arena_dir={shm_folder}/arena"
    with kvstore.connect(url) as client:
        for with_client in (None, client, client):
            engine = Engine(model, num_blocks=32, client=with_client, lookup_budget=10.0, load_deadline=30.0)
            if with_client is not None:
                eventually(lambda client=with_client: is_pinned(client.arena))
            engine.add_request("a", prompt, 8)
            answers += engine.run()
            engine.close()

    assert [answer.tokens_loaded for answer in answers] == [0, 0, 112]
    assert len({answer.token_ids for answer in answers}) == 1
