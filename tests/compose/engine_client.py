"""An engine that does what it is told: a line of JSON in, a line of JSON out. It lives through all faults.

``python engine_client.py URL``, then requests such as ``{"prompt": 3}`` or ``{"prompt": 3, "plain": true}``: without
kvstore and without any cache, so that it says what is right. Every answer has the totals of what was loaded and stored.
"""

from __future__ import annotations

import json
import random
import sys
from typing import Any

import torch

import kvstore
from connector.reference.engine import Engine
from connector.reference.model import Llama, LlamaConfig

MODEL = LlamaConfig(
    vocab_size=512, hidden_size=256, intermediate_size=512, num_layers=4, num_heads=8, num_kv_heads=2, seed=1
)
NUM_BLOCKS = 32
"""Little more than one prompt takes: what comes again comes from the node."""
LOOKUP_BUDGET = 1.0
"""Seconds: a busy machine must not turn hits into misses."""


def prompt_of(number: int) -> list[int]:
    """20 pages of 16 tokens and some more; the first 8 pages are common to each hundred prompts."""
    common, own = random.Random(f"system {number // 100}"), random.Random(number)
    return [*common.choices(range(512), k=128), *own.choices(range(512), k=195)]


def main() -> None:
    torch.set_num_threads(1)
    model = Llama(MODEL)
    with kvstore.connect(sys.argv[1]) as client:
        cached = Engine(model, num_blocks=NUM_BLOCKS, client=client, lookup_budget=LOOKUP_BUDGET)
        plain = Engine(model, num_blocks=NUM_BLOCKS, enable_caching=False)
        for place, line in enumerate(sys.stdin):
            request = json.loads(line)
            engine = plain if request.get("plain") else cached
            engine.add_request(str(place), prompt_of(request["prompt"]), max_tokens=8)
            (answer,) = engine.run()
            reply: dict[str, Any] = {
                "tokens": answer.token_ids,
                "hit": answer.tokens_hit,
                "loaded": answer.tokens_loaded,
                "computed": answer.tokens_computed,
                "gap": answer.smallest_gap,
            }
            if cached.worker is not None:
                moved = cached.worker.statistics()
                reply |= {"pages_stored": moved.pages_stored, "pages_loaded": dict(moved.pages_loaded)}
            print(json.dumps(reply), flush=True)
        cached.close()


if __name__ == "__main__":
    main()
