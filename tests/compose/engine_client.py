"""An engine that does what it is told: a line of JSON in, a line of JSON out. It lives through all faults.

``python engine_client.py URL``, then requests such as ``{"prompt": 3}`` or ``{"prompt": 3, "plain": true}``: without
kvstore and without any cache, so that it says what is right. Every answer has the totals of what was loaded and stored.

``python engine_client.py URL NODE_ID [PEER=URL…]`` hands over as well: ``{"prompt": 3, "transfer":
{"do_remote_decode": true}}`` is answered with a ticket, which is another one's ``transfer``. The answer is given before
everything is stored. ``CLOCK_AHEAD`` in the environment is so many seconds by which this engine's tickets are ahead.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from contextlib import ExitStack
from typing import Any

import torch

import kvstore
from kvstore.connector.reference.engine import Disaggregation, Engine
from kvstore.connector.reference.model import Llama, LlamaConfig

MODEL = LlamaConfig(
    vocab_size=512, hidden_size=256, intermediate_size=512, num_layers=4, num_heads=8, num_kv_heads=2, seed=1
)
NUM_BLOCKS = 32
"""Little more than one prompt takes: what comes again comes from the node."""
LOOKUP_BUDGET = 1.0
"""Seconds: a busy machine must not turn hits into misses."""


TICKET_KEY = bytes(range(32))


def prompt_of(number: int) -> list[int]:
    """20 pages of 16 tokens and some more; the first 8 pages are common to each hundred prompts."""
    common, own = random.Random(f"system {number // 100}"), random.Random(number)
    return [*common.choices(range(512), k=128), *own.choices(range(512), k=195)]


def main() -> None:
    torch.set_num_threads(1)
    model = Llama(MODEL)
    url, *names = sys.argv[1:]
    with ExitStack() as stack:
        client = stack.enter_context(kvstore.connect(url))
        disaggregation = None
        if names:
            pairs = (name.split("=", 1) for name in names[1:])
            peers = {name: stack.enter_context(kvstore.connect(where)) for name, where in pairs}
            disaggregation = Disaggregation(TICKET_KEY, names[0], peers)
        cached = Engine(
            model, num_blocks=NUM_BLOCKS, client=client, lookup_budget=LOOKUP_BUDGET, disaggregation=disaggregation
        )
        ahead = float(os.environ.get("CLOCK_AHEAD", "0"))
        if cached.handover is not None:
            cached.handover._now = lambda: time.time() + ahead
        plain = Engine(model, num_blocks=NUM_BLOCKS, enable_caching=False)
        for place, line in enumerate(sys.stdin):
            request = json.loads(line)
            engine = plain if request.get("plain") else cached
            transfer = request.get("transfer") or {}
            max_tokens = 1 if transfer.get("do_remote_decode") else 8
            engine.add_request(str(place), prompt_of(request["prompt"]), max_tokens, transfer)
            (answer,) = engine.run()
            reply: dict[str, Any] = {
                "tokens": answer.token_ids,
                "hit": answer.tokens_hit,
                "loaded": answer.tokens_loaded,
                "computed": answer.tokens_computed,
                "gap": answer.smallest_gap,
                "ticket": answer.ticket,
                "pid": os.getpid(),
            }
            if cached.worker is not None:
                moved = cached.worker.statistics()
                reply |= {"pages_stored": moved.pages_stored, "pages_dropped": moved.pages_dropped}
            print(json.dumps(reply), flush=True)
            cached.settle()
        cached.close()


if __name__ == "__main__":
    main()
